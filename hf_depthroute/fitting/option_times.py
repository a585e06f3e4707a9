"""The time that an option saves, measured in the layers that may have it.

FLOPs say little about the time of attention and of narrow products, and how much less depends on the machine.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn

from ..adapter.tuner import get_depth_routed_model
from ..base.contexts import hooked, of_this_thread
from ..base.distributed import each_of_all
from ..base.stack import stack_of
from ..config.adapter import DepthRouteConfig
from .options import Option, StaticFit, config_of

_SAMPLES = 12  # of every option at least, over its layers
_BUSY = 1.25  # times as long for the same prompt: something else runs on the machine


@torch.no_grad()
def time_savings(
    base: nn.Module, found: Mapping[int, Mapping[Option, StaticFit]], ids: torch.Tensor, tail: int
) -> dict[Option, float]:
    """The share of the time of a prompt that each option leaves out in one layer; below 0 where it takes longer.

    In every round each layer has another of its options, or none, so that a pass of the prompt times all of them; an
    option's saving is the median over its layers of what it takes off the layer's own time. Warns where the unchanged
    prompt took a quarter longer at one end of the rounds than at the other.

    Args:
        base: The model, not routed; it is given back as it was.
        found: The options of each layer, by its index.
        ids: A prompt, `[1, T]`.
        tail: Tokens at its end that run in full.
    """
    before = _dense_seconds(base, ids)
    given = DepthRouteConfig(layers="all", phases="prefill", prompt_tail=tail)
    seconds: dict[tuple[int, Option | None], list[float]] = {}
    for number in range(_rounds(found)):
        taken = _options_of(found, number)
        chosen = {index: option for index, option in taken.items() if option is not None}
        routed: Any = get_depth_routed_model(base, config_of(chosen, given)).eval() if chosen else base
        for index, duration in _layer_seconds(routed, ids).items():
            seconds.setdefault((index, taken.get(index)), []).append(duration)
        if chosen:
            routed.unload()
    after = _dense_seconds(base, ids)
    if max(before, after) > _BUSY * min(before, after):
        warnings.warn(
            f"fit_router: the same prompt took {before:.2f} s and then {after:.2f} s: with something else on the "
            "machine, keep_of='time' may choose badly",
            stacklevel=2,
        )
    whole = min(before, after)
    saved: dict[Option, list[float]] = {}
    for (index, option), durations in seconds.items():
        if option is not None and (index, None) in seconds:
            saved.setdefault(option, []).append((min(seconds[index, None]) - min(durations)) / whole)
    return dict(each_of_all({option: median(shares) for option, shares in saved.items()})[0])  # all choose alike


def _rounds(found: Mapping[int, Mapping[Option, StaticFit]]) -> int:
    """Enough for every layer to have all of its options, and for every option to have been timed often enough."""
    turns = max(len(options) for options in found.values()) + 1
    return turns * max(1, -(-_SAMPLES // len(found)))


def _options_of(found: Mapping[int, Mapping[Option, StaticFit]], number: int) -> dict[int, Option | None]:
    """The option of each layer in a round: each in turn, and none."""
    taken = {}
    for place, (index, options) in enumerate(found.items()):
        turns = [None, *options]
        taken[index] = turns[(place + number) % len(turns)]
    return taken


def _layer_seconds(model: Any, ids: torch.Tensor) -> dict[int, float]:
    """The time of every decoder layer in a pass of the prompt; the pass before it makes what is kept."""
    with torch.no_grad():
        _pass(model, ids)
        with _timed(list(stack_of(model).layers), ids.device) as seconds:
            _pass(model, ids)
    return seconds


def _dense_seconds(model: Any, ids: torch.Tensor) -> float:
    """The faster of three passes of the prompt."""
    found = []
    for _ in range(3):
        started = time.perf_counter()
        _pass(model, ids)
        found.append(time.perf_counter() - started)
    return min(found)


def _pass(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    _wait(ids.device)


@contextmanager
def _timed(layers: list[nn.Module], device: torch.device) -> Iterator[dict[int, float]]:
    """Inside the block, the time of each layer's last call is kept, by its index."""
    seconds: dict[int, float] = {}

    def enter(layer: nn.Module, args: tuple[Any, ...]) -> None:
        _wait(device)
        seconds[layers.index(layer)] = -time.perf_counter()

    def leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _wait(device)
        seconds[layers.index(layer)] += time.perf_counter()

    handles = [layer.register_forward_pre_hook(of_this_thread(enter)) for layer in layers]
    handles += [layer.register_forward_hook(of_this_thread(leave)) for layer in layers]
    with hooked(handles):
        yield seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

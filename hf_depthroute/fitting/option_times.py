"""The time that an option saves, measured in the layers that may have it.

FLOPs say little about the time of attention and of narrow products, and how much less depends on
the machine.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from ..adapter.tuner import get_depth_routed_model
from ..base.contexts import synchronise
from ..base.distributed import each_of_all
from ..base.stack import stack_of
from ..config.adapter import DepthRouteConfig
from ..inference.autotune import timed_layers
from ..routing.trace import full_depth
from .options import Option, StaticFit, choose, config_of
from .text import FitWarning

_SAMPLES = 12  # of every option at least, over its layers
_ROUNDS = 3  # at least: an option's time is told from a layer's by layers that have several
_TURNS = 5  # passes of the whole prompt, routed and not in turn
_BUSY = 1.25  # times as long for the same work: something else runs on the machine


class PassTimes(NamedTuple):
    """Seconds of a pass of the prompt: the whole of it, and its decoder layers by their index."""

    whole: float
    layers: dict[int, float]


def in_time(
    base: nn.Module,
    found: Mapping[int, Mapping[Option, StaticFit]],
    wanted: float,
    ids: torch.Tensor,
    tail: int,
) -> dict[int, dict[Option, StaticFit]]:
    """`found` with what every option saves as a share of the time of a prompt.

    Options are timed one by one; what those that save `wanted` by that save together is timed, too,
    and sets the scale of all: 0 where they save nothing. On a machine that is too busy to tell,
    nothing is scaled. The other arguments are those of `time_savings`.
    """

    def scaled(factor: float) -> dict[int, dict[Option, StaticFit]]:
        return {
            index: {
                option: replace(fit, saved=factor * saved[option]) for option, fit in fits.items()
            }
            for index, fits in found.items()
        }

    saved = time_savings(base, found, ids, tail)
    chosen = choose(scaled(1.0), wanted)
    if not chosen:
        return scaled(1.0)
    left = time_left(base, chosen, ids, tail)
    if left is None:
        return scaled(1.0)
    return scaled(max(0.0, 1 - left) / sum(saved[option] for option in chosen.values()))


@torch.no_grad()
def time_savings(
    base: nn.Module, found: Mapping[int, Mapping[Option, StaticFit]], ids: torch.Tensor, tail: int
) -> dict[Option, float]:
    """The share of a prompt's time that each option saves in one layer; below 0 if it is slower.

    In every pass each layer has another of its options, or none, so that all of them are timed at
    the same speed of the machine. An option's saving is the share that it takes off a layer's own
    time, times the typical layer's share of an unchanged pass. Warns where the same work took a
    quarter longer at one time than at another.

    `base`, not routed, is given back as it was; `found` has each layer's options by its index. The
    last `tail` tokens of the prompt `ids`, `[1, T]`, run in full.
    """
    given = DepthRouteConfig(layers="all", phases="prefill", prompt_tail=tail)
    dense = [_seconds(base, ids)]
    passes = []
    for number in range(_rounds(found)):
        taken = _options_of(found, number)
        chosen = {index: option for index, option in taken.items() if option is not None}
        if not chosen:
            passes.append((taken, _seconds(base, ids).layers))
            continue
        routed = get_depth_routed_model(base, config_of(chosen, given)).eval()
        passes.append((taken, _seconds(routed, ids).layers))
        routed.unload()
    dense.append(_seconds(base, ids))
    times, speeds = _times_of_options(passes)
    uneven = max(
        max(speeds) / min(speeds), max(t.whole for t in dense) / min(t.whole for t in dense)
    )
    if uneven > _BUSY:
        warnings.warn(
            f"fit_router: the same work took {uneven:.1f} times as long at one time as at another: "
            "with something else on the machine, keep_of='time' may choose badly",
            FitWarning,
            stacklevel=2,
        )
    fastest = min(dense, key=lambda found: found.whole)
    share = median(fastest.layers[index] for index in found) / fastest.whole
    saved = {option: share * (1 - taken) for option, taken in times.items() if option is not None}
    return dict(each_of_all(saved)[0])  # every process has to choose alike


@torch.no_grad()
def time_left(
    base: nn.Module, chosen: Mapping[int, Option], ids: torch.Tensor, tail: int
) -> float | None:
    """The share of a prompt's time that is left with the `chosen` options, by the fastest passes.

    It is None if the same work took a quarter longer at one time than at another. The other
    arguments are those of `time_savings`.
    """
    given = DepthRouteConfig(layers="all", phases="prefill", prompt_tail=tail)
    routed = get_depth_routed_model(base, config_of(chosen, given)).eval()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    try:
        for turn in range(_TURNS + 1):  # the first makes what is kept
            for is_routed in (True, False) if turn % 2 else (False, True):
                with nullcontext() if is_routed else full_depth(routed):
                    started = time.perf_counter()
                    _pass(routed, ids)
                    seconds[is_routed].append(time.perf_counter() - started)
    finally:
        routed.unload()
    warm = {is_routed: times[1:] for is_routed, times in seconds.items()}
    uneven = any(max(times) > _BUSY * min(times) for times in warm.values())
    left = None
    if not uneven:
        left = min(warm[True]) / min(warm[False])
    found: float | None = each_of_all(left)[0]  # every process has to choose alike
    return found


def _times_of_options(
    passes: list[tuple[dict[int, Option | None], dict[int, float]]],
) -> tuple[dict[Option | None, float], list[float]]:
    """The time of a layer with each option over its own, and of each pass over the first one.

    Least squares of the logarithm, which is a sum of the layer's, of the option's and of the
    pass's: in every pass the machine may be as fast as it is just then. Layers that have no options
    tell the pass's speed, too.
    """
    rows = [
        (i, taken.get(i), number) for number, (taken, seconds) in enumerate(passes) for i in seconds
    ]
    layers = sorted({row[0] for row in rows})
    options = list(dict.fromkeys(row[1] for row in rows))
    design = torch.zeros(len(rows), len(layers) + len(options) + len(passes), dtype=torch.float64)
    wanted = torch.empty(len(rows), 1, dtype=torch.float64)
    for row, (index, option, number) in enumerate(rows):
        places = (
            layers.index(index),
            len(layers) + options.index(option),
            len(layers) + len(options) + number,
        )
        design[row, list(places)] = 1.0
        wanted[row] = math.log(passes[number][1][index])
    # Options and passes have no zero.
    found = torch.linalg.lstsq(design, wanted, driver="gelsd").solution.squeeze(1)
    of_options, of_passes = found[len(layers) :].split([len(options), len(passes)])
    times = (of_options - of_options[options.index(None)]).exp().tolist()
    return dict(zip(options, times, strict=True)), (of_passes - of_passes[0]).exp().tolist()


def _rounds(found: Mapping[int, Mapping[Option, StaticFit]]) -> int:
    """Enough for every option to be timed `_SAMPLES` times, where that many layers have it."""
    turns = max(len(options) for options in found.values()) + 1
    most = turns * max(1, -(-_SAMPLES // len(found)))  # every layer has all of its options
    taken: Counter[Option | None] = Counter(
        {option: 0 for options in found.values() for option in options}
    )
    for number in range(most):
        if number >= _ROUNDS and min(taken.values()) >= _SAMPLES:
            return number
        taken.update(_options_of(found, number).values())
    return most


def _options_of(
    found: Mapping[int, Mapping[Option, StaticFit]], number: int
) -> dict[int, Option | None]:
    """The option of each layer in a round: each in turn, and none."""
    taken = {}
    for place, (index, options) in enumerate(found.items()):
        turns = [None, *options]
        taken[index] = turns[(place + number) % len(turns)]
    return taken


def _seconds(model: nn.Module, ids: torch.Tensor) -> PassTimes:
    """The faster of two passes, after one that makes what is kept."""
    found = []
    with torch.no_grad():
        _pass(model, ids)
        for _ in range(2):
            with timed_layers(list(stack_of(model).layers)) as layers:
                started = time.perf_counter()
                _pass(model, ids)
                whole = time.perf_counter() - started
            found.append(PassTimes(whole, dict(enumerate(layers))))
    return min(found, key=lambda times: times.whole)


def _pass(model: nn.Module, ids: torch.Tensor) -> None:
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    synchronise(ids.device)

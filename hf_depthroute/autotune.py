"""Measured choice of executor: per routed layer and input shape, the fastest one, and never slower than the base.

Skipping pays where the skipped arithmetic or memory traffic costs more than the gate and the indexing. In the decoding
of a large batch on a GPU it does not: some token of the batch needs the FFN's weights anyway. What a machine does at a
shape is measured on the model itself rather than predicted.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .calibration import active_routings
from .holder import HOLDER, Routing, shape_class
from .trace import overridden


@dataclass(frozen=True)
class Choice:
    """What `tune_execution` found for one layer and one kind of step.

    Attributes:
        layer: Index of the decoder layer.
        step: `"prefill"` or `"decode"`.
        shape: `(B, T)` of the step.
        executor: The chosen one.
        milliseconds: Median time of the whole decoder layer by executor; `"full"` is the base's layer.
    """

    layer: int
    step: str
    shape: tuple[int, int]
    executor: str
    milliseconds: dict[str, float]


@torch.no_grad()
def tune_execution(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    steps: int = 8,
    repeats: int = 5,
    floor: float = 0.99,
    keep_decisions: bool = False,
    executors: Sequence[str] | None = None,
) -> list[Choice]:
    """Time every routed layer under every executor on these prompts, and use the fastest from now on.

    A layer for which no executor reaches `floor` of the base's speed runs as the base does at that shape: every token
    full, no gate. That changes the output, towards the base's, and makes it depend on the batch size; `keep_decisions`
    forbids it. Prompts should be as many and as long as those to come. The choice holds for inputs of about the same
    number of rows (to the next power of two), prefill and decode apart; other shapes run as before. It is not saved.

        tune_execution(model, tokenizer(prompts, return_tensors="pt", padding=True).input_ids.to(model.device))

    Args:
        model: A model with an active, calibrated adapter.
        input_ids: Prompts, `[B, T]`.
        attention_mask: `[B, T]`.
        steps: Decoding steps to time; 0 leaves decoding as it is.
        repeats: Times that each executor runs prefill and decode, in turn; medians count.
        floor: Least speed over the base's, per layer.
        keep_decisions: Never turn routing off.
        executors: What to choose from. Default: `"gathered"`, `"masked"`, and on CUDA `"rows"`.

    Returns:
        One `Choice` per layer and kind of step.

    Raises:
        ValueError: No routed adapter is active; decisions are about sequences or exits, which have to hold through a
            generation; or `floor` is not in (0, 1].
    """
    holders = active_routings(model)
    config = holders[0].active_config()
    if config.granularity == "sequence" or config.gate in ("exit", "none"):
        raise ValueError(
            "tune_execution: decisions of whole sequences and of early exit hold through a generation and cannot "
            "depend on the shape"
        )
    if not 0 < floor <= 1:
        raise ValueError(f"tune_execution: floor must be in (0, 1], not {floor}")
    if executors is None:
        executors = ("gathered", "masked", *(("rows",) if input_ids.is_cuda else ()))
    model.eval()
    for holder in holders:
        holder.tuned = {}
    times: dict[tuple[str, int, str], list[float]] = {}
    for round_ in range(repeats + 1):  # the first one warms up
        for executor in ("full", *executors):
            with overridden(model, "executor", executor):
                for step, layer, seconds in _timed(model, holders, input_ids, attention_mask, steps):
                    if round_:
                        times.setdefault((step, layer, executor), []).append(seconds)
    shapes = {"prefill": (input_ids.shape[0], input_ids.shape[1]), "decode": (input_ids.shape[0], 1)}
    choices = []
    for holder in holders:
        for step, shape in shapes.items():
            if step == "decode" and not steps:
                continue
            found = {x: statistics.median(times[step, holder.layer_index, x]) * 1e3 for x in ("full", *executors)}
            best = min(executors, key=found.__getitem__)
            if not keep_decisions and found[best] > found["full"] / floor:
                best = "full"
            holder.tuned[shape_class(*shape)] = best
            choices.append(Choice(holder.layer_index, step, shape, best, found))
    return choices


def _timed(
    model: Any,
    holders: Sequence[Routing],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    steps: int,
) -> Iterator[tuple[str, int, float]]:
    """Seconds of every routed layer: once for the prompt, then for each decoding step."""
    with _stopwatches(model, holders) as read:
        out = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True, logits_to_keep=1)
        yield from (("prefill", layer, seconds) for layer, seconds in read())
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            if attention_mask is not None:
                attention_mask = torch.cat([attention_mask, torch.ones_like(token)], dim=1)
            out = model(
                input_ids=token, attention_mask=attention_mask, past_key_values=out.past_key_values, use_cache=True
            )
            yield from (("decode", layer, seconds) for layer, seconds in read())


@contextmanager
def _stopwatches(model: nn.Module, holders: Sequence[Routing]) -> Iterator[Callable[[], list[tuple[int, float]]]]:
    """While inside, every call of a routed layer is timed; the function reads and forgets the times."""
    owners = {module._modules.get(HOLDER): module for module in model.modules()}
    started: dict[int, float] = {}
    seconds: list[tuple[int, float]] = []
    handles = []
    for holder in holders:
        layer, index = owners[holder], holder.layer_index

        def start(module: nn.Module, args: Any, index: int = index) -> None:
            _synchronise(args)
            started[index] = time.perf_counter()

        def stop(module: nn.Module, args: Any, output: Any, index: int = index) -> None:
            _synchronise(args)
            seconds.append((index, time.perf_counter() - started[index]))

        handles += [layer.register_forward_pre_hook(start), layer.register_forward_hook(stop)]

    def read() -> list[tuple[int, float]]:
        taken = list(seconds)
        seconds.clear()
        return taken

    try:
        yield read
    finally:
        for handle in handles:
            handle.remove()


def _synchronise(args: Any) -> None:
    if args and isinstance(args[0], torch.Tensor) and args[0].is_cuda:
        torch.cuda.synchronize(args[0].device)

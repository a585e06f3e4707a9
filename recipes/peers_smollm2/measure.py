"""What is measured of a system beside its loss: calls, FLOPs,
and whether an answer depends on how it is asked for.

Everything goes through the system's own `generate` and its own pass. A step is a call of the base's
embedding, seen by a hook; the logits of a step are what the base's head gave last in it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from systems import System
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ROWS, LENGTH, PADDING, NEW = 4, 32, 8, 8  # of a generation that is checked


@dataclass
class Step:
    started: float
    logits: torch.Tensor | None = None  # `[B, V]`, of the last position


@contextmanager
def steps_of(system: System) -> Iterator[list[Step]]:
    """Note each step of what runs inside."""
    steps: list[Step] = []

    def begin(module: Any, args: Any) -> None:
        steps.append(Step(time.perf_counter()))

    def note(module: Any, args: Any, out: torch.Tensor) -> None:
        if steps:
            steps[-1].logits = out.detach().view(-1, *out.shape[-2:])[:, -1]

    hooks = [
        system.base.get_input_embeddings().register_forward_pre_hook(begin),
        system.base.get_output_embeddings().register_forward_hook(note),
    ]
    try:
        yield steps
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def ffn_rows(system: System) -> Iterator[list[int]]:
    """The rows that enter each call of an FFN inside."""
    kind, found = type(system.base.model.layers[0].mlp), []

    def count(module: Any, args: Any) -> None:
        found.append(args[0].shape[:-1].numel())

    modules = [module for module in system.base.modules() if isinstance(module, kind)]
    hooks = [module.register_forward_pre_hook(count) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class Flops(TorchDispatchMode):
    """What torch's `FlopCounterMode` counts, without its hooks on every module: under hooks, what
    reads weights in place of a call takes a path of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


@torch.no_grad()
def calls(system: System, ids: torch.Tensor, depth: int) -> dict[str, float]:
    """The share of FFN calls that a pass over `ids` makes, and that a decoded token makes;
    FLOPs of the pass."""
    with ffn_rows(system) as seen, Flops() as counter:
        system.logits(ids)
    found = {"pass": sum(seen) / (ids.numel() * depth), "flops": counter.total}
    prompt, mask = ids[:1, :LENGTH], torch.ones_like(ids[:1, :LENGTH])
    with ffn_rows(system) as few:
        system.generate(prompt, mask, 1)
    with ffn_rows(system) as many:
        new = system.generate(prompt, mask, 1 + NEW).shape[1] - LENGTH - 1
    return found | {"decode": (sum(many) - sum(few)) / (max(new, 1) * depth)}


@torch.no_grad()
def agreement(system: System, ids: torch.Tensor) -> dict[str, Any]:
    """Whether the tokens that are decoded are those of one pass over them,
    and how far logits are apart.

    Logits are compared where each step gave a token, and are in units of the model's own.
    """
    flips, apart = 0, 0.0
    for row in ids[:ROWS, :LENGTH].split(1):
        with steps_of(system) as steps:
            out = system.generate(row, torch.ones_like(row), NEW)
        whole = system.logits(out)[0, LENGTH - 1 : -1].float()
        flips += int((whole.argmax(-1) != out[0, LENGTH:]).sum())
        decoded = [step.logits for step in steps if step.logits is not None][: len(whole)]
        if len(steps) in (len(whole), len(whole) + 1):
            apart = max(apart, float((whole - torch.cat(decoded).float()).abs().max()))
        else:
            apart = float("nan")
    return {
        "flips": flips,
        "of": ROWS * NEW,
        "difference": None if apart != apart else round(apart, 6),
    }


@torch.no_grad()
def same_answers(system: System, ids: torch.Tensor, padding: int) -> dict[str, Any]:
    """How many rows answer otherwise in a batch than alone,
    the last two behind `padding` tokens of padding."""
    rows = list(ids[:ROWS, :LENGTH])
    if padding:
        rows = [row[padding:] if number >= ROWS - 2 else row for number, row in enumerate(rows)]
    batch = torch.full((ROWS, LENGTH), int(system.base.generation_config.pad_token_id or 0))
    mask = torch.zeros_like(batch)
    for number, row in enumerate(rows):
        batch[number, LENGTH - len(row) :], mask[number, LENGTH - len(row) :] = row, 1
    with steps_of(system) as steps:
        together = system.generate(batch, mask, NEW)[:, LENGTH:]
    first, apart, changed = first_logits(steps), 0.0, []
    for number, row in enumerate(rows):
        with steps_of(system) as alone:
            answer = system.generate(row[None], torch.ones_like(row[None]), NEW)[0, len(row) :]
        width = min(len(answer), together.shape[1])
        changed.append(not torch.equal(answer[:width], together[number, :width]))
        apart = max(apart, float((first_logits(alone)[0] - first[number]).abs().max()))
    return {"changed": sum(changed), "of": ROWS, "difference": round(apart, 6)}


def first_logits(steps: list[Step]) -> torch.Tensor:
    """The logits `[B, V]` of the first step that has some."""
    found: torch.Tensor = next(step.logits for step in steps if step.logits is not None)
    return found.float()


def behaviour(system: System, ids: torch.Tensor, depth: int) -> dict[str, Any]:
    """Each check by name; one that the system cannot do says why."""
    checks = {
        "calls": lambda: calls(system, ids, depth),
        "agreement": lambda: agreement(system, ids),
        "batch": lambda: same_answers(system, ids, 0),
        "padding": lambda: same_answers(system, ids, PADDING),
    }
    return {name: attempt(check) for name, check in checks.items()}


def attempt(check: Any) -> Any:
    try:
        return check()
    except Exception as error:  # what a peer cannot do is a result
        return {"fails": first_line(error)}


def first_line(error: Exception) -> str:
    """What an error says, without the folders of this machine."""
    text = re.sub(r"\s*\((/|[A-Z]:\\)[^)]*\)", "", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


@torch.no_grad()
def timed(system: System, ids: torch.Tensor, new: int) -> dict[str, float]:
    """Seconds of a prompt and its first token, and of each further token: `ids` are `[B, T]`."""
    started = time.perf_counter()
    with steps_of(system) as steps:
        out = system.generate(ids, torch.ones_like(ids), new)
    ended = time.perf_counter()
    second = steps[1].started if len(steps) > 1 else ended
    return {
        "prompt": second - started,
        "token": (ended - second) / max(1, out.shape[1] - ids.shape[1] - 1),
    }

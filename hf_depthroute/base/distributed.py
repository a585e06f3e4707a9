"""Sums and rows over the processes of a data-parallel group; of one process alone, its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """How many processes there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of all processes' `values`, which are overwritten with it."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


_sharing: ContextVar[bool] = ContextVar("sharing", default=False)


@contextmanager
def sharing() -> Iterator[None]:
    """In this block every process holds a share of the rows,
    and `total` and what is `of_all` are of all processes.

    Outside of it, and in one process, they give back what they are given.
    """
    token = _sharing.set(True)
    try:
        yield
    finally:
        _sharing.reset(token)


def _shares() -> bool:
    return _sharing.get() and world_size() > 1


def total(values: Tensor) -> Tensor:
    """The sum of all processes' `values`."""
    if _shares():
        return sum_over_processes(values.clone())
    return values


def each_of_all(value: object) -> list[Any]:
    """The values of all processes."""
    if not _shares():
        return [value]
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def raised_by_all(kind: type[Exception]) -> Iterator[None]:
    """An error of this kind in the block of one process is raised in every process,
    at the end of the block, in which nothing may be summed or gathered.

    Alone, it would leave the others waiting for the next sum.
    """
    own: Exception | None = None
    try:
        yield
    except kind as error:
        own = error
    lines = each_of_all(None if own is None else str(own))
    if own is not None:
        raise own
    line = next((line for line in lines if line is not None), None)
    if line is not None:
        raise kind(line)


def rows_of_all(rows: Tensor) -> Tensor:
    """The rows of all processes `[N, ...]`, one process after the other; counts may differ."""
    if _shares():
        return torch.cat([part.to(rows.device) for part in each_of_all(rows.cpu())])
    return rows


def own_share(count: int) -> slice:
    """Which of `count` rows this process has: shares lie one after the other,
    as `rows_of_all` puts them together."""
    if not _shares():
        return slice(0, count)
    rank = dist.get_rank()
    processes = world_size()
    return slice(count * rank // processes, count * (rank + 1) // processes)


def own_rows(count: int) -> tuple[slice, int]:
    """Where the `count` rows of this process lie among those of all, and how many there are."""
    counts = each_of_all(count)
    before = sum(counts[: dist.get_rank()]) if _shares() else 0
    return slice(before, before + count), sum(counts)

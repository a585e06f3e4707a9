"""Block shapes of the Triton kernels: tables, and the fastest row, measured once per shape.

Measuring runs the kernel on half of the rows, writes only what the call that follows writes again,
and never happens while a CUDA graph is captured: then, and in the interpreter, the first row of the
table is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """Compile-time block shapes of one kernel, warps of a program, stages of its pipeline."""

    blocks: dict[str, int] = field(hash=False)
    warps: int = 4
    stages: int = 3

    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {**self.blocks, "num_warps": self.warps, "num_stages": self.stages}


Trial = Callable[[Choice], None]


def _tile(m: int, n: int, k: int, warps: int, stages: int) -> Choice:
    return Choice({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8}, warps, stages)


def _strip(n: int, k: int, warps: int, stages: int) -> Choice:
    return Choice({"BLOCK_N": n, "BLOCK_K": k, "STAGES": stages}, warps, stages)


def _queries(m: int, n: int, warps: int, stages: int) -> Choice:
    return Choice({"BLOCK_M": m, "BLOCK_N": n}, warps, stages)


# By kernel, for 16-bit inputs, the safest first. Two accumulators (gate_up) take twice the
# registers of one.
_TABLES: dict[str, tuple[Choice, ...]] = {
    "gate_up": (
        _tile(128, 128, 64, 8, 3),
        _tile(128, 128, 64, 8, 4),
        _tile(128, 64, 64, 4, 4),
        _tile(256, 64, 64, 8, 3),
    ),
    "project": (
        _tile(128, 128, 64, 8, 3),
        _tile(128, 256, 64, 8, 3),
        _tile(128, 256, 64, 8, 4),
        _tile(128, 128, 64, 4, 4),
    ),
    "gate_up, one tile": (
        _tile(64, 32, 128, 4, 3),
        _tile(64, 64, 64, 4, 4),
        _tile(64, 64, 128, 4, 3),
    ),
    "project, one tile": (
        _tile(64, 32, 128, 4, 4),
        _tile(64, 32, 256, 4, 3),
        _tile(64, 64, 128, 4, 4),
    ),
    "gate_up, one row": (
        _strip(8, 512, 4, 2),
        _strip(4, 1024, 4, 2),
        _strip(8, 512, 4, 3),
        _strip(8, 1024, 8, 2),
    ),
    "project, one row": (
        _strip(8, 1024, 4, 2),
        _strip(8, 1024, 4, 3),
        _strip(4, 2048, 4, 2),
        _strip(8, 2048, 8, 2),
    ),
    "gate_up, few rows": (_strip(32, 128, 4, 3), _strip(16, 256, 4, 3), _strip(32, 256, 4, 3)),
    "project, few rows": (_strip(16, 256, 4, 4), _strip(32, 256, 4, 3), _strip(16, 512, 4, 3)),
    "attend_many": (
        _queries(128, 64, 8, 3),
        _queries(128, 128, 8, 2),
        _queries(128, 64, 4, 3),
        _queries(64, 64, 4, 3),
    ),
    "attend_few": (_queries(16, 64, 4, 3), _queries(16, 128, 4, 3), _queries(16, 128, 8, 2)),
}
# Float32 takes twice the shared memory and has no fast tensor cores for exact products: one small
# tile for each.
_FLOAT32: dict[str, Choice] = {
    "gate_up": _tile(64, 32, 32, 4, 2),
    "project": _tile(64, 64, 32, 4, 2),
    "gate_up, one tile": _tile(64, 32, 32, 4, 2),
    "project, one tile": _tile(64, 32, 32, 4, 2),
    "gate_up, one row": _strip(8, 256, 4, 2),
    "project, one row": _strip(8, 512, 4, 2),
    "gate_up, few rows": _strip(16, 64, 4, 2),
    "project, few rows": _strip(16, 128, 4, 2),
    "attend_many": _queries(32, 32, 4, 2),
    "attend_few": _queries(16, 32, 4, 2),
}
_chosen: dict[Hashable, Choice] = {}


def choose(
    kernel: str, shape: Hashable, dtype: torch.dtype, prepare: Callable[[], Trial]
) -> Choice:
    """The row of `kernel`'s table to run at `shape`; `prepare` makes inputs for a trial,
    which launches it with one."""
    if dtype == torch.float32:
        return _FLOAT32[kernel]
    table = _TABLES[kernel]
    key = (kernel, shape, dtype)
    if key not in _chosen:
        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return table[0]
        _chosen[key] = _fastest(table, prepare())
    return _chosen[key]


def _fastest(table: Sequence[Choice], trial: Trial) -> Choice:
    """The row with the least median time; one that the card has no room for is left out."""
    times = {}
    for number, choice in enumerate(table):
        try:
            trial(choice)  # compiles
        except Exception as error:
            if type(error).__name__ not in ("OutOfResources", "PTXASError"):
                raise
            continue
        events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
        for event in events:
            event.record()
            trial(choice)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        torch.cuda.synchronize()
        times[number] = median(one.elapsed_time(other) for one, other in pairwise(events[1:]))
    if not times:
        raise RuntimeError("no block shape of this Triton kernel fits the GPU")
    return table[min(times, key=times.__getitem__)]


def half_of(rows: int, sequences: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every other row, in the form of `rows.compact`: what block shapes are measured on."""
    index = torch.arange(rows, device=device, dtype=torch.int32) * 2 % max(1, rows - 1)
    count = torch.full((sequences,), (rows + 1) // 2, device=device, dtype=torch.int32)
    return index.expand(sequences, -1).contiguous(), count

"""From the row ops' arguments to Triton launches; imported on first use on CUDA, because it imports Triton.

Nothing here waits for the device. Shapes and docstrings of the operators: `ops`; of the kernels: their own modules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton

from . import few_queries, few_rows, many_queries, many_rows, plain
from .choices import Choice, Trial, choose, half_of

Rows = tuple[torch.Tensor, torch.Tensor]  # of `compact`: int32 `[R, N]` where chosen, int32 `[R]` how many

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FEW = 16  # rows of one decoding tile
_MOST_QUERIES = 64  # of one key-value head in a decoding step
_COMPACT = 1024


def linear(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.linear_rows`."""
    if not len(x) or not _supported(x, weight):
        return plain.linear(x, mask, weight, bias)
    x, weight, mask = x.contiguous(), weight.contiguous(), _bytes(mask)
    if len(x) <= _FEW:
        return _project_few(x, mask, weight, bias, None, None)
    rows = _compacted(mask[None])
    return _project(x, rows, weight, bias, None, None, x.new_zeros(len(x), len(weight)), gather=True)


def swiglu(
    stream: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
    scale: torch.Tensor | None,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:
    """See `ops.swiglu_rows`."""
    if not len(x) or not _supported(stream, x, w_gate, w_up, w_down):
        return plain.swiglu(stream, x, mask, scale, w_gate, w_up, w_down)
    stream, x, w_gate, w_up, w_down = (part.contiguous() for part in (stream, x, w_gate, w_up, w_down))
    scale, mask = None if scale is None else scale.contiguous(), _bytes(mask)
    hidden = x.new_empty(len(x), len(w_gate))  # written and read at chosen rows only
    if len(x) <= _FEW:
        _gate_up_few(x, mask, w_gate, w_up, hidden)
        return _project_few(hidden, mask, w_down, None, stream, scale)
    rows = _compacted(mask[None])
    _gate_up(x, rows, w_gate, w_up, hidden)
    return _project(hidden, rows, w_down, None, stream, scale, stream.clone(), gather=False)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    allowed: torch.Tensor | None,
    past: int,
    scaling: float,
) -> torch.Tensor:
    """See `ops.attend_rows`."""
    if not q.numel() or q.shape[-1] > 256 or not _supported(q, keys, values):
        return plain.attend(q, keys, values, mask, allowed, past, scaling)
    q, mask = q.contiguous(), _bytes(mask)
    keys, values = (part if part.stride(-1) == 1 else part.contiguous() for part in (keys, values))
    table = 0 if allowed is None else 1 if allowed.dtype == torch.bool else 2
    if allowed is not None:
        allowed = allowed if allowed.stride(-1) == 1 else allowed.contiguous()
        allowed = allowed.view(torch.uint8) if table == 1 else allowed
    width = triton.next_power_of_2(max(16, q.shape[-1]))
    heads = {"HEADS": q.shape[2], "GROUPS": keys.shape[1], "HEAD": q.shape[3], "BLOCK_D": width, "TABLE": table}
    few = q.shape[1] * (q.shape[2] // keys.shape[1]) <= _MOST_QUERIES
    run = _attend_few if few else _attend_many
    return run(q, keys, values, mask, allowed, past, scaling * math.log2(math.e), heads)


def _supported(*tensors: torch.Tensor) -> bool:
    return tensors[0].dtype in _DTYPES and all(tensor.dtype == tensors[0].dtype for tensor in tensors)


def _bytes(mask: torch.Tensor) -> torch.Tensor:
    return mask.contiguous().view(torch.uint8)


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"  # without effect on 16-bit inputs


def _compacted(mask: torch.Tensor) -> Rows:
    """The rows of `mask` `[R, N]`, one byte each; the index is filled up to the count."""
    index = torch.empty_like(mask, dtype=torch.int32)
    count = mask.new_empty(len(mask), dtype=torch.int32)
    grid = (triton.cdiv(mask.shape[1], _COMPACT), len(mask))
    many_rows.compact[grid](mask, index, count, mask.shape[1], BLOCK=_COMPACT)
    return index, count


def _gate_up(x: torch.Tensor, rows: Rows, w_gate: torch.Tensor, w_up: torch.Tensor, hidden: Any) -> None:
    inner, width = w_gate.shape

    def launch(choice: Choice, rows: Rows, hidden: torch.Tensor) -> None:
        grid = (_tiles(choice, len(x), inner),)
        many_rows.gate_up[grid](
            x, *rows, w_gate, w_up, hidden, WIDTH=width, INNER=inner, PRECISION=_precision(x), **choice.options()
        )

    launch(_choose_tile("gate_up", x, (inner, width), hidden, launch), rows, hidden)


def _project(
    a: torch.Tensor,
    rows: Rows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stream: torch.Tensor | None,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    gather: bool,
) -> torch.Tensor:
    width, inner = weight.shape

    def launch(choice: Choice, rows: Rows, out: torch.Tensor) -> None:
        grid = (_tiles(choice, len(a), width),)
        many_rows.project[grid](
            a, *rows, weight, bias, stream, scale, out,
            WIDTH=inner, OUT=width, GATHER=gather, PRECISION=_precision(a), **choice.options(),
        )  # fmt: skip

    launch(_choose_tile("project", a, (width, inner, gather), out, launch), rows, out)
    return out


def _tiles(choice: Choice, rows: int, columns: int) -> Any:
    return triton.cdiv(rows, choice.blocks["BLOCK_M"]) * triton.cdiv(columns, choice.blocks["BLOCK_N"])


def _choose_tile(
    kernel: str, x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor, launch: Callable[..., None]
) -> Choice:
    def prepare() -> Trial:
        # Into another tensor: the rows of `out` that are skipped have their values already.
        rows, scratch = half_of(len(x), 1, x.device), torch.empty_like(out)
        return lambda choice: launch(choice, rows, scratch)

    one_tile = len(x) <= 64
    key = (*shape, one_tile or triton.next_power_of_2(len(x)))
    return choose(f"{kernel}, one tile" if one_tile else kernel, key, x.dtype, prepare)


def _gate_up_few(
    x: torch.Tensor, mask: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, hidden: torch.Tensor
) -> None:
    inner, width = w_gate.shape

    def launch(choice: Choice, mask: torch.Tensor) -> None:
        few_rows.gate_up_few[(triton.cdiv(inner, choice.blocks["BLOCK_N"]),)](
            x, mask, w_gate, w_up, hidden,
            N=len(x), WIDTH=width, INNER=inner, PRECISION=_precision(x), **choice.options(),
        )  # fmt: skip

    name = "gate_up_few, one row" if len(x) == 1 else "gate_up_few"
    launch(choose(name, (inner, width, len(x)), x.dtype, _on_all(mask, launch)), mask)


def _project_few(
    a: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stream: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    width, inner = weight.shape
    out = a.new_empty(len(a), width)

    def launch(choice: Choice, mask: torch.Tensor) -> None:
        few_rows.project_few[(triton.cdiv(width, choice.blocks["BLOCK_N"]),)](
            a, mask, weight, bias, stream, scale, out,
            N=len(a), WIDTH=inner, OUT=width, PRECISION=_precision(a), **choice.options(),
        )  # fmt: skip

    name = "project_few, one row" if len(a) == 1 else "project_few"
    launch(choose(name, (width, inner, len(a)), a.dtype, _on_all(mask, launch)), mask)
    return out


def _on_all(mask: torch.Tensor, launch: Callable[[Choice, torch.Tensor], None]) -> Callable[[], Trial]:
    """What block shapes of a decoding step are measured on: every row is chosen."""

    def prepare() -> Trial:
        everything = torch.ones_like(mask)
        return lambda choice: launch(choice, everything)

    return prepare


def _attend_many(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    allowed: torch.Tensor | None,
    past: int,
    scaling: float,
    heads: dict[str, int],
) -> torch.Tensor:
    batch, length = q.shape[:2]
    out = torch.zeros_like(q)
    rows = _compacted(mask)
    bounds: tuple[Any, Any, Any] = (None, None, None)
    if heads["TABLE"] == 1:
        assert allowed is not None
        bounds = tuple(mask.new_empty(len(allowed), length, dtype=torch.int32) for _ in range(3))  # type: ignore[assignment]
        many_queries.visible_range[(length, len(allowed))](
            allowed, *bounds, allowed.shape[-1], allowed.stride(0), allowed.stride(2), length, BLOCK=1024
        )

    def launch(choice: Choice, rows: Rows, out: torch.Tensor) -> None:
        grid = (triton.cdiv(length, choice.blocks["BLOCK_M"]), q.shape[2], batch)
        many_queries.attend_many[grid](
            q, keys, values, *rows, allowed, *bounds, out, length, keys.shape[2], past, scaling,
            *keys.stride()[:3], *values.stride()[:3], *_strides(allowed),
            0 if allowed is None or len(allowed) == 1 else length,
            PRECISION=_precision(q), **heads, **choice.options(),
        )  # fmt: skip

    def prepare() -> Trial:
        half, scratch = half_of(length, batch, q.device), torch.empty_like(out)
        return lambda choice: launch(choice, half, scratch)

    key = (*heads.values(), triton.next_power_of_2(length))
    launch(choose("attend_many", key, q.dtype, prepare), rows, out)
    return out


def _attend_few(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    allowed: torch.Tensor | None,
    past: int,
    scaling: float,
    heads: dict[str, int],
) -> torch.Tensor:
    out = torch.empty_like(q)
    length, share = q.shape[1], q.shape[2] // keys.shape[1]
    pairs = q.shape[0] * keys.shape[1]
    tile = triton.next_power_of_2(max(16, length * share))
    splits = _splits(pairs, keys.shape[2], q.device)
    sizes = {**heads, "T": length, "SPLITS": splits}
    parts: list[Any] = [None, None, None]
    if splits > 1:
        parts = [
            q.new_empty(pairs * splits * tile * columns, dtype=torch.float32) for columns in (heads["BLOCK_D"], 1, 1)
        ]

    def launch(choice: Choice, mask: torch.Tensor) -> None:
        few_queries.attend_few[(pairs, splits)](
            q, keys, values, mask, allowed, out, *parts, keys.shape[2], past, scaling,
            *keys.stride()[:3], *values.stride()[:3], *_strides(allowed),
            PRECISION=_precision(q), **sizes, **{**choice.options(), "BLOCK_M": tile},
        )  # fmt: skip

    key = (*heads.values(), pairs, tile, splits)
    launch(choose("attend_few", key, q.dtype, _on_all(mask, launch)), mask)
    if splits > 1:
        del sizes["TABLE"]
        few_queries.combine_splits[(pairs, length * share)](*parts, out, **sizes, BLOCK_M=tile)
    return out


def _strides(allowed: torch.Tensor | None) -> tuple[int, int]:
    """The strides of a sequence and of a query; a mask of one sequence serves all."""
    if allowed is None:
        return 0, 0
    return allowed.stride(0) if len(allowed) > 1 else 0, allowed.stride(2)


def _splits(pairs: int, length: int, device: torch.device) -> int:
    """Cuts of the keys, a power of two: four programs for every multiprocessor, at least 128 keys for each."""
    wanted = 4 * _processors(device) // max(1, pairs)
    return 2 ** max(0, min(wanted, length // 128, 64).bit_length() - 1)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

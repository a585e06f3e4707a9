"""From the row ops' arguments to Triton launches; imported on first use on CUDA.

Nothing here waits for the device. Arguments and shapes of the operators: `plain`.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
from torch import Tensor

from . import plain, queries, rows
from .choices import Choice, Trial, choose, half_of

# Chosen rows: a mask of one byte each, `[N]`, of few; of many what `rows.compact` leaves: int32
# `[R, N]` where, int32 `[R]` how many.
Rows = tuple[Tensor, ...]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FEW = 16  # rows of one decoding tile
_MOST_QUERIES = 64  # of one key-value head in a decoding step
_COMPACT = 1024


def linear(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `plain.linear`."""
    if not len(x) or not _supported(x, weight):
        return plain.linear(x, mask, weight, bias)
    out = x.new_zeros(len(x), len(weight))
    return _multiply(x.contiguous(), _rows(mask), weight, out, bias=bias)


def swiglu(
    stream: Tensor,
    x: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
) -> Tensor:
    """See `plain.swiglu`."""
    if not len(x) or not _supported(stream, x, w_gate, w_up, w_down):
        return plain.swiglu(stream, x, mask, scale, w_gate, w_up, w_down)
    stream = stream.contiguous()
    chosen = _rows(mask)
    if scale is not None:
        scale = scale.contiguous()
    hidden = x.new_empty(len(x), len(w_gate))  # read at chosen rows only
    _multiply(x.contiguous(), chosen, w_gate, hidden, up=w_up.contiguous())
    out = torch.empty_like(stream) if len(x) <= _FEW else stream.clone()
    return _multiply(hidden, chosen, w_down, out, stream=stream, scale=scale)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    allowed: Tensor | None,
    past: int,
    scaling: float,
) -> Tensor:
    """See `plain.attend`."""
    if not q.numel() or q.shape[-1] > 256 or not _supported(q, keys, values):
        return plain.attend(q, keys, values, mask, allowed, past, scaling)
    if keys.stride() != values.stride() or keys.stride(-1) != 1:
        keys = keys.contiguous()
        values = values.contiguous()
    table = 0
    strides = (0, 0)  # of a sequence and a query of `allowed`; a mask of one sequence serves all
    if allowed is not None:
        table = 1 if allowed.dtype == torch.bool else 2
        if allowed.stride(-1) != 1:
            allowed = allowed.contiguous()
        if table == 1:
            allowed = allowed.view(torch.uint8)
        strides = (allowed.stride(0) if len(allowed) > 1 else 0, allowed.stride(2))
    numbers = (keys.shape[2], past, scaling * math.log2(math.e), *keys.stride()[:3], *strides)
    width = triton.next_power_of_2(max(16, q.shape[-1]))
    heads = {
        "HEADS": q.shape[2],
        "GROUPS": keys.shape[1],
        "HEAD": q.shape[3],
        "BLOCK_D": width,
        "TABLE": table,
    }
    few = q.shape[1] * (q.shape[2] // keys.shape[1]) <= _MOST_QUERIES
    return (_attend_few if few else _attend_many)(
        q.contiguous(), keys, values, _bytes(mask), allowed, numbers, heads
    )


def _supported(*tensors: Tensor) -> bool:
    (dtype, *others) = {tensor.dtype for tensor in tensors}
    return dtype in _DTYPES and not others


def _bytes(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


def _precision(x: Tensor) -> str:
    if x.dtype == torch.float32:
        return "ieee"
    return "tf32"  # without effect on 16-bit inputs


def _rows(mask: Tensor) -> Rows:
    if len(mask) <= _FEW:
        return (_bytes(mask),)
    return _compacted(_bytes(mask)[None])


def _compacted(mask: Tensor) -> Rows:
    """The rows of `mask` `[R, N]`, one byte each; the index is filled up to the count."""
    index = torch.empty_like(mask, dtype=torch.int32)
    count = mask.new_empty(len(mask), dtype=torch.int32)
    grid = (triton.cdiv(mask.shape[1], _COMPACT), len(mask))
    rows.compact[grid](mask, index, count, mask.shape[1], BLOCK=_COMPACT)
    return index, count


def _multiply(
    x: Tensor,
    chosen: Rows,
    weight: Tensor,
    out: Tensor,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    stream: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """`rows.multiply_many`, or `rows.multiply_few`, into `out`."""
    number = len(x)
    few = len(x) <= _FEW
    weight = weight.contiguous()
    sizes = {"WIDTH": x.shape[1], "OUT": len(weight), "PRECISION": _precision(x)}
    if few:
        sizes |= {"N": number, "BLOCK_M": 1 if number == 1 else _FEW}

    def launch(choice: Choice, chosen: Rows, out: Tensor) -> None:
        arguments = x, *chosen, weight, up, bias, stream, scale, out
        columns = triton.cdiv(len(weight), choice.blocks["BLOCK_N"])
        if few:
            rows.multiply_few[(columns,)](*arguments, **sizes, **choice.options())
        else:
            grid = (triton.cdiv(number, choice.blocks["BLOCK_M"]) * columns,)
            rows.multiply_many[grid](*arguments, **sizes, **choice.options())

    def prepare() -> Trial:
        # Into another tensor: the rows of `out` that are skipped have their values already.
        trial: Rows
        if few:
            trial = (torch.ones_like(chosen[0]),)
        else:
            trial = half_of(number, 1, x.device)
        scratch = torch.empty_like(out)
        return lambda choice: launch(choice, trial, scratch)

    kernel = "project" if up is None else "gate_up"
    if number == 1:
        kernel += ", one row"
    elif few:
        kernel += ", few rows"
    elif number <= 64:
        kernel += ", one tile"
    key = (*weight.shape, number if few else triton.next_power_of_2(max(64, number)))
    launch(choose(kernel, key, x.dtype, prepare), chosen, out)
    return out


def _attend_many(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    allowed: Tensor | None,
    numbers: tuple[float, ...],
    heads: dict[str, int],
) -> Tensor:
    batch, length = q.shape[:2]
    out = torch.zeros_like(q)
    bounds = None
    if heads["TABLE"] == 1:
        assert allowed is not None
        bounds = mask.new_empty(len(allowed), length, 3, dtype=torch.int32)
        queries.visible_range[(length, len(allowed))](
            allowed, bounds, allowed.shape[-1], allowed.stride(0), allowed.stride(2), length,
            BLOCK=1024,
        )  # fmt: skip

    def launch(choice: Choice, chosen: Rows, out: Tensor) -> None:
        grid = (triton.cdiv(length, choice.blocks["BLOCK_M"]), q.shape[2], batch)
        queries.attend_many[grid](
            q, keys, values, *chosen, allowed, bounds, out, length, *numbers,
            PRECISION=_precision(q), **heads, **choice.options(),
        )  # fmt: skip

    def prepare() -> Trial:
        half = half_of(length, batch, q.device)
        scratch = torch.empty_like(out)
        return lambda choice: launch(choice, half, scratch)

    key = (*heads.values(), triton.next_power_of_2(length))
    launch(choose("attend_many", key, q.dtype, prepare), _compacted(mask), out)
    return out


def _attend_few(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    allowed: Tensor | None,
    numbers: tuple[float, ...],
    heads: dict[str, int],
) -> Tensor:
    out = torch.empty_like(q)
    length = q.shape[1]
    share = q.shape[2] // keys.shape[1]
    pairs = q.shape[0] * keys.shape[1]
    tile = triton.next_power_of_2(max(16, length * share))
    splits = _splits(pairs, keys.shape[2], q.device)
    sizes = {**heads, "T": length, "SPLITS": splits, "BLOCK_M": tile}
    parts: list[Tensor | None] = [None, None, None]
    if splits > 1:
        parts = [
            q.new_empty(pairs * splits * tile * width, dtype=torch.float32)
            for width in (heads["BLOCK_D"], 1, 1)
        ]

    def launch(choice: Choice, mask: Tensor) -> None:
        queries.attend_few[(pairs, splits)](
            q, keys, values, mask, allowed, out, *parts, *numbers,
            PRECISION=_precision(q), **{**choice.options(), **sizes},
        )  # fmt: skip

    def prepare() -> Trial:
        everything = torch.ones_like(mask)
        return lambda choice: launch(choice, everything)

    launch(choose("attend_few", (*heads.values(), pairs, tile, splits), q.dtype, prepare), mask)
    if splits > 1:
        del sizes["TABLE"]
        queries.combine_splits[(pairs, length * share)](*parts, out, **sizes)
    return out


def _splits(pairs: int, length: int, device: torch.device) -> int:
    """Cuts of the keys, a power of two: four programs a multiprocessor, of 128 keys or more."""
    wanted = 4 * _processors(device) // max(1, pairs)
    return 2 ** max(0, min(wanted, length // 128, 64).bit_length() - 1)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4

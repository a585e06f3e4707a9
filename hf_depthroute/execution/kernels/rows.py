"""Triton kernels for chosen rows: compaction of a mask,
and products with weights of few rows or of many.

No kernel tells the host anything. For many rows, grids are sized for all of them; the number of
chosen ones is read on the device, and programs beyond it return before they touch a weight. For at
most 16, a decoding step, where the time is that of reading the weights, a program owns some outputs
and looks at the mask itself; when no row is chosen it reads no weight. No atomics: results do not
depend on the order in which programs run. Weights are `[out, in]`, as nn.Linear keeps them, and
everything is contiguous. Widths are compile-time constants (a model has few of them).

Legend: N rows, i and o input and output width; a `slot` counts chosen rows, `row` is where one
stands.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length"])
def compact(mask, index, count, length, BLOCK: tl.constexpr):
    """Where each row of `mask` `[R, length]` (one byte each) is true, ascending, and how often.

    Grid: (blocks of `length`, R). Every program counts the rows before its block itself: reading so
    many bytes from the L2 cache again costs less than a second launch.
    """
    block = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    mask += sequence * length
    index += sequence * length
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, block * BLOCK, BLOCK):
        before += tl.load(mask + first + lanes).to(tl.int32)
    offset = tl.sum(before, axis=0)
    position = block * BLOCK + lanes
    chosen = tl.load(mask + position, mask=position < length, other=0).to(tl.int32)
    slot = offset + tl.cumsum(chosen, axis=0) - 1
    tl.store(index + slot, position, mask=chosen != 0)
    if block == tl.num_programs(0) - 1:
        tl.store(count + sequence, offset + tl.sum(chosen, axis=0))


@triton.jit
def _product(
    x, row, live, weight, up, column, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`x W^T` of a tile of rows and columns, float32 `[M, N]`; with `up`,
    `SiLU(x W^T) * (x W_up^T)`.

    One row is multiplied on the vector units, several on the tensor cores; of those only the `live`
    ones are read.
    """
    k = tl.arange(0, BLOCK_K)
    # The masks of what always exists are known to the compiler, which drops them.
    whole: tl.constexpr = WIDTH % BLOCK_K == 0
    if BLOCK_M == 1:
        at = column[:, None] * WIDTH + k[None, :]
        part = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        up_part = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            inside = (k < WIDTH - start) | whole
            a = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
            part += tl.load(weight + at + start, mask=inside[None, :], other=0.0).to(tl.float32) * a
            if up is not None:
                up_part += (
                    tl.load(up + at + start, mask=inside[None, :], other=0.0).to(tl.float32) * a
                )
        result = tl.sum(part, axis=1)[None, :]
        more = tl.sum(up_part, axis=1)[None, :]
    else:
        x_at = x + row[:, None] * WIDTH + k[None, :]
        at = column[None, :] * WIDTH + k[:, None]
        weight_at = weight + at
        if up is not None:
            up_at = up + at
        result = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        more = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            inside = (k < WIDTH - start) | whole
            a = tl.load(x_at, mask=live[:, None] & inside[None, :], other=0.0)
            w = tl.load(weight_at, mask=inside[:, None], other=0.0)
            result = tl.dot(a, w, result, input_precision=PRECISION)
            if up is not None:
                u = tl.load(up_at, mask=inside[:, None], other=0.0)
                more = tl.dot(a, u, more, input_precision=PRECISION)
                up_at += BLOCK_K
            x_at += BLOCK_K
            weight_at += BLOCK_K
    if up is not None:
        result = result * tl.sigmoid(result) * more
    return result


@triton.jit
def _write(result, row, column, real, live, bias, stream, scale, out, OUT: tl.constexpr):
    """`out[row] = stream[row] + scale[row] * (result + bias)` at the `real` rows;
    `stream[row]` where not `live`."""
    if bias is not None:
        result += tl.load(bias + tl.minimum(column, OUT - 1)).to(tl.float32)[None, :]
    if scale is not None:
        result *= tl.load(scale + row, mask=real, other=0.0).to(tl.float32)[:, None]
    if live is not None:
        result = tl.where(live[:, None], result, 0.0)
    inside = real[:, None] & (column < OUT)[None, :]
    place = row[:, None] * OUT + column[None, :]
    if stream is not None:
        result += tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply_many(
    x, index, count, weight, up, bias, stream, scale, out,
    WIDTH: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`out[row] = stream[row] + scale[row] * (x[row] W^T + bias)` at the rows of `compact`;
    `out` keeps the others.

    With `up`, `SiLU(x W^T) * (x W_up^T)` stands for `x W^T`. All of `up`, `bias`, `stream` (0) and
    `scale` (1) may be None. `x` `[N, i]`, `stream` and `out` `[N, o]`.
    """
    total = tl.load(count)
    tiles_m = tl.cdiv(total, BLOCK_M)
    tiles_n = tl.cdiv(OUT, BLOCK_N)
    pid = tl.program_id(0)
    if pid >= tiles_m * tiles_n:
        return
    # GROUP rows of tiles share the columns they pass, so weights stay in the L2.
    in_group = GROUP * tiles_n
    first = pid // in_group * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    slot = (first + pid % in_group % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (pid % in_group // high) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the end, the last chosen row and the last column are computed again and not stored: no
    # mask in the loop.
    row = tl.load(index + tl.minimum(slot, total - 1)).to(tl.int64)
    read = tl.minimum(column, OUT - 1).to(tl.int64)
    every = tl.full([BLOCK_M], True, tl.int1)
    result = _product(
        x, row, every, weight, up, read, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, 1, PRECISION
    )
    _write(result, row, column, slot < total, None, bias, stream, scale, out, OUT)


@triton.jit
def multiply_few(
    x, mask, weight, up, bias, stream, scale, out, N: tl.constexpr,
    WIDTH: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`multiply_many` at the rows in `mask`, N <= BLOCK_M of them;
    at the others `out` is the stream, or 0."""
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(column, OUT - 1).to(tl.int64)
    live = tl.load(mask + row, mask=row < N, other=0) != 0
    result = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if tl.sum(live.to(tl.int32), axis=0) != 0:
        result = _product(
            x, row, live, weight, up, read, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PRECISION
        )
    _write(result, row, column, row < N, live, bias, stream, scale, out, OUT)

"""Triton kernels for many rows: compaction of a mask, gathered gate-up GEMM with SwiGLU, GEMM scattered to its rows.

No kernel tells the host anything. Grids are sized for all rows; the number of chosen ones is read on the device, and
programs beyond it return before they touch a weight. Weights are `[out, in]`, as nn.Linear keeps them, and everything
is contiguous. Widths are compile-time constants (a model has few of them), the number of rows is not.

Legend: N rows, F chosen rows, d model width, f FFN width; a `slot` counts chosen rows, `row` is where one stands.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length"])
def compact(mask, index, count, length, BLOCK: tl.constexpr):
    """Where each row of `mask` `[R, length]` (one byte each) is true, ascending, and how often.

    Grid: (blocks of `length`, R). Every program counts what stands in front of its block itself: reading so many
    bytes from the L2 cache again costs less than a second launch.
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
def _tile(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of tile `pid`: GROUP rows of tiles share the columns they pass, so weights stay in the L2."""
    in_group = GROUP * tiles_n
    first = pid // in_group * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + pid % in_group % rows, pid % in_group // rows


@triton.jit
def gate_up(
    x,
    index,
    count,
    w_gate,
    w_up,
    hidden,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`hidden[slot] = SiLU(W_gate x[row]) * W_up x[row]`: `x` `[N, d]`, `hidden` `[N, f]` filled up to the count."""
    total = tl.load(count)
    tiles_m = tl.cdiv(total, BLOCK_M)
    tiles_n = tl.cdiv(INNER, BLOCK_N)
    pid = tl.program_id(0)
    if pid >= tiles_m * tiles_n:
        return
    m, n = _tile(pid, tiles_m, tiles_n, GROUP)
    slot = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the end, the last chosen row and the last column are computed again and not stored: no mask in the loop.
    row = tl.load(index + tl.minimum(slot, total - 1)).to(tl.int64)
    weight = tl.minimum(column, INNER - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * WIDTH + k[None, :]
    gate_at = w_gate + weight[None, :] * WIDTH + k[:, None]
    up_at = w_up + weight[None, :] * WIDTH + k[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            a, g, u = tl.load(x_at), tl.load(gate_at), tl.load(up_at)
        else:
            inside = k < WIDTH - start
            a = tl.load(x_at, mask=inside[None, :], other=0.0)
            g = tl.load(gate_at, mask=inside[:, None], other=0.0)
            u = tl.load(up_at, mask=inside[:, None], other=0.0)
        gate = tl.dot(a, g, gate, input_precision=PRECISION)
        up = tl.dot(a, u, up, input_precision=PRECISION)
        x_at += BLOCK_K
        gate_at += BLOCK_K
        up_at += BLOCK_K
    out = gate * tl.sigmoid(gate) * up
    inside = (slot < total)[:, None] & (column < INNER)[None, :]
    tl.store(
        hidden + slot.to(tl.int64)[:, None] * INNER + column[None, :], out.to(hidden.dtype.element_ty), mask=inside
    )


@triton.jit
def project(
    a,
    index,
    count,
    weight,
    bias,
    stream,
    scale,
    out,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`out[row] = stream[row] + scale[row] * (W a + bias)`; `bias`, `stream` and `scale` may be None.

    `a` is `[N, WIDTH]`, read at `row` where GATHER, at `slot` otherwise; `out` `[N, OUT]` keeps its skipped rows.
    """
    total = tl.load(count)
    tiles_m = tl.cdiv(total, BLOCK_M)
    tiles_n = tl.cdiv(OUT, BLOCK_N)
    pid = tl.program_id(0)
    if pid >= tiles_m * tiles_n:
        return
    m, n = _tile(pid, tiles_m, tiles_n, GROUP)
    slot = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    source = tl.minimum(slot, total - 1)
    row = tl.load(index + source).to(tl.int64)
    if GATHER:  # noqa: SIM108
        a_row = row
    else:
        a_row = source.to(tl.int64)
    at = tl.minimum(column, OUT - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_at = a + a_row[:, None] * WIDTH + k[None, :]
    weight_at = weight + at[None, :] * WIDTH + k[:, None]
    result = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            left, right = tl.load(a_at), tl.load(weight_at)
        else:
            inside = k < WIDTH - start
            left = tl.load(a_at, mask=inside[None, :], other=0.0)
            right = tl.load(weight_at, mask=inside[:, None], other=0.0)
        result = tl.dot(left, right, result, input_precision=PRECISION)
        a_at += BLOCK_K
        weight_at += BLOCK_K
    inside = (slot < total)[:, None] & (column < OUT)[None, :]
    place = row[:, None] * OUT + column[None, :]
    if bias is not None:
        result += tl.load(bias + at).to(tl.float32)[None, :]
    if scale is not None:
        result *= tl.load(scale + row).to(tl.float32)[:, None]
    if stream is not None:
        result += tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)

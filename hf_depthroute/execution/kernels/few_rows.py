"""Triton kernels for a decoding step: at most 16 rows, where the time is that of reading the weights.

A program owns some outputs and looks at the mask itself, so there is no compaction; when no row is chosen it reads no
weight. One row is multiplied on the vector units, several on the tensor cores as one tile of 16. No atomics: results do
not depend on the order in which programs run.

Legend: as in `many_rows`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_up_few(
    x,
    mask,
    w_gate,
    w_up,
    hidden,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`hidden[row] = SiLU(W_gate x[row]) * W_up x[row]` where `mask`; `x` `[N, d]`, `hidden` `[N, f]`, N up to 16."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = tl.minimum(column, INNER - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    if N == 1:
        if tl.load(mask) == 0:
            return
        gate_part = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        up_part = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            inside = k < WIDTH - start
            at = weight[:, None] * WIDTH + start + k[None, :]
            if WIDTH % BLOCK_K == 0:
                g, u, a = tl.load(w_gate + at), tl.load(w_up + at), tl.load(x + start + k)
            else:
                g = tl.load(w_gate + at, mask=inside[None, :], other=0.0)
                u = tl.load(w_up + at, mask=inside[None, :], other=0.0)
                a = tl.load(x + start + k, mask=inside, other=0.0)
            gate_part += g.to(tl.float32) * a.to(tl.float32)[None, :]
            up_part += u.to(tl.float32) * a.to(tl.float32)[None, :]
        gate, up = tl.sum(gate_part, axis=1), tl.sum(up_part, axis=1)
        out = gate * tl.sigmoid(gate) * up
        tl.store(hidden + column, out.to(hidden.dtype.element_ty), mask=column < INNER)
    else:
        row = tl.arange(0, 16)
        live = tl.load(mask + row, mask=row < N, other=0) != 0
        if tl.sum(live.to(tl.int32), axis=0) == 0:
            return
        gate = tl.zeros([16, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([16, BLOCK_N], dtype=tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            inside = k < WIDTH - start
            at = weight[None, :] * WIDTH + start + k[:, None]
            a = tl.load(x + row[:, None] * WIDTH + start + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            if WIDTH % BLOCK_K == 0:
                g, u = tl.load(w_gate + at), tl.load(w_up + at)
            else:
                g = tl.load(w_gate + at, mask=inside[:, None], other=0.0)
                u = tl.load(w_up + at, mask=inside[:, None], other=0.0)
            gate = tl.dot(a, g, gate, input_precision=PRECISION)
            up = tl.dot(a, u, up, input_precision=PRECISION)
        out = gate * tl.sigmoid(gate) * up
        place = hidden + row[:, None] * INNER + column[None, :]
        tl.store(place, out.to(hidden.dtype.element_ty), mask=live[:, None] & (column < INNER)[None, :])


@triton.jit
def project_few(
    a,
    mask,
    weight,
    bias,
    stream,
    scale,
    out,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`out[row] = stream[row] + scale[row] * (W a[row] + bias)` where `mask`, else `stream[row]`, for all N <= 16 rows.

    `bias`, `stream` (0) and `scale` (1) may be None; `a` is not read in skipped rows.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.minimum(column, OUT - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    if N == 1:
        result = tl.zeros([BLOCK_N], dtype=tl.float32)
        if tl.load(mask) != 0:
            part = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
            for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
                inside = k < WIDTH - start
                weight_at = weight + at[:, None] * WIDTH + start + k[None, :]
                if WIDTH % BLOCK_K == 0:
                    w, v = tl.load(weight_at), tl.load(a + start + k)
                else:
                    w = tl.load(weight_at, mask=inside[None, :], other=0.0)
                    v = tl.load(a + start + k, mask=inside, other=0.0)
                part += w.to(tl.float32) * v.to(tl.float32)[None, :]
            result = tl.sum(part, axis=1)
            if bias is not None:
                result += tl.load(bias + at).to(tl.float32)
            if scale is not None:
                result *= tl.load(scale).to(tl.float32)
        if stream is not None:
            result += tl.load(stream + at).to(tl.float32)
        tl.store(out + column, result.to(out.dtype.element_ty), mask=column < OUT)
    else:
        row = tl.arange(0, 16)
        live = tl.load(mask + row, mask=row < N, other=0) != 0
        result = tl.zeros([16, BLOCK_N], dtype=tl.float32)
        if tl.sum(live.to(tl.int32), axis=0) != 0:
            for start in range(0, WIDTH, BLOCK_K):
                inside = k < WIDTH - start
                wanted = live[:, None] & inside[None, :]
                left = tl.load(a + row[:, None] * WIDTH + start + k[None, :], mask=wanted, other=0.0)
                weight_at = weight + at[None, :] * WIDTH + start + k[:, None]
                if WIDTH % BLOCK_K == 0:
                    right = tl.load(weight_at)
                else:
                    right = tl.load(weight_at, mask=inside[:, None], other=0.0)
                result = tl.dot(left, right, result, input_precision=PRECISION)
            if bias is not None:
                result += tl.load(bias + at).to(tl.float32)[None, :]
            if scale is not None:
                result *= tl.load(scale + row, mask=live, other=0.0).to(tl.float32)[:, None]
            result = tl.where(live[:, None], result, 0.0)
        inside = (row < N)[:, None] & (column < OUT)[None, :]
        place = row[:, None] * OUT + column[None, :]
        if stream is not None:
            result += tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)

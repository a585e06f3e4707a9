"""Triton kernels for attention of the chosen queries: flash-style tiles of many.

A tile of queries reads the keys between the first and the last that any of them may see, and nothing where no query is
chosen. Scores and sums are float32, in powers of two: `scaling` comes multiplied by log2(e). Keys and values have a
stride per sequence, head and position; the head width is contiguous everywhere.

Legend: B sequences, T positions, S keys, H query heads, G key-value heads, R = H / G, k head width.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length", "T"])
def visible_range(allowed, low, high, uneven, length, stride_b, stride_t, T, BLOCK: tl.constexpr):
    """First visible key, last + 1, and whether there is a gap, for each row of a bool mask `allowed` `[B, T, S]`.

    Causal masks, padding, windows and packed documents are rows without a gap: the attention kernel then compares
    positions and need not read the mask for every head. Grid: (T, B).
    """
    t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    allowed += b * stride_b + t.to(tl.int64) * stride_t
    lanes = tl.arange(0, BLOCK)
    first = tl.zeros([BLOCK], dtype=tl.int32) + length
    last = tl.zeros([BLOCK], dtype=tl.int32)
    seen = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, length, BLOCK):
        at = start + lanes
        yes = tl.load(allowed + at, mask=at < length, other=0) != 0
        first = tl.minimum(first, tl.where(yes, at, length))
        last = tl.maximum(last, tl.where(yes, at + 1, 0))
        seen += yes.to(tl.int32)
    lowest, highest = tl.min(first, axis=0), tl.max(last, axis=0)
    place = b * T + t
    tl.store(low + place, tl.minimum(lowest, highest))
    tl.store(high + place, highest)
    tl.store(uneven + place, (highest - lowest > tl.sum(seen, axis=0)).to(tl.int32))


@triton.jit
def _absorb(
    acc,
    norm,
    peak,
    q,
    keys,
    values,
    begin,
    end,
    low,
    high,
    table,
    scaling,
    stride_ks,
    stride_vs,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPARE: tl.constexpr,
    TABLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One pass of the online softmax over keys `begin .. end`: `acc` `[M, k]`, `norm` and `peak` `[M]`.

    COMPARE: a query sees `low .. high` only. TABLE: 1, its row of the bool `table` (pointers `[M]`) says what it sees;
    2, that row is added to its scores.
    """
    lanes, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        at = start + lanes
        if COMPARE:  # elsewhere every key of the tile exists and is visible
            inside = at < end
            k = tl.load(
                keys + at.to(tl.int64)[None, :] * stride_ks + d[:, None],
                mask=inside[None, :] & (d < HEAD)[:, None],
                other=0.0,
            )
        elif BLOCK_D == HEAD:
            k = tl.load(keys + at.to(tl.int64)[None, :] * stride_ks + d[:, None])
        else:
            k = tl.load(keys + at.to(tl.int64)[None, :] * stride_ks + d[:, None], mask=(d < HEAD)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scaling
        if TABLE == 1:
            seen = tl.load(table[:, None] + at[None, :], mask=inside[None, :], other=0) != 0
            scores = tl.where(seen, scores, float("-inf"))
        elif TABLE == 2:
            added = tl.load(table[:, None] + at[None, :], mask=inside[None, :], other=float("-inf")).to(tl.float32)
            scores += added * 1.4426950408889634
        elif COMPARE:
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(peak, tl.max(scores, axis=1))
        finite = tl.where(raised == float("-inf"), 0.0, raised)  # nothing seen yet: -inf minus -inf is NaN
        probs = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(peak - finite)
        norm = norm * fade + tl.sum(probs, axis=1)
        if COMPARE:
            v = tl.load(
                values + at.to(tl.int64)[:, None] * stride_vs + d[None, :],
                mask=inside[:, None] & (d < HEAD)[None, :],
                other=0.0,
            )
        elif BLOCK_D == HEAD:
            v = tl.load(values + at.to(tl.int64)[:, None] * stride_vs + d[None, :])
        else:
            v = tl.load(values + at.to(tl.int64)[:, None] * stride_vs + d[None, :], mask=(d < HEAD)[None, :], other=0.0)
        acc = tl.dot(probs.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        peak = raised
    return acc, norm, peak


@triton.jit(do_not_specialize=["T", "S", "past"])
def attend_many(
    q,
    keys,
    values,
    index,
    count,
    allowed,
    low,
    high,
    uneven,
    out,
    T,
    S,
    past,
    scaling,
    stride_kb,
    stride_kg,
    stride_ks,
    stride_vb,
    stride_vg,
    stride_vs,
    stride_ab,
    stride_at,
    stride_low,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles of chosen queries: `q`, `out` `[B, T, H, k]`, `index` `[B, T]` and `count` `[B]` from `compact`.

    TABLE: 0, causal after `past` keys; 1, a bool mask with its `visible_range`; 2, a float added to the scores.
    Grid: (tiles of T, H, B); the last tile, which sees most keys, comes first.
    """
    b = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    total = tl.load(count + b)
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first_slot >= total:
        return
    slot = first_slot + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    time = tl.load(index + b * T + tl.minimum(slot, total - 1))
    place = ((b * T + time) * HEADS + head)[:, None] * HEAD + d[None, :]
    query = tl.load(q + place, mask=(d < HEAD)[None, :], other=0.0)
    group = (head // (HEADS // GROUPS)).to(tl.int64)
    keys += b * stride_kb + group * stride_kg
    values += b * stride_vb + group * stride_vg
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    norm = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.zeros([BLOCK_M], dtype=tl.float32) + float("-inf")
    table = allowed
    if TABLE > 0:
        table = allowed + b * stride_ab + time.to(tl.int64) * stride_at
    if TABLE == 2:
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys, values, 0, S, time, time, table, scaling, stride_ks, stride_vs,
            HEAD, BLOCK_D, BLOCK_N, True, 2, PRECISION,
        )  # fmt: skip
    else:
        if TABLE == 1:
            lowest = tl.load(low + b * stride_low + time)
            highest = tl.load(high + b * stride_low + time)
            gaps = tl.max(tl.load(uneven + b * stride_low + time), axis=0)
        else:
            lowest = tl.zeros([BLOCK_M], dtype=tl.int32)
            highest = tl.minimum(past + time + 1, S)
            gaps = 0
        begin, end = tl.min(lowest, axis=0), tl.max(highest, axis=0)
        # Between them every query of the tile sees every key, where there is no gap.
        inner_begin = begin + tl.cdiv(tl.max(lowest, axis=0) - begin, BLOCK_N) * BLOCK_N
        inner_end = inner_begin + tl.maximum(tl.min(highest, axis=0) - inner_begin, 0) // BLOCK_N * BLOCK_N
        if TABLE == 1:  # noqa: SIM102 (a constant; what follows is known on the device only)
            if gaps != 0:
                acc, norm, peak = _absorb(
                    acc, norm, peak, query, keys, values, begin, end, lowest, highest, table, scaling,
                    stride_ks, stride_vs, HEAD, BLOCK_D, BLOCK_N, True, 1, PRECISION,
                )  # fmt: skip
                inner_begin, inner_end, begin = end, end, end  # the passes below find nothing left
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys, values, begin, tl.minimum(inner_begin, end), lowest, highest, table, scaling,
            stride_ks, stride_vs, HEAD, BLOCK_D, BLOCK_N, True, 0, PRECISION,
        )  # fmt: skip
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys, values, inner_begin, inner_end, lowest, highest, table, scaling,
            stride_ks, stride_vs, HEAD, BLOCK_D, BLOCK_N, False, 0, PRECISION,
        )  # fmt: skip
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys, values, inner_end, end, lowest, highest, table, scaling,
            stride_ks, stride_vs, HEAD, BLOCK_D, BLOCK_N, True, 0, PRECISION,
        )  # fmt: skip
    result = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=(slot < total)[:, None] & (d < HEAD)[None, :])

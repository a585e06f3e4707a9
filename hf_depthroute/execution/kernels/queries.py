"""Triton kernels for attention of the chosen queries: flash-style tiles of many,
and decoding steps.

A tile of queries reads the keys between the first and the last that any of them may see, and
nothing where no query is chosen. Scores and sums are float32, in powers of two: `scaling` comes
multiplied by log2(e). Keys and values have the same strides of a sequence, a head and a position;
the head width is contiguous everywhere.

Legend: B sequences, T positions, S keys, H query heads, G key-value heads, R = H / G, k head width.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length", "T"])
def visible_range(allowed, bounds, length, stride_b, stride_t, T, BLOCK: tl.constexpr):
    """`bounds` `[B, T, 3]` of a bool mask `allowed` `[B, T, S]`: first visible key, last + 1,
    whether there is a gap.

    Causal masks, padding, windows and packed documents are rows without a gap: the attention kernel
    then compares positions and need not read the mask for every head. Grid: (T, B).
    """
    t = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
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
    lowest = tl.min(first, axis=0)
    highest = tl.max(last, axis=0)
    bounds += (b * T + t) * 3
    tl.store(bounds, tl.minimum(lowest, highest))
    tl.store(bounds + 1, highest)
    tl.store(bounds + 2, (highest - lowest > tl.sum(seen, axis=0)).to(tl.int32))


@triton.jit
def _absorb(
    acc, norm, peak, q, keys, values, begin, end, low, high, table, scaling, stride_s,
    HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, COMPARE: tl.constexpr,
    TABLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One pass of the online softmax over keys `begin .. end`: `acc` `[M, k]`,
    `norm` and `peak` `[M]`.

    COMPARE: a query sees `low .. high` only; elsewhere every key of the tile exists and is visible.
    TABLE: 1, its row of the bool `table` (pointers `[M]`) says what it sees; 2, that row is added
    to its scores.
    """
    lanes = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    wide = (d < HEAD) | (BLOCK_D == HEAD)  # the compiler drops masks that it knows to hold
    for start in range(begin, end, BLOCK_N):
        at = start + lanes
        inside = (at < end) | (COMPARE == 0)
        place = at.to(tl.int64) * stride_s
        k = tl.load(
            keys + place[None, :] + d[:, None], mask=inside[None, :] & wide[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scaling
        if TABLE == 1:
            seen = tl.load(table[:, None] + at[None, :], mask=inside[None, :], other=0) != 0
            scores = tl.where(seen, scores, float("-inf"))
        elif TABLE == 2:
            added = tl.load(
                table[:, None] + at[None, :], mask=inside[None, :], other=float("-inf")
            ).to(tl.float32)
            scores += added * 1.4426950408889634
        elif COMPARE:
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(peak, tl.max(scores, axis=1))
        # Nothing seen yet: -inf minus -inf is NaN.
        finite = tl.where(raised == float("-inf"), 0.0, raised)
        probs = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(peak - finite)
        norm = norm * fade + tl.sum(probs, axis=1)
        v = tl.load(
            values + place[:, None] + d[None, :], mask=inside[:, None] & wide[None, :], other=0.0
        )
        acc = tl.dot(probs.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        peak = raised
    return acc, norm, peak


@triton.jit(do_not_specialize=["T", "S", "past"])
def attend_many(
    q, keys, values, index, count, allowed, bounds, out, T, S, past, scaling, stride_b, stride_g,
    stride_s, allowed_b, allowed_t, HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr, TABLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles of chosen queries: `q`, `out` `[B, T, H, k]`,
    `index` `[B, T]` and `count` `[B]` from `compact`.

    TABLE: 0, causal after `past` keys; 1, a bool mask with its `visible_range`; 2, a float added to
    the scores. Grid: (tiles of T, H, B); the last tile, which sees most keys, comes first.
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
    own = b * stride_b + group * stride_g
    keys = keys + own
    values = values + own
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    norm = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.zeros([BLOCK_M], dtype=tl.float32) + float("-inf")
    table = allowed
    if TABLE > 0:
        table = allowed + b * allowed_b + time.to(tl.int64) * allowed_t
    if TABLE == 2:
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys, values, 0, S, time, time, table, scaling, stride_s,
            HEAD, BLOCK_D, BLOCK_N, True, 2, PRECISION,
        )  # fmt: skip
    else:
        if TABLE == 1:
            # One sequence's mask may serve all.
            bounds += (tl.where(allowed_b == 0, 0, b) * T + time) * 3
            lowest = tl.load(bounds)
            highest = tl.load(bounds + 1)
            gaps = tl.max(tl.load(bounds + 2), axis=0)
        else:
            lowest = tl.zeros([BLOCK_M], dtype=tl.int32)
            highest = tl.minimum(past + time + 1, S)
            gaps = 0
        begin = tl.min(lowest, axis=0)
        end = tl.max(highest, axis=0)
        # Between them every query of the tile sees every key, where there is no gap.
        inner_begin = begin + tl.cdiv(tl.max(lowest, axis=0) - begin, BLOCK_N) * BLOCK_N
        inner_end = (
            inner_begin + tl.maximum(tl.min(highest, axis=0) - inner_begin, 0) // BLOCK_N * BLOCK_N
        )
        if TABLE == 1:  # noqa: SIM102 (a constant; what follows is known on the device only)
            if gaps != 0:
                acc, norm, peak = _absorb(
                    acc, norm, peak, query, keys, values, begin, end, lowest, highest, table,
                    scaling, stride_s, HEAD, BLOCK_D, BLOCK_N, True, 1, PRECISION,
                )  # fmt: skip
                # The passes below find nothing left.
                inner_begin = end
                inner_end = end
                begin = end
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys, values, begin, tl.minimum(inner_begin, end), lowest,
            highest, table, scaling, stride_s, HEAD, BLOCK_D, BLOCK_N, True, 0, PRECISION,
        )  # fmt: skip
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys, values, inner_begin, inner_end, lowest, highest, table,
            scaling, stride_s, HEAD, BLOCK_D, BLOCK_N, False, 0, PRECISION,
        )  # fmt: skip
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys, values, inner_end, end, lowest, highest, table, scaling,
            stride_s, HEAD, BLOCK_D, BLOCK_N, True, 0, PRECISION,
        )  # fmt: skip
    result = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(
        out + place,
        result.to(out.dtype.element_ty),
        mask=(slot < total)[:, None] & (d < HEAD)[None, :],
    )


@triton.jit(do_not_specialize=["S", "past"])
def attend_few(
    q, keys, values, mask, allowed, out, part_acc, part_norm, part_peak, S, past, scaling, stride_b,
    stride_g, stride_s, allowed_b, allowed_t, T: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, TABLE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A decoding step: the `T * R` queries that share a key-value head are one tile,
    the keys are cut into SPLITS.

    With one split the output is written here, otherwise `combine_splits` does it from `part_acc`
    `[B * G, SPLITS, M, k]` and the two sums `[B * G, SPLITS, M]`. Grid: (B * G, SPLITS). TABLE as
    in `attend_many`.
    """
    pair = tl.program_id(0)
    split = tl.program_id(1)
    b = (pair // GROUPS).to(tl.int64)
    group = (pair % GROUPS).to(tl.int64)
    SHARE: tl.constexpr = HEADS // GROUPS
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    t = row // SHARE
    real = t < T
    live = tl.load(mask + b * T + t, mask=real, other=0) != 0
    place = ((b * T + t) * HEADS + group * SHARE + row % SHARE)[:, None] * HEAD + d[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    norm = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.zeros([BLOCK_M], dtype=tl.float32) + float("-inf")
    if tl.sum(live.to(tl.int32), axis=0) != 0:
        query = tl.load(q + place, mask=live[:, None] & (d < HEAD)[None, :], other=0.0)
        own = b * stride_b + group * stride_g
        chunk = tl.cdiv(tl.cdiv(S, SPLITS), BLOCK_N) * BLOCK_N
        begin = split * chunk
        end = tl.minimum(begin + chunk, S)
        low = tl.zeros([BLOCK_M], dtype=tl.int32)
        high = past + t + 1
        table = allowed
        if TABLE == 0:
            end = tl.minimum(end, past + T)
        else:
            table = allowed + b * allowed_b + tl.minimum(t, T - 1).to(tl.int64) * allowed_t
        # A static cache is long and mostly empty: read the keys that a live query sees.
        if TABLE == 1:
            SCAN: tl.constexpr = 1024
            lanes = tl.arange(0, SCAN)
            first = tl.zeros([SCAN], dtype=tl.int32) + end
            last = tl.zeros([SCAN], dtype=tl.int32) + begin
            for step in range(0, T):
                row_of = allowed + b * allowed_b + step * allowed_t
                wanted = tl.load(mask + b * T + step) != 0
                for start in range(begin, end, SCAN):
                    at = start + lanes
                    yes = (tl.load(row_of + at, mask=at < end, other=0) != 0) & wanted
                    first = tl.minimum(first, tl.where(yes, at, end))
                    last = tl.maximum(last, tl.where(yes, at + 1, begin))
            begin = tl.min(first, axis=0)
            end = tl.max(last, axis=0)
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys + own, values + own, begin, end, low, high, table, scaling,
            stride_s, HEAD, BLOCK_D, BLOCK_N, True, TABLE, PRECISION,
        )  # fmt: skip
    if SPLITS == 1:
        result = tl.where(live[:, None], acc / tl.where(norm == 0.0, 1.0, norm)[:, None], 0.0)
        tl.store(
            out + place, result.to(out.dtype.element_ty), mask=real[:, None] & (d < HEAD)[None, :]
        )
    else:
        norm = tl.where(live, norm, 0.0)
        slot = (pair * SPLITS + split).to(tl.int64) * BLOCK_M + row
        tl.store(part_norm + slot, norm)
        tl.store(part_peak + slot, peak)
        tl.store(part_acc + slot[:, None] * BLOCK_D + d[None, :], acc, mask=(norm != 0.0)[:, None])


@triton.jit
def combine_splits(
    part_acc, part_norm, part_peak, out, T: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The softmax over all keys from that over each split, always in the same order.

    Grid: (B * G, T * R).

    A split that saw nothing (`norm` 0) has written no `acc`. SPLITS is a power of two.
    """
    pair = tl.program_id(0)
    row = tl.program_id(1)
    SHARE: tl.constexpr = HEADS // GROUPS
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    slot = (pair * SPLITS + split).to(tl.int64) * BLOCK_M + row
    norm = tl.load(part_norm + slot)
    seen = norm != 0.0
    peak = tl.where(seen, tl.load(part_peak + slot), float("-inf"))
    top = tl.max(peak, axis=0)
    weight = tl.where(seen, tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    acc = tl.load(part_acc + slot[:, None] * BLOCK_D + d[None, :], mask=seen[:, None], other=0.0)
    total = tl.sum(norm * weight, axis=0)
    result = tl.sum(acc * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    t = row // SHARE
    head = pair % GROUPS * SHARE + row % SHARE
    place = ((pair // GROUPS).to(tl.int64) * T + t) * HEADS + head
    tl.store(out + place * HEAD + d, result.to(out.dtype.element_ty), mask=d < HEAD)

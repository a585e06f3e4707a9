"""Triton kernels for the attention of a decoding step: one tile of queries per key-value head, splits over the keys.

No key or value is read where no query is chosen, nor before the first and after the last visible key.

Legend: as in `many_queries`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .many_queries import _absorb


@triton.jit(do_not_specialize=["S", "past"])
def attend_few(
    q,
    keys,
    values,
    mask,
    allowed,
    out,
    part_acc,
    part_norm,
    part_peak,
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
    T: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TABLE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A decoding step: the `T * R` queries that share a key-value head are one tile, the keys are cut into SPLITS.

    With one split the output is written here, otherwise `combine_splits` does it from `part_acc`
    `[B * G, SPLITS, M, k]` and the two sums `[B * G, SPLITS, M]`. Grid: (B * G, SPLITS). TABLE as in `attend_many`.
    """
    pair, split = tl.program_id(0), tl.program_id(1)
    b, group = (pair // GROUPS).to(tl.int64), (pair % GROUPS).to(tl.int64)
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
        keys_of = keys + b * stride_kb + group * stride_kg
        values_of = values + b * stride_vb + group * stride_vg
        chunk = tl.cdiv(tl.cdiv(S, SPLITS), BLOCK_N) * BLOCK_N
        begin = split * chunk
        end = tl.minimum(begin + chunk, S)
        low = tl.zeros([BLOCK_M], dtype=tl.int32)
        high = past + t + 1
        table = allowed
        if TABLE == 0:
            end = tl.minimum(end, past + T)
        else:
            table = allowed + b * stride_ab + tl.minimum(t, T - 1).to(tl.int64) * stride_at
        if TABLE == 1:  # a static cache is long and mostly empty: read the keys that a live query sees
            SCAN: tl.constexpr = 1024
            lanes = tl.arange(0, SCAN)
            first = tl.zeros([SCAN], dtype=tl.int32) + end
            last = tl.zeros([SCAN], dtype=tl.int32) + begin
            for step in range(0, T):
                row_of = allowed + b * stride_ab + step * stride_at
                wanted = tl.load(mask + b * T + step) != 0
                for start in range(begin, end, SCAN):
                    at = start + lanes
                    yes = (tl.load(row_of + at, mask=at < end, other=0) != 0) & wanted
                    first = tl.minimum(first, tl.where(yes, at, end))
                    last = tl.maximum(last, tl.where(yes, at + 1, begin))
            begin, end = tl.min(first, axis=0), tl.max(last, axis=0)
        acc, norm, peak = _absorb(
            acc, norm, peak, query, keys_of, values_of, begin, end, low, high, table, scaling,
            stride_ks, stride_vs, HEAD, BLOCK_D, BLOCK_N, True, TABLE, PRECISION,
        )  # fmt: skip
    if SPLITS == 1:
        result = tl.where(live[:, None], acc / tl.where(norm == 0.0, 1.0, norm)[:, None], 0.0)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=real[:, None] & (d < HEAD)[None, :])
    else:
        norm = tl.where(live, norm, 0.0)
        slot = (pair * SPLITS + split).to(tl.int64) * BLOCK_M + row
        tl.store(part_norm + slot, norm)
        tl.store(part_peak + slot, peak)
        tl.store(part_acc + slot[:, None] * BLOCK_D + d[None, :], acc, mask=(norm != 0.0)[:, None])


@triton.jit
def combine_splits(
    part_acc,
    part_norm,
    part_peak,
    out,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The softmax over all keys from that over each split, always in the same order. Grid: (B * G, T * R).

    A split that saw nothing (`norm` 0) has written no `acc`. SPLITS is a power of two.
    """
    pair, row = tl.program_id(0), tl.program_id(1)
    SHARE: tl.constexpr = HEADS // GROUPS
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    slot = (pair * SPLITS + split).to(tl.int64) * BLOCK_M + row
    norm = tl.load(part_norm + slot)
    seen = norm != 0.0
    peak = tl.where(seen, tl.load(part_peak + slot), float("-inf"))
    top = tl.max(peak, axis=0)
    weight = tl.where(seen, tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    acc = tl.load(part_acc + slot[:, None] * BLOCK_D + d[None, :], mask=seen[:, None], other=0.0)
    total = tl.sum(norm * weight, axis=0)
    result = tl.sum(acc * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    t, head = row // SHARE, pair % GROUPS * SHARE + row % SHARE
    place = ((pair // GROUPS).to(tl.int64) * T + t) * HEADS + head
    tl.store(out + place * HEAD + d, result.to(out.dtype.element_ty), mask=d < HEAD)

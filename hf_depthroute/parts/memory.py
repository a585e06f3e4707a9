"""Conditional memory: hashed n-grams of the token ids look up trained slots,
and a gate weighs what they hold.

"Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in Engram-Style Conditional
Memory" (FARS, Analemma; gitlab.com/fars-a/counterfactual-gate-supervision), equations 1 and 2. The
suffix n-grams of the orders 2 to N are hashed by K heads each; the slots that they hit,
concatenated, are `e`:

    k = W_K e;   v = W_V e;   alpha = sigmoid(RMSNorm(h) . RMSNorm(k) / sqrt(d));   h <- h + alpha v

As a cheap branch (`branch="memory"`) the orders begin at 1, and `v` is added without a gate.

An n-gram ends at its token and never reaches into padding or into the document before: what would
lie there counts as one reserved token, as n-gram models pad a sentence's start. What follows
padding in a later call, over the KV cache, goes on with the last real token.

Shapes: B batch, T positions, N longest order, S hashes, K of every order, w slot width, E = S w, d
model width.
"""

from __future__ import annotations

import functools
import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .branches import MixedLinear, RMSNorm, TensorMap, TransientCache, reset_linear
from .gate import Gate, GateOutput

MISSING = -1  # in place of a token: there is none in this document
EARLIER = -2  # in place of a token: it belongs to an earlier call, if there was one
LEAST_SLOTS = 512  # of one hash
_EPSILON = 1e-6
_BITS = 2**64 - 1


class MemorySizes(Protocol):
    """The fields of `DepthRouteConfig` that the memory reads."""

    memory_slots: int
    memory_width: int
    memory_heads: int
    ngram_order: int
    branch: str
    seed: int


def shortest_order(config: MemorySizes) -> int:
    """The fewest tokens that are looked up: 1 for a cheap branch, 2 before the attention."""
    return 1 if config.branch == "memory" else 2


def hash_count(config: MemorySizes) -> int:
    """`S`: every order from the shortest on is hashed by every head."""
    return config.memory_heads * (config.ngram_order - shortest_order(config) + 1)


def embedding_width(config: MemorySizes) -> int:
    """`E`, the width of what is looked up for one token."""
    return hash_count(config) * config.memory_width


def suffixes(
    ids_BT: Tensor, order: int, real_BT: Tensor | None = None, starts_BT: Tensor | None = None
) -> Tensor:
    """Every token with the `order - 1` before it, the newest first, int64 `[B, T, N]`: ids,
    `MISSING` where a document has none, `EARLIER` where this call does not hold it.

    `starts_BT` is true where a document starts after another one.
    """
    newest = ids_BT.long()
    cut = starts_BT
    if real_BT is not None:
        newest = newest.masked_fill(~real_BT, MISSING)
        cut = ~real_BT if cut is None else cut | ~real_BT
    columns = [newest]
    for _ in range(order - 1):
        before = F.pad(columns[-1][:, :-1], (1, 0), value=EARLIER)
        columns.append(before if cut is None else before.masked_fill(cut, MISSING))
    return torch.stack(columns, dim=-1)


def continued(ngrams_BTN: Tensor, before_BM: Tensor) -> Tensor:
    """`suffixes` of a call that goes on where another ended,
    whose last `M = N - 1` tokens are given, newest first."""
    if ngrams_BTN.shape[1] == 1:  # a decoding step, in fewer operators
        before_B1N = F.pad(before_BM[:, : ngrams_BTN.shape[2] - 1], (1, 0))[:, None]
        return torch.where(ngrams_BTN == EARLIER, before_B1N, ngrams_BTN)
    filled = ngrams_BTN.clone()
    for t in range(min(filled.shape[1], before_BM.shape[1])):
        open_ = filled[:, t, t + 1 :]
        filled[:, t, t + 1 :] = torch.where(open_ == EARLIER, before_BM[:, : open_.shape[1]], open_)
    return filled


def over_padding(held_BTM: Tensor, real_BT: Tensor, before_BM: Tensor | None) -> Tensor:
    """The newest `M` of `suffixes`, where padding has those of the last real position before it.

    `before_BM` are the last tokens of the call before; None if there was none.
    """
    before = held_BTM if before_BM is None else before_BM[:, None]
    if real_BT.shape[1] == 1:  # a decoding step, in fewer operators
        return torch.where(real_BT[..., None], held_BTM, before)
    places_T = torch.arange(real_BT.shape[1], device=real_BT.device)
    places_BT1 = torch.where(real_BT, places_T, -1).cummax(dim=1).values[..., None]
    found = held_BTM.gather(1, places_BT1.clamp(min=0).expand_as(held_BTM))
    return torch.where(places_BT1 < 0, before, found)


class NgramMemory(nn.Module):
    """The slots of one layer and `W_V`; called with n-grams it gives `e`,
    and `value` makes `v` of it.

    Hash `s` of an n-gram `x_0 ... x_(n-1)`, the newest token first, is

        slot = offset_s + ((x_0 + 1) m_s0 xor (x_1 + 1) m_s1 xor ...) mod p_s

    with odd multipliers below 2^31 that follow from the seed, the layer, the order and the head
    alone, and a prime `p_s` of its own. Products stay below 2^62, so that int64 gives the same
    slots on every machine. Every hash has an equal part of the slots; `p_s` is the largest prime in
    it that no hash before has taken.

    Slots start at zero: the memory first adds nothing, and an n-gram that training never met adds
    nothing later, unless it shares its slots with one that it did meet.

    Args:
        width: `d`.
        config: Sizes and seed.
        layer_index: Index of the decoder layer; each has hashes of its own.
    """

    def __init__(self, width: int, config: MemorySizes, layer_index: int = 0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(config.memory_slots, config.memory_width))
        self.value = MixedLinear(embedding_width(config), width, bias=False)
        self._multipliers, self._primes, self._offsets = _hashes(config, layer_index)
        self._on_device = TransientCache()

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.table)
        reset_linear(self.value, generator)

    def extra_repr(self) -> str:
        return "slots={}, width={}".format(*self.table.shape)

    def weights_per_token(self) -> int:
        """Weights that one token multiplies with: those of `W_V`."""
        return self.value.weight.numel()

    def slots(self, ngrams: Tensor) -> Tensor:
        """The rows of the table that n-grams hit, int64 `[..., N] -> [..., S]`."""
        multipliers_NS, primes_S, offsets_S = self._constants(ngrams.device)
        tokens = ngrams.clamp(min=MISSING) + 1  # [..., N], 0 where there is none
        mixed = tokens[..., :1] * multipliers_NS[0]
        # The multiplier is 0 where the n-gram is shorter.
        for place in range(1, len(multipliers_NS)):
            mixed = mixed ^ (tokens[..., place : place + 1] * multipliers_NS[place])
        return mixed % primes_S + offsets_S

    def forward(self, ngrams: Tensor) -> Tensor:
        """`e`, `[..., N] -> [..., E]`."""
        return F.embedding(self.slots(ngrams.to(self.table.device)), self.table).flatten(-2)

    def for_decoding(self, dtype: torch.dtype) -> TensorMap:
        """`update` with `W_V` as it is now, for decoding."""
        weight, _ = self.value.cast(dtype)
        return lambda ngrams: F.linear(self(ngrams).to(dtype), weight)

    def update(self, ngrams: Tensor, dtype: torch.dtype) -> Tensor:
        """`v` in the stream's dtype, `[..., N] -> [..., d]`."""
        return self.value(self(ngrams).to(dtype))

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if device not in self._on_device:
            numbers = (self._multipliers, self._primes, self._offsets)
            self._on_device[device] = tuple(torch.tensor(part, device=device) for part in numbers)
        return self._on_device[device]


class MemoryGate(Gate):
    """`u = RMSNorm(h) . RMSNorm(W_K e) / sqrt(d)`, and `alpha = sigmoid(u)` weighs the memory,
    in inference too.

    It is given the stream and what was retrieved, concatenated.
    """

    called = "the memory's gate"
    targets = ("memory",)
    granularities = ("token",)
    selections = ("soft",)
    default_selection = "soft"
    default_threshold = 0.0
    default_temperature = 1.0
    reads = "residual"
    soft = True

    def __init__(self, width: int, config: MemorySizes, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        self.key = MixedLinear(embedding_width(config), width, bias=False)
        self.stream_norm = RMSNorm(nn.Parameter(torch.ones(width)), _EPSILON)
        self.key_norm = RMSNorm(nn.Parameter(torch.ones(width)), _EPSILON)

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        nn.init.ones_(self.stream_norm.weight)
        nn.init.ones_(self.key_norm.weight)

    def forward(self, x: Tensor) -> GateOutput:  # [B, T, d + E] -> scores [B, T]
        h, e = x.split([self.key.out_features, self.key.in_features], dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            products = self.stream_norm(h) * self.key_norm(self.key(e))
        return {"scores": products.sum(-1) / math.sqrt(self.key.out_features)}


def _hashes(config: MemorySizes, layer_index: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Multipliers `[N][S]`, primes `[S]` and offsets `[S]`; order by order, head by head."""
    count = hash_count(config)
    order = config.ngram_order
    share = config.memory_slots // count
    multipliers = [
        [
            _mixed(config.seed, layer_index, n, head, place) >> 33 | 1 if place < n else 0
            for n in range(shortest_order(config), order + 1)
            for head in range(config.memory_heads)
        ]
        for place in range(order)
    ]
    offsets = [share * place for place in range(count)]
    return multipliers, list(_primes_below(share + 1, count)), offsets


def _mixed(*numbers: int) -> int:
    """64 bits that depend on all numbers: the finaliser of SplitMix64, applied to each in turn."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _BITS
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _BITS
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _BITS
        state ^= state >> 31
    return state


@functools.cache
def _primes_below(end: int, count: int) -> tuple[int, ...]:
    """The `count` largest primes below `end`, descending."""
    found: list[int] = []
    candidate = end - 1
    while len(found) < count and candidate > 1:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
        candidate -= 1
    return tuple(found)

"""Roofline: the FLOPs and bytes of a forward pass, and the least time that a machine needs for them.

Every part of a pass takes at least `max(bytes / bandwidth, FLOPs / matmul rate)`, and parts run one after the other.
Counted are two FLOPs per weight and token, the attention's two products, and as bytes: every weight that is needed once
per pass, the input and the output of every matrix product, the KV cache, and the logits. What can be fused (norms,
activations, residual adds, the rotation) counts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import DynamicCache

from ..base.cache import cache_layer, can_skip
from ..base.families import Family, text_config
from ..base.projections import STYLES
from ..base.stack import stack_of
from ..inference.calibration import active_routings
from ..parts.gate import Gate
from ..parts.memory import NgramMemory
from ..parts.neurons import NeuronBranch
from ..routing.routing import ROUTING, Routing

PARTS = ("attention projections", "attention core", "ffn", "router", "head")


@dataclass(frozen=True)
class Peaks:
    """A machine's peak rates in one dtype.

    Attributes:
        bytes_per_s: The higher rate of a copy (bytes read and written) and of a matrix-vector product (bytes read).
        flops_per_s: What a linear map of as many rows as features reaches, 1,024 on CPUs and 8,192 on GPUs.
    """

    bytes_per_s: float
    flops_per_s: float

    def to_dict(self) -> dict[str, float]:
        return {
            "gb_per_s": round(self.bytes_per_s / 1e9, 2),
            "gflop_per_s": round(self.flops_per_s / 1e9, 2),
        }


@dataclass
class Work:
    """FLOPs and bytes of each of `PARTS`."""

    flops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, part: str, flops: float, moved: float) -> None:
        self.flops[part] += flops
        self.bytes[part] += moved

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())

    def seconds(self, peaks: Peaks) -> float:
        return sum(max(self._times(part, peaks)) for part in self.flops)

    def summary(self, peaks: Peaks) -> dict[str, Any]:
        """JSON-ready: totals, the least time, and which of the two binds for the larger part of it."""
        times = [self._times(part, peaks) for part in self.flops]
        by_bytes = sum(moving for computing, moving in times if moving >= computing)
        seconds = self.seconds(peaks)
        return {
            "gflop": round(self.total_flops / 1e9, 4),
            "gb": round(sum(self.bytes.values()) / 1e9, 4),
            "ideal_ms": round(seconds * 1e3, 4),
            "bound": "bandwidth" if by_bytes > seconds / 2 else "compute",
        }

    def _times(self, part: str, peaks: Peaks) -> tuple[float, float]:
        return self.flops[part] / peaks.flops_per_s, self.bytes[part] / peaks.bytes_per_s


@dataclass(frozen=True)
class Matrix:
    """A weight that tokens are multiplied with: `[out, in]`, or of fused experts `[E, out, in]`.

    Attributes:
        part: One of `PARTS`.
        weight: It.
        chosen: Experts per token; 1 for a plain weight.
        left_out: How much of it a token on the cheap path does not meet, 0 to 1.
    """

    part: str
    weight: torch.Tensor
    chosen: int = 1
    left_out: float = 0.0

    @property
    def per_token(self) -> float:
        """Weights that a token on the full path meets."""
        return self.weight.numel() * (self.chosen / len(self.weight) if self.weight.ndim == 3 else 1)


def matrices(layer: Any, config: Any, family: Family | None = None, routing: Routing | None = None) -> list[Matrix]:
    """The weights of a decoder layer, or of any module, without those of its router; norms do not count.

    Args:
        layer: The module.
        config: The base model's.
        family: The base's family, to tell the attention from the rest.
        routing: The layer's router, where one is on.
    """
    parts: dict[str, float] = {} if routing is None else _left_out(layer, config, routing)
    found = []
    for name, weight in layer.named_parameters():
        if name.startswith(f"{ROUTING}.") or "norm" in name or weight.ndim not in (2, 3):  # a norm of heads is 2-d
            continue
        left_out = max((share for prefix, share in parts.items() if name.startswith(f"{prefix}.")), default=0.0)
        inside = family is not None and name.startswith(f"{family.attention}.")
        chosen = config.num_experts_per_tok if weight.ndim == 3 else 1
        found.append(Matrix("attention projections" if inside else "ffn", weight, chosen, left_out))
    return found


def _left_out(layer: Any, config: Any, routing: Routing) -> dict[str, float]:
    """By the name of a child, how much of it the cheap path leaves out."""
    family, target = routing.family, routing.active_target()
    parts = {family.ffn: 1.0} if target.skips_ffn else {}
    if target.per_pair:
        parts[f"{family.ffn}.{family.experts}"] = 1.0
    if skips_attention(routing, config):
        if skips_sequences(routing, config):
            return parts | {family.attention: 1.0}
        assert family.queries is not None
        queries = STYLES[family.queries].weights(getattr(layer, family.attention))
        parts |= {f"{family.attention}.{name}": share for name, share in queries.items()}
    return parts


def skips_sequences(routing: Routing, config: Any) -> bool:
    """Whether a skipped attention leaves its keys and values out of the KV cache that `generate` makes.

    `config` is the base model's. A layer with a sliding window holds every sequence, and so does flex attention.
    """
    adapter = routing.active_config()
    whole = adapter.granularity == "sequence" or (routing.active_gate().static and adapter.phases == "all")
    if not (whole and routing.active_target().skips_attention) or config._attn_implementation == "flex_attention":
        return False
    return can_skip(cache_layer(DynamicCache(config=config), routing.layer_index))


def runs_full(routing: Routing, length: int) -> bool:
    """Whether a layer runs as the base's, without gate and branch, in a pass of `length` new tokens."""
    return in_full(routing, length) == 1.0


def in_full(routing: Routing, length: int) -> float:
    """The share of `length` new tokens that run in full whatever their scores: the last ones of `phases="prefill"`."""
    config = routing.active_config()
    return min(1.0, config.last_in_full / length) if config.phases == "prefill" else 0.0


def skips_attention(routing: Routing, config: Any) -> bool:
    """Whether the cheap path saves the attention: per token only where the family's projections are known."""
    target, queries_known = routing.active_target(), routing.family.queries is not None
    return target.skips_attention and (queries_known or skips_sequences(routing, config))


def gate_weights(routing: Routing, length: int) -> float:
    """Weights that the gate and the exits' predictor multiply a token with, in sequences of `length`."""
    name, config = routing.active_name(), routing.active_config()
    gates = [group[name] for group in (routing.depth_route_gate, routing.depth_route_predictor) if name in group]
    weights = float(sum(cast(Gate, gate).weights_per_token() for gate in gates))
    return weights / length if config.granularity == "sequence" else weights


def branch_weights(routing: Routing, config: Any) -> float:
    """Weights of the cheap branch, its memory's included; `config` is the base model's."""
    name, recalls = routing.active_name(), routing.active_config().branch == "memory"
    branches = [routing.depth_route_branch[name]] if name in routing.depth_route_branch else []
    weights = sum(matrix.per_token for branch in branches for matrix in matrices(branch, config))
    weights += sum(_borrowed(branch) for branch in branches)
    return weights + (_memory_weights(routing) if recalls else 0.0)


def _borrowed(branch: nn.Module) -> int:
    """Weights of the base that a branch multiplies a token with."""
    return branch.borrowed_weights() if isinstance(branch, NeuronBranch) else 0


def memory_weights(routing: Routing) -> float:
    """Weights that the memory of target memory multiplies a token with, without its gate's; 0 of another target."""
    return 0.0 if routing.active_config().branch == "memory" else _memory_weights(routing)


def _memory_weights(routing: Routing) -> float:
    name = routing.active_name()
    if name not in routing.depth_route_memory:
        return 0.0
    return float(cast(NgramMemory, routing.depth_route_memory[name]).weights_per_token())


def attention_sizes(config: Any) -> tuple[float, int]:
    """FLOPs of one query and one key (both products, all heads) in an attention layer, and values cached per token.

    Falcon caches the keys of one head or those of every query head, repeated; DeepSeek a latent vector.
    """
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        key_width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return 2.0 * heads * (key_width + config.v_head_dim), config.kv_lora_rank + config.qk_rope_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "falcon":
        shared = config.multi_query and not config.new_decoder_architecture
        kv_heads = 1 if shared else heads
    return 4.0 * heads * head_dim, 2 * kv_heads * head_dim


def windows_of(config: Any, seen: int) -> list[int]:
    """By layer, how many keys a query meets at most after `seen` tokens: all, or those of a sliding window."""
    return [min(seen, getattr(layer, "sliding_window", seen)) for layer in DynamicCache(config=config).layers]


def query_key_pairs(length: int, cached: int, window: int) -> int:
    """How many keys the queries of one causal sequence meet in all, at most `window` each."""
    growing = min(max(window - cached, 0), length)  # queries that meet every earlier token
    return growing * cached + growing * (growing + 1) // 2 + (length - growing) * window


def count_work(
    model: nn.Module,
    *,
    batch: int,
    length: int,
    cached: int = 0,
    logits: int = 1,
    shares: Mapping[int, tuple[float, float]] | None = None,
    trained_from: int | None = None,
) -> Work:
    """The work of one forward pass.

    Args:
        model: A `PeftModel` with an active depth-routed adapter, or any base model of a known family.
        batch: Sequences.
        length: New tokens per sequence.
        cached: Tokens per sequence already in the KV cache.
        logits: Positions per sequence that go through the LM head.
        shares: Per routed layer, the share of rows that run full and the share of passes in which any does, as from
            `PassCounter.shares`. None: the dense model, without an adapter.
        trained_from: Index of the first layer that trains. Then the work is that of a training step: one more time the
            matrix products of this layer, of those after it and of the head (gradients of their inputs), and twice
            the attention core; the gradients of the few trained weights count nothing.
    """
    stack = stack_of(model)
    family, layers = stack.family, stack.layers
    routings = {} if shares is None else {h.layer_index: h for h in active_routings(model) if not runs_full(h, length)}
    work = Work()
    config = text_config(model.config)
    size = next(p for n, p in layers[0].named_parameters() if f"{ROUTING}." not in n).element_size()
    tokens, trains = batch * length, trained_from is not None
    per_pair, cached_values = attention_sizes(config)
    windows = windows_of(config, cached + length)
    for index, layer in enumerate(layers):
        again = 2.0 if trained_from is not None and index >= trained_from else 1.0
        routing = routings.get(index)
        rows, passes = (1.0, 1.0) if routing is None or shares is None else shares[index]
        for matrix in matrices(layer, config, family, routing):
            flops, moved = _product(matrix, tokens, rows, passes)
            work.add(matrix.part, again * flops, again * size * moved)
        skips = routing is not None and skips_attention(routing, config)
        whole = routing is not None and skips_sequences(routing, config)
        share = rows if skips else 1.0
        read = share if length == 1 or whole or not skips else passes
        held = min(cached, windows[index]) + length
        moved = batch * cached_values * (held * read + length * (share if whole else 1.0))
        moved += tokens * share * per_pair / 2  # queries in, outputs out
        twice = 2 * again - 1
        pairs = batch * query_key_pairs(length, cached, windows[index])
        work.add("attention core", twice * share * pairs * per_pair, twice * size * moved)
        if routing is not None:
            _count_router(work, routing, config, tokens, length, 1.0 if trains else 1 - rows, again)
    again = 2.0 if trains else 1.0
    kept, width, vocabulary = batch * logits, config.hidden_size, config.vocab_size
    moved = size * (width * vocabulary + kept * (width + vocabulary))
    work.add("head", again * 2.0 * kept * width * vocabulary, again * moved)
    return work


def _product(matrix: Matrix, tokens: int, rows: float, passes: float) -> tuple[float, float]:
    """FLOPs of one matrix, and the values it moves; `rows` and `passes` as in `count_work`."""
    weight, ran = matrix.weight, tokens * (1 - matrix.left_out * (1 - rows))
    met = weight.numel() * (1 - matrix.left_out * (1 - passes))
    if weight.ndim == 3:  # fused experts: those that any token is sent to
        ran *= matrix.chosen
        weight = weight[0]
        experts = len(matrix.weight)
        met = weight.numel() * experts * (1 - (1 - 1 / experts) ** ran)
    return 2.0 * ran * weight.numel(), met + ran * sum(weight.shape)


def _count_router(
    work: Work, routing: Routing, config: Any, tokens: int, length: int, cheap: float, again: float
) -> None:
    """The gate and target memory on every token, the branch on the share `cheap`; weights are read on every pass."""
    name = routing.active_name()
    for group in (routing.depth_route_gate, routing.depth_route_predictor, routing.depth_route_branch):
        if name not in group:
            continue
        module = group[name]
        held = sum(p.numel() * p.element_size() for p in module.parameters())
        if group is routing.depth_route_branch:
            borrowed = _borrowed(module)
            met, seen = sum(matrix.per_token for matrix in matrices(module, config)) + borrowed, tokens * cheap
            held += borrowed * next(p.element_size() for p in module.parameters())
        else:
            met = float(cast(Gate, module).weights_per_token())
            seen = tokens / length if routing.active_config().granularity == "sequence" else tokens
        width = next(p.element_size() for p in module.parameters()) if held else 4
        work.add("router", again * 2.0 * seen * met, again * (held + 2 * width * seen * routing.width))
    if name in routing.depth_route_memory:
        memory = cast(NgramMemory, routing.depth_route_memory[name])
        met, size = memory.weights_per_token(), memory.table.element_size()
        seen = tokens * cheap if routing.active_config().branch == "memory" else tokens
        moved = size * (met + seen * (memory.value.in_features + routing.width))  # of the table, the rows looked up
        work.add("router", again * 2.0 * seen * met, again * moved)

"""The FLOPs of a forward pass, by part: two for each weight and token,
and the attention's two products.

Norms, activations, residual adds and the rotation count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import DynamicCache, PreTrainedConfig

from ..base.cache import cache_layer, can_skip
from ..base.families import Family, text_config
from ..base.projections import STYLES
from ..base.stack import stack_of
from ..base.weights import weight_shapes
from ..inference.calibration import active_routings
from ..parts.gate import Gate
from ..parts.memory import NgramMemory
from ..parts.neurons import NeuronBranch
from ..routing.routing import ROUTING, Routing

PARTS = ("attention projections", "attention core", "ffn", "router", "head")


@dataclass(frozen=True)
class Matrix:
    """A weight that tokens are multiplied with."""

    part: str  # one of `PARTS`
    shape: tuple[int, ...]  # `[out, in]`, or of fused experts `[E, out, in]`
    chosen: int = 1  # experts per token
    left_out: float = 0.0  # how much of it a token on the cheap path does not meet, 0 to 1

    @property
    def per_token(self) -> int:
        """Weights that a token on the full path meets."""
        return self.chosen * math.prod(self.shape[-2:])


def matrices(
    layer: nn.Module,
    config: PreTrainedConfig,
    family: Family | None = None,
    routing: Routing | None = None,
) -> list[Matrix]:
    """The weights of a decoder layer, or of any module, without those of its router; norms do not
    count. `family` tells the attention from the rest; `routing` is the layer's router, if on."""
    parts = {}
    if routing is not None:
        parts = _left_out(layer, config, routing)
    found = []
    for name, shape in weight_shapes(layer):
        # A norm of heads is 2-d.
        if name.startswith(f"{ROUTING}.") or "norm" in name or len(shape) not in (2, 3):
            continue
        shares = [share for prefix, share in parts.items() if name.startswith(f"{prefix}.")]
        inside = family is not None and name.startswith(f"{family.attention}.")
        part = "attention projections" if inside else "ffn"
        chosen = 1
        if len(shape) == 3:
            chosen = config.num_experts_per_tok
        found.append(Matrix(part, shape, chosen, max(shares, default=0.0)))
    return found


def _left_out(layer: nn.Module, config: PreTrainedConfig, routing: Routing) -> dict[str, float]:
    """By the name of a child, how much of it the cheap path leaves out."""
    family = routing.family
    target = routing.active_target()
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


def skips_sequences(routing: Routing, config: PreTrainedConfig) -> bool:
    """Whether a skipped attention leaves its keys and values out of the KV cache that
    `generate` makes.

    `config` is the base model's. A layer with a sliding window holds every sequence, and so does
    flex attention.
    """
    adapter = routing.active_config()
    static = routing.active_gate().static and adapter.phases == "all"
    whole = adapter.granularity == "sequence" or static
    if not (whole and routing.active_target().skips_attention):
        return False
    if config._attn_implementation == "flex_attention":
        return False
    return can_skip(cache_layer(DynamicCache(config=config), routing.layer_index))


def runs_full(routing: Routing, length: int) -> bool:
    """Whether a layer runs without gate and branch in a pass of `length` new tokens."""
    return share_in_full(routing, length) == 1.0


def share_in_full(routing: Routing, length: int) -> float:
    """The share of `length` new tokens, the last, that `phases="prefill"` runs in full."""
    config = routing.active_config()
    if config.phases == "prefill":
        return min(1.0, config.last_in_full / length)
    return 0.0


def skips_attention(routing: Routing, config: PreTrainedConfig) -> bool:
    """Whether the cheap path saves the attention; per token only with known projections."""
    target = routing.active_target()
    queries_known = routing.family.queries is not None
    return target.skips_attention and (queries_known or skips_sequences(routing, config))


def gate_weights(routing: Routing, length: int) -> float:
    """Weights of the gate and the exits' predictor per token, in sequences of `length`."""
    name = routing.active_name()
    config = routing.active_config()
    groups = (routing.depth_route_gate, routing.depth_route_predictor)
    gates = [cast(Gate, group[name]) for group in groups if name in group]
    weights = float(sum(gate.weights_per_token() for gate in gates))
    if config.granularity == "sequence":
        return weights / length
    return weights


def branch_weights(routing: Routing, config: PreTrainedConfig) -> float:
    """Weights of the cheap branch, its memory's included; `config` is the base model's."""
    name = routing.active_name()
    weights = memory_weights(routing, of_branch=True)
    if name in routing.depth_route_branch:
        branch = routing.depth_route_branch[name]
        weights += sum(matrix.per_token for matrix in matrices(branch, config))
        if isinstance(branch, NeuronBranch):
            weights += branch.borrowed_weights()
    return weights


def branch_share(routing: Routing, config: PreTrainedConfig, full: float, length: int) -> float:
    """The share of `length` tokens that meet the cheap branch, where the share `full` of all
    decisions, of what always runs in full too, is for full.

    Where each pair of a token and an expert is decided by itself, it is the tokens that drop at
    least one of theirs, if pairs are dropped independently. `config` is the base model's.
    """
    one_a_token = routing.active_config().expert_gates == "per_layer"
    if not routing.active_target().per_pair or (one_a_token and not routing.active_gate().static):
        return 1 - full
    routed = 1 - share_in_full(routing, length)
    if routed == 0:
        return 0.0
    return routed * (1 - (1 - (1 - full) / routed) ** config.num_experts_per_tok)


def memory_weights(routing: Routing, of_branch: bool = False) -> float:
    """Weights per token of target memory's memory, or a branch's, without its gate's; or 0."""
    name = routing.active_name()
    recalls = routing.active_config().branch == "memory"
    if recalls != of_branch or name not in routing.depth_route_memory:
        return 0.0
    return float(cast(NgramMemory, routing.depth_route_memory[name]).weights_per_token())


def attention_sizes(config: PreTrainedConfig) -> tuple[float, int]:
    """FLOPs of one query and one key (both products, all heads) in an attention layer,
    and values cached per token.

    Falcon caches the keys of one head or those of every query head, repeated; DeepSeek a latent
    vector.
    """
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return 2.0 * heads * widths, config.kv_lora_rank + config.qk_rope_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "falcon":
        shared = config.multi_query and not config.new_decoder_architecture
        kv_heads = 1 if shared else heads
    return 4.0 * heads * head_dim, 2 * kv_heads * head_dim


def windows_of(config: PreTrainedConfig, seen: int) -> list[int]:
    """By layer, how many keys a query meets at most after `seen` tokens."""
    layers = DynamicCache(config=config).layers
    return [min(seen, getattr(layer, "sliding_window", seen)) for layer in layers]


def query_key_pairs(length: int, cached: int, window: int) -> int:
    """How many keys the queries of one causal sequence meet in all, at most `window` each."""
    growing = min(max(window - cached, 0), length)  # queries that meet every earlier token
    return growing * cached + growing * (growing + 1) // 2 + (length - growing) * window


def count_flops(
    model: nn.Module,
    *,
    batch: int,
    length: int,
    cached: int = 0,
    logits: int = 1,
    shares: Mapping[int, float] | None = None,
) -> dict[str, float]:
    """The FLOPs of one forward pass, by `PARTS`.

    Args:
        model: A `PeftModel` with an active depth-routed adapter, or a base of a known family.
        batch: Sequences, each of `length` new tokens after `cached` ones in the KV cache.
        logits: Positions per sequence that go through the LM head.
        shares: Per routed layer, the share of rows that run full; None: the dense model.
    """
    stack = stack_of(model)
    routings = {}
    if shares is not None:
        routings = {h.layer_index: h for h in active_routings(model) if not runs_full(h, length)}
    config = text_config(model.config)
    flops = dict.fromkeys(PARTS, 0.0)
    tokens = batch * length
    per_pair, _ = attention_sizes(config)
    windows = windows_of(config, cached + length)
    for index, layer in enumerate(stack.layers):
        routing = routings.get(index)
        full = 1.0
        if routing is not None and shares is not None:
            full = shares[index]
        for matrix in matrices(layer, config, stack.family, routing):
            rows = tokens * (1 - matrix.left_out * (1 - full))
            flops[matrix.part] += 2.0 * rows * matrix.per_token
        skips = routing is not None and skips_attention(routing, config)
        pairs = query_key_pairs(length, cached, windows[index])
        flops["attention core"] += (full if skips else 1.0) * batch * pairs * per_pair
        if routing is not None:
            weights = gate_weights(routing, length) + memory_weights(routing)
            weights += branch_share(routing, config, full, length) * branch_weights(routing, config)
            flops["router"] += 2.0 * tokens * weights
    flops["head"] = 2.0 * batch * logits * config.hidden_size * config.vocab_size
    return flops

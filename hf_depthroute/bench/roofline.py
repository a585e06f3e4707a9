"""The time a machine needs at least, from counted bytes and FLOPs and its measured peaks.

Every part of a forward pass takes at least `max(bytes / bandwidth, FLOPs / matmul rate)`, and parts run one after the
other. Counted are two FLOPs per weight and token, the attention's two products, and as bytes: every weight that is
needed once per pass, the input and the output of every matrix product, the KV cache, and the logits. What can be fused
(norms, activations, residual adds, the rotation) counts nothing.

Legend: N tokens of a pass, r share of rows that run full, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from ..calibration import active_routings
from ..cost import attention_sizes
from ..execution.projections import STYLES
from ..families import find_decoder, find_family
from ..gates import MLPGate
from ..holder import HOLDER, Routing
from .timing import Peaks

PARTS = ("attention projections", "attention core", "ffn", "router", "head")


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
        return sum(
            max(self.flops[part] / peaks.flops_per_s, self.bytes[part] / peaks.bytes_per_s) for part in self.flops
        )

    def summary(self, peaks: Peaks) -> dict[str, Any]:
        """JSON-ready: totals, the least time, and which of the two binds for the larger part of it."""
        by_bytes = sum(
            self.bytes[part] / peaks.bytes_per_s
            for part in self.flops
            if self.bytes[part] / peaks.bytes_per_s >= self.flops[part] / peaks.flops_per_s
        )
        seconds = self.seconds(peaks)
        return {
            "gflop": round(self.total_flops / 1e9, 4),
            "gb": round(sum(self.bytes.values()) / 1e9, 4),
            "ideal_ms": round(seconds * 1e3, 4),
            "bound": "bandwidth" if by_bytes > seconds / 2 else "compute",
        }


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
    family = find_family(model)
    layers = getattr(find_decoder(model, family), family.layers)
    holders = {} if shares is None else {h.layer_index: h for h in active_routings(model)}
    work = Work()
    config: Any = model.config
    size = next(p for n, p in layers[0].named_parameters() if f"{HOLDER}." not in n).element_size()
    tokens = batch * length
    for index, layer in enumerate(layers):
        again = 1.0 if trained_from is None or index < trained_from else 2.0
        holder = holders.get(index)
        rows, passes = (1.0, 1.0) if holder is None or shares is None else shares[index]
        _count_layer(work, layer, holder, config, family, (batch, length, cached), size, rows, passes, again)
        if holder is not None:
            _count_router(work, holder, tokens, length, 1.0 if trained_from is not None else 1 - rows, again)
    again = 1.0 if trained_from is None else 2.0
    kept, width, vocabulary = batch * logits, config.hidden_size, config.vocab_size
    moved = size * (width * vocabulary + kept * (width + vocabulary))
    work.add("head", again * 2.0 * kept * width * vocabulary, again * moved)
    return work


def _count_layer(
    work: Work,
    layer: Any,
    holder: Routing | None,
    config: Any,
    family: Any,
    sizes: tuple[int, int, int],
    size: int,
    rows: float,
    passes: float,
    again: float,
) -> None:
    batch, length, cached = sizes
    tokens = batch * length
    target = "none" if holder is None else holder.active_config().target
    whole = holder is not None and (holder.active_config().granularity == "sequence" or _is_static(holder))
    skips_attention = target in ("attention", "block") and (whole or family.queries is not None)

    attention = getattr(layer, family.attention)
    parts = {} if whole or not skips_attention else STYLES[family.queries].weights(attention)
    for name, weight in attention.named_parameters():
        if weight.ndim != 2:
            continue
        part = (
            1.0 if whole and skips_attention else parts.get(name.split(".")[0], 0.0)
        )  # of the weight that a skipped token leaves out
        count = weight.numel()
        ran = 1 - part * (1 - rows)
        moved = count * (1 - part * (1 - passes)) + tokens * ran * sum(weight.shape)
        work.add("attention projections", again * 2.0 * tokens * ran * count, again * size * moved)

    share = rows if skips_attention else 1.0
    per_pair, cached_values = attention_sizes(config)
    pairs = batch * (length * cached + length * (length + 1) // 2)
    read = share if length == 1 or whole else (passes if skips_attention else 1.0)
    written = share if whole else 1.0
    moved = batch * cached_values * ((cached + length) * read + length * written)
    moved += tokens * share * per_pair / 2  # queries in, outputs out
    twice = 2 * again - 1
    work.add("attention core", twice * share * pairs * per_pair, twice * size * moved)

    share, some = (rows, passes) if target in ("ffn", "block") else (1.0, 1.0)
    for weight in getattr(layer, family.ffn).parameters():
        if weight.ndim == 2:
            moved = weight.numel() * some + tokens * share * sum(weight.shape)
            work.add("ffn", again * 2.0 * tokens * share * weight.numel(), again * size * moved)
        elif weight.ndim == 3:  # fused experts: those that any token is sent to
            experts, chosen = weight.shape[0], config.num_experts_per_tok
            ran = tokens * chosen * (rows if target == "experts" else share)
            met = experts * (1 - (1 - 1 / experts) ** ran)
            moved = weight[0].numel() * met + ran * sum(weight.shape[1:])
            work.add("ffn", again * 2.0 * ran * weight[0].numel(), again * size * moved)


def _count_router(work: Work, holder: Routing, tokens: int, length: int, cheap: float, again: float) -> None:
    """The gate on every token, the branch on the share `cheap`; their parameters are read on every pass."""
    name, config = holder.active_name(), holder.active_config()
    for group in (holder.depth_route_gate, holder.depth_route_predictor, holder.depth_route_branch):
        if name not in group:
            continue
        module = group[name]
        held = sum(p.numel() * p.element_size() for p in module.parameters())
        if group is holder.depth_route_branch:
            met, seen = float(sum(p.numel() for p in module.parameters() if p.ndim == 2)), tokens * cheap
        else:
            met = float(cast(MLPGate, module).weights_per_token())
            seen = tokens / length if config.granularity == "sequence" else tokens
        width = next(p.element_size() for p in module.parameters()) if held else 4
        work.add("router", again * 2.0 * seen * met, again * (held + 2 * width * seen * holder.width))


def _is_static(holder: Routing) -> bool:
    return holder.active_config().gate == "none"

"""Decoding steps on a CPU: one new token per sequence, without gradients.

A step streams every weight through the caches, so Python and the dispatcher run cold in each layer:
an operator that takes 3 us in a loop takes 30 us there, and a method that looks up a few attributes
80 us. What does not depend on the token is therefore done once for all layers before the first of
them runs (`executors.decode_steps`), and a `DecodeStep` keeps what is left.

Shapes: B batch, d model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..base.cache import cache_layer, cache_of, remembered
from ..base.cache_layers import SkippingLayer
from ..base.families import Family
from ..base.sublayers import Kwargs
from .attention import write_keys_values
from .context import ForwardContext
from .gathered import gathered_update
from .step_weights import Prepared, StepWeights

if TYPE_CHECKING:
    from ..routing.plan import RoutePlan
    from ..routing.routing import Routing

DECODE_ROWS = 64  # more sequences than this are no longer bound by overhead


class DecodeStep:
    """A routed FFN layer's forward pass for one new token per sequence: `[B, 1, d] -> [B, 1, d]`.

    It computes what `layer._run` does, with the adapter's weights in the stream's dtype and the
    threshold on the host. A batch of one needs no mask: its score is read, and one of two calls is
    made. A static layer needs no score. Where gate and branch join (`parts.fused`) their weights
    are float32, and scores and cheap updates differ by rounding. It is not changed after it was
    made: threads that decode with one plan, one that `supports_decode`, share it.

    Attributes:
        scores: Whether it scores tokens.
        most_rows: Sequences that it takes.
    """

    scores: ClassVar[bool] = True
    most_rows: ClassVar[int] = DECODE_ROWS

    def __init__(self, routing: Routing, plan: RoutePlan, weights: StepWeights) -> None:
        family = routing.family
        self.plan = plan
        self.weights = weights
        assert family.attention_norm is not None and family.ffn_norm is not None
        self.names = family.attention_norm, family.attention, family.ffn_norm, family.ffn
        self.reads_stream = plan.config.gate_input == "residual"
        threshold = 0.0 if plan.rule == "predictor" else plan.threshold
        self.threshold = torch.as_tensor(threshold, dtype=torch.float32).item()

    def __call__(
        self, layer: nn.Module, h: Tensor, kwargs: Kwargs, context: ForwardContext
    ) -> Tensor | None:
        modules: Any = layer._modules
        attention_norm, attention, ffn_norm, ffn = self.names
        ngrams = self._ngrams(context, kwargs)
        made = self.weights.prepared(h.dtype, modules[ffn_norm])
        a = h + modules[attention](modules[attention_norm](h), **kwargs)[0]
        if self.plan.rule == "static":
            return _cheap(made, a, ngrams)
        if made.joint is not None:
            return made.joint.run(
                a, self.threshold, lambda rows: modules[ffn](modules[ffn_norm](rows))
            )[0]
        assert made.score is not None
        if self.reads_stream:
            normed = None  # a skipped token needs none
            scores_B = made.score(a)
        else:
            normed = modules[ffn_norm](a)
            scores_B = made.score(normed)
        one = len(scores_B) == 1
        if one and not scores_B.item() >= self.threshold:
            return _cheap(made, a, ngrams)
        if normed is None:
            normed = modules[ffn_norm](a)
        if one:
            return a + modules[ffn](normed)
        full_B = scores_B >= self.threshold
        out = gathered_update(a, normed, full_B[:, None], modules[ffn], made.branch)
        if ngrams is None or made.recall is None or full_B.all():
            return out
        return out.index_add_(0, (~full_B).nonzero().squeeze(-1), made.recall(ngrams[~full_B]))

    def _ngrams(self, context: ForwardContext, kwargs: Kwargs) -> Tensor | None:
        """The new tokens' n-grams, `[B, 1, N]`; the cache learns of those that run full, too."""
        if self.weights.memory is None:
            return None
        return context.ngrams(self.plan, kwargs)


class AttentionStep(DecodeStep):
    """The same for a layer whose attention or block is routed, and for one sequence:
    `[1, 1, d] -> [1, 1, d]`.

    A skipped token still writes its keys and values, for later ones to see.
    """

    most_rows = 1

    def __init__(self, routing: Routing, plan: RoutePlan, weights: StepWeights) -> None:
        super().__init__(routing, plan, weights)
        self.style = routing.family.queries

    def __call__(
        self, layer: nn.Module, h: Tensor, kwargs: Kwargs, context: ForwardContext
    ) -> Tensor:
        modules: Any = layer._modules
        attention_norm, attention, ffn_norm, ffn = self.names
        ngrams = self._ngrams(context, kwargs)
        made = self.weights.prepared(h.dtype, modules[attention_norm])
        normed = modules[attention_norm](h)
        maps = None
        p = None
        if made.joint is not None:
            (score,), maps = made.joint.scores(h)
            full = score >= self.threshold
        else:
            assert made.score is not None
            score_1 = made.score(h if self.reads_stream else normed)
            full = score_1.item() >= self.threshold
            if self.plan.mix == "scaled_ffn":
                p = torch.sigmoid(score_1 / self.plan.temperature)
        if full:
            a = h + modules[attention](normed, **kwargs)[0]
        else:
            write_keys_values(modules[attention], self.style, normed, kwargs)
            a = h.clone()  # the layer's input is not the step's to change
            if maps is not None and made.joint is not None:
                update = made.joint.cheap(maps, a)
                if update is not None:
                    a = a.add_(update)
            else:
                a = _cheap(made, a, ngrams, None if p is None else 1 - p)
            if self.plan.target.skips_ffn:
                return a
        full_update: Tensor = modules[ffn](modules[ffn_norm](a))
        return a + (full_update if p is None else full_update * p.to(a.dtype))


class SequenceStep(DecodeStep):
    """The same for decisions about whole sequences, and for static layers without attention:
    nothing is scored.

    The decision was made on the prompt and lies in the KV cache. Sequences that differ take the
    general pass, and so does one that skips its attention in a cache that holds its keys and
    values.
    """

    scores = False

    def __call__(
        self, layer: nn.Module, h: Tensor, kwargs: Kwargs, context: ForwardContext
    ) -> Tensor | None:
        cache = cache_of(kwargs)
        decided = remembered(cache, self.plan.layer_index)
        if decided is None:  # these tokens are the prompt
            return None
        keep = decided[0]
        kept = int(keep.sum())
        held = cache_layer(cache, self.plan.layer_index)
        target = self.plan.target
        skips_keys = target.skips_attention and isinstance(held, SkippingLayer)
        if 0 < kept < len(keep) or (kept and self.plan.rule == "static"):
            return None
        if not kept and target.skips_attention and not skips_keys:
            return None
        modules: Any = layer._modules
        attention_norm, attention, ffn_norm, ffn = self.names
        if kept:
            out = run_base(layer, h, kwargs, context)
        else:
            branch = self.weights.prepared(h.dtype, modules[ffn_norm]).branch
            if skips_keys:
                out = h.clone()  # the layer's input is not the step's to change
                held.advance(1)
            else:
                out = h + modules[attention](modules[attention_norm](h), **kwargs)[0]
            if branch is not None:
                out = out.add_(branch(out))
            if not target.skips_ffn:
                out = out + modules[ffn](modules[ffn_norm](out))
        return out


def _cheap(made: Prepared, a: Tensor, ngrams: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """The stream after the cheap path, the branch's update times `scale`; overwrites `a`."""
    if made.branch is not None:
        update = made.branch(a)
        a = a.add_(update if scale is None else update * scale.to(update.dtype))
    if ngrams is None or made.recall is None:
        return a
    return a.add_(made.recall(ngrams))


def run_base(layer: Any, h: Tensor, kwargs: Kwargs, context: ForwardContext) -> Tensor:
    """A layer that is not routed, or whose every token runs full."""
    return cast(Tensor, layer._base_forward(h, **kwargs))


def decodes(decoder: nn.Module, inputs: Tensor) -> bool:
    """Whether a pass of `inputs` `[B, T, ...]` is a decoding step on a CPU, in plain inference."""
    if inputs.shape[1] != 1 or len(inputs) > DECODE_ROWS or inputs.device.type != "cpu":
        return False
    return not (
        torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    )


def supports_decode(plan: RoutePlan, family: Family) -> bool:
    """Whether the step of its target computes what `plan` says, in a layer of `family`."""
    if not family.plain:
        return False
    mixes = ("hard", "scaled_ffn") if plan.target.skips_attention else ("hard",)
    return plan.by_token and plan.mix in mixes and not plan.gate.exits

"""One call of the routed part of a layer: what there is to run, what was decided, and who runs it.

A `Site` is a target: where the routed part is in a layer, and what its paths compute. An `Executor` is a way to run it:
which rows are computed, and by which operators. Their tables are `sites.SITES` and `executors.EXECUTORS`.

Shapes: B batch, T positions, d model width, E experts, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.families import Family
from ..routing.plan import RoutePlan
from ..routing.routing import Routing
from .context import ForwardContext
from .masked import masked_update

Kwargs = dict[str, Any]


@dataclass
class Decision:
    """The gate's decision for every token, or for every (token, expert) pair.

    Attributes:
        scores: Float32 `[B, T]`; of pairs `[B, T, K]`.
        extras: What is recorded besides, by name.
        mask: Bool, in the shape of `scores`: what runs in full. None for pairs, as long as the base's own router has
            not chosen them; their scores are `[B, T]` or `[B, T, E]` until then.
        probs: Float32, `sigmoid(scores / tau)`.
    """

    scores: Tensor
    extras: dict[str, Tensor]
    mask: Tensor | None = None
    probs: Tensor | None = None


def without_scores(routing: Routing, plan: RoutePlan, x: Tensor, mask: Tensor, probs: Tensor | None = None) -> Decision:
    """A decision that was not made on these tokens: scores and extras are NaN, and so are the probs that are not given.

    Args:
        routing: The layer's adapter state.
        plan: How it routes.
        x: `[B, T, d]`. Where extras are recorded, the gate is asked about one token, for their shapes.
        mask: Bool `[B, T]`.
        probs: Float32 `[B, T]`.
    """
    nothing = torch.full(x.shape[:2], torch.nan, device=x.device)
    extras = dict.fromkeys(plan.extras, nothing)
    if plan.recorders and plan.gate.outputs:
        shapes = {name: value.shape[2:] for name, value in routing.score(plan, x[:, :1]).items()}
        extras |= {name: nothing.new_full((*x.shape[:2], *shapes[name]), torch.nan) for name in plan.gate.outputs}
    return Decision(nothing, extras, mask, nothing if probs is None else probs)


@dataclass(frozen=True)
class RoutedCall:
    """The arguments of an executor.

    Attributes:
        layer: The decoder layer.
        routing: Its adapter state.
        plan: How this forward pass routes.
        site: The target's class.
        stream: The residual stream before the routed part, `[B, T, d]`. It may be overwritten when no gradient is
            recorded, unless the family's layers are parallel.
        normed: What the full path reads, `[B, T, d]`, where it is known already; see `norm`.
        token_mask: Bool `[B, T]`, true at real tokens; all are real when it is None.
        kwargs: What the decoder layer was called with.
        decision: None if nothing is decided, because both paths are wanted.
        ngrams: Int64 `[B, T, N]`, the n-grams that end at each token, over the KV cache; None if nothing is looked
            up.
    """

    layer: Any
    routing: Routing
    plan: RoutePlan
    site: Site
    stream: Tensor
    normed: Tensor | None
    token_mask: Tensor | None
    kwargs: Kwargs
    decision: Decision | None = None
    ngrams: Tensor | None = None

    @property
    def family(self) -> Family:
        return self.routing.family

    @property
    def branch(self) -> Any:
        """From rows of the stream to the cheap path's update, without that of a memory; None when that adds nothing."""
        return self.routing.depth_route_branch._modules.get(self.plan.adapter)

    @property
    def memory(self) -> Any:
        """The `NgramMemory` of the cheap path; None if it has none."""
        has_one = self.plan.config.branch == "memory"
        return self.routing.depth_route_memory[self.plan.adapter] if has_one else None

    @property
    def mask(self) -> Tensor:
        assert self.decision is not None and self.decision.mask is not None
        return self.decision.mask

    @property
    def probs(self) -> Tensor:
        assert self.decision is not None and self.decision.probs is not None
        return self.decision.probs

    @property
    def scale(self) -> Tensor | None:
        """The factor of the full path's update, `[B, T]`."""
        return self.probs if self.plan.mix == "scaled" else None

    @property
    def attention_scale(self) -> Tensor | None:
        """The factor of the attention's update, `[B, T]`."""
        return self.probs if self.plan.mix == "scaled_sublayers" else None

    @property
    def ffn_scale(self) -> Tensor | None:
        """The factor of the FFN's update, `[B, T]`."""
        return self.probs if self.plan.mix in ("scaled_sublayers", "scaled_ffn") else None

    @property
    def cheap_scale(self) -> Tensor | None:
        """The factor of the branch's update, `[B, T]`."""
        return 1 - self.probs if self.plan.mix == "scaled_ffn" else None

    @property
    def needs_both_paths(self) -> bool:
        """Whether every token runs both paths: in training, and where they are mixed."""
        return self.plan.training or self.plan.rule == "soft"

    def norm(self) -> Tensor:
        """The full path's input, `[B, T, d]`."""
        return self.site.norm(self.layer, self.family, self.stream) if self.normed is None else self.normed

    def full(self) -> Tensor:
        """The stream after the full path of every token, `[B, T, d]`."""
        return self.site.full(self)

    def cheap(self) -> Tensor:
        """The stream after the cheap path of every token, `[B, T, d]`."""
        branch, recalled, scale = self.branch, self.recalled(), self.cheap_scale
        after = self.stream
        if branch is not None:
            update = branch(after)
            after = after + (update if scale is None else update * scale[..., None].to(update.dtype))
        return after if recalled is None else after + recalled

    def recalled(self) -> Tensor | None:
        """The memory's update for every token, `[B, T, d]` in the stream's dtype; None without a memory."""
        if self.memory is None:
            return None
        assert self.ngrams is not None
        update: Tensor = self.memory.update(self.ngrams, self.stream.dtype)
        return update

    def with_recalled(self, after: Tensor) -> Tensor:
        """`after`, `[B, T, d]`, and at the tokens that are not chosen what the memory adds; it looks up no others.

        `after` is written into where no gradient is recorded.
        """
        if self.memory is None:
            return after
        assert self.ngrams is not None
        index = (~self.mask).reshape(-1).nonzero().squeeze(-1)
        if not len(index):
            return after
        update = self.memory.update(self.ngrams.flatten(0, 1)[index.to(self.ngrams.device)], after.dtype)
        rows = after.reshape(-1, after.shape[-1])
        add = rows.index_add if torch.is_grad_enabled() else rows.index_add_
        return add(0, index, update.to(rows.dtype)).view(after.shape)  # autocast may have made it another dtype

    def finish(self, after: Tensor) -> Tensor:
        """The layer's output, from the stream after the routed part, each `[B, T, d]`."""
        return self.site.finish(self, after)

    def of(self, rows: Any, kwargs: Kwargs) -> RoutedCall:
        """The call for the sequences `rows`, an index or a slice, and their `kwargs`."""

        def part(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        made, stream = self.decision, self.stream[rows]
        decision = None if made is None else Decision(made.scores[rows], {}, part(made.mask), part(made.probs))
        return replace(
            self,
            stream=stream,
            normed=part(self.normed),
            token_mask=part(self.token_mask),
            kwargs=kwargs,
            decision=decision,
            ngrams=part(self.ngrams),
        )


class Executor(Protocol):
    """A way to run the routed part."""

    def supports(self, call: RoutedCall) -> bool:
        """Whether it can run this plan in this layer, on a stream of this kind, whatever is decided."""
        ...

    def run(self, call: RoutedCall) -> Tensor:
        """The layer's output, `[B, T, d]`."""
        ...


class Site(ABC):
    """One target: what of a decoder layer is routed. One object serves all layers, unless `of_call` makes others.

    It splits the layer's forward pass into what comes before the routed part, the part itself, and the rest:

        stream = enter(h);   after = full path or cheap path;   out = finish(after)

    A target has to have `norm` and `full`, and `enter` and `finish` where something stands in front or behind. The
    methods below them compute every token's both paths; a target that can save work says how.

    Attributes:
        attends_behind: Whether `finish` runs the attention, with the layer's keyword arguments.
    """

    attends_behind = False

    def of_call(self, routing: Routing, plan: RoutePlan, h: Tensor, context: ForwardContext, kwargs: Kwargs) -> Site:
        """The site of one forward pass, where a target reads more than the stream.

        Args:
            routing: The layer's adapter state.
            plan: How it routes.
            h: The layer's input, `[B, T, d]`.
            context: What the stack hands to its layers.
            kwargs: What the decoder layer was called with.
        """
        return self

    def enter(self, layer: Any, family: Family, h: Tensor, kwargs: Kwargs) -> Tensor:
        """The stream before the routed part, from the layer's input, each `[B, T, d]`."""
        return h

    @abstractmethod
    def norm(self, layer: Any, family: Family, stream: Tensor) -> Tensor:
        """The full path's input, `[B, T, d]`."""

    @abstractmethod
    def full(self, call: RoutedCall) -> Tensor:
        """The stream after the full path, `[B, T, d]`."""

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        """The layer's output, from the stream after the routed part, each `[B, T, d]`."""
        return after

    def decide(self, routing: Routing, plan: RoutePlan, gate_input: Tensor, token_mask: Tensor | None) -> Decision:
        """The gate's decision, from the stream or its norm, `[B, T, d]`."""
        extras = routing.score(plan, gate_input)
        scores = extras.pop("scores")
        return Decision(scores, extras, *routing.decide(plan, scores, token_mask, extras.get("predicted")))

    def both(self, call: RoutedCall) -> tuple[Tensor, Tensor]:
        """The stream after the full and after the cheap path, for every token, each `[B, T, d]`."""
        return call.full(), call.cheap()

    def mixed(self, call: RoutedCall, after_full: Tensor, after_cheap: Tensor) -> Tensor:
        """The stream after the two paths, mixed or chosen as the plan says, `[B, T, d]`."""
        return masked_update(call.stream, after_full, after_cheap, call.mask, call.probs, call.plan.mix)

    def masked(self, call: RoutedCall) -> Tensor:
        """The stream after the routed part, `[B, T, d]`, both paths computed; adds to the decision's `extras`."""
        assert call.decision is not None
        after_full, after_cheap = self.both(call)
        after = self.mixed(call, after_full, after_cheap)
        call.decision.extras |= _outcomes(call, after_full, after_cheap)
        return after

    def gathered(self, call: RoutedCall) -> Tensor:
        """The stream after the path that was chosen for each token, `[B, T, d]`; skipped rows are not computed."""
        return self.masked(call)

    def hides(self, call: RoutedCall) -> bool:
        """Whether `gathered` would keep from hooks some of the outputs that they record in this forward pass."""
        return False

    def supports_rows(self, call: RoutedCall) -> bool:
        """Whether `by_rows` can run the call."""
        return False

    def by_rows(self, call: RoutedCall) -> Tensor:
        """As `gathered`, in row ops whose shapes do not depend on the mask; the cheap path runs for every token.

        Raises:
            TypeError: The site has no row ops, as `supports_rows` says.
        """
        raise TypeError(f"{type(self).__name__} has no row ops")


def _outcomes(call: RoutedCall, after_full: Tensor, after_cheap: Tensor) -> dict[str, Tensor]:
    """Observations of the two paths that losses ask for."""
    found = {}
    if "z_full" in call.plan.extras:
        project = call.routing.projections[call.plan.adapter][0]
        found = {"z_full": project(after_full), "z_cheap": project(after_cheap)}
    with torch.no_grad():
        for name, metric in call.plan.observed.items():
            found[name] = metric(call.stream, after_full, after_cheap)
    return found

"""One call of the routed part of a layer: what there is to run, what was decided, and who runs it.

A `target.Target` is where the routed part is in a layer, and what its paths compute. An `Executor`
is a way to run it: which rows are computed, and by which operators. Their tables are `TARGETS` and
`executors.EXECUTORS`.

Shapes: B batch, T positions, d model width, E experts, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.families import Family
from ..base.sublayers import Kwargs
from .context import Step
from .masked import scaled

if TYPE_CHECKING:
    from ..routing.plan import RoutePlan
    from ..routing.routing import Routing
    from .target import Target


@dataclass
class Decision:
    """The gate's decision for every token, or for every (token, expert) pair.

    Attributes:
        scores: Float32 `[B, T]`; of pairs `[B, T, K]`.
        extras: What is recorded besides, by name.
        mask: Bool, in the shape of `scores`: what runs in full. None for pairs, as long as the
            base's own router has not chosen them; their scores are `[B, T]` or `[B, T, E]` until
            then.
        probs: Float32, `sigmoid(scores / tau)`.
    """

    scores: Tensor
    extras: dict[str, Tensor]
    mask: Tensor | None = None
    probs: Tensor | None = None


def without_scores(
    routing: Routing, plan: RoutePlan, x: Tensor, mask: Tensor, probs: Tensor | None = None
) -> Decision:
    """A decision that was not made on the tokens `x`, `[B, T, d]`: scores and extras are NaN,
    and so are the probs that are not given.

    Where extras are recorded, the gate is asked about one token, for their shapes.
    """
    nothing = torch.full(x.shape[:2], torch.nan, device=x.device)
    extras = dict.fromkeys(plan.extras, nothing)
    if plan.recorders and plan.gate.outputs:
        shapes = {name: value.shape[2:] for name, value in routing.score(plan, x[:, :1]).items()}
        extras |= {
            name: nothing.new_full((*x.shape[:2], *shapes[name]), torch.nan)
            for name in plan.gate.outputs
        }
    return Decision(nothing, extras, mask, nothing if probs is None else probs)


@dataclass(frozen=True)
class RoutedCall:
    """The arguments of an executor.

    Attributes:
        layer: The decoder layer.
        routing: Its adapter state.
        plan: How this forward pass routes.
        target: The plan's; of one that reads more than the stream, the one of this pass.
        stream: The residual stream before the routed part, `[B, T, d]`. It may be overwritten when
            no gradient is recorded, unless the family's layers are parallel.
        normed: What the full path reads, `[B, T, d]`, where it is known already; see `norm`.
        token_mask: Bool `[B, T]`, true at real tokens; all are real when it is None.
        kwargs: What the decoder layer was called with.
        decision: None if nothing is decided, because both paths are wanted.
        ngrams: Int64 `[B, T, N]`, the n-grams that end at each token, over the KV cache; None if
            nothing is looked up.
        finishes: Whether `finish` adds what follows the routed part.
    """

    layer: Any
    routing: Routing
    plan: RoutePlan
    target: Target
    stream: Tensor
    normed: Tensor | None
    token_mask: Tensor | None
    kwargs: Kwargs
    decision: Decision | None = None
    ngrams: Tensor | None = None
    finishes: bool = True

    @property
    def family(self) -> Family:
        return self.routing.family

    @property
    def branch(self) -> Any:
        """From rows of the stream to the cheap path's update, without that of a memory;
        None when that adds nothing."""
        return self.routing.depth_route_branch._modules.get(self.plan.adapter)

    @property
    def memory(self) -> Any:
        """The `NgramMemory` of the cheap path; None if it has none."""
        if self.plan.config.branch == "memory":
            return self.routing.depth_route_memory[self.plan.adapter]
        return None

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
        if self.plan.mix == "scaled":
            return self.probs
        return None

    @property
    def attention_scale(self) -> Tensor | None:
        """The factor of the attention's update, `[B, T]`."""
        if self.plan.mix == "scaled_sublayers":
            return self.probs
        return None

    @property
    def ffn_scale(self) -> Tensor | None:
        """The factor of the FFN's update, `[B, T]`."""
        if self.plan.mix in ("scaled_sublayers", "scaled_ffn"):
            return self.probs
        return None

    @property
    def cheap_scale(self) -> Tensor | None:
        """The factor of the branch's update, `[B, T]`."""
        if self.plan.mix == "scaled_ffn":
            return 1 - self.probs
        return None

    @property
    def needs_both_paths(self) -> bool:
        """Whether every token runs both paths: in training, and where they are mixed."""
        return self.plan.training or self.plan.rule == "soft"

    def norm(self) -> Tensor:
        """The full path's input, `[B, T, d]`."""
        if self.normed is None:
            return self.target.norm(self.layer, self.family, self.stream)
        return self.normed

    def full(self) -> Tensor:
        """The stream after the full path of every token, `[B, T, d]`."""
        return self.target.full(self)

    def cheap(self) -> Tensor:
        """The stream after the cheap path of every token, `[B, T, d]`."""
        after = self.stream
        if self.branch is not None:
            after = after + scaled(self.branch(after), self.cheap_scale)
        if self.memory is None:
            return after
        assert self.ngrams is not None
        return after + self.memory.update(self.ngrams, self.stream.dtype)

    def with_recalled(self, after: Tensor) -> Tensor:
        """`after`, `[B, T, d]`, and at the tokens that are not chosen what the memory adds;
        it looks up no others.

        `after` is written into where no gradient is recorded.
        """
        if self.memory is None:
            return after
        assert self.ngrams is not None
        index = (~self.mask).reshape(-1).nonzero().squeeze(-1)
        if not len(index):
            return after
        update = self.memory.update(
            self.ngrams.flatten(0, 1)[index.to(self.ngrams.device)], after.dtype
        )
        rows = after.reshape(-1, after.shape[-1])
        add = rows.index_add if torch.is_grad_enabled() else rows.index_add_
        # Autocast may have made it another dtype.
        return add(0, index, update.to(rows.dtype)).view(after.shape)

    def finish(self, after: Tensor) -> Tensor:
        """The layer's output, from the stream after the routed part, each `[B, T, d]`."""
        if self.finishes:
            return self.target.finish(self, after)
        return after

    def of(self, rows: Any, kwargs: Kwargs) -> RoutedCall:
        """The call for the sequences `rows`, an index or a slice, and their `kwargs`."""

        def part(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        decision = self.decision
        if decision is not None:
            mask = part(decision.mask)
            decision = Decision(decision.scores[rows], {}, mask, part(decision.probs))
        return replace(
            self,
            stream=self.stream[rows],
            normed=part(self.normed),
            token_mask=part(self.token_mask),
            kwargs=kwargs,
            decision=decision,
            ngrams=part(self.ngrams),
        )


class Executor(ABC):
    """A way to run the routed part."""

    @abstractmethod
    def supports(self, call: RoutedCall) -> bool:
        """Whether it can run this plan in this layer, on such a stream, whatever is decided."""

    @abstractmethod
    def run(self, call: RoutedCall) -> Tensor:
        """The layer's output, `[B, T, d]`."""

    def prepare(self, layer: nn.Module, plan: RoutePlan, batch: int) -> Step | None:
        """The layer's forward pass for one new token of each of `batch` sequences,
        made before any layer runs.

        None: such tokens are a call like any other. Steps are asked for on a CPU, where nothing is
        recorded, replayed or compiled.
        """
        return None

"""`Target`: where the routed part is in a decoder layer, and what its paths compute.

Layers with parallel attention and FFN have nothing before the routed part: `stream` is the layer's
input, and `finish` adds the sublayer that is not routed. Shapes: B batch, T positions, d model
width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..base.families import Family
from ..base.sublayers import Kwargs, norm_of
from ..parts.targets import TargetTraits
from ..routing.decision import decide
from .call import Decision, RoutedCall
from .context import ForwardContext
from .masked import masked_update

if TYPE_CHECKING:
    from ..routing.plan import RoutePlan
    from ..routing.routing import Routing
    from .decode import DecodeStep


class Target(TargetTraits, ABC):
    """The part of a decoder layer that is routed.

    One object serves all layers, unless `of_call` makes others.

    It splits the layer's forward pass into what comes before the routed part, the part itself, and
    the rest:

        stream = enter(h);   after = full path or cheap path;   out = finish(after)

    A target has to have `full`, and `enter` and `finish` where the layer has something before or
    after it. The methods below them compute every token's both paths; a target that can save work
    says how.

    Attributes:
        decode_step: The step that computes one new token of it (`execution.decode`); None: the
            general pass does. A subclass says it itself, because a step of its parent's computes
            what its parent does.
        finish_attends: Whether `finish` runs the attention, with the layer's keyword arguments.
    """

    decode_step: ClassVar[type[DecodeStep] | None]
    finish_attends: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "decode_step" not in vars(cls):
            raise TypeError(
                f"{cls.__name__}.decode_step is not declared: name a step of execution.decode, or "
                "None"
            )

    def of_call(
        self, routing: Routing, plan: RoutePlan, h: Tensor, context: ForwardContext, kwargs: Kwargs
    ) -> Target:
        """The target of one forward pass, where a target reads more than the stream.

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

    def norm(self, layer: Any, family: Family, stream: Tensor) -> Tensor:
        """The full path's input, `[B, T, d]`; here after the norm before the sublayer `norm_of`."""
        return norm_of(layer, family, self.norm_of)(stream)

    @abstractmethod
    def full(self, call: RoutedCall) -> Tensor:
        """The stream after the full path, `[B, T, d]`."""

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        """The layer's output, from the stream after the routed part, each `[B, T, d]`."""
        return after

    def decide(
        self, routing: Routing, plan: RoutePlan, gate_input: Tensor, token_mask: Tensor | None
    ) -> Decision:
        """The gate's decision, from the stream or its norm, `[B, T, d]`."""
        extras = routing.score(plan, gate_input)
        scores = extras.pop("scores")
        return Decision(scores, extras, *decide(plan, scores, token_mask, extras.get("predicted")))

    def both(self, call: RoutedCall) -> tuple[Tensor, Tensor]:
        """The stream after the full and after the cheap path, for every token, each `[B, T, d]`."""
        return call.full(), call.cheap()

    def mixed(self, call: RoutedCall, after_full: Tensor, after_cheap: Tensor) -> Tensor:
        """The stream after the two paths, mixed or chosen as the plan says, `[B, T, d]`."""
        return masked_update(
            call.stream, after_full, after_cheap, call.mask, call.probs, call.plan.mix
        )

    def masked(self, call: RoutedCall) -> Tensor:
        """The stream after the routed part, `[B, T, d]`, both paths computed;
        adds to the decision's `extras`."""
        assert call.decision is not None
        after_full, after_cheap = self.both(call)
        after = self.mixed(call, after_full, after_cheap)
        call.decision.extras |= _outcomes(call, after_full, after_cheap)
        return after

    def gathered(self, call: RoutedCall) -> Tensor:
        """The stream after the path that was chosen for each token, `[B, T, d]`;
        skipped rows are not computed."""
        return self.masked(call)

    def hides(self, call: RoutedCall) -> bool:
        """Whether `gathered` would keep from hooks some of the outputs that they record in
        this forward pass."""
        return False

    def supports_rows(self, call: RoutedCall) -> bool:
        """Whether `by_rows` can run the call."""
        return False

    def by_rows(self, call: RoutedCall) -> Tensor:
        """As `gathered`, in row ops whose shapes do not depend on the mask;
        the cheap path runs for every token.

        Raises:
            TypeError: The target has no row ops, as `supports_rows` says.
        """
        raise TypeError(f"{type(self).__name__} has no row ops")


def target_of(plan: RoutePlan) -> Target:
    """The plan's target.

    Raises:
        TypeError: Its class declares, and runs nothing.
    """
    if isinstance(plan.target, Target):
        return plan.target
    raise TypeError(
        f"target {plan.target.called!r}: {type(plan.target).__name__} does not derive from {Target}"
    )


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

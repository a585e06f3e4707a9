"""Traits that gates declare, so that no other code compares their names."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .gates import GATES


@dataclass(frozen=True)
class GateTraits:
    """The class attributes by which a gate says what it is; where its class leaves one out, the value here holds.

    Attributes:
        outputs: Names of its outputs besides the scores, kept in the trace.
        sizes: Fields of `DepthRouteConfig` that set how many weights it has.
        called: How messages name it.
        targets: The rows of `TARGETS` that it decides on; empty for all (of experts, `scores_experts` has a say too).
        granularities: What one of its decisions may cover, `"token"` or `"sequence"`; empty for both.
        scores_experts: Whether it can return one score per expert, `[B, T, E]`.
        selections: The rules that it can train with; empty for all.
        default_selection: The training rule where the configuration names none. Where tokens are not ranked (whole
            sequences, a global budget), `"threshold"` stands in for `"topk"`.
        default_threshold: The score that a token has to reach where the configuration names neither rule nor
            threshold; None: what the budget asks for.
        default_temperature: `tau` in `p = sigmoid(u / tau)`, where the configuration names none.
        reads: The `gate_input` that it always has; None for the configuration's.
        spares_layer_0: It never routes layer 0; where the configuration names no layers, it routes all others.
        static: It decides nothing: every token takes the cheap path, and the budget has no say.
        exits: A token that takes the cheap path takes it in every later layer, too.
        reads_logits: `connect` gives it the final norm and the LM head.
        predicts_outcomes: It is trained on the outcomes of both paths, `z_full` and `z_cheap` in the trace, seen
            through a `TargetProjection`.
        soft: `p` weighs the two paths in inference, too: nothing is compared with a threshold, and no budget is held.
        scales_sublayers: `p` multiplies the update of each sublayer (arXiv:2605.05222), not that of the full path.
        scales_ffn: `p` multiplies the update of a block's FFN, for a token that runs, and `1 - p` the branch's, for one
            that does not; the attention's update is as it is (arXiv:2503.23798).
        hidden_divisor: The default of `gate_hidden` is the model's width divided by it.
    """

    outputs: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    called: str = "the gate"
    targets: tuple[str, ...] = ()
    granularities: tuple[str, ...] = ()
    scores_experts: bool = False
    selections: tuple[str, ...] = ()
    default_selection: str = "topk"
    default_threshold: float | None = None
    default_temperature: float = 2.0
    reads: str | None = None
    spares_layer_0: bool = False
    static: bool = False
    exits: bool = False
    reads_logits: bool = False
    predicts_outcomes: bool = False
    soft: bool = False
    scales_sublayers: bool = False
    scales_ffn: bool = False
    hidden_divisor: int = 4


_NAMES = tuple(field.name for field in fields(GateTraits))  # a compiler cannot trace `fields`


def traits_of(gate: str) -> GateTraits:
    """The traits of the row `gate` of `GATES`."""
    row = GATES[gate]
    return GateTraits(**{name: getattr(row, name) for name in _NAMES if hasattr(row, name)})

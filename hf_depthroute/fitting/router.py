"""A router without training: branches by least squares,
gates by regression on the error that their branch leaves.

What a fitted branch misses is largely a simple function of what the routed part reads. So a gate
can be regressed on it, and needs no training. One currency decides over all layers: a score is the
fourth root of the nats that the cheap path of the token is predicted to cost, and one threshold on
it holds the whole budget. Nats are a square of the error, in a metric that is found for each layer
(`sensitivity.stream_metrics`). The root, since what is decided is decided among the cheap tokens,
which the largest errors would drown.

Shapes: B batch, T positions, R rows.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict

import torch
from peft import PeftModel
from torch import nn

from ..adapter.loading import restoring
from ..adapter.tuner import get_depth_routed_model
from ..base.contexts import evaluating
from ..base.distributed import rows_of_all, sharing, world_size
from ..base.lm_head import check_head, predicting
from ..base.stack import stack_of
from ..config.adapter import ConfigError, DepthRouteConfig
from ..data.batches import labels_of, model_inputs
from ..inference.calibration import calibrate_budgets, gated_routings, keep_shares
from ..inference.non_finite import check_losses
from ..parts.gates import GATES
from ..parts.targets import TARGETS
from ..routing.trace import full_depth
from .bar import FitBar
from .layer_fits import Fits, LayerFit
from .narrowing import (
    MISSED,
    Trial,
    layer_states,
    parts_of_mean,
    remember_fit,
    restore,
    rises,
    row_losses,
    tokens_and_losses,
    trial_of,
    without_gates,
    without_layers,
)
from .prompts import fit_prompts
from .sensitivity import PRICED
from .text import (
    Batches,
    FitWarning,
    first_tokens,
    own_part,
    positions,
    split,
    tokens_to_fit,
    warn_if_few,
)

# A layer that runs this share of the tokens in full is not routed: its gate costs what the others
# save.
DENSE = 0.96
STATIC = 0.005  # a layer that runs no more than this share of the tokens in full may need no gate
_ROUNDS = 2
_BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)  # whose thresholds are found on the streams that they leave
_BUDGET_TOKENS = 2048  # that they are found on


@restoring
def fit_router(
    model: nn.Module,
    batches: Iterable[Mapping[str, object]] | Mapping[str, object],
    keep: float = 0.5,
    config: DepthRouteConfig | None = None,
    *,
    rounds: int | None = None,
    keep_of: str = "flops",
    length: int | None = None,
    progress: bool | None = None,
) -> PeftModel:
    """Make an unrouted model a routed one, without training,
    so that the share `keep` of all calls runs in full.

        model = fit_router(AutoModelForCausalLM.from_pretrained(name), batches, keep=0.5)

    With `DepthRouteConfig(phases="prefill")` prompts alone are routed, and `keep` is a share of
    their FLOPs, or with `keep_of="time"` of their time: see `fit_prompts`.

    A `DepthRouteTrainer` goes on from there; with `train_gates=False` it keeps what the gates know.

    Layer by layer on kept hidden states: branches are fitted to the target's update, gates to the
    error that their branch leaves, in nats, as they are told from gradients (`stream_metrics`), and
    scaled to what the layer's cheap tokens cost on held-out text; one threshold over all layers
    then holds `keep`. Attention sinks, tokens whose stream is more than 5 times the median of their
    layer, run in full and take no part in what is fitted (`norms_and_sinks`).

    Each further round fits branches and gates again on the stream and on the tokens that they
    really get. Every fifth row is held out: costs are measured and thresholds set on it, and a
    round is kept unless the loss rises there, by the mean of the rows' differences, by more than
    that mean's standard error: a smaller rise may be chance. Layers that run 96 % of the tokens in
    full are left out of the adapter: a gate of the default width costs 3 % of an FFN's FLOPs, as
    much as the other 4 % save. Those that run next to none become static: they lose their gates,
    and the other layers run that much more. They keep them where the loss rises as above, since no
    gate is the cheaper choice. The thresholds of other budgets are calibrated too, so that
    `set_budget` holds them.

    It takes as long as ten to twenty forward passes of the text with two rounds, whatever the
    number of layers. In memory are the base, a few times the hidden states of the text at one
    layer, and two gradients of up to 8,192 held-out tokens for every layer, bfloat16. Nothing is
    random but for the configuration's seed.

    Under `accelerate launch` every process calls it with the whole of `batches` and a model of its
    own. Each takes its share of the rows, sums are over all, and every process gets the router of
    one process but for rounding.

    Args:
        model: A transformers model of a supported family, not routed; it may be offloaded by
            accelerate. It is changed in place, as by `get_depth_routed_model`, and left in eval
            mode.
        batches: Dicts with `input_ids` and optionally `attention_mask` and `position_ids`, each
            `[B, T]`; see `calibrate`. Rows should begin as prompts do, with the beginning token
            where the tokenizer puts one. 16,000 tokens are enough for a model of the size of
            Qwen2.5-0.5B; they are kept in memory.
        keep: In (0, 1): the share of all calls of the target in the whole model that run in full.
            Which layers they are in is found on the text.
        config: What to fit; by default MLP gates and low-rank branches for the FFNs of all layers.
            Its budget is overridden by `keep`, and held by all layers together
            (`budget_scope="global"`).
        rounds: How often everything is fitted, at least once; by default twice. A fit for prompts
            has none.
        keep_of: With `phases="prefill"`, what `keep` is a share of: `"flops"` or `"time"`.
        length: With `phases="prefill"`, tokens of the prompt that `keep` is a share of.
        progress: Show a bar over all phases; by default where a terminal is, unless transformers'
            bars are turned off.

    Raises:
        ConfigError: `keep` is out of range, too low for the layers in `config`, or `config` has a
            gate or a branch that is not fitted; the model is untouched.
        ValueError: `batches` holds fewer than 512 real tokens, fewer rows to fit on or to hold out
            than there are processes, or no row to hold out with two tokens; or the model has no LM
            head.
        NonFiniteError: The base, or the routed model, computes NaN or infinity.
    """
    if config is not None and config.phases == "prefill":
        _check_for_prompts(config, rounds)
        return fit_prompts(
            model, batches, keep, config, keep_of=keep_of, length=length, progress=progress
        )
    if keep_of != "flops" or length is not None:
        raise ConfigError(
            "keep_of and length are of a fit for prompts: set phases='prefill', or leave them out"
        )
    started = time.monotonic()
    rounds = _ROUNDS if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    check_head(model, "fit_router")
    # thresholds are found first
    causal_rule = "quantile"
    if config is not None:
        causal_rule = config.causal_rule
    config = config_to_fit(len(stack_of(model).layers), keep, config)
    text, held_out = split(list(model_inputs(model, batches)))
    tokens = tokens_to_fit(text, "fit_router")
    _check_rows(text, "to fit on")
    _check_rows(held_out, "to hold out")
    _check_held_out(held_out)
    seen = ": on 3,000 a router lost twice to five times what it lost on 16,000"
    warn_if_few(tokens, stacklevel=3, seen=seen)  # past `restoring`
    routed = get_depth_routed_model(model, config)
    rated = first_tokens(held_out, PRICED)
    last = first_tokens(held_out, _BUDGET_TOKENS)
    with torch.no_grad(), evaluating(routed), sharing(), ExitStack() as stack:
        bar = stack.enter_context(_bar(routed, rounds, progress, text, rated, held_out, last))
        own = own_part(held_out)
        fit = Fits(routed, own_part(text), own_part(rated), bar)
        found, layers, losses = _kept_round(fit, own, rounds)
        bar.phase("layers to leave out")
        with full_depth(routed):
            dense_R = parts_of_mean(rows_of_all(row_losses(routed, own)))
        dense = [index for index, share in found.shares.items() if share >= DENSE]
        static = [index for index, share in found.shares.items() if share <= STATIC]
        routed, found = without_layers(routed, found, dense, own)
        routed, found = without_gates(routed, found, static, own)
        bar.phase("other budgets")
        calibrate_budgets(routed, own_part(last), _BUDGETS)
        for index, layer in layers.items():
            layer.share = found.shares.get(index, 1.0)
        gated = gated_routings(routed)
        gated[0].active_config().causal_rule = causal_rule
        keep_shares(gated, found.shares, gated[0].budget())
        depth = len(stack_of(routed).layers)
        ran_R = 1 - (1 - found.ran_R) * len(found.shares) / depth
    _warn_if_missed(1 - (len(found.shares) - sum(found.shares.values())) / depth, keep)
    fit_record = {
        "keep": keep,
        **tokens_and_losses(tokens, held_out, dense_R, found.loss_R),
        "share_of_rows": ran_R.quantile(torch.tensor([0.05, 0.95], dtype=ran_R.dtype)).tolist(),
        "loss_of_rounds": losses,
        "layers": {str(index): asdict(layer) for index, layer in layers.items()},
    }
    return remember_fit(routed, fit_record, started, bar.seconds)


def _check_for_prompts(config: DepthRouteConfig, rounds: int | None) -> None:
    """`ConfigError` for what a fit for prompts has not."""
    if config.causal_rule != "quantile":
        raise ConfigError(
            f"causal_rule={config.causal_rule!r}: a fit for prompts has no rule; leave it out"
        )
    if rounds is not None:
        raise ConfigError(
            "rounds is of a fit for all tokens: prompts are fitted once; leave it out"
        )


def _check_rows(part: Batches, use: str) -> None:
    """`ValueError` for fewer rows than processes."""
    rows = sum(len(batch["input_ids"]) for batch in part)
    if rows < world_size():
        raise ValueError(
            f"fit_router: batches holds {rows} rows {use}, for {world_size()} processes"
        )


def _check_held_out(held_out: Batches) -> None:
    """`ValueError` where the held-out rows have no loss."""
    predicted = (predicting(labels_of(b), b.get("attention_mask")) for b in held_out)
    if not any(bool(mask.any()) for mask in predicted):
        raise ValueError(
            "fit_router: no row that is held out has two real tokens, so there is no loss to "
            "measure; give longer rows"
        )


def _warn_if_missed(share: float, keep: float) -> None:
    """Say that another share of all calls runs than `keep`."""
    if abs(share - keep) > MISSED:
        warnings.warn(
            f"fit_router: {share:.0%} of all calls run in full on the held-out text, and "
            f"keep={keep:g} was asked for: many tokens have the same score, as where what they "
            "skip adds nothing; route other layers or another target",
            FitWarning,
            stacklevel=4,  # past `fit_router` and `restoring`
        )


def _kept_round(
    fit: Fits, held_out: Batches, rounds: int
) -> tuple[Trial, dict[int, LayerFit], list[float]]:
    """The trial and the fits of the last round whose held-out loss is no higher than that of the
    one kept so far, but for noise; and the losses of all.

    Gates and branches of a later round know the streams that are served: they hold on text of
    another kind where those of the first, as good on text of the same kind, do not.
    """
    best: tuple[Trial, dict[int, dict[str, object]], dict[int, LayerFit]] | None = None
    losses = []
    for number in range(rounds):
        fit.bar.phase(f"round {number + 1} of {rounds}")
        fit.round(first=number == 0)
        fit.bar.phase(f"thresholds {number + 1} of {rounds}")
        fit.calibrate(held_out)
        found = trial_of(fit.model, held_out)
        losses.append(float(found.loss_R.mean()))
        check_losses(fit.model, losses, held_out)
        if best is None or not rises(found.loss_R, best[0].loss_R):
            best = found, layer_states(fit.model), copy.deepcopy(fit.layers)
    assert best is not None
    found, state, layers = best
    restore(fit.model, state)
    return found, layers, losses


def _bar(model: PeftModel, rounds: int, shown: bool | None, *parts: Batches) -> FitBar:
    """A bar over all passes of the text, what is rated, what is held out, and that for budgets."""
    layers = stack_of(model).layers
    text, rated, held_out, budgets = (positions(own_part(part)) for part in parts)
    passes = (
        rounds * (text + rated) + rated + (2 * rounds + 5) * held_out + 2 * len(_BUDGETS) * budgets
    )
    return FitBar(layers, passes, text + rated, shown)


def config_to_fit(depth: int, keep: float, config: DepthRouteConfig | None) -> DepthRouteConfig:
    """`config` as `fit_router` begins with it, for `depth` layers; `ConfigError` as there."""
    if not 0 < keep < 1:
        raise ConfigError(
            f"keep={keep!r} must be between 0 and 1, the share of all calls that runs in full"
        )
    given = config or DepthRouteConfig(layers="all")
    if TARGETS[given.target].per_pair or given.granularity != "token":
        raise ConfigError(
            f"target={given.target!r} per {given.granularity} is not fitted; use ffn, attention or "
            "block per token"
        )
    if not GATES[given.gate].is_fitted:
        known = ", ".join(name for name, gate in GATES.items() if gate.is_fitted)
        raise ConfigError(f"gate={given.gate!r} is not fitted; use one of: {known}")
    if given.static_layers is not None:
        raise ConfigError("fit_router finds the static layers itself; leave static_layers out")
    if given.branch == "none" or given.scale_by_gate or not given.takes_budget():
        raise ConfigError(
            "fit_router fits a branch, with thresholds that follow the budget, unscaled"
        )
    routed = len(given.routed_layers(depth))
    budget = (keep * depth - (depth - routed)) / routed
    if not budget > 0:
        raise ConfigError(
            f"keep={keep:g}: {depth - routed} of {depth} layers are not routed and run everything"
        )
    values = given.to_dict() | {
        "budget": budget,
        "budget_scope": "global",
        "selection": "threshold",
        "causal_rule": "quantile",
        "share_shifts": None,
    }
    for name in ("base_architecture", "library_version"):
        values.pop(name, None)
    return DepthRouteConfig(**values)

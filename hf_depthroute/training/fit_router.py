"""A router without training: branches by least squares, gates by regression on the error that their branch leaves.

What a fitted branch misses is largely a simple function of what the routed part reads. So a gate can be regressed on
it, and needs no gradient. One currency decides over all layers: a score is the fourth root of the nats that the cheap
path of the token is predicted to cost, and one threshold on it holds the whole budget. Nats go with the square of the
error, at a rate that is measured for each layer. The root, since what is decided is decided among the cheap tokens,
which the largest errors would drown.

Shapes: B batch, T positions, N real tokens, d model width, r branch rank.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import nn
from tqdm.auto import tqdm

from ..adapter.tuner import get_depth_routed_model
from ..base.contexts import evaluating
from ..base.distributed import each_of_all, own_share, rows_of_all, sharing, total, world_size
from ..base.families import find_layers
from ..base.readout import predicting, token_losses
from ..config.adapter import ConfigError, DepthRouteConfig
from ..data.batches import model_inputs, token_mask
from ..execution.call import RoutedCall
from ..files.versions import versions
from ..inference.calibration import active_routings, calibrate, calibrate_budgets
from ..inference.fitting import fit_branch, fit_memory
from ..parts.gates import GATES
from ..parts.regression import moments, ridge_weights
from ..parts.targets import TARGETS
from ..routing.thresholds import quantile_table
from ..routing.trace import full_depth, record_routes
from .layer_walk import LayerWalk, walk_layers
from .record import remember_training

Batches = list[dict[str, torch.Tensor]]

DENSE = 0.995  # a layer that runs this share of the tokens in full is not routed
STATIC = 0.005  # a layer that runs no more than this share of the tokens in full may need no gate
_PENALTY = 1e-3
_FEWEST = 256  # tokens that a branch is fitted on, at least
_BUDGET_TOKENS = 4096  # that the thresholds of the other budgets are found on
_RATE_TOKENS = 256  # that a layer's divergence is measured on, at least


@dataclass
class LayerFit:
    """What was found for one layer, on the calibration text.

    Attributes:
        share: The share of the tokens that runs in full with the final thresholds; 0 in a static layer, 1 in one that
            is not routed.
        branch_r2: `1 - |update - branch|^2 / |update|^2`, over the tokens that take the branch.
        gate_r2: The share of the variance of the scores, over all tokens, that the gate predicts.
        nats: The divergence from the base that its cheap tokens alone cause, nats per token, measured.
    """

    share: float
    branch_r2: float
    gate_r2: float
    nats: float


def fit_router(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    keep: float = 0.5,
    config: DepthRouteConfig | None = None,
    *,
    rounds: int = 2,
    progress: bool = False,
) -> PeftModel:
    """Make an unrouted model a routed one, without training, so that the share `keep` of all calls runs in full.

        model = fit_router(AutoModelForCausalLM.from_pretrained(name), batches, keep=0.5)

    A `DepthRouteTrainer` goes on from there; with `train_gates=False` it keeps what the gates know.

    Layer by layer on kept hidden states: branches are fitted to the target's update, gates to the error that their
    branch leaves, scaled to what the layer's cheap tokens alone cost; one threshold over all layers then holds `keep`.
    Each further round fits branches and gates again on the stream and on the tokens that they really get. Every fifth
    row is held out: costs are measured and thresholds set on it, and the round with the lowest loss there is kept.
    Layers that run every token in full are left out of the adapter. Those that run next to none become static: they
    lose their gates, and the other layers run that much more. They keep them where the loss of the held-out rows rises,
    by the mean of the rows' differences, by more than that mean's standard error: a smaller rise may be chance, and
    no gate is the cheaper choice. The thresholds of other budgets are calibrated too, so that `set_budget` holds them.

    About 13 forward passes of the text with two rounds, whatever the number of layers, and the gates' regression. In
    memory are the base and a few times the hidden states of the text at one layer. Nothing is random but for the
    configuration's seed.

    Under `accelerate launch` every process calls it with the whole of `batches` and a model of its own. Each takes its
    share of the rows, sums are over all, and every process gets the router of one process but for rounding.

    Args:
        model: A transformers model of a supported family, not routed; it may be offloaded by accelerate. It is changed
            in place, as by `get_depth_routed_model`, and left in eval mode.
        batches: Dicts with `input_ids` and optionally `attention_mask`, each `[B, T]`; see `calibrate`. 16,000 tokens
            are enough for a model of the size of Qwen2.5-0.5B; they are kept in memory.
        keep: In (0, 1): the share of all calls of the target in the whole model that run in full. Which layers they
            are in is found on the text.
        config: What to fit; by default MLP gates and low-rank branches for the FFNs of all layers. Its budget is
            overridden by `keep`, and held by all layers together (`budget_scope="global"`).
        rounds: How often everything is fitted, at least once.
        progress: Show a progress bar.

    Raises:
        ConfigError: `keep` is out of range, too low for the layers in `config`, or `config` has a gate or a branch
            that is not fitted; the model is untouched.
        ValueError: `batches` holds fewer than 512 real tokens, or fewer rows to fit on than there are processes.
    """
    started = time.time()
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    config = config_to_fit(len(find_layers(model)), keep, config)
    text, held_out = _split([batch for batch in model_inputs(model, batches)])
    tokens = sum(int(token_mask(batch).sum()) for batch in text)
    if tokens < 2 * _FEWEST:
        raise ValueError(f"fit_router: batches holds {tokens} tokens to fit on; {2 * _FEWEST} is the least")
    if (rows := sum(len(batch["input_ids"]) for batch in text)) < world_size():
        raise ValueError(f"fit_router: batches holds {rows} rows to fit on, for {world_size()} processes")
    routed = get_depth_routed_model(model, config)
    bar = tqdm(total=rounds * len(find_layers(routed)), disable=not progress)
    with torch.no_grad(), evaluating(routed), bar, sharing():
        every_token = max(_RATE_TOKENS, tokens // len(find_layers(routed)))  # one pass of the text for all layers
        fit = _Fit(routed, _share(text), _share(_first_tokens(held_out, every_token)), bar)
        own = _share(held_out)
        best: tuple[float, dict[int, dict[str, Any]], dict[int, LayerFit]] | None = None
        losses = []
        for number in range(rounds):
            fit.round(first=number == 0)
            fit.calibrate(own)
            losses.append(_loss(routed, own))
            if best is None or losses[-1] < best[0]:
                best = losses[-1], _state(routed), copy.deepcopy(fit.layers)
        assert best is not None
        _restore(routed, best[1])
        with full_depth(routed):
            dense_loss = _loss(routed, own)
        layers = best[2]
        dense = [index for index, layer in layers.items() if layer.share >= DENSE]
        static = [index for index, layer in layers.items() if layer.share <= STATIC]
        routed = _narrowed(routed, dense=dense)
        shares = calibrate(routed, own)
        routed, shares = _without_gates(routed, shares, static, own)
        calibrate_budgets(routed, _share(_first_tokens(held_out, _BUDGET_TOKENS)))
        for index, layer in layers.items():
            layer.share = shares.get(index, 1.0)
        loss = _loss(routed, own)
    record = {
        "fit": {
            "keep": keep,
            "tokens": tokens,
            "held_out_tokens": sum(int(token_mask(batch).sum()) for batch in held_out),
            "loss_dense": dense_loss,
            "loss": loss,
            "loss_of_rounds": losses,
            "layers": {str(index): asdict(layer) for index, layer in layers.items()},
        },
        "seconds": round(time.time() - started, 1),
        "trainable_parameters": sum(p.numel() for p in routed.parameters() if p.requires_grad),
        "versions": versions(),
    }
    remember_training(routed, record)
    return routed.eval()


def config_to_fit(depth: int, keep: float, config: DepthRouteConfig | None) -> DepthRouteConfig:
    """A copy of `config` as `fit_router` begins with it, for a model of `depth` layers; `ConfigError` as there."""
    if not 0 < keep < 1:
        raise ConfigError(f"keep={keep!r} must be between 0 and 1, the share of all calls that runs in full")
    given = DepthRouteConfig(layers="all") if config is None else config
    if TARGETS[given.target].per_pair or given.granularity != "token":
        raise ConfigError(
            f"target={given.target!r} per {given.granularity} is not fitted; use ffn, attention or block per token"
        )
    if not hasattr(GATES[given.gate], "fit"):
        known = ", ".join(name for name, gate in GATES.items() if hasattr(gate, "fit"))
        raise ConfigError(f"gate={given.gate!r} is not fitted; use one of: {known}")
    if given.static_layers is not None:
        raise ConfigError("fit_router finds the static layers itself; leave static_layers out")
    if given.branch == "none" or given.scale_by_gate or not given.takes_budget():
        raise ConfigError("fit_router fits a branch, with thresholds that follow the budget, unscaled")
    routed = len(given.routed_layers(depth))
    budget = (keep * depth - (depth - routed)) / routed
    if not budget > 0:
        raise ConfigError(f"keep={keep:g}: {depth - routed} of {depth} layers are not routed and run everything")
    values = given.to_dict() | {"budget": budget, "budget_scope": "global", "selection": "threshold"}
    kept = {name: value for name, value in values.items() if name not in ("base_architecture", "library_version")}
    return DepthRouteConfig(**kept)


def _split(batches: Batches) -> tuple[Batches, Batches]:
    """`(to fit on, held out)`: every fifth row is held out, of fewer the last; one row alone is both."""
    sizes = [len(batch["input_ids"]) for batch in batches]
    if sum(sizes) < 2:
        return batches, batches
    held = torch.arange(sum(sizes)) % min(5, sum(sizes)) == min(5, sum(sizes)) - 1

    return _taken(batches, ~held), _taken(batches, held)


def _taken(batches: Batches, rows_R: torch.Tensor) -> Batches:
    """The rows in a bool mask over those of all batches, in batches as they were."""
    parts = zip(batches, rows_R.split([len(batch["input_ids"]) for batch in batches]))
    return [{n: v[part.to(v.device)] for n, v in batch.items()} for batch, part in parts if part.any()]


def _share(batches: Batches) -> Batches:
    """This process's share of the rows."""
    own_R = torch.zeros(sum(len(batch["input_ids"]) for batch in batches), dtype=torch.bool)
    own_R[own_share(len(own_R))] = True
    return _taken(batches, own_R)


def _first_tokens(batches: Batches, count: int) -> Batches:
    """The first rows, in batches as they were, with about `count` positions."""
    found: Batches = []
    for batch in batches:
        rows, length = batch["input_ids"].shape
        taken = min(rows, -(-count // length))
        found += [{name: value[:taken] for name, value in batch.items()}] if taken > 0 else []
        count -= taken * length
    return found


class _Fit:
    """The state of a fit over its rounds."""

    def __init__(self, model: PeftModel, text: Batches, held_out: Batches, bar: Any) -> None:
        self.model, self.bar = model, bar
        self.walk = LayerWalk(model, text)
        self.holders = {holder.layer_index: holder for holder in active_routings(model)}
        self.config = next(iter(self.holders.values())).active_config()
        for holder in self.holders.values():  # nothing is decided by it, and nothing warns that it is missing
            holder.active_quantiles().set(quantile_table(torch.zeros(1)))
        self.layers = {index: LayerFit(1.0, 0.0, 0.0, 0.0) for index in self.holders}
        self.held_out = held_out  # that rates are measured on
        self.rates = dict.fromkeys(self.holders, 1.0)  # nats for the square of an error
        self.threshold = 0.0  # of the gates as they are
        self.next_threshold = 0.0  # the same, of the gates that a round has fitted so far
        self._factor, self._middle = 1.0, 0.0
        self._predicted: dict[int, torch.Tensor] = {}  # scores `[N]`, of the rows of all processes

    def round(self, first: bool) -> None:
        """Fit every layer, the first time on the stream of the base, then on that of the routed model."""

        def visit(index: int, calls: list[RoutedCall]) -> list[torch.Tensor]:
            rows = _Rows(calls, self.walk.real)
            cheap_N = None if first else self._scores(index, rows) < self.threshold
            self._fit_layer(index, rows, cheap_N)
            scores_N = self._scores(index, rows)
            self._predicted[index] = rows_of_all(scores_N.cpu())
            return rows.outputs(None if first else scores_N >= self.next_threshold)

        walk_layers(self.walk, visit, self.bar.update)
        if first:  # nothing is known of a layer yet, so each is measured at the share of all
            self._measure_rates({index: quantile_table(part) for index, part in self._predicted.items()})
        for _ in range(1 if first else 2):
            self._measure_rates(dict.fromkeys(self.holders, quantile_table(self._pooled())))
        pooled = self._pooled()
        middle = pooled.kthvalue(max(1, round((1 - self.config.budget) * len(pooled)))).values
        spread = (pooled - middle).abs().mean().clamp(min=1e-30)
        self._factor, self._middle = float(self.config.gate_temperature or 1.0) / float(spread), float(middle)
        for index in self.holders:  # one map for all: 0 at the threshold, and as wide as the temperature
            _rescale(self._gate(index), self._factor, self._middle)

    def _pooled(self) -> torch.Tensor:
        return torch.cat(list(self._predicted.values()))

    def _measure_rates(self, tables: Mapping[int, torch.Tensor]) -> None:
        """Scale every layer's scores to the divergence that its cheap tokens alone cause on held-out text.

        The standard error of the measurement keeps a rate that it cannot tell near that of all layers together.

        Args:
            tables: The quantiles that each layer's threshold is read from.
        """
        for index, holder in self.holders.items():
            holder.active_quantiles().set(tables[index])
        measured: dict[int, list[torch.Tensor]] = {index: [] for index in self.holders}
        predicted = dict.fromkeys(self.holders, 0.0)
        with full_depth(self.model):
            for batch in self.held_out:
                dense, real = self.model(**batch, use_cache=False).logits, token_mask(batch)
                for index, holder in self.holders.items():
                    holder._disable_adapters = False
                    with record_routes(self.model) as trace:
                        routed = self.model(**batch, use_cache=False).logits
                    holder._disable_adapters = True
                    record = trace[index]
                    measured[index].append(_divergences(dense, routed, real).cpu())
                    predicted[index] += float(record.scores[record.real & ~record.mask].clamp(min=0).pow(4).sum())
        tokens = sum(each_of_all(sum(int(token_mask(batch).sum()) for batch in self.held_out)))
        nats = {index: rows_of_all(torch.cat([torch.empty(0), *rows])) for index, rows in measured.items()}
        predicted = {index: sum(each_of_all(nats)) for index, nats in predicted.items()}
        all_nats, all_predicted = sum(float(rows.mean()) for rows in nats.values()), sum(predicted.values()) / tokens
        common = all_nats / all_predicted if all_nats > 0 and all_predicted > 0 else 1.0
        for index, nats_R in nats.items():
            found, expected = float(nats_R.mean()), common * predicted[index] / tokens
            error = float(nats_R.std()) / len(nats_R) ** 0.5 if len(nats_R) > 1 else expected
            rate = common * ((found + error) / (expected + error) if found > 0 and expected > 0 else 1.0)
            self.layers[index].nats = found
            self.rates[index] *= rate
            self._predicted[index] *= rate**0.25
            _rescale(self._gate(index), rate**0.25, 0.0)

    def calibrate(self, text: Batches) -> None:
        """The one threshold that holds the budget, and the share that each layer gets."""
        for index, share in calibrate(self.model, text).items():
            self.layers[index].share = share
        holder = next(iter(self.holders.values()))
        self.threshold = float(holder.active_quantiles()(self.config.budget))
        self.next_threshold = self._middle + self.threshold / self._factor

    def _fit_layer(self, index: int, rows: _Rows, cheap_N: torch.Tensor | None) -> None:
        """Branch, then gate; without a decision yet, the cheaper half by a linear prediction stands in for it."""
        found, gate = self.layers[index], self._gate(index)
        if cheap_N is None:
            cheap_N = _cheaper_half(rows.gate, self._fit_cheap_path(index, rows, None).norm(dim=-1))
        missed_Nd = self._fit_cheap_path(index, rows, cheap_N)
        missed, update = (total(part[cheap_N].double().square().sum()) for part in (missed_Nd, rows.update))
        found.branch_r2 = float(1 - missed / update) if update > 0 else 0.0
        wanted_N = missed_Nd.norm(dim=-1).sqrt()
        of_all_N = rows_of_all(wanted_N)
        mean, spread = of_all_N.mean(), of_all_N.std().clamp(min=1e-30)
        gate.fit(rows.gate, (wanted_N - mean) / spread, self.config.seed + index)
        found.gate_r2 = float(1 - F.mse_loss(rows_of_all(self._scores(index, rows)), (of_all_N - mean) / spread))
        _rescale(gate, float(spread) * self.rates[index] ** 0.25, -float(mean / spread))

    def _fit_cheap_path(self, index: int, rows: _Rows, chosen_N: torch.Tensor | None) -> torch.Tensor:
        """Fit branch and memory on the tokens in `chosen_N`; what they miss of the update of each, `[N, d]`."""
        holder = self.holders[index]
        branch = holder.depth_route_branch[holder.active_name()]
        memory: Any = holder.depth_route_memory._modules.get(holder.active_name())
        _fit_branch(branch, rows, chosen_N)
        missed_Nd = rows.missed(branch)
        return missed_Nd if memory is None else fit_memory(memory, rows.ngrams, missed_Nd, chosen_N)

    def _scores(self, index: int, rows: _Rows) -> torch.Tensor:
        scores: torch.Tensor = self._gate(index)(rows.gate)["scores"]
        return scores

    def _gate(self, index: int) -> Any:
        return self.holders[index].depth_route_gate[self.holders[index].active_name()]


class _Rows:
    """The real tokens of a layer: what its gate and its branch read, and the update, float32 `[N, d]` each."""

    def __init__(self, calls: list[RoutedCall], real: list[torch.Tensor]) -> None:
        self.calls = calls
        self.real = [mask.to(call.stream.device) for call, mask in zip(calls, real)]
        self.fulls = [call.full() for call in calls]
        residual = calls[0].plan.config.gate_input == "residual"
        branch: Any = calls[0].branch
        streams = self._of([call.stream for call in calls])
        self.update = self._of(self.fulls) - streams
        self.gate = streams if residual else self._of([call.norm() for call in calls])
        self.normed: torch.Tensor = branch.norm(streams).float()
        ngrams = [c.ngrams.to(mask.device)[mask] for c, mask in zip(calls, self.real) if c.ngrams is not None]
        self.ngrams = torch.cat(ngrams) if ngrams else torch.empty(0)  # of a branch with a memory

    def _of(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[mask] for part, mask in zip(parts, self.real)]).float()

    def missed(self, branch: Any) -> torch.Tensor:
        """The update less what the low-rank branch gives, `[N, d]`."""
        return self.update - branch.down(F.silu(branch.up(self.normed)))

    def outputs(self, full_N: torch.Tensor | None) -> list[torch.Tensor]:
        """The layer's outputs; with `full_N`, bool `[N]`, the other tokens take the cheap path."""
        if full_N is None:
            return [call.finish(full) for call, full in zip(self.calls, self.fulls)]
        parts, out = full_N.split([int(mask.sum()) for mask in self.real]), []
        for call, full, mask, part in zip(self.calls, self.fulls, self.real, parts):
            chosen = torch.ones_like(mask)
            chosen[mask] = part
            out.append(call.finish(torch.where(chosen[..., None], full, call.cheap())))
        return out


def _fit_branch(branch: Any, rows: _Rows, chosen_N: torch.Tensor | None) -> None:
    """Fit the branch on the tokens in `chosen_N`, on all of them where those are few."""
    if chosen_N is not None and sum(each_of_all(int(chosen_N.sum()))) < max(_FEWEST, 2 * branch.up.out_features):
        chosen_N = None
    chosen = slice(None) if chosen_N is None else chosen_N
    x_Nd = rows.normed[chosen]
    penalty = max(_PENALTY, 0.1 * x_Nd.shape[1] / sum(each_of_all(len(x_Nd))))
    fit_branch(branch, x_Nd, rows.update[chosen], penalty)


def _cheaper_half(x_Nd: torch.Tensor, y_N: torch.Tensor) -> torch.Tensor:
    """Bool `[N]`: where a linear prediction of `y` is low."""
    x = torch.cat([x_Nd, torch.ones_like(x_Nd[:, :1])], dim=1)
    predicted_N = x @ ridge_weights(*moments(x, y_N[:, None]), _PENALTY).to(x).squeeze(1)
    of_all_N = rows_of_all(predicted_N)
    return predicted_N <= of_all_N.kthvalue((len(of_all_N) + 1) // 2).values


def _rescale(gate: Any, factor: float, shift: float) -> None:
    """Make a gate's scores `factor * (u - shift)`."""
    gate.score.weight.mul_(factor)
    gate.score.bias.sub_(shift).mul_(factor)


def _row_losses(model: nn.Module, batches: Batches) -> torch.Tensor:
    """The mean next-token loss of each row, nats, `[R]`."""
    rows = [torch.empty(0, dtype=torch.float64)]
    for batch in batches:
        counted = predicting(batch["input_ids"], batch.get("attention_mask"))
        logits = model(**batch, use_cache=False).logits[:, :-1]
        losses = token_losses(logits[counted], batch["input_ids"][:, 1:][counted]).double()
        sums = losses.new_zeros(counted.shape).masked_scatter(counted, losses).sum(1)
        rows.append((sums / counted.sum(1).clamp(min=1)).cpu())
    return torch.cat(rows)


def _divergences(dense_BTV: torch.Tensor, routed_BTV: torch.Tensor, real_BT: torch.Tensor) -> torch.Tensor:
    """The mean `KL(dense || routed)` of each row, nats, `[B]`."""
    kl_BT = torch.stack(
        [
            F.kl_div(
                routed.float().log_softmax(-1), dense.float().log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
            for dense, routed in zip(dense_BTV, routed_BTV)
        ]
    )
    return (kl_BT * real_BT.to(kl_BT)).sum(1) / real_BT.sum(1).clamp(min=1).to(kl_BT)


def _loss(model: nn.Module, batches: Batches) -> float:
    return float(rows_of_all(_row_losses(model, batches)).mean())


def _state(model: nn.Module) -> dict[int, dict[str, Any]]:
    return {holder.layer_index: copy.deepcopy(holder.state_dict()) for holder in active_routings(model)}


def _restore(model: nn.Module, state: Mapping[int, dict[str, Any]]) -> None:
    """Give every layer what it held; of a layer that has become static, the gate is left out."""
    for holder in active_routings(model):
        if (held := state.get(holder.layer_index)) is not None:
            holder.load_state_dict({name: held[name] for name in holder.state_dict()})


def _narrowed(model: PeftModel, dense: Sequence[int] = (), static: Sequence[int] = ()) -> PeftModel:
    """The model with the layers in `dense` not routed and those in `static` without gates.

    The others hold what they held, and the budget that is left; where no other is left, the model stays as it is.
    """
    config = copy.deepcopy(active_routings(model)[0].active_config())
    layers = cast("list[int]", config.layers)
    gated = [index for index in layers if index not in (*dense, *static)]
    if not gated or len(gated) == len(layers):
        return model
    config.budget = min(1.0, max(0.01, (config.budget * len(layers) - len(dense)) / len(gated)))
    config.layers = [index for index in layers if index not in dense]
    config.static_layers = [index for index in layers if index in static] or None
    return _injected(model, config, _state(model))


def _injected(model: PeftModel, config: DepthRouteConfig, state: Mapping[int, dict[str, Any]]) -> PeftModel:
    """The base of `model` with another configuration of the adapter, and what its layers hold."""
    routed = get_depth_routed_model(model.unload(), config)
    _restore(routed, state)
    return routed.eval()


def _without_gates(
    model: PeftModel, shares: dict[int, float], static: Sequence[int], text: Batches
) -> tuple[PeftModel, dict[int, float]]:
    """The calibrated model with the layers in `static` static, unless that costs more than noise; and its shares."""
    if not static or len(static) == len(shares):
        return model, shares
    config, state = active_routings(model)[0].active_config(), _state(model)
    before_R = rows_of_all(_row_losses(model, text))
    narrowed = _narrowed(model, static=static)
    shares_without = calibrate(narrowed, text)
    rise_R = rows_of_all(_row_losses(narrowed, text)) - before_R
    error = float(rise_R.std()) / len(rise_R) ** 0.5 if len(rise_R) > 1 else 0.0
    if float(rise_R.mean()) <= error:
        return narrowed, shares_without
    model = _injected(narrowed, config, state)
    return model, calibrate(model, text)

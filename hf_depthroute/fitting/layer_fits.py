"""Per-layer fits of `fit_router`: the branch by least squares, the gate by regression on the branch's error.

Shapes: B batch, T positions, N real tokens, R rows, V vocabulary, d model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel

from ..base.distributed import each_of_all, rows_of_all, total
from ..data.batches import token_mask
from ..execution.call import RoutedCall
from ..inference.calibration import active_routings, calibrate
from ..inference.fitting import fit_branch, fit_memory
from ..parts.regression import moments, norms_and_sinks, ridge_weights
from ..routing.thresholds import quantile_table
from ..routing.trace import full_depth, overridden, record_routes
from .layer_walk import LayerWalk, walk_layers
from .text import Batches

FEWEST = 256  # tokens that a branch is fitted on, at least
_PENALTY = 1e-3


@dataclass
class LayerFit:
    """The fit of one layer, on the calibration text.

    Attributes:
        share: The share of the tokens that runs in full with the final thresholds; 0 in a static layer, 1 in one that
            is not routed.
        branch_r2: `1 - |update - branch|^2 / |update|^2`, over the tokens that take the branch, errors relative to the
            stream behind the full path.
        gate_r2: The share of the variance of the scores, over all tokens but the sinks, that the gate predicts.
        nats: The divergence from the base that its cheap tokens alone cause, nats per token, measured.
        sinks: Tokens of the text that are attention sinks behind this layer (`norms_and_sinks`). They run in full, and
            nothing is fitted to them.
    """

    share: float
    branch_r2: float
    gate_r2: float
    nats: float
    sinks: int = 0


class Fits:
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
            self._predicted[index] = rows_of_all(scores_N[~rows.sinks].cpu())
            self.bar.layer_done()
            return rows.outputs(None if first else scores_N >= self.next_threshold)

        walk_layers(self.walk, visit)
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
                for index in self.holders:
                    with overridden(self.model, layers=frozenset({index})), record_routes(self.model) as trace:
                        routed = self.model(**batch, use_cache=False).logits
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
            cheap_N = _cheaper_half(rows, self._fit_cheap_path(index, rows, ~rows.sinks) * rows.norms)
        missed_N = self._fit_cheap_path(index, rows, cheap_N & ~rows.sinks)
        taken_N = cheap_N & ~rows.sinks
        update_N = rows.update.norm(dim=-1) / rows.norms
        missed, update = (total(part[taken_N].double().square().sum()) for part in (missed_N, update_N))
        found.branch_r2 = float(1 - missed / update) if update > 0 else 0.0
        found.sinks = sum(each_of_all(int(rows.sinks.sum())))
        always_Sd = rows.gate[rows.sinks] if found.sinks else None
        wanted_N = (missed_N * rows.norms)[~rows.sinks].sqrt()  # its length: what the stream carries on
        of_all_N = rows_of_all(wanted_N)
        mean, spread = of_all_N.mean(), of_all_N.std().clamp(min=1e-30)
        gate.fit(rows.gate[~rows.sinks], (wanted_N - mean) / spread, self.config.seed + index, always_Sd)
        predicted_N = rows_of_all(self._scores(index, rows)[~rows.sinks])
        found.gate_r2 = float(1 - F.mse_loss(predicted_N, (of_all_N - mean) / spread))
        _rescale(gate, float(spread) * self.rates[index] ** 0.25, -float(mean / spread))

    def _fit_cheap_path(self, index: int, rows: _Rows, chosen_N: torch.Tensor) -> torch.Tensor:
        """Fit branch and memory on the tokens in `chosen_N`; what they miss of each token's update, `[N]`.

        It is relative to the stream behind the full path.
        """
        holder = self.holders[index]
        branch = holder.depth_route_branch[holder.active_name()]
        memory: Any = holder.depth_route_memory._modules.get(holder.active_name())
        _fit_branch(branch, rows, chosen_N)
        missed_Nd = rows.missed(branch)
        if memory is not None:
            missed_Nd = fit_memory(memory, rows.ngrams, missed_Nd, chosen_N)
        return missed_Nd.norm(dim=-1) / rows.norms

    def _scores(self, index: int, rows: _Rows) -> torch.Tensor:
        scores: torch.Tensor = self._gate(index)(rows.gate)["scores"]
        return scores

    def _gate(self, index: int) -> Any:
        return self.holders[index].depth_route_gate[self.holders[index].active_name()]


class _Rows:
    """The real tokens of a layer: what its gate and its branch read, and the update, float32 `[N, d]` each.

    `norms` and `sinks` are those of the stream behind the full path.
    """

    def __init__(self, calls: list[RoutedCall], real: list[torch.Tensor]) -> None:
        self.calls = calls
        self.real = [mask.to(call.stream.device) for call, mask in zip(calls, real)]
        self.fulls = [call.full() for call in calls]
        residual = calls[0].plan.config.gate_input == "residual"
        branch: Any = calls[0].branch
        streams = self._of([call.stream for call in calls])
        after = self._of(self.fulls)
        self.norms, self.sinks = norms_and_sinks(after)
        self.update = after - streams
        self.gate = streams if residual else self._of([call.norm() for call in calls])
        self.normed: torch.Tensor = branch.normed(streams).float()
        ngrams = [c.ngrams.to(mask.device)[mask] for c, mask in zip(calls, self.real) if c.ngrams is not None]
        self.ngrams = torch.cat(ngrams) if ngrams else torch.empty(0)  # of a branch with a memory

    def _of(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[mask] for part, mask in zip(parts, self.real)]).float()

    def missed(self, branch: Any) -> torch.Tensor:
        """The update less what the branch gives, `[N, d]`."""
        return self.update - branch.down(branch.features(self.normed).to(branch.down.weight.dtype))

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


def _fit_branch(branch: Any, rows: _Rows, chosen_N: torch.Tensor) -> None:
    """Fit the branch on the tokens in `chosen_N`, on all but the sinks where those are few."""
    if sum(each_of_all(int(chosen_N.sum()))) < max(FEWEST, 2 * branch.down.in_features):
        chosen_N = ~rows.sinks
    x_Nd = rows.normed[chosen_N]
    penalty = max(_PENALTY, 0.1 * x_Nd.shape[1] / sum(each_of_all(len(x_Nd))))
    fit_branch(branch, x_Nd, rows.update[chosen_N], penalty, rows.norms[chosen_N])


def _cheaper_half(rows: _Rows, missed_N: torch.Tensor) -> torch.Tensor:
    """Bool `[N]`: where a linear prediction of what is missed is low."""
    x, others_N = F.pad(rows.gate, (0, 1), value=1.0), ~rows.sinks
    predicted_N = x @ ridge_weights(*moments(x[others_N], missed_N[others_N, None]), _PENALTY).to(x).squeeze(1)
    of_all_N = rows_of_all(predicted_N[others_N])
    return predicted_N <= of_all_N.kthvalue((len(of_all_N) + 1) // 2).values


def _rescale(gate: Any, factor: float, shift: float) -> None:
    """Make a gate's scores `factor * (u - shift)`."""
    gate.score.weight.mul_(factor)
    gate.score.bias.sub_(shift).mul_(factor)


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

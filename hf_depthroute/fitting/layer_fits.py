"""Per-layer fits of `fit_router`: the branch by least squares,
the gate by regression on the branch's error.

Shapes: B batch, T positions, N real tokens, R rows, V vocabulary, d model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft import PeftModel

from ..base.distributed import each_of_all, raised_by_all, rows_of_all, total
from ..execution.call import RoutedCall
from ..inference.calibration import active_routings, set_thresholds
from ..inference.fitting import fit_branch, fit_memory, neurons_to_copy, ridge_of
from ..inference.non_finite import NonFiniteError
from ..parts.gate import Gate
from ..parts.neurons import NeuronBranch
from ..parts.regression import moments, norms_and_sinks, ridge_weights
from ..routing.thresholds import quantile_table
from .layer_walk import LayerWalk, check_finite, walk_layers
from .sensitivity import squared_slopes, stream_metrics, text_gradients
from .text import Batches

if TYPE_CHECKING:
    from .bar import FitBar

FEWEST = 256  # tokens that a branch is fitted on, at least
_PENALTY = 1e-3
_DRAWS = 2  # of the held-out text, whose gradients price errors
_MOST = 16.0  # times what a layer's scores say is believed


@dataclass
class LayerFit:
    """The fit of one layer, on the calibration text.

    Attributes:
        share: The share of the tokens that runs in full with the final thresholds; 0 in a static
            layer, 1 in one that is not routed.
        branch_r2: `1 - |update - branch|^2 / |update|^2`, over the tokens that take the branch,
            errors relative to the stream behind the full path.
        gate_r2: The share of the variance of the scores, over all tokens but the sinks, that the
            gate predicts; a prediction beyond their range counts as its end.
        nats: The divergence from the base that its cheap tokens alone cause, nats per token, told
            from gradients, with the threshold of the last round.
        sinks: Tokens of the text that are attention sinks behind this layer (`norms_and_sinks`).
            They run in full, and nothing is fitted to them.
    """

    share: float
    branch_r2: float
    gate_r2: float
    nats: float
    sinks: int = 0


class Fits:
    """The state of a fit over its rounds."""

    def __init__(self, model: PeftModel, text: Batches, held_out: Batches, bar: FitBar) -> None:
        self.model = model
        self.bar = bar
        self.walk = LayerWalk(model, text + held_out)
        # The batches before this one are fitted on, by the others a layer's scores are scaled.
        self._fitted = len(text)
        self.routings = {routing.layer_index: routing for routing in active_routings(model)}
        self.config = next(iter(self.routings.values())).active_config()
        # Nothing is decided by it, and nothing warns that it is missing.
        for routing in self.routings.values():
            routing.active_quantiles().set(quantile_table(torch.zeros(1)))
        self.layers = {index: LayerFit(1.0, 0.0, 0.0, 0.0) for index in self.routings}
        real = self.walk.real[self._fitted :]
        bar.phase("gradients")
        self._gradients = text_gradients(model, held_out, real, self.config.seed, _DRAWS)
        self.metrics = stream_metrics(
            self._gradients, real, next(iter(self.routings.values())).width
        )
        self.threshold = 0.0  # of the gates as they are
        self.next_threshold = 0.0  # the same, of the gates that a round has fitted so far
        self._factor = 1.0
        self._middle = 0.0
        self._predicted: dict[int, torch.Tensor] = {}  # scores `[N]`, of the rows of all processes

    def round(self, first: bool) -> None:
        """Fit every layer, first on the stream of the base, then on that of the routed model."""

        def visit(index: int, calls: list[RoutedCall]) -> list[torch.Tensor]:
            rows = _Rows(calls[: self._fitted], self.walk.real[: self._fitted])
            with raised_by_all(NonFiniteError):
                check_finite(index, rows.fulls, rows.real)
            cheap_N = None
            if not first:
                cheap_N = self._scores(index, rows) < self.threshold
            self._fit_layer(index, rows, cheap_N)
            held_out = _Rows(calls[self._fitted :], self.walk.real[self._fitted :])
            self._scale_layer(index, held_out, None if first else self.next_threshold)
            scores_N = self._scores(index, rows)
            others_N = self._scores(index, held_out)
            self._predicted[index] = rows_of_all(others_N[~held_out.sinks].cpu())
            self.bar.layer_done()
            if first:
                return rows.outputs(None) + held_out.outputs(None)
            return rows.outputs(scores_N >= self.next_threshold) + held_out.outputs(
                others_N >= self.next_threshold
            )

        walk_layers(self.walk, visit)
        pooled = torch.cat(list(self._predicted.values()))
        middle = pooled.kthvalue(max(1, round((1 - self.config.budget) * len(pooled)))).values
        spread = (pooled - middle).abs().mean().clamp(min=1e-30)
        self._factor = float(self.config.gate_temperature or 1.0) / float(spread)
        self._middle = float(middle)
        table = quantile_table((pooled - self._middle) * self._factor)
        # One map for all: 0 at the threshold, as wide as the temperature.
        for index, routing in self.routings.items():
            _rescale(self._gate(index), self._factor, self._middle)
            routing.active_quantiles().set(table.to(self.metrics[index].device))

    def calibrate(self, text: Batches) -> None:
        """The one threshold that holds the budget on the stream left by that of the text."""
        set_thresholds(self.model, text)
        routing = next(iter(self.routings.values()))
        self.threshold = float(routing.active_quantiles()(self.config.budget))
        self.next_threshold = self._middle + self.threshold / self._factor

    def _fit_layer(self, index: int, rows: _Rows, cheap_N: torch.Tensor | None) -> None:
        """Branch, then gate; before any decision, `_cheaper_half` stands in for one."""
        found = self.layers[index]
        gate = self._gate(index)
        if cheap_N is None:
            cheap_N = _cheaper_half(
                rows, self._fit_cheap_path(index, rows, ~rows.sinks).norm(dim=-1)
            )
        taken_N = cheap_N & ~rows.sinks
        missed_Nd = self._fit_cheap_path(index, rows, taken_N)
        missed, update = (
            total((part[taken_N] / rows.norms[taken_N, None]).double().square().sum())
            for part in (missed_Nd, rows.update)
        )
        found.branch_r2 = 0.0
        if update > 0:
            found.branch_r2 = float(1 - missed / update)
        found.sinks = sum(each_of_all(int(rows.sinks.sum())))
        always_Sd = rows.gate[rows.sinks] if found.sinks else None
        nats_N = (missed_Nd @ self.metrics[index].to(missed_Nd)).square().sum(-1)
        wanted_N = nats_N[~rows.sinks].sqrt().sqrt()
        of_all_N = rows_of_all(wanted_N)
        mean = of_all_N.mean()
        spread = of_all_N.std().clamp(min=1e-30)
        gate.fit(
            rows.gate[~rows.sinks], (wanted_N - mean) / spread, self.config.seed + index, always_Sd
        )
        wanted_N = (of_all_N - mean) / spread
        predicted_N = rows_of_all(self._scores(index, rows)[~rows.sinks])
        # Of a token that looks like a sink it is huge.
        predicted_N = predicted_N.clamp(wanted_N.min(), wanted_N.max())
        found.gate_r2 = float(1 - F.mse_loss(predicted_N, wanted_N))
        _rescale(gate, float(spread), -float(mean / spread))

    def _scale_layer(self, index: int, rows: _Rows, threshold: float | None) -> None:
        """Scale a layer's scores to what gradients say its cheap tokens cost on held-out text.

        The metric knows neither what a token's gradient has to do with its error nor what the
        errors of several tokens do together, and the branch was fitted to the errors that the gate
        was: this measures all of it.
        """
        scores_N = self._scores(index, rows)
        if threshold is None:  # none is known yet: at the share of all
            others_N = rows_of_all(scores_N[~rows.sinks])
            threshold = float(
                others_N.kthvalue(max(1, round((1 - self.config.budget) * len(others_N)))).values
            )
        cheap_N = (scores_N < threshold) & ~rows.sinks
        squares = rows.update.new_zeros((), dtype=torch.float64)
        start = 0
        for call, full, real, gradients in zip(
            rows.calls, rows.fulls, rows.real, self._gradients, strict=True
        ):
            count = int(real.sum())
            cheap = torch.zeros_like(real)
            cheap[real] = cheap_N[start : start + count]
            start += count
            change = call.finish(call.cheap()) - call.finish(full)
            squares = squares + squared_slopes(gradients[index], change, cheap)
        found = float(total(squares)) / 4 / _DRAWS
        predicted = float(total(scores_N[cheap_N].clamp(min=0).double().pow(4).sum()))
        self.layers[index].nats = found / sum(each_of_all(len(scores_N)))
        if found > 0 and predicted > 0:
            _rescale(self._gate(index), min(_MOST, max(1 / _MOST, found / predicted)) ** 0.25, 0.0)

    def _fit_cheap_path(self, index: int, rows: _Rows, chosen_N: torch.Tensor) -> torch.Tensor:
        """Fit branch and memory on `chosen_N`; what they miss of each update, `[N, d]`."""
        routing = self.routings[index]
        branch = routing.depth_route_branch[routing.active_name()]
        memory: Any = routing.depth_route_memory._modules.get(routing.active_name())
        neurons = neurons_to_copy(routing, routing.active_name())
        _fit_branch(branch, rows, chosen_N, self.metrics[index], neurons)
        missed_Nd = rows.missed(branch)
        if memory is not None:
            missed_Nd = fit_memory(memory, rows.ngrams, missed_Nd, chosen_N)
        return missed_Nd

    def _scores(self, index: int, rows: _Rows) -> torch.Tensor:
        return self._gate(index)(rows.gate)["scores"]

    def _gate(self, index: int) -> Gate:
        routing = self.routings[index]
        return routing.gate(routing.active_name())


class _Rows:
    """A layer's real tokens: what gate and branch read, and the update, float32 `[N, d]`.

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
        self.gate = streams
        if not residual:
            self.gate = self._of([call.norm() for call in calls])
        self.normed: torch.Tensor = branch.normed(streams).float()
        ngrams = [
            c.ngrams.to(mask.device)[mask]
            for c, mask in zip(calls, self.real)
            if c.ngrams is not None
        ]
        self.ngrams = torch.empty(0)  # of a branch with a memory
        if ngrams:
            self.ngrams = torch.cat(ngrams)

    def _of(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[mask] for part, mask in zip(parts, self.real)]).float()

    def missed(self, branch: Any) -> torch.Tensor:
        """The update less what the branch gives, `[N, d]`."""
        return self.update - branch.down(branch.features(self.normed).to(branch.down.weight.dtype))

    def outputs(self, full_N: torch.Tensor | None) -> list[torch.Tensor]:
        """The layer's outputs; with `full_N`, bool `[N]`, the other tokens take the cheap path."""
        if full_N is None:
            return [call.finish(full) for call, full in zip(self.calls, self.fulls)]
        parts = full_N.split([int(mask.sum()) for mask in self.real])
        out = []
        for call, full, mask, part in zip(self.calls, self.fulls, self.real, parts):
            chosen = torch.ones_like(mask)
            chosen[mask] = part
            out.append(call.finish(torch.where(chosen[..., None], full, call.cheap())))
        return out


def _fit_branch(
    branch: Any,
    rows: _Rows,
    chosen_N: torch.Tensor,
    metric_dd: torch.Tensor,
    neurons: NeuronBranch | None,
) -> None:
    """Fit the branch on the tokens in `chosen_N`, on all but the sinks where those are few.

    Neurons are chosen by what they cost. A low-rank branch misses too much for the metric, which is
    that of a small change: with it, a fit of all tokens of SmolLM2 loses no less.
    """
    if sum(each_of_all(int(chosen_N.sum()))) < max(FEWEST, 2 * branch.down.in_features):
        chosen_N = ~rows.sinks
    x_Nd = rows.normed[chosen_N]
    of_neurons = isinstance(branch, NeuronBranch) or neurons is not None
    fit_branch(
        branch,
        x_Nd,
        rows.update[chosen_N],
        ridge_of(of_neurons, sum(each_of_all(len(x_Nd))), x_Nd.shape[1]),
        rows.norms[chosen_N],
        metric_dd=metric_dd if of_neurons else None,
        neurons=neurons,
    )


def _cheaper_half(rows: _Rows, missed_N: torch.Tensor) -> torch.Tensor:
    """Bool `[N]`: where a linear prediction of what is missed is low."""
    x = F.pad(rows.gate, (0, 1), value=1.0)
    others_N = ~rows.sinks
    predicted_N = x @ ridge_weights(*moments(x[others_N], missed_N[others_N, None]), _PENALTY).to(
        x
    ).squeeze(1)
    of_all_N = rows_of_all(predicted_N[others_N])
    return predicted_N <= of_all_N.kthvalue((len(of_all_N) + 1) // 2).values


def _rescale(gate: Any, factor: float, shift: float) -> None:
    """Make a gate's scores `factor * (u - shift)`."""
    gate.score.weight.mul_(factor)
    gate.score.bias.sub_(shift).mul_(factor)

"""Parts of a prompt to leave out: the options of every layer, fitted and priced,
and the cheapest set of them.

Shapes: B batch, T positions, N tokens, d model width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from peft import PeftModel

from ..base.distributed import each_of_all, raised_by_all, total
from ..config.adapter import DepthRouteConfig
from ..data.batches import PROMPT_SHARE, prompts_of, token_mask
from ..evaluation.flops import count_flops
from ..execution.call import RoutedCall
from ..inference.calibration import active_routings
from ..inference.fitting import fit_branch, ridge_of
from ..inference.non_finite import NonFiniteError
from ..parts.baseline_gates import SinkGate
from ..parts.neurons import NeuronBranch, neurons_of
from ..parts.regression import norms_and_sinks
from ..parts.targets import TARGETS
from ..routing.routing import Routing
from .bar import FitBar
from .layer_walk import LayerWalk, check_finite
from .sensitivity import squared_slopes, stream_metrics, text_gradients
from .text import Batches

_DRAWS = 4  # of the text behind a prompt, whose gradients price the options
_NO_BUDGET = 1e-3  # sinks are few, and no budget says how many
_STEP = 1e-5  # of a prompt, in which savings are counted
_ROUNDING = 1e-6  # of a step, by which a whole number of them may miss it


# The routed part of a layer on a batch, and the stream behind its full path.
Path = tuple[RoutedCall, torch.Tensor]


@dataclass(frozen=True)
class Option:
    """A way to leave out a part of a layer: the target, and the branch in its place."""

    target: str
    branch: str
    rank: int


@dataclass
class StaticFit:
    """Result for one layer and one option.

    Attributes:
        nats: What it costs the text behind the prompt, nats per token, as it is predicted from
            gradients.
        saved: The share of the FLOPs of a prompt that it leaves out, or of its time
            (`option_times.in_time`).
        branch_r2: `1 - |update - branch|^2 / |update|^2` on the text fitted on, sinks left out,
            errors relative to the stream behind the full path.
    """

    nats: float
    saved: float
    branch_r2: float


class Search:
    """Every option in every layer, fitted and priced.

    Attributes:
        found: By layer index and option.
        branches: The fitted branches, the same way.
        metrics: `stream_metrics` of each layer, for what a change in a prompt costs the text behind
            it; None if that is nothing.
    """

    def __init__(
        self,
        model: PeftModel,
        text: Batches,
        held_out: Batches,
        length: int,
        tail: int,
        seed: int,
        bar: FitBar,
    ) -> None:
        self.found: dict[int, dict[Option, StaticFit]] = {}
        self.branches: dict[int, dict[Option, torch.nn.Module]] = {}
        self._fitted = len(text)  # the batches before this one are fitted on, the others held out
        batches = text + held_out
        masks = [prompts_of(batch, tail) for batch in batches]
        self._cheap = [cheap for cheap, _ in masks]
        counted = [behind for _, behind in masks[self._fitted :]]
        self._behind = sum(each_of_all(sum(int(behind.sum()) for behind in counted)))
        bar.phase("gradients")
        self._gradients = text_gradients(model, held_out, counted, seed, _DRAWS)
        metrics = stream_metrics(
            self._gradients, self._cheap[self._fitted :], active_routings(model)[0].width
        )
        self.metrics = [metric if metric.any() else None for metric in metrics]
        bar.phase("options of every layer")
        self._walk = LayerWalk(model, batches)
        saved = _savings(model, length, tail)
        states = self._walk.first()
        for index in range(len(self._walk.layers)):
            routing = self._walk.routing(index)
            if routing is None:
                states = self._walk.run(index, states)
            else:
                states = self._layer(routing, states, saved)
            bar.layer_done()

    def _layer(
        self,
        routing: Routing,
        states: list[torch.Tensor],
        saved: Callable[[Routing, Option], float],
    ) -> list[torch.Tensor]:
        index = routing.layer_index
        paths: dict[str, list[Path]] = {}
        self.found[index] = {}
        self.branches[index] = {}
        for target in ("ffn", "attention", "block"):
            paths[target] = self._paths(routing, target, states, paths)
        outputs = [call.finish(full) for call, full in paths["ffn"]]
        with raised_by_all(NonFiniteError):
            check_finite(index, outputs, self._walk.real)
        rows: dict[tuple[str, str], Rows] = {}
        gates: dict[str, SinkGate] = {}
        for option in options_of(routing):
            branch = routing.make_branch(option.target, option.branch, option.rank).to(
                outputs[0].device
            )
            kind = option.target, option.branch
            path = paths[option.target]
            if kind not in rows:
                rows[kind] = rows_of(branch, path[: self._fitted], self._walk.real[: self._fitted])
            r2 = fit_on(branch, rows[kind], self.metrics[index])
            if option.target not in gates:
                gates[option.target] = self._sink_gate(path)
            sinks = gates[option.target]
            held_out = path[self._fitted :]
            nats = self._price(index, branch, sinks, held_out, outputs[self._fitted :])
            self.branches[index][option] = branch
            self.found[index][option] = StaticFit(nats, saved(routing, option), r2)
        return outputs

    def _paths(
        self,
        routing: Routing,
        target: str,
        states: list[torch.Tensor],
        paths: Mapping[str, list[Path]],
    ) -> list[Path]:
        """Routed parts and full streams by batch; sequential layers compute them once."""
        plan = routing.plan(False)
        assert plan is not None
        traits = TARGETS[target]
        calls = self._walk.calls(routing.layer_index, states, replace(plan, target=traits))
        if routing.family.parallel or not traits.skips_attention:
            return [(call, call.full()) for call in calls]
        if traits.skips_ffn:
            return [(call, full) for call, (_, full) in zip(calls, paths["ffn"])]
        return [(call, ffn_call.stream) for call, (ffn_call, _) in zip(calls, paths["ffn"])]

    def _sink_gate(self, paths: list[Path]) -> SinkGate:
        """The gate of a layer whose routed part reads the streams of `paths`."""
        gate = SinkGate(0, None).to(paths[0][1].device)
        gate.set_bound(real_rows([call.stream for call, _ in paths], self._walk))
        return gate

    def _price(
        self,
        index: int,
        branch: torch.nn.Module,
        gate: SinkGate,
        paths: list[Path],
        outputs: list[torch.Tensor],
    ) -> float:
        """Half of two estimates, those of `squared_slopes`."""
        squares = torch.zeros((), dtype=torch.float64)
        for (call, _), out, gradients, cheap in zip(
            paths, outputs, self._gradients, self._cheap[self._fitted :], strict=True
        ):
            change = call.finish(call.stream + branch(call.stream)) - out
            skipped = cheap & (gate(call.stream)["scores"] < 0)
            squares += squared_slopes(gradients[index], change, skipped).cpu()
        return float(total(squares)) / 4 / _DRAWS / max(1, self._behind)


@dataclass
class Rows:
    """Rows to fit a branch to: its norm's output and the update `[N, d]`, stream sizes `[N]`."""

    x_Nd: torch.Tensor
    y_Nd: torch.Tensor
    norms_N: torch.Tensor
    energy: torch.Tensor | None = None  # of the FFN's neurons, once it is known


def rows_of(branch: Any, paths: list[Path], real: list[torch.Tensor]) -> Rows:
    """The rows of all real tokens, of the prompt or behind it, without the sinks."""
    masked = list(zip(paths, real, strict=True))
    x_Nd = torch.cat([branch.normed(call.stream)[mask].float() for (call, _), mask in masked])
    update_Nd = torch.cat([(full - call.stream)[mask].float() for (call, full), mask in masked])
    norms_N, sinks_N = norms_and_sinks(
        torch.cat([full[mask].float() for (_, full), mask in masked])
    )
    return Rows(x_Nd[~sinks_N], update_Nd[~sinks_N], norms_N[~sinks_N])


def fit_on(branch: torch.nn.Module, rows: Rows, metric_dd: torch.Tensor | None) -> float:
    """Fit a branch to what matters by the metric; the share of the update that it explains."""
    if isinstance(branch, NeuronBranch) and rows.energy is None:
        rows.energy = branch.energy(rows.x_Nd, 1 / rows.norms_N.square(), metric_dd)
    of_neurons = isinstance(branch, NeuronBranch)
    ridge = ridge_of(of_neurons, sum(each_of_all(len(rows.x_Nd))), rows.x_Nd.shape[1])
    return 1 - fit_branch(branch, rows.x_Nd, rows.y_Nd, ridge, rows.norms_N, rows.energy, metric_dd)


def real_rows(streams: list[torch.Tensor], walk: LayerWalk) -> torch.Tensor:
    """The real tokens of each batch's streams `[B, T, d]`, `[N, d]`."""
    return torch.cat([h[real.to(h.device)] for h, real in zip(streams, walk.real, strict=True)])


def options_of(routing: Routing) -> list[Option]:
    """A layer's options: FFN, attention or both, by low-rank branches and parts of the neurons."""
    ffn = routing.ffn
    width = routing.width
    low = max(1, width // 8)
    found = [Option("block", "lowrank", low)]
    if (neurons := neurons_of(ffn)) is None:
        found += [Option("ffn", "lowrank", low), Option("ffn", "lowrank", max(1, width // 3))]
    else:
        found += [Option("ffn", "neurons", max(1, neurons // part)) for part in (4, 2)]
        found += [Option("block", "neurons", max(1, neurons // 4))]
    # Attention that is skipped per token is computed all the same.
    if routing.family.queries is None:
        return [option for option in found if not TARGETS[option.target].skips_attention]
    return [*found, Option("attention", "lowrank", low)]


def config_of(chosen: Mapping[int, Option], given: DepthRouteConfig) -> DepthRouteConfig:
    """The adapter with these options: those of most layers are its own, the others patterns."""
    (main, _), *_ = Counter(chosen.values()).most_common()
    others = {index: option for index, option in chosen.items() if option != main}
    return DepthRouteConfig(
        layers=sorted(chosen),
        target=main.target,
        gate="sinks",
        budget=_NO_BUDGET,
        branch=main.branch,
        branch_rank=main.rank,
        target_pattern={i: o.target for i, o in others.items() if o.target != main.target} or None,
        branch_pattern={i: o.branch for i, o in others.items() if o.branch != main.branch} or None,
        rank_pattern={i: o.rank for i, o in others.items() if o.rank != main.rank} or None,
        phases="prefill",
        prompt_tail=given.prompt_tail,
        seed=given.seed,
        task_type=given.task_type,
        modules_to_save=given.modules_to_save,
    )


def choose(found: Mapping[int, Mapping[Option, StaticFit]], wanted: float) -> dict[int, Option]:
    """The options that save `wanted` together at the least predicted cost; `{}` if none do.

    A knapsack, by dynamic programming over the layers: `cost[n]` is the least that the layers so
    far cost if they save at least `n` steps of `_STEP`, to which savings are rounded down.
    """
    needed = np.arange(math.ceil(wanted / _STEP - _ROUNDING) + 1)
    cost = np.where(needed == 0, 0.0, np.inf)
    turns: list[tuple[int, list[tuple[Option | None, int]], np.ndarray]] = []
    for index, fits in found.items():
        # Of what costs the same, the first is taken: what saves most; a full layer comes last.
        options: list[tuple[Option | None, int]] = []
        costs = []
        for option, fit in sorted(fits.items(), key=lambda item: -item[1].saved):
            if (steps := math.floor(fit.saved / _STEP + _ROUNDING)) > 0:
                options.append((option, steps))
                costs.append(cost[np.maximum(0, needed - steps)] + fit.nats)
        options.append((None, 0))
        costs.append(cost)
        turns.append((index, options, np.argmin(costs, axis=0)))
        cost = np.min(costs, axis=0)
    if np.isinf(cost[-1]):
        return {}
    chosen: dict[int, Option] = {}
    left = len(needed) - 1
    for index, options, best in reversed(turns):
        option, steps = options[best[left]]
        left = max(0, left - steps)
        if option is not None:
            chosen[index] = option
    return dict(sorted(chosen.items()))


def _savings(model: PeftModel, length: int, tail: int) -> Callable[[Routing, Option], float]:
    """A function of a routing and an option: the share of a prompt's FLOPs that it leaves out."""
    in_full = min(1.0, tail / length)
    full = dict.fromkeys((routing.layer_index for routing in active_routings(model)), 1.0)
    dense = sum(count_flops(model, batch=1, length=length, shares=full).values())
    known: dict[tuple[int, str], float] = {}

    def saved(routing: Routing, option: Option) -> float:
        key = routing.layer_index, option.target
        config = routing.active_config()
        if key not in known:
            before = config.target
            config.target = option.target
            try:
                shares = full | {routing.layer_index: in_full}
                left = sum(count_flops(model, batch=1, length=length, shares=shares).values())
            finally:
                config.target = before
            known[key] = (dense - left) / dense
        branch = routing.make_branch(option.target, option.branch, option.rank)
        weights = sum(p.numel() for p in branch.parameters() if p.ndim == 2)
        if isinstance(branch, NeuronBranch):
            weights += branch.borrowed_weights()
        return known[key] - 2.0 * weights * length * (1 - in_full) / dense

    return saved


def prompt_length(batches: Batches) -> int:
    """Tokens of the longest row's prompt; every process has to choose alike."""
    longest = max((int(token_mask(batch).sum(1).max()) for batch in batches), default=0)
    return int(max(each_of_all(longest)) * PROMPT_SHARE)

"""The training objective: the sum of the losses, when labels are refreshed,
thresholds and what is logged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from ..base.distributed import sum_over_processes
from ..base.stack import stack_of
from ..config.rules import ConfigError
from ..inference.calibration import active_routings, gated_routings
from ..routing.routing import Routing
from ..routing.stack import state_of
from ..routing.thresholds import Measured
from ..routing.trace import RouteRecord, RouteTrace, record_routes
from .arguments import LOSSES, RoutingArguments
from .forks import Prefix, check_forkable, observe_prefix
from .losses import LossInputs, diagnostics, routing_losses
from .oracle import NO_LABELS, LabelScale, prefix_utility
from .prompts import of_prompts
from .trace_statistics import stack

# Of one optimizer step; what a loop without a callback leaves does not pile up.
_WATCHED_BATCHES = 64


class NonFiniteLossError(RuntimeError):
    """A training step was stopped before its optimizer step.

    The message is one line: step, terms, layer.
    """


class RoutingObjective:
    """Adds the routing losses to a model's own, tracks thresholds, and collects what is logged.

    Args:
        arguments: Weights, schedules, and which parts train.
        model: The model with routed layers.

    Raises:
        ValueError: The model has no active depth-routed adapter.
        ConfigError: The adapter's tokens have no labels that the arguments ask for, or it holds a
            global budget by running ranks.
    """

    def __init__(self, arguments: RoutingArguments, model: nn.Module) -> None:
        routings = active_routings(model)
        labels = arguments.uses_oracle() or arguments.cgs_weight > 0
        config = routings[0].active_config()
        if labels:
            if config.phases == "prefill":
                raise ConfigError(NO_LABELS)
            check_forkable(config)
        if config.causal_rule == "running" and config.budget_scope == "global":
            raise ConfigError(
                "causal_rule='running' with budget_scope='global' needs the shares of the layers, "
                "which training moves: train with 'quantile', then call calibrate(model, batches) "
                "and set_causal_rule(model, 'running')"
            )
        self.arguments = arguments
        self.model = model
        frozen = [] if arguments.train_gates else routings
        gates = [routing.depth_route_gate[routing.active_name()] for routing in frozen]
        self._frozen = [p for gate in gates for p in gate.parameters() if p.requires_grad]
        self.freeze()
        self._step = 0
        self._label_scale = LabelScale()
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        # Tokens run full and seen: since the last optimizer step; and by the thresholds, since the
        # last log entry.
        self._load: dict[int, torch.Tensor] = {}
        self._full: dict[int, torch.Tensor] = {}
        self._budgets: dict[int, float] = {}
        # Of the batches since the last optimizer step: the terms, and the scores by layer.
        self._pending: deque[tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]] = deque(
            maxlen=_WATCHED_BATCHES
        )

    @contextmanager
    def watching(self) -> Iterator[LossInputs]:
        """Around forward passes: what the losses see of the last one; no more than they need."""
        a = self.arguments
        with ExitStack() as watchers:
            watchers.enter_context(_without_input_gradients(self.model))
            rows = [LOSSES[name] for name, weight in a.weights().items() if weight > 0]
            metrics = {name: metric for row in rows for name, metric in row.metrics.items()}
            watchers.enter_context(state_of(self.model).override(observed=metrics))
            trace = watchers.enter_context(record_routes(self.model))
            trace.with_graph = True
            prefix = None
            if a.forks():
                prefix = watchers.enter_context(observe_prefix(self.model))
            watches = dict.fromkeys(row.observe for row in rows if row.observe is not None)
            seen = {watch: watchers.enter_context(watch(self.model)) for watch in watches}
            yield LossInputs(
                trace,
                alive_min=a.alive_min,
                jepa_targets=a.jepa_targets,
                prefix=prefix,
                observed=seen,
            )

    def __call__(
        self,
        lm: torch.Tensor,
        watched: LossInputs,
        share: float,
        labels: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss to back-propagate for one batch, inside the `watching` block of its pass.

        Args:
            lm: The language-model loss; already divided by the number of accumulated batches if
                `share` is below 1.
            watched: From `watching`.
            share: This batch's part of the optimizer step, for terms that are means over the batch.
            labels: The batch's labels `[B, T]`; needed by `util`, `rank`, `cgs`, `distill` and
                `exit`.
            logits: The model's logits `[B, T, V]`; needed by `distill`.

        Raises:
            ValueError: A term with a weight lacks what it needs.
        """
        a = self.arguments
        trace = of_prompts(self.model, watched.trace)
        prefix = watched.prefix
        due: dict[str, Any] = {}
        if prefix is not None:
            if labels is None:
                raise ValueError("the util, rank, cgs and distill losses need labels in the batch")
            if a.distill_weight > 0 and logits is None:
                raise ValueError(
                    "the distill loss needs the model's logits; turn off what removes them"
                )
            due = self._refreshed(prefix, labels)
        given = vars(watched) | {"trace": trace, "lm": lm, "labels": labels, "logits": logits} | due
        terms = routing_losses(**given, weights=a.weights())
        for routing in gated_routings(self.model):
            self._count(routing, trace[routing.layer_index])
        self._collect(terms, trace, share)
        found = {name: term.detach() for name, term in terms.items()}
        scores = {index: record.scores.detach() for index, record in trace.items()}
        self._pending.append((found, scores))
        zero = lm.new_zeros(())
        return terms.pop("lm", zero) + share * sum(terms.values(), zero)

    def _refreshed(self, prefix: Prefix, labels: torch.Tensor) -> dict[str, Any]:
        a = self.arguments
        step = self._step
        due: dict[str, object] = {}
        if a.uses_oracle() and _is_due(step, a.oracle_warmup, a.oracle_interval):
            due["utility"] = prefix_utility(
                prefix, labels, a.oracle, a.oracle_window, a.oracle_gamma
            )
        if a.cgs_weight > 0 and _is_due(step, a.cgs_warmup, a.cgs_interval):
            layers = [routing.layer_index for routing in gated_routings(self.model)]
            layer = layers[(step - a.cgs_warmup) // a.cgs_interval % len(layers)]
            difference = prefix_utility(prefix, labels, "on_policy", window=1, layers=[layer])
            due["counterfactual"] = difference
            due["counterfactual_temperature"] = self._label_scale.update(difference[layer])
        return due

    def schedule(self, step: int) -> None:
        """Set the budget and the temperature of optimizer step `step`."""
        a = self.arguments
        self._step = step
        self._label_scale.begin_step()
        config = active_routings(self.model)[0].active_config()
        state = state_of(self.model)
        temperature = config.gate_temperature
        assert temperature is not None
        state.scheduled_budget = ramp(step, a.budget_schedule_steps, a.budget_start, config.budget)
        state.scheduled_temperature = ramp(
            step, a.temperature_schedule_steps, a.temperature_start, temperature
        )

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the thresholds of `selection="controller"` by the load since the last step.

        Every layer by its own load, or by the mean over layers where the budget is global; that of
        all processes.
        """
        routings = [h for h in active_routings(self.model) if h.layer_index in self._load]
        if not routings:
            return
        counts_C2 = sum_over_processes(stack([self._load.pop(h.layer_index) for h in routings]))
        load_C = counts_C2[:, 0] / counts_C2[:, 1]
        if routings[0].active_config().budget_scope == "global":
            load_C = load_C.mean().expand_as(load_C)
        for routing, load in zip(routings, load_C):
            controller = routing.active_controller()
            budget = self._budgets[routing.layer_index]
            assert controller is not None
            # Without a single token the load is NaN, and the threshold stays.
            controller.move(load.nan_to_num(nan=budget), budget, self.arguments.controller_step)

    @torch.no_grad()
    def check_finite(self, step: int, gradients: bool = True) -> None:
        """Before optimizer step `step`: refuse it if a loss term or a gradient is not finite.

        `gradients` count but with a float16 scaler, which means to meet infinities, and skips the
        step itself.

        Raises:
            NonFiniteLossError: With the terms and the first layer whose scores are not finite.
                Weights and optimizer state are those of the step before; finite scores of this one
                may have moved the thresholds.
        """
        pending = list(self._pending)
        self._pending.clear()
        watched = [term.float() for terms, _ in pending for term in terms.values()]
        trained = [p.grad for p in self.model.parameters() if gradients and p.requires_grad]
        found = [gradient for gradient in trained if type(gradient) is torch.Tensor]
        if found:
            watched += [get_total_norm(found)]
        if not watched or bool(stack([value.reshape(()) for value in watched]).isfinite().all()):
            return
        names = {n for terms, _ in pending for n, term in terms.items() if not term.isfinite()}
        every = (scores.items() for _, scores in pending)
        layers = {i for scores in every for i, value in scores if not value.isfinite().all()}
        what = "a gradient (every loss term is finite)"
        if names:
            what = f"loss terms {', '.join(sorted(names))}"
        where = "all scores are finite"
        if layers:
            where = f"the scores of layer {min(layers)} are the first that are not"
        raise NonFiniteLossError(
            f"step {step}: not finite: {what}; {where}. Stopped before the optimizer moved: the "
            f"weights are as after step {step - 1}. Look at the batch, or lower the learning rate"
        )

    def state(self) -> dict[str, float]:
        """State to keep in a checkpoint besides the model: the counterfactual temperature."""
        if self._label_scale.value is None:
            return {}
        return {"temperature": float(self._label_scale.value)}

    def load_state(self, state: dict[str, float]) -> None:
        """Undo `state`."""
        self._label_scale.value = None
        if "temperature" in state:
            device = next(self.model.parameters()).device
            self._label_scale.value = torch.tensor(state["temperature"], device=device)
        self._label_scale.begin_step()

    @torch.no_grad()
    def _count(self, routing: Routing, record: RouteRecord) -> None:
        """Count what ran full, for a controller, and what inference's threshold would let run."""
        index = routing.layer_index
        config = routing.active_config()
        if routing.active_controller() is not None:
            self._load[index] = self._load.get(index, 0) + _full_and_seen(record.mask, record.real)
            self._budgets[index] = record.budget
        if config.takes_budget():
            full = record.scores >= routing.threshold(routing.active_name(), config.budget)
            self._full[index] = self._full.get(index, 0) + _full_and_seen(full, record.real)

    def note_shares(self) -> None:
        """Leave with the thresholds what they let run since the last log entry, for the card."""
        for h in active_routings(self.model):
            if h.layer_index in self._full:
                full, seen = self._full[h.layer_index].tolist()
                budget = h.active_config().budget
                h.active_quantiles().measured = Measured(budget, full / max(1, seen), "training")

    def freeze(self) -> None:
        """Freeze the gates where `train_gates` is off, until `thaw` or `end_schedule`."""
        for parameter in self._frozen:
            parameter.requires_grad_(False)

    def thaw(self) -> None:
        """Let the gates train that `freeze` froze."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)

    def end_schedule(self) -> None:
        """After a training the adapter's own budget and temperature hold, and its gates train.

        What was collected from a step that did not come to its end is no part of the next training.
        """
        state_of(self.model).end_schedule()
        self.thaw()
        for collected in (self._pending, self._load, self._full, self._sums):
            collected.clear()

    def pop_metrics(self) -> dict[str, float]:
        """Means since the last call: `loss_lm`, `loss_budget`, ..., and the per-layer diagnostics.

        Each over the batches that had it: `loss_util` over the refreshes.
        """
        metrics = {name: float(total) / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        self._full = {}
        return metrics

    def _collect(self, terms: dict[str, torch.Tensor], trace: RouteTrace, share: float) -> None:
        weights = self.arguments.weights()
        values = {f"loss_{name}": term.detach() / weights[name] for name, term in terms.items()}
        if "loss_lm" in values:
            values["loss_lm"] /= share
        for name, value in {**values, **diagnostics(trace)}.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)


def _full_and_seen(mask: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """How many real tokens are in `mask`, and how many there are: int64 `[2]`."""
    return torch.stack([(mask & real).sum(), real.sum()])


def _is_due(step: int, warmup: int, interval: int) -> bool:
    """Whether `step` is a refresh: every `interval` steps, from step `warmup` on."""
    return step >= warmup and (step - warmup) % interval == 0


def ramp(step: int, steps: int, start: float, end: float) -> float | None:
    """The value of a linear schedule at optimizer step `step`; None once it has ended."""
    if step >= steps:
        return None
    return start + (end - start) * step / steps


@contextmanager
def _without_input_gradients(model: nn.Module) -> Iterator[None]:
    """Passes in the block start without a graph at a frozen embedding; gradients are the same.

    With gradient checkpointing transformers lets the output of a frozen embedding require a
    gradient. Reentrant checkpoints need that: they only connect what goes in with what comes out.
    Others do not, and there every frozen layer below the first routed one would keep its input, run
    once more and be differentiated for nothing.
    """
    decoder = stack_of(model).decoder
    parts = [part for part in decoder.modules() if getattr(part, "gradient_checkpointing", False)]
    functions = [getattr(part, "_gradient_checkpointing_func", None) for part in parts]
    keywords = [getattr(function, "keywords", {}) for function in functions]
    reentrant = [given.get("use_reentrant") is not False for given in keywords]
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if embeddings is None or not embeddings._forward_hooks or any(reentrant):
        yield
        return

    def stop(embeddings: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor | None:
        # A leaf that requires a gradient comes from no parameter: the flag was put on it.
        if output.is_leaf:
            return output.requires_grad_(False)
        return None

    with embeddings.register_forward_hook(stop):  # after transformers' own
        yield

"""Losses of other routing methods against their formulas, the global budget,
and the threshold controller's step."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_traces import REAL, TAU, average, made_trace, p_bar, real_entries
from models import build_routed, tokens
from torch import nn
from training import make_trainer, rows, step_logs

from hf_depthroute.adapter.labels import as_served
from hf_depthroute.base.stack import stack_of
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing.stack import routings_of, state_of
from hf_depthroute.routing.thresholds import BudgetController
from hf_depthroute.routing.trace import RouteRecord, RouteTrace, record_routes
from hf_depthroute.training import objective as objective_module
from hf_depthroute.training.exits import exit_cross_entropy, observe_exits
from hf_depthroute.training.losses import LOSSES, mean_probability, routing_losses
from hf_depthroute.training.objective import RoutingArguments, RoutingObjective


def term(name: str, trace: RouteTrace, **inputs: Any) -> torch.Tensor:
    return routing_losses(trace, weights={name: 1.0}, **inputs)[name]


def with_extra(name: str, seed: int = 2, **fields: Any) -> RouteTrace:
    """`made_trace` plus a random extra `[B, T]`, whose padding would show in any mean and
    win any ranking."""
    trace, generator = made_trace(**fields), torch.Generator().manual_seed(seed)
    for record in trace.values():
        value = torch.where(REAL, torch.randn(2, 4, generator=generator), -90.0)
        record.extras[name] = value.requires_grad_(name == "predicted")
    return trace


def experts_trace() -> RouteTrace:
    """Records of routed experts: the token records with three experts per token."""
    trace = made_trace()
    for record in trace.values():
        for name in ("mask", "scores", "probs"):
            setattr(record, name, getattr(record, name)[..., None].expand(2, 4, 3))
    return trace


def bce(logit: float, label: float) -> float:
    return math.log1p(math.exp(-logit)) if label else math.log1p(math.exp(logit))


def test_capacity_is_the_excess_of_the_executed_share_over_the_budget() -> None:
    trace = made_trace(budget=0.25)
    share = average([value for i in (1, 3) for value in real_entries(trace[i].mask.float())])
    assert share > 0.25
    assert term("capacity", trace).item() == pytest.approx(share - 0.25, abs=1e-6)


def test_capacity_costs_nothing_below_the_budget() -> None:
    trace = made_trace(budget=1.0)
    loss = term("capacity", trace)
    loss.backward()
    assert loss.item() == 0.0
    assert all((record.scores.grad == 0).all() for record in trace.values())


def test_capacity_passes_the_gradient_straight_through_the_mask() -> None:
    trace = made_trace(budget=0.25)
    gradient = torch.autograd.grad(term("capacity", trace), trace[1].probs)[0]
    torch.testing.assert_close(gradient, REAL.float() / (2 * REAL.sum()))  # dM/dp = 1, two layers


def test_depth_is_the_mean_active_probability() -> None:
    trace = made_trace()
    assert term("depth", trace).item() == pytest.approx(
        average([p_bar(trace, 1), p_bar(trace, 3)]), abs=1e-6
    )


def test_squared_depth_is_the_mean_square_of_the_layers_that_a_token_runs() -> None:
    trace = made_trace()
    first, last = (real_entries(trace[index].probs) for index in (1, 3))
    expected = average([(one + other) ** 2 for one, other in zip(first, last)])
    assert term("squared_depth", trace).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "extra", "sign"), [("similarity", "similarity", 1), ("recoverability", "missed", -1)]
)
@pytest.mark.parametrize(
    ("budget", "counts"), [(0.25, (1, 1)), (0.5, (2, 1)), (0.6, (3, 2)), (1.0, (4, 2))]
)
def test_labels_are_the_tokens_that_the_full_path_changes_most_or_the_cheap_one_misses_most(
    name: str, extra: str, sign: int, budget: float, counts: tuple[int, int]
) -> None:
    trace = with_extra(extra, budget=budget)

    def losses(index: int) -> list[float]:
        found = []
        for b, count in enumerate(counts):
            real = [t for t in range(4) if REAL[b, t]]
            lowest = sorted(real, key=lambda t: sign * getattr(trace[index], extra)[b, t].item())[
                :count
            ]
            found += [bce(trace[index].scores[b, t].item() / TAU, float(t in lowest)) for t in real]
        return found

    expected = average([average(losses(i)) for i in (1, 3)])
    assert term(name, trace).item() == pytest.approx(expected, abs=1e-6)


def test_predictor_is_taught_the_mask() -> None:
    trace = with_extra("predicted")

    def losses(index: int) -> list[float]:
        pairs = zip(real_entries(trace[index].predicted), real_entries(trace[index].mask.float()))
        return [bce(logit, label) for logit, label in pairs]

    assert routing_losses(trace)["predictor"].item() == pytest.approx(
        average([*losses(1), *losses(3)]), abs=1e-6
    )


def test_predictor_and_scores_do_not_teach_each_other() -> None:
    trace = with_extra("predicted")
    term("predictor", trace).backward()
    assert all(
        record.scores.grad is None and record.predicted.grad is not None
        for record in trace.values()
    )
    assert all((record.predicted.grad[~REAL] == 0).all() for record in trace.values())


@pytest.mark.parametrize("name", ["similarity", "recoverability", "predictor", "exit"])
def test_terms_without_their_inputs_do_not_apply(name: str) -> None:
    assert name not in routing_losses(made_trace(), weights={name: 1.0})


def test_a_global_budget_holds_the_mean_over_layers() -> None:
    trace = made_trace(budget=0.25)
    mean = average([p_bar(trace, 1), p_bar(trace, 3)])
    terms = routing_losses(trace, weights={"alive": 1.0}, alive_min=0.9, budget_scope="global")
    assert terms["budget"].item() == pytest.approx((mean - 0.25) ** 2, abs=1e-6)
    assert terms["alive"].item() == pytest.approx(0.9 - mean, abs=1e-6)


def test_a_global_budget_lets_layers_differ() -> None:
    trace = RouteTrace(
        {
            i: RouteRecord(REAL, torch.zeros(2, 4), torch.full((2, 4), p), REAL, 0.5)
            for i, p in ((0, 0.9), (1, 0.1))
        }
    )
    assert term("budget", trace, budget_scope="global").item() == pytest.approx(0.0, abs=1e-12)
    assert term("budget", trace).item() == pytest.approx(0.16, abs=1e-6)


@pytest.mark.parametrize("name", ["budget", "alive", "z", "capacity", "depth"])
def test_pairs_of_experts_are_averaged_like_tokens(name: str) -> None:
    torch.testing.assert_close(
        term(name, experts_trace(), alive_min=0.9), term(name, made_trace(), alive_min=0.9)
    )


def test_mean_probability_of_pairs_leaves_out_padding() -> None:
    torch.testing.assert_close(mean_probability(experts_trace()), mean_probability(made_trace()))


# Early exits


def test_exit_loss_is_the_mean_cross_entropy_of_the_head_on_the_layers_inputs() -> None:
    model, ids = build_routed("llama", layers=[1, 3]).train(), tokens(2, 8)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, 6:] = False
    labels = ids.masked_fill(~real, -100)
    labels[0, 3] = -100
    with observe_exits(model) as exits, record_routes(model) as trace:
        model(input_ids=ids, attention_mask=real.long(), output_hidden_states=False)
        streams = {index: stream.detach() for index, stream in exits.items()}
        loss = term("exit", trace, observed={observe_exits: exits}, labels=labels)
    base = model.get_base_model()

    def cross_entropy(stream: torch.Tensor) -> torch.Tensor:
        logits = base.lm_head(base.model.norm(stream))
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )

    assert list(streams) == [1, 3]
    torch.testing.assert_close(loss, (cross_entropy(streams[1]) + cross_entropy(streams[3])) / 2)


def test_exit_streams_are_what_the_routed_layers_read() -> None:
    model, ids = build_routed("llama", layers=[1, 3]).eval(), tokens(2, 8)
    with observe_exits(model) as exits, torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        for index, stream in exits.items():
            assert torch.equal(stream, states[index])
    assert not exits  # let go after the block


def test_exit_loss_is_that_of_all_labels_where_prompts_alone_are_routed() -> None:
    ids = tokens(2, 8)
    labels = ids.clone()
    labels[:, :4] = -100
    found = {}
    for phases in ("all", "prefill"):
        model = build_routed("llama", layers=[1], phases=phases).train()
        objective = RoutingObjective(RoutingArguments(exit_weight=1.0), model)
        with (
            objective.watching() as watched,
            as_served(model, {"input_ids": ids, "labels": labels}),
        ):
            out = model(ids, labels=labels)
            objective(out.loss, watched, 1.0, labels, out.logits)
        found[phases] = float(objective.pop_metrics()["loss_exit"])
    assert found["prefill"] == pytest.approx(found["all"]) and found["all"] > 1


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_exit_loss_trains_the_layers_below(reentrant: bool | None) -> None:
    model, ids = build_routed("llama", layers=[1, 3]).train(), tokens(2, 8)
    model.requires_grad_(True)
    model(ids)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with observe_exits(model) as exits:
        model(ids)
        exit_cross_entropy(exits, ids, torch.ones_like(ids, dtype=torch.bool)).backward()
    layers = model.get_base_model().model.layers
    touched = [
        any(p.grad is not None and (p.grad != 0).any() for p in layer.parameters())
        for layer in layers
    ]
    assert touched == [True, True, True, False]  # layer 3 only reads the last exit


def test_exit_loss_in_training_needs_labels() -> None:
    objective = RoutingObjective(RoutingArguments(exit_weight=1.0), build_routed("llama").train())
    with objective.watching() as watched, pytest.raises(ValueError, match="exit loss needs labels"):
        objective.model(tokens(2, 8))
        objective(torch.tensor(1.0), watched, 1.0)


def test_exit_loss_is_logged_by_the_trainer(tmp_path: Path) -> None:
    trainer, _ = make_trainer(
        build_routed("llama"), rows(4), tmp_path, exit_weight=0.5, depth_weight=0.001
    )
    trainer.train()
    for log in step_logs(trainer):
        assert log["loss_exit"] > 0 and 0 < log["loss_depth"] < 1


# The controller


class Controlled:
    """What `RoutingObjective` reads of a routing for its controller, without a model."""

    def __init__(self, layer_index: int, scope: str, selection: str) -> None:
        self.layer_index = layer_index
        self.controller = BudgetController() if selection == "controller" else None
        self.config = SimpleNamespace(
            selection=selection,
            budget_scope=scope,
            takes_budget=lambda: False,
            causal_rule="quantile",
        )

    def active_controller(self) -> BudgetController | None:
        return self.controller

    def active_config(self) -> Any:
        return self.config


class Controllers:
    """Two layers with a controller each, and the objective that moves them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, scope: str = "layer", selection: str = "controller"
    ) -> None:
        self.routings: list[Any] = [
            Controlled(0, scope, selection),
            Controlled(1, scope, selection),
        ]
        monkeypatch.setattr(objective_module, "active_routings", lambda model: self.routings)
        self.objective = RoutingObjective(RoutingArguments(controller_step=0.01), nn.Module())

    def see(self, trace: RouteTrace) -> None:
        for routing in self.routings:
            self.objective._count(routing, trace[routing.layer_index])

    def thresholds(self) -> list[float]:
        return [h.controller.threshold.item() for h in self.routings]


def loads(shares: tuple[float, float], budget: float = 0.5) -> RouteTrace:
    """Two layers with ten tokens that run in the given shares,
    and two padding tokens that ran too."""
    real = torch.arange(12)[None] < 10
    masks = [(torch.arange(12)[None] < 10 * share) | ~real for share in shares]
    scores = torch.zeros(1, 12)
    return RouteTrace(
        {i: RouteRecord(mask, scores, scores, real, budget) for i, mask in enumerate(masks)}
    )


def test_the_controller_moves_thresholds_against_the_sign_of_the_load_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = Controllers(monkeypatch)
    layers.see(loads((0.6, 0.1)))
    layers.objective.after_step()
    assert layers.thresholds() == pytest.approx([0.01, -0.01])
    layers.see(loads((0.5, 0.1)))
    layers.objective.after_step()
    assert layers.thresholds() == pytest.approx([0.01, -0.02])  # at the budget: no step


def test_the_controller_sums_the_batches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Controllers(monkeypatch)
    layers.see(loads((0.6, 0.4)))
    layers.see(loads((0.2, 0.9)))
    layers.objective.after_step()
    layers.objective.after_step()  # nothing ran since
    assert layers.thresholds() == pytest.approx([-0.01, 0.01])


def test_a_global_controller_follows_the_mean_load(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Controllers(monkeypatch, scope="global")
    layers.see(loads((0.9, 0.3)))
    layers.objective.after_step()
    assert layers.thresholds() == pytest.approx([0.01, 0.01])


def test_a_step_without_real_tokens_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, trace = Controllers(monkeypatch), loads((0.9, 0.3))
    for record in trace.values():
        record.token_mask = torch.zeros(1, 12, dtype=torch.bool)
    layers.see(trace)
    layers.objective.after_step()
    assert layers.thresholds() == [0.0, 0.0]


def test_other_selections_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Controllers(monkeypatch, selection="topk")
    layers.see(loads((0.9, 0.3)))
    layers.objective.after_step()
    assert layers.objective._load == {}


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_training_holds_the_budget_by_the_controller_alone(tmp_path: Path, scope: str) -> None:
    config = {"selection": "controller", "budget": 0.25, "budget_scope": scope}
    model = build_routed("llama", layers=[1, 3], **config)
    for routing in routings_of(model):
        routing.active_controller().threshold.fill_(-1.0)  # too many scores are above
    examples, step = rows(64, padding=(0, 5)), 0.05
    trainer, _ = make_trainer(
        model, examples, tmp_path, budget_weight=0.0, alive_weight=0.0, controller_step=step,
        per_device_train_batch_size=8, num_train_epochs=8, learning_rate=1e-4,
    )  # fmt: skip
    trainer.train()
    logs = step_logs(trainer)
    shares = [average([log[f"full_ratio/layer_{i}"] for i in (1, 3)]) for log in logs]
    assert shares[0] > 0.5
    assert average(shares[-16:]) == pytest.approx(0.25, abs=0.05)
    thresholds = [routing.active_controller().threshold.item() for routing in routings_of(model)]
    assert (thresholds[0] == thresholds[1]) or scope == "layer"
    steps = [(value + 1) / step for value in thresholds]
    assert steps == pytest.approx([round(count) for count in steps], abs=1e-3) and min(steps) > 5


@pytest.mark.parametrize(
    ("name", "extra"), [("similarity", "similarity"), ("recoverability", "missed")]
)
def test_the_trainer_looks_at_the_paths_only_for_a_loss_by_them(
    tmp_path: Path, name: str, extra: str
) -> None:
    model = build_routed("llama")
    trainer, _ = make_trainer(model, rows(4), tmp_path, **{f"{name}_weight": 1.0})
    trainer.train()
    assert all(log[f"loss_{name}"] > 0 for log in step_logs(trainer))
    with record_routes(model.train()) as trace:
        model(tokens(2, 8))
    assert all(extra not in record.extras for record in trace.values())


def test_what_the_cheap_path_misses_is_how_far_its_update_is_from_the_full_one() -> None:
    model, seen = build_routed("llama").train(), {}
    routing = routings_of(model)[0]
    layer = stack_of(model).layers[routing.layer_index]
    parts = {"full": layer.mlp, "cheap": routing.depth_route_branch["default"]}
    for name, part in parts.items():
        part.register_forward_hook(lambda module, args, out, name=name: seen.update({name: out}))
    with (
        state_of(model).override(observed=LOSSES["recoverability"].metrics),
        record_routes(model) as trace,
    ):
        model(tokens(2, 8))
    torch.testing.assert_close(
        trace[routing.layer_index].missed, (seen["full"] - seen["cheap"]).norm(dim=-1)
    )


def test_the_predictor_learns_in_training(tmp_path: Path) -> None:
    model = build_routed("llama", causal_rule="predictor")
    trainer, _ = make_trainer(
        model, rows(32), tmp_path, num_train_epochs=8, per_device_train_batch_size=8
    )
    trainer.train()
    losses = [log["loss_predictor"] for log in step_logs(trainer)]
    assert average(losses[-4:]) < 0.9 * average(losses[:4])


# Arguments


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capacity_weight": -1.0}, "capacity_weight=-1.0"),
        ({"controller_step": float("nan")}, "controller_step=nan"),
        (
            {"jepa_targets": "all"},
            "jepa_targets='all' is not supported; use one of: paired, deranged",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingArguments(**fields).check()

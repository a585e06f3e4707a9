"""Training: what is minimised, what trains, what is logged, and that a run can be interrupted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import COVERING, GATES, KINDS, build_base, build_routed, tokens
from peft import LoraConfig, get_peft_model
from training import (
    adapter_state,
    assert_same_tensors,
    backward,
    gradients,
    make_trainer,
    rows,
    stacked,
    step_logs,
    training_arguments,
)
from transformers import Trainer, TrainerCallback

from hf_depthroute import (
    DepthRouteCallback,
    DepthRouteConfig,
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    get_depth_routed_model,
    record_routes,
)
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.inference.calibration import is_calibrated
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import RouteTrace
from hf_depthroute.training.checkpoints import fault_of
from hf_depthroute.training.losses import LOSSES, mean_probability, routing_losses
from hf_depthroute.training.trainer import RoutingArguments

LAYERS = (1, 2, 3)
TERMS = {"mlp": ("lm", "budget", "alive"), "jepa": ("lm", "jepa", "budget", "alive")}
DIAGNOSTICS = {
    "mlp": ("full_ratio", "gate_prob", "score_var"),
    "jepa": ("full_ratio", "gate_prob", "score_var", "q_distance", "q_cosine"),
}
# Weights that differ from each other and from the defaults, with an alive term that is never zero.
WEIGHTS = {
    "lm_weight": 0.7,
    "jepa_weight": 0.3,
    "budget_weight": 2.0,
    "alive_weight": 0.4,
    "alive_min": 0.99,
}


def assert_same_traces(one: RouteTrace, two: RouteTrace) -> None:
    assert list(one) == list(two) == list(LAYERS)
    for index in one:
        a, b = one[index], two[index]
        assert (
            torch.equal(a.mask, b.mask)
            and torch.equal(a.scores, b.scores)
            and torch.equal(a.probs, b.probs)
        )
        assert a.extras.keys() == b.extras.keys()
        assert all(torch.equal(a.extras[name], b.extras[name]) for name in a.extras)


def enable_checkpointing(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    # The first routed layer's input has no graph of its own: everything before it is frozen.
    if reentrant:
        model.enable_input_require_grads()


# --- what is minimised ----------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES)
def test_the_logged_loss_is_the_weighted_sum_of_the_logged_terms(gate: str, tmp_path: Path) -> None:
    trainer, _ = make_trainer(
        build_routed("llama", gate), rows(8, padding=(0, 3)), tmp_path, **WEIGHTS
    )
    trainer.train()
    logs = step_logs(trainer)
    assert len(logs) == 4
    for entry in logs:
        expected = sum(WEIGHTS[f"{name}_weight"] * entry[f"loss_{name}"] for name in TERMS[gate])
        assert entry["loss"] == pytest.approx(expected, rel=1e-5)
        assert all(entry[f"loss_{name}"] > 0 for name in TERMS[gate])


def test_the_logged_loss_is_the_weighted_sum_over_accumulated_batches_and_steps(
    tmp_path: Path,
) -> None:
    trainer, _ = make_trainer(
        build_routed("llama", "jepa"),
        rows(24, padding=(0, 3, 5)),
        tmp_path,
        gradient_accumulation_steps=3,
        logging_steps=2,
        **WEIGHTS,
    )
    trainer.train()
    logs = step_logs(trainer)
    assert len(logs) == 2
    for entry in logs:
        expected = sum(WEIGHTS[f"{name}_weight"] * entry[f"loss_{name}"] for name in TERMS["jepa"])
        assert entry["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gate", GATES)
def test_a_trainer_step_has_the_gradients_of_a_loop_written_by_hand(
    gate: str, tmp_path: Path
) -> None:
    examples = rows(2, padding=(0, 3))
    model = build_routed("llama", gate)
    trainer, kept = make_trainer(model, examples, tmp_path)
    trainer.train()
    by_hand = build_routed("llama", gate).train()
    terms, _ = backward(by_hand, stacked(examples))
    assert_same_tensors(kept.steps[0], gradients(by_hand), tolerance=1e-6)
    assert step_logs(trainer)[0]["loss"] == pytest.approx(
        sum(t.item() for t in terms.values()), rel=1e-6
    )


def test_the_folder_may_be_the_first_argument_as_in_transformers(tmp_path: Path) -> None:
    arguments = DepthRouteTrainingArguments(str(tmp_path), distill_weight=1.0)
    assert (arguments.output_dir, arguments.distill_weight) == (str(tmp_path), 1.0)


def test_default_weights_are_those_of_the_table() -> None:
    assert RoutingArguments().weights() == {name: term.weight for name, term in LOSSES.items()}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "kind"), COVERING)
def test_padding_does_not_change_the_losses(family: str, kind: str, side: str) -> None:
    plain = stacked(rows(3, length=8))
    plain["labels"][:, 0] = -100  # behind left padding, the last pad position would predict it
    amount = 5
    values = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    padded = {}
    for name, value in plain.items():
        pad = torch.full((3, amount), values[name])
        padded[name] = torch.cat([pad, value] if side == "left" else [value, pad], dim=1)
    if side == "left" and family == "gpt2":  # learned positions: the tokens must keep theirs
        padded["position_ids"] = (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    results = []
    for batch in (plain, padded):
        model = build_routed(family, kind).train()
        terms, trace = backward(model, batch, alive_min=0.99)
        real = batch["attention_mask"].bool()
        masks = torch.stack([record.mask[real] for record in trace.values()])
        results.append((terms, masks, gradients(model)))
    (terms, masks, grads), (padded_terms, padded_masks, padded_grads) = results
    assert torch.equal(masks, padded_masks)
    assert terms.keys() == padded_terms.keys() == set(TERMS["jepa" if kind == "jepa" else "mlp"])
    for name, value in terms.items():
        assert value.item() == pytest.approx(padded_terms[name].item(), abs=1e-5), name
    assert_same_tensors(grads, padded_grads, tolerance=1e-4)


# --- invariant 11: gradient checkpointing ---------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("family", "kind"), COVERING)
def test_checkpointing_changes_no_loss_no_gradient_and_no_trace(
    family: str, kind: str, reentrant: bool
) -> None:
    batch = stacked(rows(3, length=8, padding=(0, 3)))
    plain = build_routed(family, kind).train()
    plain_terms, plain_trace = backward(plain, batch, alive_min=0.99)

    model = build_routed(family, kind).train()
    enable_checkpointing(model, reentrant)
    calls = dict.fromkeys((0, *LAYERS), 0)
    layers = (
        model.get_base_model().transformer.h
        if family == "gpt2"
        else model.get_base_model().model.layers
    )
    for index in calls:
        attention = layers[index].attn if family == "gpt2" else layers[index].self_attn
        attention.register_forward_pre_hook(lambda *_, i=index: calls.update({i: calls[i] + 1}))
    terms, trace = backward(model, batch, alive_min=0.99)

    # Every routed layer was recomputed; layer 0 is frozen, and needs it only where its input was
    # made to need a graph.
    assert all(calls[index] == 2 for index in LAYERS)
    assert_same_traces(plain_trace, trace)
    assert set(terms) == set(TERMS["jepa" if kind == "jepa" else "mlp"])
    for name, value in terms.items():
        assert torch.equal(value, plain_terms[name]), name
    assert_same_tensors(gradients(plain), gradients(model))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(gradients(model))


@pytest.mark.parametrize("selection", ["topk", "threshold", "soft"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_checkpointing_trains_to_the_same_parameters(
    gate: str, reentrant: bool, selection: str, tmp_path: Path
) -> None:
    """Also with the threshold rule, whose tables move between a forward pass and
    its recomputation."""
    results = []
    for checkpointing in (False, True):
        model = build_routed("llama", gate, selection=selection)
        if checkpointing:
            enable_checkpointing(model, reentrant)
        trainer, kept = make_trainer(
            model,
            rows(12, padding=(0, 3)),
            tmp_path,
            gradient_accumulation_steps=2,
            temperature_schedule_steps=2,
        )
        trainer.train()
        results.append((step_logs(trainer), kept.steps, adapter_state(model)))
    (plain_logs, plain_steps, plain), (logs, steps, checkpointed) = results
    for one, two in zip(plain_steps, steps, strict=True):
        assert_same_tensors(one, two)
    assert_same_tensors(plain, checkpointed)
    for one, two in zip(plain_logs, logs, strict=True):
        assert all(
            one[name] == two[name]
            for name in one
            if name.startswith(("loss", "full_ratio", "gate_prob"))
        )


def test_a_backward_pass_after_the_recording_block_recomputes_the_same_forward() -> None:
    batch = stacked(rows(2))
    plain = build_routed("llama", "jepa").train()
    backward(plain, batch)
    model = build_routed("llama", "jepa").train()
    enable_checkpointing(model, reentrant=False)
    with record_routes(model) as trace:
        lm = model(**batch).loss
    loss = sum(routing_losses(trace, lm).values())
    for routing in routings_of(model):  # what a schedule does between the passes
        routing.state.scheduled_budget, routing.state.scheduled_temperature = 1.0, 9.0
    loss.backward()
    assert_same_tensors(gradients(plain), gradients(model))


# --- invariant 12: auxiliary losses count once ----------------------------------------------------


@pytest.mark.parametrize("gate", GATES)
def test_four_equal_accumulated_batches_count_as_one(gate: str, tmp_path: Path) -> None:
    batch = rows(2, padding=(0, 3))
    one, kept_one = make_trainer(build_routed("llama", gate), batch, tmp_path, **WEIGHTS)
    four, kept_four = make_trainer(
        build_routed("llama", gate), batch * 4, tmp_path, gradient_accumulation_steps=4, **WEIGHTS
    )
    one.train()
    four.train()
    assert len(kept_one.steps) == len(kept_four.steps) == 1
    assert_same_tensors(kept_one.steps[0], kept_four.steps[0], tolerance=1e-6)
    [log_one], [log_four] = step_logs(one), step_logs(four)
    for name in log_one:
        if name not in ("epoch", "step"):
            assert log_one[name] == pytest.approx(log_four[name], abs=1e-6), name


def test_accumulated_batches_of_equal_size_add_up_to_the_whole_batch(tmp_path: Path) -> None:
    """Exact for the terms that are linear in the tokens; the budget term is per batch,
    and left out here."""
    examples = rows(8)
    fields = {"alive_min": 0.99, "budget_weight": 0.0}
    model, split = build_routed("llama", "jepa"), build_routed("llama", "jepa")
    whole, kept_whole = make_trainer(
        model, examples, tmp_path, per_device_train_batch_size=8, **fields
    )
    parts, kept_parts = make_trainer(
        split, examples, tmp_path, gradient_accumulation_steps=4, **fields
    )
    whole.train()
    parts.train()
    assert_same_tensors(kept_whole.steps[0], kept_parts.steps[0], tolerance=1e-6)
    [log_whole], [log_parts] = step_logs(whole), step_logs(parts)
    for name in (
        "loss",
        "loss_lm",
        "loss_jepa",
        "loss_alive",
        "full_ratio/layer_1",
        "gate_prob/layer_3",
    ):
        assert log_whole[name] == pytest.approx(log_parts[name], abs=2e-6), name
    assert log_whole["loss_alive"] > 0


def test_the_budget_term_of_accumulated_batches_is_the_mean_of_theirs(tmp_path: Path) -> None:
    examples = rows(8)
    model = build_routed("llama").train()
    values = []
    for i in range(0, 8, 2):
        with record_routes(model) as trace:
            model(**stacked(examples[i : i + 2]))
        values.append((mean_probability(trace) - 0.5).square().mean().item())
    trainer, _ = make_trainer(
        build_routed("llama"), examples, tmp_path, gradient_accumulation_steps=4
    )
    trainer.train()
    assert step_logs(trainer)[0]["loss_budget"] == pytest.approx(sum(values) / 4, abs=1e-6)


def test_a_trainer_that_scales_its_own_loss_has_routing_terms_that_count_once(
    tmp_path: Path,
) -> None:
    class MeanPerBatch(DepthRouteTrainer):
        """A per-batch mean that the Trainer divides by the number of accumulated batches."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    batch = rows(2) * 4
    results = []
    for cls in (DepthRouteTrainer, MeanPerBatch):
        trainer, kept = make_trainer(
            build_routed("llama"), batch, tmp_path, cls, gradient_accumulation_steps=4, **WEIGHTS
        )
        trainer.train()
        results.append((kept.steps[0], step_logs(trainer)[0]))
    (one, one_log), (two, two_log) = results
    assert_same_tensors(one, two, tolerance=1e-6)
    assert one_log["loss"] == pytest.approx(two_log["loss"], abs=1e-5)
    assert one_log["loss_lm"] == pytest.approx(two_log["loss_lm"], abs=1e-5)


@pytest.mark.parametrize("knows_trainer", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_the_callback_on_a_plain_trainer_equals_the_trainer(
    gate: str, knows_trainer: bool, tmp_path: Path
) -> None:
    examples = rows(12, padding=(0, 3, 5))
    fields = {"gradient_accumulation_steps": 2, "budget_schedule_steps": 2}
    model, other = build_routed("llama", gate), build_routed("llama", gate)
    ours, kept_ours = make_trainer(model, examples, tmp_path, **fields)
    ours.train()
    plain, kept_plain = make_trainer(other, examples, tmp_path, Trainer, **fields)
    plain.add_callback(
        DepthRouteCallback(
            plain if knows_trainer else None, RoutingArguments(budget_schedule_steps=2)
        )
    )
    plain.train()
    assert len(kept_ours.steps) == 3
    for one, two in zip(kept_ours.steps, kept_plain.steps, strict=True):
        assert_same_tensors(one, two, tolerance=1e-6)
    assert_same_tensors(adapter_state(model), adapter_state(other), tolerance=1e-5)
    for one, two in zip(step_logs(ours), step_logs(plain), strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert one[name] == pytest.approx(two[name], abs=1e-5), name


def test_the_last_step_of_an_epoch_counts_once_although_it_accumulates_less(tmp_path: Path) -> None:
    """Ten rows in batches of two, three batches a step: the second step has two."""
    examples = rows(2) * 5
    steps = []
    for cls in (DepthRouteTrainer, Trainer):
        trainer, kept = make_trainer(
            build_routed("llama"),
            examples,
            tmp_path,
            cls,
            gradient_accumulation_steps=3,
            learning_rate=0.0,
        )
        if cls is Trainer:
            trainer.add_callback(DepthRouteCallback(trainer))
        trainer.train()
        steps.append(kept.steps)
    for kept_steps in steps:
        assert len(kept_steps) == 2
        assert_same_tensors(kept_steps[0], kept_steps[1], tolerance=1e-6)
    assert_same_tensors(steps[0][1], steps[1][1], tolerance=1e-6)


def test_the_callback_leaves_nothing_behind(tmp_path: Path) -> None:
    model, batch = build_routed("llama"), stacked(rows(2))
    trainer, _ = make_trainer(model, rows(2), tmp_path, Trainer)
    trainer.add_callback(DepthRouteCallback(trainer))
    trainer.train()
    model.train()
    loss = model(**batch).loss
    model.eval()
    for routing in routings_of(model):
        state = routing.state
        assert (state.settings.recorders, state.scheduled_budget, state.scheduled_temperature) == (
            (),
            None,
            None,
        )
    fresh = build_routed("llama").train()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(loss, fresh(**batch).loss)


def test_training_again_after_an_exception_counts_the_losses_once(tmp_path: Path) -> None:
    class Fail(TrainerCallback):
        armed = True

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if self.armed:
                raise RuntimeError("interrupted")

    model = build_routed("llama")
    trainer, kept = make_trainer(model, rows(2), tmp_path, Trainer)
    trainer.add_callback(DepthRouteCallback(trainer))
    trainer.add_callback(Fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        trainer.train()
    Fail.armed = False
    model.zero_grad()
    trainer.train()
    assert_same_tensors(kept.steps[0], kept.steps[1])
    assert all(not routing.state.settings.recorders for routing in routings_of(model))


# --- invariant 13: what trains --------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), COVERING)
def test_every_trainable_parameter_gets_a_gradient_and_no_base_parameter_does(
    family: str, kind: str
) -> None:
    model = build_routed(family, kind).train()
    backward(model, stacked(rows(4, padding=(0, 3))))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    for name, parameter in model.named_parameters():
        adapter = ".routing.depth_route_gate." in name or ".routing.depth_route_branch." in name
        assert parameter.requires_grad is adapter, name
        assert (parameter.grad is not None) is adapter, name
    for name, parameter in trainable.items():
        assert parameter.grad.isfinite().all() and (parameter.grad != 0).any(), name


@pytest.mark.parametrize(
    "fields", [{"branch": "none"}, {"gate_input": "normed"}, {"selection": "soft"}]
)
@pytest.mark.parametrize("gate", GATES)
def test_every_variant_trains_all_of_its_parameters(gate: str, fields: dict[str, Any]) -> None:
    model = build_routed("llama", gate, **fields).train()
    backward(model, stacked(rows(4, padding=(0, 3))))
    for name, parameter in model.named_parameters():
        assert (
            parameter.grad is not None and bool((parameter.grad != 0).any())
        ) is parameter.requires_grad, name


@pytest.mark.parametrize("routed", ["everything", "nothing"])
@pytest.mark.parametrize("gate", GATES)
def test_parameters_get_a_gradient_tensor_even_when_a_path_has_no_token(
    gate: str, routed: str
) -> None:
    """What DistributedDataParallel needs: the set of parameters in the graph never depends
    on the decisions."""
    threshold = -1e4 if routed == "everything" else 1e4
    model = build_routed("llama", gate, selection="threshold", threshold=threshold).train()
    _, trace = backward(model, stacked(rows(2)))
    assert set(trace.full_ratio().values()) == {1.0 if routed == "everything" else 0.0}
    assert set(gradients(model)) == {
        name for name, p in model.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize(("family", "kind"), COVERING)
def test_a_fresh_adapter_trains_and_the_base_stays_as_it_was(
    family: str, kind: str, tmp_path: Path
) -> None:
    model = get_depth_routed_model(
        build_base(family), DepthRouteConfig(layers=list(LAYERS), **KINDS[kind])
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer, _ = make_trainer(
        model, rows(8, padding=(0, 3)), tmp_path, num_train_epochs=2, warmup_steps=0
    )
    trainer.train()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, value in model.state_dict().items():
        moves = name in trainable or ".depth_route_quantiles." in name
        assert torch.equal(value, before[name]) is not moves, name


def test_the_objective_falls_while_training(tmp_path: Path) -> None:
    trainer, _ = make_trainer(
        build_routed("llama", "jepa"), rows(2) * 30, tmp_path, learning_rate=3e-3
    )
    trainer.train()
    logs = step_logs(trainer)
    assert logs[-1]["loss"] < 0.95 * logs[0]["loss"]
    assert logs[-1]["loss_jepa"] < logs[0]["loss_jepa"]


# --- schedules ------------------------------------------------------------------------------------


class KeepPlans(TrainerCallback):
    """Budget and temperature in force during every step, in training and in inference."""

    def __init__(self) -> None:
        self.training: list[tuple[float, float]] = []
        self.inference: list[tuple[float, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for mode, kept in ((True, self.training), (False, self.inference)):
            plans = {
                (p.budget, p.temperature)
                for p in (h.plan(mode) for h in routings_of(kwargs["model"]))
            }
            assert len(plans) == 1
            kept.append(plans.pop())


def test_budget_and_temperature_follow_their_schedules(tmp_path: Path) -> None:
    model, plans = build_routed("llama", budget=0.5), KeepPlans()
    trainer, _ = make_trainer(
        model,
        rows(12, length=8),
        tmp_path,
        budget_start=1.0,
        budget_schedule_steps=4,
        temperature_start=8.0,
        temperature_schedule_steps=3,
    )
    trainer.add_callback(plans)
    trainer.train()
    assert plans.training == [
        (1.0, 8.0),
        (0.875, 6.0),
        (0.75, 4.0),
        (0.625, 2.0),
        (0.5, 2.0),
        (0.5, 2.0),
    ]
    assert plans.inference == [(0.5, 2.0)] * 6
    ratios = [entry["full_ratio/layer_2"] for entry in step_logs(trainer)]
    assert ratios == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert model.peft_config["default"].budget == 0.5
    assert all(routing.plan(True).budget == 0.5 for routing in routings_of(model))


def test_the_scheduled_budget_is_the_target_of_the_budget_loss(tmp_path: Path) -> None:
    model, examples = build_routed("llama"), rows(2)
    trainer, _ = make_trainer(model, examples, tmp_path, budget_start=0.9, budget_schedule_steps=10)
    trainer.train()
    fresh = build_routed("llama").train()
    for routing in routings_of(fresh):
        routing.state.scheduled_budget = 0.9
    with record_routes(fresh) as trace:
        fresh(**stacked(examples))
    expected = (mean_probability(trace) - 0.9).square().mean().item()
    assert step_logs(trainer)[0]["loss_budget"] == pytest.approx(expected, abs=1e-6)


def test_without_a_schedule_the_adapters_budget_is_in_force(tmp_path: Path) -> None:
    model, plans = build_routed("llama", budget=0.25, gate_temperature=3.0), KeepPlans()
    trainer, _ = make_trainer(model, rows(4), tmp_path)
    trainer.add_callback(plans)
    trainer.train()
    assert plans.training == [(0.25, 3.0)] * 2


# --- logs -----------------------------------------------------------------------------------------


def expected_metrics(gate: str) -> set[str]:
    per_layer = {f"{name}/layer_{index}" for name in DIAGNOSTICS[gate] for index in LAYERS}
    return per_layer | {f"loss_{name}" for name in TERMS[gate]}


@pytest.mark.parametrize("gate", GATES)
def test_log_entries_hold_every_term_and_the_diagnostics_of_every_layer(
    gate: str, tmp_path: Path
) -> None:
    trainer, _ = make_trainer(build_routed("llama", gate), rows(4), tmp_path)
    trainer.train()
    for entry in step_logs(trainer):
        assert expected_metrics(gate) <= set(entry)
        assert all(
            isinstance(entry[name], float) and math.isfinite(entry[name])
            for name in expected_metrics(gate)
        )


@pytest.mark.parametrize("kind", ["trainer", "callback"])
def test_tensorboard_gets_every_term_and_diagnostic(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fields = {"report_to": "tensorboard", "logging_dir": str(tmp_path / "logs")}
    known = DepthRouteTrainingArguments.__dataclass_fields__
    fields = {name: value for name, value in fields.items() if name in known}
    cls = DepthRouteTrainer if kind == "trainer" else Trainer
    trainer, _ = make_trainer(build_routed("llama", "jepa"), rows(4), tmp_path, cls, **fields)
    if kind == "callback":
        trainer.add_callback(DepthRouteCallback(trainer))
    trainer.train()
    [event_file] = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(event_file)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in expected_metrics("jepa") | {"loss"}} <= tags
    logged = [event.value for event in events.Scalars("train/loss_budget")]
    assert logged == pytest.approx([entry["loss_budget"] for entry in step_logs(trainer)], rel=1e-6)


def test_terms_with_weight_zero_are_not_logged(tmp_path: Path) -> None:
    trainer, _ = make_trainer(
        build_routed("llama", "jepa"),
        rows(2),
        tmp_path,
        jepa_weight=0.0,
        budget_weight=0.0,
        alive_weight=0.0,
    )
    trainer.train()
    [entry] = step_logs(trainer)
    assert [name for name in entry if name.startswith("loss_")] == ["loss_lm"]
    assert entry["loss"] == pytest.approx(entry["loss_lm"], rel=1e-6)


def test_a_run_without_the_language_model_loss_trains_the_gate(tmp_path: Path) -> None:
    trainer, kept = make_trainer(build_routed("llama"), rows(2), tmp_path, lm_weight=0.0)
    trainer.train()
    [entry] = step_logs(trainer)
    assert entry["loss"] == pytest.approx(
        entry["loss_budget"] + 0.5 * entry["loss_alive"], rel=1e-6
    )
    assert any((value != 0).any() for name, value in kept.steps[0].items() if "gate" in name)


# --- evaluation, saving, resuming -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["trainer", "callback"])
@pytest.mark.parametrize("gate", GATES)
def test_the_evaluation_loss_is_the_lm_loss_alone_under_the_threshold_rule(
    gate: str, kind: str, tmp_path: Path
) -> None:
    model, held_out = build_routed("llama", gate), rows(4, padding=(0, 3), seed=5)
    cls = DepthRouteTrainer if kind == "trainer" else Trainer
    trainer, _ = make_trainer(
        model, rows(4), tmp_path, cls, eval_dataset=held_out, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4, budget_schedule_steps=4,
    )  # fmt: skip
    if kind == "callback":
        trainer.add_callback(DepthRouteCallback(trainer, RoutingArguments(budget_schedule_steps=4)))
    trainer.train()
    metrics = trainer.evaluate()
    model.eval()
    with torch.no_grad(), record_routes(model) as trace:
        expected = model(**stacked(held_out)).loss.item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
    during = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(during) == 3 and during[-1] == during[-2] == metrics["eval_loss"]
    if kind == "trainer":
        shares = trace.full_ratio().values()
        assert metrics["eval_full_ratio"] == pytest.approx(sum(shares) / len(shares))
        assert trainer.state.log_history[-1]["eval_full_ratio"] == metrics["eval_full_ratio"]
    for routing in routings_of(model):
        record = trace[routing.layer_index]
        threshold = routing.depth_route_quantiles["default"](0.5)
        assert torch.equal(record.mask, (record.scores >= threshold) & record.real)


def test_training_leaves_tracked_thresholds_that_meet_the_budget(tmp_path: Path) -> None:
    model = get_depth_routed_model(
        build_base("llama"), DepthRouteConfig(layers=list(LAYERS), budget=0.25)
    )
    assert not is_calibrated(model)
    examples = rows(2, length=16) * 20
    trainer, _ = make_trainer(
        model, examples, tmp_path, learning_rate=1e-4, per_device_train_batch_size=2
    )
    trainer.train()
    assert is_calibrated(model)
    model.eval()
    with torch.no_grad(), record_routes(model) as trace:
        model(**stacked(examples[:2]))
    assert trace.full_ratio()[1] == pytest.approx(0.25, abs=0.07)


@pytest.mark.parametrize("gate", GATES)
def test_save_model_writes_an_adapter_that_loads_to_the_same_model(
    gate: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    model = build_routed("llama", gate)
    trainer, _ = make_trainer(model, rows(4), tmp_path / "run")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path / "saved").eval()
    assert_same_tensors(adapter_state(model), adapter_state(loaded))
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(tokens(2, 8)).logits, loaded(tokens(2, 8)).logits)


RESUMED: dict[str, dict[str, Any]] = {
    "mlp": {},
    "jepa": {},
    "controller": {"selection": "controller", "target": "attention"},
    "global controller": {"selection": "controller", "budget_scope": "global"},
    "gumbel": {"selection": "gumbel", "target": "block"},
    "sequence": {"granularity": "sequence", "target": "attention"},
}


@pytest.mark.parametrize("kind", ["trainer", "callback"])
@pytest.mark.parametrize("method", RESUMED)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    method: str, kind: str, tmp_path: Path
) -> None:
    """Parameters, thresholds, optimizer, schedules and the logged values,
    with data in random order."""
    gate = "jepa" if method == "jepa" else "mlp"
    cls = DepthRouteTrainer if kind == "trainer" else Trainer
    fields = {
        "save_strategy": "steps",
        "save_steps": 3,
        "max_steps": 6,
        "budget_schedule_steps": 5,
        "temperature_start": 6.0,
        "temperature_schedule_steps": 5,
        "train_sampling_strategy": "random",
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
    }
    schedule = RoutingArguments(
        budget_schedule_steps=5, temperature_start=6.0, temperature_schedule_steps=5
    )

    def run(folder: Path, resume: str | None) -> tuple[Any, Any]:
        model = build_routed("llama", gate, seed=0 if resume is None else 7, **RESUMED[method])
        trainer, _ = make_trainer(model, rows(16, padding=(0, 3)), folder, cls, **fields)
        if kind == "callback":
            trainer.add_callback(DepthRouteCallback(trainer, schedule))
        trainer.train(resume_from_checkpoint=resume)
        return model, trainer

    model, trainer = run(tmp_path, None)
    whole = tmp_path / "checkpoint-6"
    resumed, resumed_trainer = run(tmp_path / "resumed", str(tmp_path / "checkpoint-3"))
    assert_same_tensors(adapter_state(model), adapter_state(resumed))
    optimizers = [
        torch.load(folder / "optimizer.pt", weights_only=True)
        for folder in (whole, tmp_path / "resumed" / "checkpoint-6")
    ]
    for one, two in zip(
        optimizers[0]["state"].values(), optimizers[1]["state"].values(), strict=True
    ):
        assert_same_tensors(one, two)
    logs, resumed_logs = step_logs(trainer), step_logs(resumed_trainer)
    for one, two in zip(logs[3:], resumed_logs[3:], strict=True):
        assert all(one[name] == two[name] for name in expected_metrics(gate))
    saved = json.loads((whole / "adapter_config.json").read_text())
    assert saved["budget"] == 0.5


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), COVERING)
def test_bfloat16_autocast_trains_with_finite_losses_and_float32_scores(
    family: str, kind: str, tmp_path: Path
) -> None:
    model = build_routed(family, kind)
    trainer, kept = make_trainer(model, rows(4, padding=(0, 3)), tmp_path, bf16=True)

    with record_routes(model) as trace:
        trainer.train()
    assert all(record.scores.dtype == torch.float32 for record in trace.values())
    for entry in step_logs(trainer):
        assert all(
            math.isfinite(entry[name])
            for name in (*expected_metrics("jepa" if kind == "jepa" else "mlp"), "loss")
        )
    for step in kept.steps:
        assert all(
            value.isfinite().all() and value.dtype == torch.float32 for value in step.values()
        )


@pytest.mark.parametrize("gate", GATES)
def test_a_bfloat16_base_trains_a_float32_adapter(gate: str, tmp_path: Path) -> None:
    base = build_base("llama", dtype=torch.bfloat16)
    model = get_depth_routed_model(base, DepthRouteConfig(layers=list(LAYERS), gate=gate))
    trainer, kept = make_trainer(model, rows(4, padding=(0, 3)), tmp_path)
    with record_routes(model) as trace:
        trainer.train()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".routing." in name else torch.bfloat16), name
    assert all(record.scores.dtype == torch.float32 for record in trace.values())
    assert all(value.isfinite().all() for step in kept.steps for value in step.values())


# --- arguments and errors -------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [DepthRouteTrainer, Trainer])
def test_a_model_without_an_active_adapter_is_refused_before_training(
    cls: type[Trainer], tmp_path: Path
) -> None:
    def start(model: Any) -> None:
        trainer, _ = make_trainer(model, rows(2), tmp_path, cls)
        if cls is Trainer:
            trainer.add_callback(DepthRouteCallback(trainer))
            trainer.train()

    with pytest.raises(
        ValueError,
        match="LlamaForCausalLM has no routed layer; wrap it with get_depth_routed_model",
    ):
        start(build_base("llama"))
    model = build_routed("llama")
    with (
        model.disable_adapter(),
        pytest.raises(ValueError, match="no depth-routed adapter is active"),
    ):
        start(model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget_start", 0.0),
        ("budget_start", 1.5),
        ("budget_start", math.nan),
        ("jepa_weight", -1.0),
        ("budget_weight", math.inf),
        ("alive_weight", math.nan),
        ("alive_min", -0.1),
        ("temperature_start", 0.0),
        ("temperature_start", math.inf),
        ("budget_schedule_steps", -1),
        ("temperature_schedule_steps", -5),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(
    field: str, value: float, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=f"{'budget' if field == 'budget_start' else field}=.* must be"
    ):
        training_arguments(tmp_path, **{field: value})
    with pytest.raises(ConfigError):
        DepthRouteCallback(arguments=RoutingArguments(**{field: value}))


def test_the_trainers_defaults_are_the_papers(tmp_path: Path) -> None:
    arguments = DepthRouteTrainingArguments(output_dir=str(tmp_path))
    assert (
        arguments.learning_rate == 2e-4
        and arguments.weight_decay == 0.01
        and arguments.max_grad_norm == 1.0
    )
    assert arguments.lr_scheduler_type == "cosine_with_min_lr"
    assert arguments.lr_scheduler_kwargs == {"min_lr_rate": 0.01}


def test_another_learning_rate_schedule_does_not_inherit_the_defaults_arguments(
    tmp_path: Path,
) -> None:
    trainer, _ = make_trainer(build_routed("llama"), rows(4), tmp_path, lr_scheduler_type="linear")
    trainer.train()
    assert step_logs(trainer)[-1]["learning_rate"] == pytest.approx(0.5e-2)


def test_routers_beside_lora_resume(tmp_path: Path) -> None:
    """A checkpoint that holds the adapter of another method too is whole."""

    def run(folder: Path, resume: str | None = None) -> Any:
        torch.manual_seed(0)
        lora = get_peft_model(
            build_base("llama"), LoraConfig(target_modules=["q_proj"]), adapter_name="tuned"
        )
        model = get_depth_routed_model(
            lora.get_base_model(), DepthRouteConfig(layers=[1, 2]), adapter_name="router"
        )
        trainer, _ = make_trainer(model, rows(8), folder, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=resume)
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    whole = run(tmp_path / "run")
    assert any("lora" in name for name in whole)
    assert fault_of(tmp_path / "run" / "checkpoint-2") is None
    assert_same_tensors(whole, run(tmp_path / "again", str(tmp_path / "run" / "checkpoint-2")))


def test_every_training_of_model_init_trains_a_model_of_its_own(tmp_path: Path) -> None:
    trainer = DepthRouteTrainer(
        model_init=lambda: build_routed("llama"),
        args=training_arguments(tmp_path),
        train_dataset=rows(4),
    )
    states = []
    for _ in range(2):
        trainer.train()
        states.append(adapter_state(trainer.model))
        assert trainer.routing_objective.model is trainer.model
        assert "loss_budget" in step_logs(trainer)[-1]
    assert_same_tensors(*states)


def test_gates_that_one_training_leaves_alone_train_in_the_next(tmp_path: Path) -> None:
    model = build_routed("llama")
    fixed, _ = make_trainer(model, rows(4), tmp_path, train_gates=False)
    before = adapter_state(model)
    fixed.train()
    fixed.train()
    moved = {
        name for name, value in adapter_state(model).items() if not torch.equal(value, before[name])
    }
    assert any("branch" in name for name in moved) and not any("gate" in name for name in moved)
    trainer, _ = make_trainer(model, rows(4), tmp_path, Trainer)
    trainer.train()
    assert any(
        "gate" in name and not torch.equal(value, before[name])
        for name, value in adapter_state(model).items()
    )


def test_a_trainer_that_has_not_begun_leaves_the_gates_to_others(tmp_path: Path) -> None:
    model = build_routed("llama")
    fixed, _ = make_trainer(model, rows(4), tmp_path, train_gates=False)
    other, _ = make_trainer(model, rows(4), tmp_path)
    for trainer, moves in ((other, True), (fixed, False)):
        before = adapter_state(model)
        trainer.train()
        now = adapter_state(model)
        moved = {name for name, value in now.items() if not torch.equal(value, before[name])}
        assert any("gate" in name for name in moved) is moves
        assert any("branch" in name for name in moved)

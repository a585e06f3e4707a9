"""Losses that use labels, targets or a teacher against their formulas,
and when a run refreshes its labels."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_traces import REAL, TAU, average, made_trace, real_entries
from models import build_routed
from training import make_trainer, rows, stacked, step_logs
from transformers import Trainer

from hf_depthroute import DepthRouteCallback
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing.trace import RouteTrace
from hf_depthroute.training import objective as objective_module
from hf_depthroute.training.losses import derangement, routing_losses, shuffled
from hf_depthroute.training.objective import RoutingArguments, RoutingObjective
from hf_depthroute.training.oracle import LabelScale, UtilityLabels

VALID = REAL & torch.tensor([[True, True, True, False], [True, True, True, True]])


def made_labels(seed: int = 1) -> dict[int, UtilityLabels]:
    generator = torch.Generator().manual_seed(seed)
    # Unlabelled entries hold values that would show in any mean.
    return {
        i: UtilityLabels(
            torch.where(VALID, 2 * torch.randn(2, 4, generator=generator), 70.0), VALID
        )
        for i in (1, 3)
    }


def term(name: str, trace: RouteTrace, **inputs: Any) -> float:
    return routing_losses(trace, weights={name: 1.0}, **inputs)[name].item()


def labelled(
    trace: RouteTrace, labels: dict[int, UtilityLabels], index: int
) -> list[tuple[int, float, float]]:
    """`(sequence, u, u*)` of every labelled token of a layer."""
    return [
        (b, trace[index].scores[b, t].item(), labels[index].utility[b, t].item())
        for b in range(2)
        for t in range(4)
        if VALID[b, t]
    ]


def test_util_loss_is_the_huber_distance_from_the_labels() -> None:
    trace, labels = made_trace(), made_labels()

    def huber(difference: float) -> float:
        return 0.5 * difference**2 if abs(difference) <= 1 else abs(difference) - 0.5

    expected = average(
        [average([huber(u - v) for _, u, v in labelled(trace, labels, i)]) for i in (1, 3)]
    )
    assert term("util", trace, utility=labels) == pytest.approx(expected, abs=1e-6)


def test_rank_loss_is_the_mean_over_the_pairs_of_a_sequence() -> None:
    trace, labels = made_trace(), made_labels()

    def pairs(index: int) -> list[float]:
        tokens = labelled(trace, labels, index)
        return [
            math.log1p(math.exp(-math.copysign(1, v_i - v_j) * (u_i - u_j)))
            for (row_i, u_i, v_i), (row_j, u_j, v_j) in combinations(tokens, 2)
            if row_i == row_j
        ]

    assert len(pairs(1)) == 4  # three labelled tokens in the first sequence, two in the second
    expected = average([average(pairs(i)) for i in (1, 3)])
    assert term("rank", trace, utility=labels) == pytest.approx(expected, abs=1e-6)


def test_rank_loss_draws_positions_of_long_sequences() -> None:
    trace = made_trace(token_mask=None)
    scores = torch.randn(2, 600)
    for index in (1, 3):
        trace[index].scores = scores
    utility = {
        i: UtilityLabels(scores.clone(), torch.ones(2, 600, dtype=torch.bool)) for i in (1, 3)
    }
    every_pair = torch.nn.functional.softplus(-(scores[..., None] - scores[:, None]).abs())
    off_diagonal = every_pair[~torch.eye(600, dtype=torch.bool).expand_as(every_pair)].mean().item()
    assert term("rank", trace, utility=utility) == pytest.approx(off_diagonal, abs=0.03)


def test_equal_labels_push_no_score() -> None:
    trace = made_trace()
    labels = {i: UtilityLabels(torch.zeros(2, 4), VALID) for i in (1, 3)}
    routing_losses(trace, weights={"rank": 1.0}, utility=labels)["rank"].backward()
    assert all((trace[i].scores.grad == 0).all() for i in (1, 3))


def test_cgs_loss_is_the_cross_entropy_with_the_tempered_counterfactual() -> None:
    trace, labels = made_trace(), {3: made_labels()[3]}
    terms = []
    for _, u, difference in labelled(trace, labels, 3):
        p, y = 1 / (1 + math.exp(-u / TAU)), 1 / (1 + math.exp(-difference / 0.4))
        terms.append(-y * math.log(p) - (1 - y) * math.log(1 - p))
    inputs = {"counterfactual": labels, "counterfactual_temperature": 0.4}
    assert term("cgs", trace, **inputs) == pytest.approx(average(terms), abs=1e-5)


def test_z_loss_is_the_squared_logsumexp_of_the_two_way_choice() -> None:
    trace = made_trace()
    expected = average([
        average([math.log(math.exp(u / TAU / 2) + math.exp(-u / TAU / 2)) ** 2 for u in real_entries(trace[i].scores)])
        for i in (1, 3)
    ])  # fmt: skip
    assert term("z", trace) == pytest.approx(expected, abs=1e-5)


@given(
    real=st.lists(st.booleans(), min_size=2, max_size=40).filter(lambda real: sum(real) >= 2),
    seed=st.integers(0, 99),
)
def test_a_derangement_is_a_permutation_without_fixed_points(real: list[bool], seed: int) -> None:
    mask = torch.tensor(real)[None]
    torch.manual_seed(seed)
    source = derangement(mask)
    count = sum(real)
    assert sorted(source.tolist()) == list(range(count))
    assert (source != torch.arange(count)).all()
    values = torch.arange(len(real)).float()[None]
    moved = shuffled(values, mask, source)
    assert torch.equal(moved[~mask], values[~mask])
    assert sorted(moved[mask].tolist()) == sorted(values[mask].tolist())
    assert (moved[mask] != values[mask]).all()


def test_deranged_targets_cross_sequences_and_stay_paired_with_each_other() -> None:
    trace = made_trace(outcomes=True)
    torch.manual_seed(3)
    source = derangement(REAL)
    torch.manual_seed(3)
    loss = routing_losses(trace, jepa_targets="deranged")["jepa"].item()
    flat = {i: {n: trace[i].extras[n][REAL] for n in trace[i].extras} for i in (1, 3)}

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return (a @ b / (a.norm() * b.norm())).item()

    expected = average([
        2 - cosine(flat[i]["q_full"][n], flat[i]["z_full"][source[n]])
        - cosine(flat[i]["q_cheap"][n], flat[i]["z_cheap"][source[n]])
        for i in (1, 3) for n in range(6)
    ])  # fmt: skip
    assert loss == pytest.approx(expected, abs=1e-6)
    assert loss != pytest.approx(routing_losses(trace)["jepa"].item(), abs=1e-3)
    sequence = torch.tensor([0, 0, 0, 0, 1, 1])
    assert (sequence[source] != sequence).any()


def test_terms_without_their_inputs_do_not_apply() -> None:
    weights = {"util": 1.0, "rank": 1.0, "cgs": 1.0, "distill": 1.0}
    assert set(routing_losses(made_trace(), weights=weights)) == {"budget", "alive"}


def refresh_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 14, **arguments: Any
) -> list[Any]:
    """`(step, kind, window, layers)` of every refresh in a training run."""
    made: list[Any] = []
    original = objective_module.prefix_utility

    def spy(
        prefix: Any, labels: Any, kind: str, window: int = 8, gamma: float = 0.5, layers: Any = None
    ) -> Any:
        made.append((trainer.state.global_step, kind, window, layers))
        return original(prefix, labels, kind, window, gamma, layers)

    monkeypatch.setattr(objective_module, "prefix_utility", spy)
    trainer, _ = make_trainer(
        build_routed("llama"), rows(2 * steps, padding=(0, 3)), tmp_path, **arguments
    )
    trainer.train()
    logged = [set(entry) & {"loss_util", "loss_rank", "loss_cgs"} for entry in step_logs(trainer)]
    assert [bool(terms) for terms in logged] == [
        step in {m[0] for m in made} for step in range(steps)
    ]
    return made


def test_labels_are_refreshed_every_fifth_step_after_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = refresh_steps(tmp_path, monkeypatch, oracle="all_full", oracle_warmup=3)
    assert made == [(step, "all_full", 8, None) for step in (3, 8, 13)]


def test_counterfactual_supervision_labels_one_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = refresh_steps(tmp_path, monkeypatch, cgs_weight=0.5, cgs_warmup=1)
    assert made == [
        (step, "on_policy", 1, [layer]) for step, layer in ((1, 1), (5, 2), (9, 3), (13, 1))
    ]


@pytest.mark.parametrize(
    "arguments", [{}, {"oracle": "all_full", "util_weight": 0.0, "rank_weight": 0.0}]
)
def test_without_an_oracle_nothing_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    assert refresh_steps(tmp_path, monkeypatch, 3, oracle_warmup=0, **arguments) == []


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_every_loss_trains_with_checkpointing_and_accumulation(
    tmp_path: Path, checkpointing: Any
) -> None:
    fields: dict[str, Any] = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": checkpointing,
    }
    trainer, kept = make_trainer(
        build_routed("qwen2", "jepa"), rows(8, padding=(0, 3)), tmp_path,
        gradient_accumulation_steps=2, oracle="on_policy", oracle_warmup=0, oracle_interval=1,
        cgs_weight=0.5, cgs_warmup=0, z_weight=0.1, distill_weight=1.0, jepa_targets="deranged",
        **(fields if checkpointing else {}),
    )  # fmt: skip
    trainer.train()
    entry = step_logs(trainer)[0]
    for name in ("lm", "jepa", "util", "rank", "budget", "alive", "cgs", "z", "distill"):
        assert math.isfinite(entry[f"loss_{name}"]), name
    assert kept.steps and all(gradient.isfinite().all() for gradient in kept.steps[0].values())


def test_labels_do_not_depend_on_checkpointing_or_on_the_trainer(tmp_path: Path) -> None:
    examples = rows(4, padding=(0, 3))
    arguments: dict[str, Any] = {"oracle": "on_policy", "oracle_warmup": 0, "oracle_interval": 1}
    expected = None
    for folder, fields in (("plain", {}), ("checkpointed", {"gradient_checkpointing": True})):
        trainer, _ = make_trainer(
            build_routed("llama"), examples, tmp_path / folder, **arguments, **fields
        )
        trainer.train()
        losses = [
            entry[name] for entry in step_logs(trainer) for name in ("loss_util", "loss_rank")
        ]
        expected = expected or losses
        assert losses == pytest.approx(expected, rel=1e-5)
    trainer, _ = make_trainer(build_routed("llama"), examples, tmp_path / "callback", cls=Trainer)
    trainer.add_callback(DepthRouteCallback(trainer, RoutingArguments(**arguments)))
    trainer.train()
    losses = [entry[name] for entry in step_logs(trainer) for name in ("loss_util", "loss_rank")]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_counterfactual_temperature_is_a_moving_average_of_the_mean_size() -> None:
    scale = LabelScale()
    first, second = made_labels(1)[1], made_labels(2)[1]

    def size(labels: UtilityLabels) -> float:
        return labels.utility[VALID].abs().mean().item()

    assert scale.update(first).item() == pytest.approx(size(first), abs=1e-6)
    scale.begin_step()
    expected = 0.99 * size(first) + 0.01 * size(second)
    assert scale.update(second).item() == pytest.approx(expected, abs=1e-6)
    # Two batches of one step count once, together; one without a label does not.
    scale.begin_step()
    scale.update(first)
    expected = 0.99 * expected + 0.01 * (size(first) + size(second)) / 2
    assert scale.update(second).item() == pytest.approx(expected, abs=1e-6)
    scale.begin_step()
    nothing = UtilityLabels(first.utility, torch.zeros_like(first.valid))
    assert scale.update(nothing).item() == pytest.approx(expected, abs=1e-6)


def test_missing_labels_and_logits_are_named() -> None:
    model = build_routed("llama").train()
    batch = stacked(rows(2))
    for arguments, left_out, message in (
        (RoutingArguments(oracle="all_full"), "labels", "need labels in the batch"),
        (RoutingArguments(distill_weight=1.0), "logits", "needs the model's logits"),
    ):
        objective = RoutingObjective(arguments, model)
        with objective.watching() as watched:
            output = model(**batch)
            given_inputs = {"labels": batch["labels"], "logits": output.logits, left_out: None}
            with pytest.raises(ValueError, match=message):
                objective(output.loss, watched, 1.0, **given_inputs)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("oracle", "later", "use one of: none, all_full, on_policy"),
        ("jepa_targets", "shuffled", "use one of: paired, deranged"),
        ("oracle_window", 0, "must be at least 1"),
        ("oracle_interval", 0, "must be at least 1"),
        ("cgs_interval", 0, "must be at least 1"),
        ("oracle_warmup", -1, "must be at least 0"),
        ("oracle_gamma", 1.5, r"must be a number in \[0, 1\]"),
        ("util_weight", -1.0, "finite number of at least 0"),
        ("distill_weight", float("nan"), "finite number of at least 0"),
    ],
)
def test_arguments_out_of_range_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=.*{message}"):
        RoutingArguments(**{field: value}).check()

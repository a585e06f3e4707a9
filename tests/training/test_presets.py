"""Published methods by one line: the adapter, and no loss but the method's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import build_base
from study.grid import CONFIG, TRAINING_FIELDS, check_fields
from training import rows

from hf_depthroute import (
    PRESETS,
    DepthRouteConfig,
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    get_depth_routed_model,
    preset,
)
from hf_depthroute.config.adapter import ConfigError

DEPTH_ROUTING = {"lm": 1.0, "util": 1.0, "rank": 0.2, "budget": 1.0, "alive": 0.5}
# The terms of each method with their weights in its paper.
TERMS = {
    "conditional-depth-routing": DEPTH_ROUTING,
    "conditional-depth-routing-jepa": DEPTH_ROUTING | {"jepa": 1.0},
    "token-selective-attention": {"lm": 1.0, "depth": 0.001},
    "router-tuning": {"lm": 1.0, "capacity": 0.1},
    "router-tuning-experts": {"lm": 1.0, "capacity": 0.1},
    "mixture-of-depths": {"lm": 1.0, "predictor": 1.0},
    "dlo": {"lm": 1.0, "similarity": 1.0},
    "flexidepth": {"lm": 1.0, "squared_depth": 1e-4},
    "counterfactual-gate-supervision": {"lm": 1.0, "cgs": 0.5},
    "counterfactual-gate-supervision-memory": {"lm": 1.0, "cgs": 0.5},
    "loss-free-balancing": {"lm": 1.0},
}
# Numbers of the papers, in the adapter and in training.
# fmt: off
ADAPTERS: dict[str, dict[str, Any]] = {
    "conditional-depth-routing": {"gate": "mlp", "gate_temperature": 2.0, "budget": 0.5, "gate_input": "residual"},
    "conditional-depth-routing-jepa": {"gate": "jepa", "context_dim": 128, "summary_dim": 64, "action_dim": 16},
    "token-selective-attention": {"gate": "halting", "selection": "soft", "threshold": 0.0, "layers": None},
    # R reads the x of "M F(x) + x", the stream; inside an expert the x of E(x), which the norm has
    # made.
    "router-tuning": {
        "target": "attention", "granularity": "sequence", "gate_input": "residual", "threshold": 0.0, "branch": "none",
    },
    "router-tuning-experts": {
        "target": "experts", "expert_gates": "per_expert", "gate_input": "normed", "budget": 0.75,
    },
    "mixture-of-depths": {"target": "block", "layers": "every:2", "budget": 0.125, "scale_by_gate": True},
    "dlo": {
        "target": "ffn", "gate": "linear", "gate_input": "residual", "branch": "none", "layers": "all", "budget": 0.9,
        "threshold": 0.0, "selection": "topk",
    },
    "flexidepth": {
        "target": "block", "gate": "bottleneck", "gate_input": "normed", "gate_temperature": 1.0, "branch": "swiglu",
        "layers": "last:half", "threshold": 1e-7, "selection": "threshold",
    },
    "counterfactual-gate-supervision": {"gate": "mlp"},
    "counterfactual-gate-supervision-memory": {"target": "memory", "memory_slots": 500_000, "layers": [2, 4, 6]},
    "loss-free-balancing": {"selection": "controller"},
}
# fmt: on
TRAINING: dict[str, dict[str, Any]] = {
    "conditional-depth-routing": {
        "oracle": "all_full",
        "oracle_window": 8,
        "oracle_warmup": 100,
        "oracle_interval": 5,
    },
    "conditional-depth-routing-jepa": {
        "learning_rate": 2e-4,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    },
    "token-selective-attention": {"learning_rate": 3e-4, "weight_decay": 0.1, "adam_beta2": 0.95},
    "router-tuning": {"learning_rate": 2e-4, "weight_decay": 0.0, "warmup_steps": 0.03},
    "dlo": {"learning_rate": 2e-5, "budget_start": 1.0, "budget_schedule_steps": 1000},
    "flexidepth": {
        "learning_rate": 1e-4,
        "adam_beta2": 0.95,
        "warmup_steps": 0.03,
        "weight_decay": 0.0,
    },
    "counterfactual-gate-supervision": {
        "cgs_warmup": 500,
        "cgs_interval": 4,
        "learning_rate": 6e-4,
    },
    "counterfactual-gate-supervision-memory": {
        "cgs_warmup": 500,
        "cgs_interval": 4,
        "learning_rate": 6e-4,
    },
}


def test_every_preset_is_in_the_tables_here() -> None:
    assert list(PRESETS) == list(TERMS) == list(ADAPTERS)
    for row in PRESETS.values():
        assert row.title and row.identifier


@pytest.mark.parametrize("name", TERMS)
def test_preset_holds_the_papers_numbers(name: str, tmp_path: Path) -> None:
    config, training = preset(name)
    assert {field: getattr(config, field) for field in ADAPTERS[name]} == ADAPTERS[name]
    arguments = DepthRouteTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **training)
    expected = TRAINING.get(name, {})
    assert {field: getattr(arguments, field) for field in expected} == expected
    assert {term: weight for term, weight in arguments.weights().items() if weight} == TERMS[name]


@pytest.mark.parametrize("name", TERMS)
def test_preset_trains_by_the_methods_losses_and_no_others(name: str, tmp_path: Path) -> None:
    shallow = {"layers": [1]} if isinstance(PRESETS[name].adapter.get("layers"), list) else {}
    config, training = preset(name, seed=3, max_steps=1, oracle_warmup=0, cgs_warmup=0, **shallow)
    model = get_depth_routed_model(
        build_base("olmoe" if config.target == "experts" else "llama"), config
    )
    arguments = DepthRouteTrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **training,
    )
    trainer = DepthRouteTrainer(model=model, args=arguments, train_dataset=rows(8))
    trainer.train()
    logged = trainer.state.log_history[0]
    found = {
        term.removeprefix("loss_"): value
        for term, value in logged.items()
        if term.startswith("loss_")
    }
    assert set(found) == set(TERMS[name])
    assert logged["loss"] == pytest.approx(
        sum(TERMS[name][term] * value for term, value in found.items()), abs=1e-3
    )


def test_router_tuning_routes_the_deepest_layers_but_the_last_and_starts_dense() -> None:
    config, _ = preset("router-tuning")
    assert config.routed_layers(32) == list(range(15, 31))
    assert config.selection == "threshold"
    assert not config.takes_budget()


def test_changes_go_where_they_belong() -> None:
    config, training = preset(
        "router-tuning", layers=[1], budget=0.25, capacity_weight=4.0, seed=7, max_steps=9
    )
    assert (config.layers, config.budget, config.seed) == ([1], 0.25, 7)
    assert (training["capacity_weight"], training["seed"], training["max_steps"]) == (4.0, 7, 9)
    assert "layers" not in training and "budget" not in training
    assert preset("router-tuning")[1]["capacity_weight"] == 0.1


def test_what_a_caller_does_to_a_preset_leaves_the_table_alone() -> None:
    preset("conditional-depth-routing")[1]["lr_scheduler_kwargs"]["min_lr_rate"] = 0.5
    assert PRESETS["conditional-depth-routing"].training["lr_scheduler_kwargs"] == {
        "min_lr_rate": 0.01
    }


def test_unknown_preset_is_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no preset 'router_tuning'; did you mean 'router-tuning'\?; use one of: ",
    ):
        preset("router_tuning")


def test_preset_is_a_key_of_a_studys_files() -> None:
    check_fields("a.yaml", {"preset": "dlo"}, CONFIG)
    with pytest.raises(ConfigError, match=r"^a.yaml: there is no preset 'dl0'; did you mean 'dlo'"):
        check_fields("a.yaml", {"preset": "dl0"}, CONFIG)
    for row in PRESETS.values():
        assert set(row.training) <= TRAINING_FIELDS
        DepthRouteConfig(**row.adapter)

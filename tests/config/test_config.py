"""Configurations: bad values are refused in one line and no time;
good ones survive every round trip."""

from __future__ import annotations

import copy
import json
import pickle
import time
from pathlib import Path
from typing import Any

import peft
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build_base
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.adapter.files import AdapterMismatchError
from hf_depthroute.adapter.tuner import register
from hf_depthroute.config.adapter import ConfigError, check_budget, register_peft_type

NAN, INF = float("nan"), float("inf")

BAD_FIELDS: dict[str, list[Any]] = {
    "budget": [0, 0.0, -0.5, 1.0001, NAN, INF, -INF, "x", "0.5", True, None, [0.5], 10**400],
    "layers": [
        [10**9],
        [1, 1],
        [-1],
        [True],
        [1.0],
        ["1"],
        [],
        [[1]],
        list(range(5000)),
        5,
        0.5,
        {"last": 2},
        "last:0",
        "last:-1",
        "last:99999",
        "before_last",
        "before_last:0",
        "every:half",
        "every:",
        "some",
        "",
        "all ",
        "(a+)+$",
        "a" * 1_000_000 + "!",
        "last:" + "1" * 1_000_000,
    ],
    "static_layers": [
        [],
        [-1],
        [3, 3],
        [True],
        [1.0],
        ["1"],
        [[1]],
        list(range(5000)),
        "last:1",
        3,
        {"1": 2},
    ],
    "target": ["layer", "", None, 3, ["ffn"]],
    "granularity": ["word", None],
    "gate": ["os.system", None, 1],
    "gate_input": ["raw", None],
    "branch": ["highrank", None],
    "selection": ["random", 1],
    "budget_scope": ["model", None],
    "causal_rule": ["topk", None],
    "expert_gates": ["per_token", None],
    "scale_by_gate": [1, "yes", None],
    "dropped_experts": [
        [[1, 1]],
        [[-1]],
        [[True]],
        [1],
        {"1": [0]},
        [list(range(5000))],
        [["0"]],
        [[[0]]],
    ],
    "gate_temperature": [0, -1.0, NAN, INF, "2", True, 1e-320, 1e308],
    "threshold": [NAN, INF, "0", "Budget", "", True, ["budget"], 1e308, -1e31],
    "gate_hidden": [0, -1, 1.5, True, "8", 10**9],
    "branch_rank": [0, -1, 1.5, True, "8", 10**9],
    "context_dim": [0, -1, 1.5, True, None, 10**9],
    "summary_dim": [0, -1, 1.5, True, None, 10**9],
    "action_dim": [0, -1, 1.5, True, None, 10**9],
    "memory_slots": [0, 511, -1, 2**26 + 1, 10**400, 1e6, True, "8", None, [8]],
    "memory_width": [0, -1, 65537, 1.5, True, "8", None],
    "memory_heads": [0, -1, 17, 1.5, True, "8", None],
    "ngram_order": [0, 1, 6, 2.5, True, "3", None, [2, 3]],
    "seed": [-1, 2**63, 1.0, True, "0", None],
    "trainable_token_indices": [[1]],
    "task_type": ["QUESTION_ANS", "SEQ_2_SEQ_LM", "seq_cls", 1, ["SEQ_CLS"]],
}
GOOD_LAYERS = {
    "all": [0, 1, 2, 3], "last:2": [2, 3], "every:2": [1, 3], "every:3": [2], "before_last:1": [2],
    "before_last:3": [0, 1, 2], "before_last:half": [1, 2], "last:half": [2, 3], None: [3],
}  # fmt: skip

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_FIELDS.items() for value in values],
    ids=lambda value: repr(value)[:24],
)
def test_bad_field_is_refused_quickly_in_one_line_that_names_it(name: str, value: Any) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        DepthRouteConfig(**{name: value})
    assert time.process_time() - start < 0.1
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    assert len(message) < 300


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(BAD_FIELDS)), anything)
def test_any_value_is_accepted_or_refused_with_a_config_error(name: str, value: Any) -> None:
    try:
        config = DepthRouteConfig(**{name: value})
    except ConfigError:
        return
    json.dumps(config.to_dict(), default=list)


CONFLICTS: dict[str, dict[str, Any]] = {
    "gate='halting'": {"gate": "halting"},
    "gate='exit'": {"gate": "exit", "target": "block", "granularity": "sequence"},
    "granularity='sequence'": {"target": "experts", "gate": "linear", "granularity": "sequence"},
    "gate='jepa'": {"target": "experts", "gate": "jepa"},
    "dropped_experts goes": {"target": "experts", "gate": "none"},
    "dropped_experts goes with": {"dropped_experts": [[0]]},
    "layers=[3, 1]": {
        "target": "experts",
        "gate": "none",
        "layers": [3, 1],
        "dropped_experts": [[0], [1]],
    },
    "scale_by_gate and causal_rule": {"target": "experts", "scale_by_gate": True},
    "selection='topk'": {"granularity": "sequence", "selection": "topk"},
    "selection='topk' ranks": {"budget_scope": "global", "selection": "topk"},
    "selection='threshold'": {"gate": "halting", "target": "block", "selection": "threshold"},
    "early exit trains": {"gate": "exit", "target": "block", "selection": "soft"},
    "causal_rule='predictor'": {"causal_rule": "predictor", "selection": "threshold"},
    "selection='controller'": {"selection": "controller", "threshold": 0.0},
    "scale_by_gate is not supported": {"scale_by_gate": True, "selection": "soft"},
    "gate='memory' decides on memory": {"gate": "memory"},
    "gate='linear': with target='memory'": {"gate": "linear", "target": "memory"},
    "memory_slots=4000 must be at least 4096": {"memory_slots": 4000, "target": "memory"},
    "memory_heads=2 goes with target='memory'": {"memory_heads": 2},
}


@pytest.mark.parametrize("start", CONFLICTS)
def test_fields_that_do_not_go_together_are_refused_in_one_line(start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DepthRouteConfig(**CONFLICTS[start])
    assert start in str(caught.value)
    assert "\n" not in str(caught.value)


DEFAULTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gate": "linear", "threshold": "budget"}, {"selection": "threshold", "threshold": "budget"}),
    (
        {"gate": "halting", "target": "block", "threshold": "budget"},
        {"selection": "soft", "threshold": "budget"},
    ),
    ({"threshold": "budget"}, {"selection": "topk", "threshold": "budget"}),
    ({}, {"selection": "topk", "threshold": None, "gate_temperature": 2.0}),
    ({"gate": "linear"}, {"selection": "threshold", "threshold": 0.0, "gate_temperature": 1.0}),
    ({"gate": "linear", "selection": "topk"}, {"selection": "topk", "threshold": None}),
    ({"gate": "linear", "selection": "threshold"}, {"selection": "threshold", "threshold": None}),
    (
        {"gate": "halting", "target": "block"},
        {"selection": "soft", "threshold": 0.0, "gate_input": "residual"},
    ),
    ({"gate": "exit", "target": "block"}, {"selection": "threshold", "threshold": None}),
    ({"granularity": "sequence"}, {"selection": "threshold", "threshold": None}),
    ({"budget_scope": "global"}, {"selection": "threshold", "threshold": None}),
    (
        {"target": "memory"},
        {"selection": "soft", "threshold": 0.0, "gate": "memory", "branch": "none", "budget": 1.0},
    ),
]


@pytest.mark.parametrize(("fields", "expected"), DEFAULTS)
def test_defaults_follow_the_gate_and_are_what_is_saved(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    saved = DepthRouteConfig(**fields).to_dict()
    assert {name: saved[name] for name in expected} == expected
    assert {name: DepthRouteConfig(**saved).to_dict()[name] for name in expected} == expected


def test_threshold_that_was_taken_away_stays_away_when_saved(tmp_path: Path) -> None:
    for fields in ({"gate": "linear"}, {"gate": "halting", "target": "block"}):
        config = DepthRouteConfig(**fields)
        config.threshold = None
        config.save_pretrained(tmp_path)
        assert DepthRouteConfig.from_pretrained(tmp_path).threshold is None


def test_threshold_of_a_file_that_was_saved_before_it_had_a_name_still_follows_the_budget() -> None:
    saved = DepthRouteConfig(gate="linear").to_dict() | {"threshold": None}
    assert DepthRouteConfig(**saved).takes_budget()
    assert not DepthRouteConfig(gate="linear").takes_budget()
    assert DepthRouteConfig(gate="linear", threshold="budget").takes_budget()


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("r", "branch_rank"),
        ("rank", "branch_rank"),
        ("target_modules", "layers says .* target"),
        ("lora_alpha", "LoRA's"),
    ],
)
def test_fields_of_lora_are_refused_with_what_comes_closest(field: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"no field '{field}' in DepthRouteConfig; .*{hint}"):
        DepthRouteConfig(**{field: 8})


def test_tasks_are_those_of_decoders() -> None:
    assert DepthRouteConfig(task_type=peft.TaskType.CAUSAL_LM).task_type == "CAUSAL_LM"
    with pytest.raises(
        ConfigError,
        match="task_type='SEQ_2_SEQ_LM' is not supported; use one of: CAUSAL_LM, SEQ_CLS",
    ):
        DepthRouteConfig(task_type="SEQ_2_SEQ_LM")


def test_halting_gate_routes_all_layers_but_the_first() -> None:
    assert DepthRouteConfig(gate="halting", target="block").routed_layers(4) == [1, 2, 3]
    for layers in ("all", [0, 2]):
        with pytest.raises(ConfigError, match="never routes layer 0"):
            DepthRouteConfig(gate="halting", target="block", layers=layers).routed_layers(4)


def test_dropped_experts_come_one_list_per_layer() -> None:
    config = DepthRouteConfig(
        target="experts", gate="none", layers=[1, 2], dropped_experts=[[0], [1, 2]]
    )
    assert config.routed_layers(4) == [1, 2]
    with pytest.raises(ConfigError, match="2 lists for 1 routed"):
        DepthRouteConfig(
            target="experts", gate="none", layers=[1], dropped_experts=[[0], [1]]
        ).routed_layers(4)


@pytest.mark.parametrize("budget", [1, 1.0, 0.5, 1e-9])
def test_budget_is_returned_as_a_float(budget: float) -> None:
    assert check_budget(budget) == budget
    assert isinstance(check_budget(budget), float)


@pytest.mark.parametrize("layers", GOOD_LAYERS)
def test_layer_rules(layers: str | None) -> None:
    assert DepthRouteConfig(layers=layers).routed_layers(4) == GOOD_LAYERS[layers]


def test_default_layers_are_the_last_third() -> None:
    assert DepthRouteConfig().routed_layers(24) == list(range(16, 24))
    assert DepthRouteConfig().routed_layers(1) == [0]


@pytest.mark.parametrize("layers", ["last:5", "every:5", "before_last:4", [4], [0, 99_999]])
def test_layers_outside_the_model_are_refused(layers: str | list[int]) -> None:
    with pytest.raises(ConfigError, match="layers="):
        DepthRouteConfig(layers=layers).routed_layers(4)


def test_json_round_trip(tmp_path: Path) -> None:
    config = DepthRouteConfig(
        layers=[2, 1], gate="jepa", budget=0.07, threshold=-0.5, seed=2**62, branch_rank=3
    )
    config.save_pretrained(tmp_path)
    for loaded in (
        DepthRouteConfig.from_pretrained(tmp_path),
        peft.PeftConfig.from_pretrained(tmp_path),
    ):
        assert type(loaded) is DepthRouteConfig
        assert loaded.to_dict() == config.to_dict() | {"inference_mode": loaded.inference_mode}


def test_saved_file_is_plain_json_without_a_path_to_import(tmp_path: Path) -> None:
    get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers="last:2")).save_pretrained(
        tmp_path
    )
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["peft_type"] == "DEPTH_ROUTE"
    assert saved["layers"] == [2, 3]
    sampled = saved["base_architecture"].pop("sampled_weights")
    assert len(sampled) > 20 and all(isinstance(value, float) for value in sampled.values())
    assert saved["base_architecture"] == {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "vocab_size": 64,
    }


@pytest.mark.parametrize(
    ("name", "value"), [("budget", NAN), ("layers", [10**9]), ("gate", "os.system")]
)
def test_hostile_file_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    DepthRouteConfig().save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    # A NaN stops the reader of the file, which does not know the field.
    with pytest.raises((ConfigError, AdapterMismatchError), match=f"{name}|NaN"):
        peft.PeftConfig.from_pretrained(tmp_path)


def test_config_given_to_a_model_is_not_changed() -> None:
    config = DepthRouteConfig(layers="last:2")
    before = copy.deepcopy(config.to_dict())
    get_depth_routed_model(build_base("llama"), config)
    assert config.to_dict() == before


def test_registration_is_idempotent() -> None:
    members, mapping = list(peft.PeftType), dict(PEFT_TYPE_TO_TUNER_MAPPING)
    first = register_peft_type()
    register()
    assert register_peft_type() is first
    assert list(peft.PeftType) == members
    assert mapping == PEFT_TYPE_TO_TUNER_MAPPING
    assert members.count(first) == 1


def test_registered_type_behaves_like_a_built_in_one() -> None:
    member = register_peft_type()
    assert isinstance(member, peft.PeftType)
    assert member == "DEPTH_ROUTE"
    assert (
        peft.PeftType("DEPTH_ROUTE")
        is peft.PeftType["DEPTH_ROUTE"]
        is peft.PeftType.DEPTH_ROUTE
        is member
    )
    assert (member.name, member.value) == ("DEPTH_ROUTE", "DEPTH_ROUTE")
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member
    assert {member: 1}[peft.PeftType.DEPTH_ROUTE] == 1


def test_config_pickles() -> None:
    config = DepthRouteConfig(layers=[1], gate="jepa")
    assert pickle.loads(pickle.dumps(config)) == config

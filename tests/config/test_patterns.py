"""`target_pattern`, `branch_pattern`, `rank_pattern`:
a target and a branch of its own in some of the layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_base, build_routed, tokens
from peft import PeftModel
from protocol import gap

from hf_depthroute import (
    DepthRouteConfig,
    get_depth_routed_model,
    record_routes,
    route_cost,
    set_phases,
)
from hf_depthroute.adapter.doctor import examine
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.inference.fitting import fit_branches
from hf_depthroute.routing.stack import routings_of, state_of

PATTERNS: dict[str, Any] = {
    "target_pattern": {1: "attention", 2: "block"},
    "branch_pattern": {1: "lowrank", 2: "lowrank"},
    "rank_pattern": {2: 6},
}


def build(**fields: Any) -> Any:
    return build_routed(
        "llama", layers=[0, 1, 2], branch="neurons", branch_rank=16, **PATTERNS, **fields
    )


def test_each_layer_holds_the_branch_that_its_patterns_name() -> None:
    model = build()
    kinds = [type(routing.depth_route_branch["default"]).__name__ for routing in routings_of(model)]
    assert kinds == ["NeuronBranch", "LowRankBranch", "LowRankBranch"]
    ranks = [
        routing.depth_route_branch["default"].down.in_features for routing in routings_of(model)
    ]
    assert ranks == [16, 4, 6]  # a branch of another kind has the default of its kind
    assert model.peft_config["default"].rank_pattern == {1: 4, 2: 6}
    assert "target block in 2" in str(
        model.print_trainable_parameters.__self__
    ) or "block per token" in str(model)


@pytest.mark.parametrize("executor", ["gathered", "rows", "auto"])
def test_every_executor_and_decoding_give_what_training_computes(executor: str) -> None:
    model, ids = build(), tokens(2, 12, seed=3)
    with torch.no_grad(), state_of(model).override(executor="masked"):
        wanted = model(ids).logits
        with state_of(model).override(executor=executor):
            assert gap(model(ids).logits, wanted) < 1e-4
            for rows in (ids, ids[:1]):  # a step of its own for one sequence
                past, steps = None, []
                for position in range(rows.shape[1]):
                    out = model(
                        rows[:, position : position + 1], past_key_values=past, use_cache=True
                    )
                    past = out.past_key_values
                    steps.append(out.logits)
                assert gap(torch.cat(steps, 1), wanted[: len(rows)]) < 1e-4


def test_a_layer_computes_what_it_would_with_the_same_target_in_all() -> None:
    """The parts of a layer depend on its own entry: what another layer routes is no part of it."""
    ids = tokens(2, 12, seed=4)
    for index, target in ((0, "ffn"), (1, "attention"), (2, "block")):
        alone = build_routed("llama", layers=[index], target=target, branch_rank=6)
        among = build_routed(
            "llama", layers=[0, 1, 2], branch_rank=6, target_pattern={1: "attention", 2: "block"}
        )
        with torch.no_grad(), state_of(among).override(layers=frozenset({index})):
            among.load_state_dict(alone.state_dict(), strict=False)
            assert torch.equal(among(ids).logits, alone(ids).logits)


def test_static_layers_write_the_keys_and_values_of_a_prompt() -> None:
    model, ids = build(static_layers=[1, 2], phases="prefill"), tokens(2, 12, seed=5)
    with torch.no_grad(), record_routes(model) as trace:
        model(ids)
    for index in (1, 2):
        assert trace[index].mask[:, -1].all() and not trace[index].mask[:, :-1].any()
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
        past = model(ids[:, :-1], use_cache=True).past_key_values
        assert [layer.get_seq_length() for layer in past.layers] == [11] * 4
    assert out.shape == (2, 18)


def test_patterns_are_saved_and_loaded_and_other_adapters_do_not_have_them(tmp_path: Path) -> None:
    model = build()
    fit_branches(model, [{"input_ids": tokens(4, 32, seed=1)}])
    model.save_pretrained(str(tmp_path))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_pattern"] == {"1": "attention", "2": "block"}
    loaded: Any = PeftModel.from_pretrained(build_base("llama"), str(tmp_path)).eval()
    assert loaded.peft_config["default"].target_pattern == {1: "attention", 2: "block"}
    ids = tokens(2, 20, seed=9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not [finding for finding in examine(tmp_path) if finding.state == "fault"]
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(saved | {"rank_pattern": {"1": 4, "2": 5}})
    )
    assert any("layer 2: the branch has shape" in found.text for found in examine(tmp_path))
    plain = DepthRouteConfig().to_dict()
    assert not any(name.endswith("_pattern") for name in plain)


def test_the_cost_counts_what_each_layer_leaves_out() -> None:
    def saved(**fields: Any) -> float:
        base = copy.deepcopy(build_base("llama"))
        model = get_depth_routed_model(
            base, DepthRouteConfig(layers=[2], gate="none", branch="none", **fields)
        )
        cost = route_cost(model)
        return 1 - cost.flops_routed / cost.flops_dense

    ffn, attention, block = (saved(target=target) for target in ("ffn", "attention", "block"))
    assert saved(target="ffn", target_pattern={2: "block"}) == pytest.approx(block)
    assert block == pytest.approx(ffn + attention) and attention > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"target_pattern": {3: "attention"}, "branch": "neurons"},
            "layer 3: branch='neurons' is made of the FFN",
        ),
        (
            {"target_pattern": {9: "block"}, "layers": [1]},
            "must name routed layers, and layer 9 is none",
        ),
        (
            {"target_pattern": {1: "experts"}},
            "is for the targets 'ffn' or 'attention' or 'block' per token",
        ),
        ({"target_pattern": {1: "block"}, "granularity": "sequence"}, "per token"),
        ({"target_pattern": {1: "block"}, "gate": "random", "target": "memory"}, "memory"),
        ({"branch_pattern": {1: "memory"}}, "is for branch='lowrank', 'swiglu' and 'neurons'"),
        (
            {"branch_pattern": {1: "lowrank"}, "branch": "none"},
            "is for branch='lowrank', 'swiglu' and 'neurons'",
        ),
        ({"rank_pattern": {1: 0}}, "has 0; use an integer from 1 to 262144"),
        ({"rank_pattern": {"first": 4}}, "must map layer indices to values"),
        ({"rank_pattern": [4]}, "must map layer indices to values"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DepthRouteConfig(**fields)


def test_phases_can_be_changed_where_layers_have_targets_of_their_own() -> None:
    model = build()
    set_phases(model, "prefill")
    assert model.peft_config["default"].phases == "prefill"

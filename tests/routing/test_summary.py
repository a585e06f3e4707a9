"""What a routed model says about itself."""

from __future__ import annotations

import pytest
from models import build_base, build_routed, routed
from peft import LoraConfig, get_peft_model

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.evaluation.cost import cost_remark
from hf_depthroute.routing.description import routing_summary


def test_trainable_parameters_are_printed_with_what_is_routed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    build_routed("llama", "mlp", budget=0.25).print_trainable_parameters()
    counts, routing = capsys.readouterr().out.splitlines()
    assert counts.startswith("trainable params: ")
    assert routing == (
        "routed: 3 of 4 layers (1-3): ffn per token, budget 0.25, gate mlp, branch lowrank; "
        "adapter 'default'"
    )


def test_adapter_that_costs_more_than_it_saves_is_printed_with_its_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(gate="jepa"))
    model.print_trainable_parameters()
    remark = capsys.readouterr().out.splitlines()[-1]
    assert remark == cost_remark(model)
    assert (
        remark.startswith("this adapter cannot pay for itself: ")
        and "context_dim (now 128)" in remark
    )
    with model.disable_adapter():
        assert cost_remark(model) is None
    assert cost_remark(model.unload()) is None


def test_every_adapter_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = routed(build_base("olmoe"), "mlp", layers=[0, 2, 3])
    model.add_adapter(
        "other", DepthRouteConfig(layers=[1], target="block", branch="none", granularity="sequence")
    )
    model.print_trainable_parameters()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0].startswith("routed: 3 of 4 layers (0, 2-3): ffn per token, ")
    assert (
        lines[1]
        == "routed: 1 of 4 layers (1): block per sequence, budget 0.5, gate mlp; adapter 'other'"
    )
    printed = str(model)
    assert "default: ffn per token" in printed and "other: block per sequence" in printed
    assert "(2-3): 2 x OlmoeDecoderLayer" in printed


def test_other_methods_print_as_they_did(capsys: pytest.CaptureFixture[str]) -> None:
    get_peft_model(
        build_base("llama"), LoraConfig(target_modules=["q_proj"])
    ).print_trainable_parameters()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_without_a_config_the_last_third_is_routed_at_half() -> None:
    config = get_depth_routed_model(build_base("llama")).peft_config["default"]
    assert (config.layers, config.budget) == ([3], 0.5)
    assert routing_summary(config) == "ffn per token, budget 0.5, gate mlp, branch lowrank"
    assert "sampled_weights" not in repr(config)

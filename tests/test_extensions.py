"""A gate and a loss from outside the package, by the public tables alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_base, logits, tokens
from peft import PeftModel
from torch import nn
from training import rows, stacked, training_arguments
from transformers import HfArgumentParser

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    RoutingArguments,
    calibrate,
    get_depth_routed_model,
    record_routes,
    set_budget,
)
from hf_depthroute.averages import mean_probability
from hf_depthroute.config import ConfigError
from hf_depthroute.doctor import examine
from hf_depthroute.gates import GATES, GateOutput, ScoreHead
from hf_depthroute.losses import LOSSES, LossInputs, LossTerm, routing_losses


class NormGate(nn.Module):
    """Two features: the size of the stream, and its largest entry."""

    outputs: tuple[str, ...] = ()

    def __init__(self, width: int, config: DepthRouteConfig, scores: int = 1) -> None:
        super().__init__()
        self.score = ScoreHead(2, scores)

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.score.weight, generator=generator)
        nn.init.zeros_(self.score.bias)

    def weights_per_token(self) -> int:
        return self.score.weight.numel()

    def forward(self, a: torch.Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T]
        return {"scores": self.score(torch.stack([a.norm(dim=-1), a.abs().amax(dim=-1)], dim=-1))}


def sure_loss(inputs: LossInputs) -> torch.Tensor:
    """`mean_l (1 - p_bar_l)`: small where the gates would run everything."""
    return (1 - mean_probability(inputs.trace)).mean()


@pytest.fixture
def norm_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GATES, "norm", NormGate)


@pytest.fixture
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "sure", LossTerm(0.0, sure_loss))


def normed() -> PeftModel:
    return get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 3], gate="norm"))


def saved(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def change(folder: Path, **fields: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(saved(folder) | fields))


@pytest.mark.usefixtures("norm_gate")
def test_gate_of_another_package_trains_follows_a_budget_and_survives_saving(tmp_path: Path) -> None:
    model = normed()
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad and "gate" in name}
    arguments = training_arguments(tmp_path / "run", max_steps=2)
    DepthRouteTrainer(model=model, args=arguments, train_dataset=rows(4)).train()
    after = dict(model.named_parameters())
    assert len(before) == 4 and all(not torch.equal(after[name], value) for name, value in before.items())
    batches = [{"input_ids": tokens(8, 16)}]
    assert calibrate(model, batches) == {1: 0.5, 3: 0.5}
    expected = logits(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), expected)
    set_budget(loaded, 0.25)
    told = [
        loaded.generate(tokens(2, 6), max_new_tokens=4, do_sample=False, use_cache=cached) for cached in (True, False)
    ]
    assert torch.equal(*told)
    assert [finding for finding in examine(tmp_path / "adapter") if finding.state == "fault"] == []


def test_adapter_names_the_package_of_a_gate_that_is_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(GATES, "norm", type("NormGate", (NormGate,), {"__module__": "packaging.gates"}))
        normed().save_pretrained(tmp_path)
    assert (saved(tmp_path)["gate_package"], saved(tmp_path)["gate_module"]) == ("packaging", "packaging.gates")
    with pytest.raises(ConfigError, match=r"gate='norm' is not .* the package packaging, module packaging\.gates"):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)


def test_gate_of_a_script_has_a_module_and_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(GATES, "norm", NormGate)
        normed().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"names no package, module {__name__}"):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)


def test_row_that_stands_in_for_an_own_gate_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(GATES, "mlp", NormGate)
        get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1])).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"gate='mlp' is not hf_depthroute's own.*module {__name__}"):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)


@pytest.mark.usefixtures("norm_gate")
def test_what_the_file_names_is_text_that_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normed().save_pretrained(tmp_path)
    (tmp_path / "imported_by_mistake.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    change(tmp_path, gate_module="imported_by_mistake")
    PeftModel.from_pretrained(build_base("llama"), tmp_path)
    change(tmp_path, gate="another")
    with pytest.raises(ConfigError, match="module imported_by_mistake"):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)
    assert "imported_by_mistake" not in sys.modules


@pytest.mark.parametrize("name", ["gate_package", "gate_module"])
@pytest.mark.parametrize("value", ["a b", "x" * 300, "rm -rf /\n", "", 1, ["a"], "é"])
def test_only_names_are_taken_for_a_package_or_a_module(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.* must be what a save wrote$"):
        DepthRouteConfig(**{name: value})


def test_own_gates_add_nothing_to_the_file() -> None:
    assert not {"gate_package", "gate_module"} & set(DepthRouteConfig().to_dict())


@pytest.mark.usefixtures("norm_gate")
def test_gate_scores_experts_if_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"gate": "norm", "target": "experts", "layers": [1]}
    with pytest.raises(ConfigError, match=r"cannot score experts; use one of: mlp, linear, random, none$"):
        DepthRouteConfig(**fields)
    monkeypatch.setattr(NormGate, "scores_experts", True, raising=False)
    model = get_depth_routed_model(build_base("olmoe"), DepthRouteConfig(**fields))
    assert sum(calibrate(model, [{"input_ids": tokens(8, 16)}]).values()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.usefixtures("sure")
def test_loss_of_another_package_is_weighted_trained_with_and_logged(tmp_path: Path) -> None:
    def first_step(**weights: float) -> dict[str, float]:
        model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 3]))
        arguments = training_arguments(tmp_path, max_steps=1, loss_weights=weights or None)
        trainer = DepthRouteTrainer(model=model, args=arguments, train_dataset=rows(2))
        trainer.train()
        return trainer.state.log_history[0]

    plain, weighted = first_step(), first_step(sure=3.0)
    assert "loss_sure" not in plain
    p_bar = (weighted["gate_prob/layer_1"] + weighted["gate_prob/layer_3"]) / 2
    assert weighted["loss_sure"] == pytest.approx(1 - p_bar)
    assert weighted["loss"] - plain["loss"] == pytest.approx(3 * weighted["loss_sure"], abs=1e-3)
    assert weighted["grad_norm"] > 2 * plain["grad_norm"]


def test_loss_that_is_not_named_has_the_weight_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "sure", LossTerm(0.5, sure_loss))
    assert RoutingArguments().weights()["sure"] == 0.5
    assert RoutingArguments(loss_weights={"sure": 0.0}).weights()["sure"] == 0.0
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1])).train()
    with record_routes(model) as trace:
        output = model(**stacked(rows(2)))
    assert "sure" in routing_losses(trace, output.loss)


@pytest.mark.usefixtures("sure")
def test_weights_of_other_losses_come_as_json_from_a_command_line() -> None:
    (parsed,) = HfArgumentParser(RoutingArguments).parse_args_into_dataclasses(["--loss_weights", '{"sure": 0.25}'])
    parsed.check()
    assert parsed.loss_weights == {"sure": 0.25} and parsed.weights()["sure"] == 0.25


@pytest.mark.usefixtures("sure")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"unsure": 1.0}, "there is no loss 'unsure'; import what adds it.*lm, jepa"),
        ({"cgs": 1.0}, "'cgs' has an argument of its own; use cgs_weight"),
        ({"sure": -1.0}, "sure_weight=-1.0 must be a finite number"),
        ({"sure": "1"}, "sure_weight='1' must be a finite number"),
        ([1.0], "must map names of losses to weights"),
        ("{", "is not JSON"),
    ],
)
def test_wrong_loss_weights_are_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        RoutingArguments(loss_weights=given).check()
    assert "\n" not in str(refused.value)

"""`branch="swiglu"` under a fit: it begins as neurons of the FFN, with weights of its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from models import build_base, decoder_layers, tokens
from peft import PeftModel
from protocol import gap

from hf_depthroute import DepthRouteConfig, fit_router, get_depth_routed_model
from hf_depthroute.inference.fitting import fit_branches, neurons_to_copy
from hf_depthroute.parts.neurons import NeuronBranch
from hf_depthroute.routing.stack import routings_of, state_of
from hf_depthroute.routing.trace import record_routes

TEXT = [{"input_ids": tokens(8, 32, seed=seed)} for seed in (5, 6)]


def fitted(branch: str, base: Any = None) -> Any:
    config = DepthRouteConfig(layers="all", branch=branch, branch_rank=16)
    if base is None:
        base = build_base("llama")
    return fit_router(base, TEXT * 2, keep=0.5, config=config, rounds=1).eval()


def branches(model: Any) -> list[Any]:
    return [routing.depth_route_branch["default"] for routing in routings_of(model)]


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_with_as_many_as_the_ffn_has_it_is_the_ffn(family: str) -> None:
    """Also where one projection holds the gate and the rest."""
    config = DepthRouteConfig(layers=[1], gate="none", branch="swiglu", branch_rank=64)
    model = get_depth_routed_model(build_base(family), config)
    assert fit_branches(model, TEXT, ridge=0.0)[1] < 1e-6


def test_it_explains_what_borrowed_neurons_do_but_for_their_bias() -> None:
    missed = {}
    for branch in ("swiglu", "neurons", "lowrank"):
        config = DepthRouteConfig(layers=[1, 2], gate="none", branch=branch, branch_rank=16)
        missed[branch] = fit_branches(get_depth_routed_model(build_base("llama"), config), TEXT)
    for layer in (1, 2):
        assert missed["swiglu"][layer] == pytest.approx(missed["neurons"][layer], abs=0.02)
        assert missed["swiglu"][layer] < missed["lowrank"][layer] - 0.05


def test_what_was_fitted_is_saved_and_loads(tmp_path: Path) -> None:
    model, ids = fitted("swiglu"), tokens(2, 20, seed=9)
    for routing, branch in zip(routings_of(model), branches(model)):
        gaps = (branch.up.weight[:, None] - routing.ffn.up_proj.weight).abs().amax(-1)
        assert (gaps.amin(1) < 1e-6).all()
    with torch.no_grad(), record_routes(model) as routes:
        logits = model(ids).logits
        assert any(0 < float(record.mask.float().mean()) < 1 for record in routes.values())
        model.save_pretrained(str(tmp_path))
        loaded = PeftModel.from_pretrained(build_base("llama"), str(tmp_path)).eval()
        assert torch.equal(loaded(ids).logits, logits)


def test_all_of_its_weights_train_and_none_of_the_base() -> None:
    model = fitted("swiglu").train()
    model.set_adapter("default")
    model(tokens(2, 12), labels=tokens(2, 12)).loss.backward()
    assert all(
        branch.gate.weight.grad.abs().sum() > 0 and branch.up.weight.grad.abs().sum() > 0
        for branch in branches(model)
    )
    ffn = decoder_layers(model)[0].mlp
    before = ffn.gate_proj.weight.clone()
    with torch.no_grad():
        branches(model)[0].gate.weight.add_(1.0)
    assert torch.equal(ffn.gate_proj.weight, before)


@pytest.mark.parametrize("executor", ["gathered", "rows", "decode"])
def test_every_executor_gives_what_training_computes(executor: str) -> None:
    model, ids = fitted("swiglu"), tokens(2, 12, seed=3)
    with torch.no_grad():
        with state_of(model).override(executor="masked"):
            wanted = model(ids).logits
        if executor == "decode":
            assert gap(decoded(model, ids), wanted) < 1e-4
        else:
            with state_of(model).override(executor=executor):
                assert gap(model(ids).logits, wanted) < 1e-4


def decoded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    past, logits = None, []
    for position in range(ids.shape[1]):
        out = model(ids[:, position : position + 1], past_key_values=past, use_cache=True)
        logits.append(out.logits)
        past = out.past_key_values
    return torch.cat(logits, dim=1)


def test_an_offloaded_base_gives_its_neurons_too() -> None:
    wanted = fitted("swiglu")
    model = fitted("swiglu", cpu_offload(build_base("llama"), execution_device=torch.device("cpu")))
    ids = tokens(2, 20, seed=9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted(ids).logits)


def test_weights_of_neurons_are_the_rows_of_the_bases_projections() -> None:
    ffn = copy.deepcopy(decoder_layers(build_base("llama"))[0].mlp)
    ffn.gate_proj.bias = torch.nn.Parameter(torch.randn(64))
    branch = NeuronBranch(None, ffn, 32, 16)
    branch.neurons.copy_(torch.arange(0, 64, 4))
    (gate, gate_bias), (up, up_bias) = branch.input_weights()
    assert gap(gate, ffn.gate_proj.weight[::4]) < 1e-6
    assert gap(gate_bias, ffn.gate_proj.bias[::4]) < 1e-6
    assert gap(up, ffn.up_proj.weight[::4]) < 1e-6 and not up_bias.any()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma", {}),  # another activation
        ("gpt2", {}),  # no gate
        ("olmo2", {}),  # no norm in front
        ("llama", {"target": "attention"}),
        ("llama", {"branch": "lowrank"}),
        ("llama", {"branch_rank": 65}),  # wider than the FFN
    ],
)
def test_other_branches_and_ffns_begin_as_they_were_drawn(
    family: str, fields: dict[str, Any]
) -> None:
    config = DepthRouteConfig(layers=[1], branch="swiglu", branch_rank=16)
    config = DepthRouteConfig(**(config.to_dict() | fields))
    model = get_depth_routed_model(build_base(family), config)
    assert neurons_to_copy(routings_of(model)[0], "default") is None

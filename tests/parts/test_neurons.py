"""`branch="neurons"`: some of the FFN's own neurons, with an output of their own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import EXTENDED, FAMILY_NAMES, build_base, build_routed, decoder_layers, tokens
from peft import PeftModel
from protocol import gap
from safetensors.torch import load_file, save_file

from hf_depthroute import (
    DepthRouteConfig,
    fit_router,
    get_depth_routed_model,
    record_routes,
    route_cost,
)
from hf_depthroute.adapter.files import AdapterMismatchError
from hf_depthroute.base.families import find_family
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.inference.fitting import fit_branches
from hf_depthroute.parts.fused import SHARED_ROWS
from hf_depthroute.parts.neurons import NeuronBranch, NeuronStep, neurons_of
from hf_depthroute.routing.stack import routings_of, state_of

TEXT = [{"input_ids": tokens(8, 32, seed=seed)} for seed in (5, 6)]


def build(**fields: Any) -> Any:
    return build_routed("llama", branch="neurons", branch_rank=16, **fields)


def branches(model: Any) -> list[Any]:
    return [routing.depth_route_branch["default"] for routing in routings_of(model)]


@pytest.mark.parametrize("family", [*FAMILY_NAMES, *EXTENDED])
def test_with_all_neurons_and_the_ffns_own_output_it_is_the_ffn_of_every_family_that_it_takes(
    family: str,
) -> None:
    base: Any = build_base(family)
    row, layer = find_family(base), decoder_layers(base)[1]
    ffn = getattr(layer, row.ffn)
    if (count := neurons_of(ffn)) is None:
        with pytest.raises(ConfigError, match="use branch='lowrank'"):
            get_depth_routed_model(base, DepthRouteConfig(layers=[1], branch="neurons"))
        return
    norm = None if row.ffn_norm is None else getattr(layer, row.ffn_norm)
    branch = NeuronBranch(norm, ffn, 32, count).eval()
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        branch.down.weight.copy_(branch.outputs(torch.arange(count)).T)
        bias = branch.output().bias
        branch.down.bias.copy_(torch.zeros(32) if bias is None else bias)
        wanted = ffn(x if norm is None else norm(x))
        assert gap(branch(x), wanted) < 1e-5
        assert branch._may_read(x.device)  # so that it computes its neurons alone
        with branch._maps()[0].register_forward_hook(lambda *_: None):
            assert gap(branch(x), wanted) < 1e-5  # and where it may not, all of them
        some = NeuronBranch(norm, ffn, 32, count // 2).eval()
        some.choose(torch.rand(count, generator=torch.Generator().manual_seed(2)))
        hidden = branch.features(branch.normed(x))
        assert gap(some.features(some.normed(x)), hidden[..., some.neurons]) < 1e-5


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "nemotron", "phi", "phi3", "glm", "starcoder2", "gpt_neox",
               "gpt_neox_sequential", "falcon", "falcon_new", "falcon_sequential"]
)  # fmt: skip
def test_with_all_of_them_a_routed_model_computes_what_its_base_does(family: str) -> None:
    count = 128 if family == "gpt2" else 64
    model = build_routed(family, layers=[1, 2], branch="neurons", branch_rank=count)
    ids = tokens(3, 12, seed=3)
    with torch.no_grad():
        for branch in branches(model):
            branch.down.weight.copy_(branch.outputs(torch.arange(count)).T)
            if branch.output().bias is not None:
                branch.down.bias.copy_(branch.output().bias)
        with model.disable_adapter():
            wanted = model(ids).logits
        with record_routes(model) as trace:
            assert gap(model(ids).logits, wanted) < 1e-4
        assert not all(record.mask.all() for record in trace.values())
        assert gap(decoded(model, ids), wanted[:, 4:]) < 1e-4


@pytest.mark.parametrize("executor", ["gathered", "rows"])
def test_every_executor_gives_what_training_computes(executor: str) -> None:
    model, ids = build(), tokens(2, 12, seed=3)
    with torch.no_grad():
        with state_of(model).override(executor="masked"):
            wanted = model(ids).logits
        with state_of(model).override(executor=executor):
            assert gap(model(ids).logits, wanted) < 1e-4
        step, past = [], None
        for position in range(ids.shape[1]):
            out = model(ids[:, position : position + 1], past_key_values=past, use_cache=True)
            step.append(out.logits)
            past = out.past_key_values
        assert gap(torch.cat(step, 1), wanted) < 1e-4


def test_only_the_output_trains_and_nothing_of_the_base_is_copied() -> None:
    model = build()
    held = {
        name.split("default.")[-1]
        for name, p in model.named_parameters()
        if "depth_route_branch" in name
    }
    assert held == {"down.weight", "down.bias"}
    model.train()
    model(tokens(2, 12), labels=tokens(2, 12)).loss.backward()
    assert all(branch.down.weight.grad.abs().sum() > 0 for branch in branches(model))
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".mlp." in name)


def test_a_fit_takes_the_neurons_with_the_most_energy_and_explains_more_than_the_first_ones() -> (
    None
):
    base = build_base("llama")
    with torch.no_grad():
        decoder_layers(base)[2].mlp.down_proj.weight[:, 40:] *= 5
    model = get_depth_routed_model(
        base, DepthRouteConfig(layers=[2], gate="none", branch="neurons", branch_rank=16)
    )
    missed = fit_branches(model, TEXT)[2]
    (branch,) = branches(model)
    assert (branch.neurons >= 40).all() and len(branch.neurons.unique()) == 16
    assert missed < 0.75


def test_neurons_that_cost_nothing_are_not_chosen() -> None:
    base = build_base("llama")
    ffn = decoder_layers(base)[2].mlp
    with torch.no_grad():
        ffn.down_proj.weight[1:, 40:] *= 5  # of the stream's first channel alone is anything read
        ffn.down_proj.weight[0, 40:] = 0
    model = get_depth_routed_model(
        base, DepthRouteConfig(layers=[2], gate="none", branch="neurons", branch_rank=16)
    )
    (branch,) = branches(model)
    x_Nd, weight_N = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)), torch.ones(64)
    metric_dd = torch.zeros(32, 32)
    metric_dd[0, 0] = 1.0
    branch.choose(branch.energy(x_Nd, weight_N))
    assert (branch.neurons >= 40).all()
    branch.choose(branch.energy(x_Nd, weight_N, metric_dd))
    assert (branch.neurons < 40).all()


def test_what_was_fitted_is_saved_and_loads(tmp_path: Path) -> None:
    base = build_base("llama")
    config = DepthRouteConfig(layers="all", branch="neurons")
    model = fit_router(copy.deepcopy(base), TEXT * 2, keep=0.5, config=config, rounds=1)
    model.save_pretrained(str(tmp_path))
    loaded: Any = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
    assert model.peft_config["default"].branch_rank == 16
    assert any((branch.neurons != torch.arange(16)).any() for branch in branches(loaded))
    ids = tokens(2, 20, seed=9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("wrong", [-1, 64])
def test_a_file_with_neurons_that_the_ffn_does_not_have_is_refused(
    wrong: int, tmp_path: Path
) -> None:
    build(layers=[1]).save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith("neurons"))
    tensors[name][0] = wrong
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"weights_hash": None}))
    with pytest.raises(
        AdapterMismatchError, match="negative index" if wrong < 0 else "neurons that the base"
    ):
        PeftModel.from_pretrained(build_base("llama"), str(tmp_path))


def test_weights_that_may_not_be_read_are_called() -> None:
    """A hook on a projection of the base sees the call, and changes what the branch computes."""
    model, ids = build(layers=[1]), tokens(2, 12, seed=3)
    with torch.no_grad():
        before = model(ids).logits
        gate = decoder_layers(model)[1].mlp.gate_proj
        handle = gate.register_forward_hook(lambda module, args, out: out * 0.5)
        (branch,) = branches(model)
        changed = branch.features(torch.ones(1, 32))
        handle.remove()
        assert gap(changed, branch.features(torch.ones(1, 32))) > 1e-3
        assert torch.equal(model(ids).logits, before)
        # The kept rows follow.
        model.base_model.model.model.layers[1].mlp.gate_proj.weight.mul_(2.0)
        assert gap(model(ids).logits, before) > 1e-3


@torch.no_grad()
def decoded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    past, logits = model(input_ids=ids[:, :4]).past_key_values, []
    for position in range(4, ids.shape[1]):
        logits.append(model(input_ids=ids[:, position : position + 1], past_key_values=past).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("batch", [1, 3, SHARED_ROWS + 1])
def test_decoding_reads_copies_of_the_bases_rows_and_gives_what_a_pass_gives(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, calls = build(), tokens(batch, 16, seed=4), []
    for name in ("__call__", "both"):
        run = getattr(NeuronStep, name)
        monkeypatch.setattr(
            NeuronStep, name, lambda *args, run=run, name=name: calls.append(name) or run(*args)
        )
    with torch.no_grad():
        assert gap(decoded(model, ids), model(ids).logits[:, 4:]) < 1e-4
    assert ("both" in calls) == (1 < batch <= SHARED_ROWS)
    assert "__call__" in calls or batch == 3


@pytest.mark.parametrize("name", ["gate_proj", "down_proj", ""])
def test_what_is_watched_is_called_in_decoding_too(name: str) -> None:
    """A hook on the FFN or on a part of it counts, whether it is there before the first step or
    comes between two."""
    model, ids = build(layers=[1]), tokens(3, 16, seed=4)
    plain = decoded(model, ids)
    watched = decoder_layers(model)[1].mlp.get_submodule(name)
    with torch.no_grad():
        handle = watched.register_forward_hook(lambda module, args, out: out * 0.5)
        assert gap(decoded(model, ids), model(ids).logits[:, 4:]) < 1e-4
        assert gap(decoded(model, ids), plain) > 1e-3
        handle.remove()
    past = model(input_ids=ids[:, :4]).past_key_values
    with torch.no_grad():
        for position in range(4, 16):
            if position == 10:
                handle = watched.register_forward_hook(lambda module, args, out: out * 0.5)
            last = model(input_ids=ids[:, position : position + 1], past_key_values=past).logits
    handle.remove()
    assert gap(last, plain[:, -1:]) > 1e-3


def test_it_is_counted() -> None:
    lowrank, neurons = (
        build_routed("llama", branch=b, branch_rank=16, budget=0.5) for b in ("lowrank", "neurons")
    )
    more = route_cost(neurons).flops_routed - route_cost(lowrank).flops_routed
    per_token = 2 * 0.5 * 3 * 16 * 32  # half of the tokens of three layers: one more map of 16 x 32
    assert more == pytest.approx(per_token * 1024, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"target": "attention"}, "made of the FFN"), ({"branch_rank": 65}, "at most 64")],
)
def test_what_it_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_depth_routed_model(
            build_base("llama"), DepthRouteConfig(**({"branch": "neurons"} | fields))
        )


class Packed(torch.nn.Module):
    """A linear map that holds no parameter and takes bfloat16 alone, as AWQ's kernel on a CPU."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("packed", linear.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        return torch.nn.functional.linear(x, self.packed)


def test_of_a_base_without_parameters_the_neurons_are_those_of_the_base_with_them() -> None:
    chosen = []
    for packs in (False, True):
        base: Any = build_base("llama", dtype=torch.bfloat16)
        if packs:
            for layer in decoder_layers(base):
                for name in ("gate_proj", "up_proj", "down_proj"):
                    setattr(layer.mlp, name, Packed(getattr(layer.mlp, name)))
        config = DepthRouteConfig(layers=[2], gate="none", branch="neurons", branch_rank=16)
        model = get_depth_routed_model(base, config)
        fit_branches(model, TEXT)
        (branch,) = branches(model)
        chosen.append(branch.neurons.tolist())
    assert chosen[0] == chosen[1]

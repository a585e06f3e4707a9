"""Routers over a base in 4 or 8 bits: they train, skip, decode and load as over any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CONFIGS, decoder_layers, logits, randomised, routed, tokens
from peft import PeftModel
from training import backward, make_trainer, rows, stacked, step_logs
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig
from transformers.utils.import_utils import (
    is_bitsandbytes_available,
    is_optimum_quanto_available,
    is_torchao_available,
)

from hf_depthroute import record_routes, replay_routes, route_cost
from hf_depthroute.inference.fitting import fit_branches
from hf_depthroute.routing.stack import routings_of

Load = Callable[[], Any]


def _torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _torchao_float8() -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return TorchAoConfig(Float8WeightOnlyConfig())


def _bitsandbytes_8bit() -> Any:
    # Without columns of outliers, which are found among the rows that come together.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def _bitsandbytes_4bit() -> Any:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


def _quanto_int8() -> Any:
    return QuantoConfig(weights="int8")


INSTALLED = {
    "torchao_int8": (_torchao_int8, is_torchao_available(), "pip install torchao"),
    "torchao_float8": (_torchao_float8, is_torchao_available(), "pip install torchao"),
    "bitsandbytes_8bit": (
        _bitsandbytes_8bit,
        is_bitsandbytes_available(),
        "pip install bitsandbytes",
    ),
    "quanto_int8": (_quanto_int8, is_optimum_quanto_available(), "pip install optimum-quanto"),
    "bitsandbytes_4bit": (
        _bitsandbytes_4bit,
        is_bitsandbytes_available(),
        "pip install bitsandbytes",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised")
    kind, config = CONFIGS["llama"]
    # Bitsandbytes packs blocks of 64 on a CPU.
    sizes = config().to_dict() | {"hidden_size": 64, "head_dim": 16}
    randomised(kind(type(config())(**sizes)), "sdpa", torch.float32, seed=0).save_pretrained(
        path / "base"
    )
    return path


@pytest.fixture(params=INSTALLED)
def load(request: pytest.FixtureRequest, folder: Path) -> Load:
    """A function that loads the base in few bits."""
    config, installed, remedy = INSTALLED[request.param]
    if not installed:
        pytest.skip(f"needs {remedy}")

    def from_folder() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder / "base", quantization_config=config(), device_map="cpu", dtype=torch.bfloat16
        )

    return from_folder


@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
def test_a_quantised_base_is_routed_and_really_skips(load: Load, kind: str) -> None:
    base = load()
    weight = decoder_layers(base)[1].mlp.gate_proj.weight
    assert type(weight) is not torch.nn.Parameter  # in few bits
    plain = logits(base)
    model = routed(base, kind)
    expected = logits(model)
    assert not torch.equal(expected, plain)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    seen: list[int] = []
    layer = decoder_layers(model)[2]
    layer.mlp.register_forward_hook(
        lambda module, args, out: seen.append(args[0].shape[:-1].numel())
    )
    with record_routes(model) as trace:
        assert torch.equal(logits(model), expected)
    chosen, every = int(trace[2].mask.sum()), trace[2].mask.numel()
    assert seen == [every if kind == "attention" else chosen] and 0 < chosen < every
    assert {p.dtype for n, p in model.named_parameters() if ".depth_route_" in n} == {torch.float32}
    ids = tokens(1, 6)
    text = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    steps = ids
    for _ in range(5):  # without a cache
        steps = torch.cat([steps, model(steps, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(text, steps)


def test_an_adapter_trains_over_a_quantised_base_and_loads_again(
    load: Load, tmp_path: Path
) -> None:
    model = routed(load(), "jepa").train()
    backward(model, stacked(rows(4, padding=(0, 3))))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert (
                parameter.grad is not None
                and parameter.grad.isfinite().all()
                and parameter.grad.any()
            ), name
        else:
            assert parameter.grad is None, name
    model.zero_grad()
    trainer, _ = make_trainer(model, rows(8), tmp_path, num_train_epochs=3)
    trainer.train()
    first, last = step_logs(trainer)[0], step_logs(trainer)[-1]
    assert last["loss"] < first["loss"]
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), logits(model.eval()))


def test_an_adapter_of_the_whole_base_loads_onto_the_quantised_one(
    load: Load, folder: Path, tmp_path: Path
) -> None:
    model = routed(AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(), tmp_path).eval()
    with record_routes(model) as trace:
        expected = logits(model)
    with replay_routes(again, trace):  # a decision that tips over is no rounding error
        found = logits(again)
    assert not torch.equal(expected, found)
    assert torch.nn.functional.cosine_similarity(expected, found, dim=-1).mean() > 0.95


def test_a_quantised_base_costs_what_it_costs_in_full(load: Load, folder: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    assert route_cost(routed(load())) == route_cost(routed(whole))


def _as_matrix(module: Any) -> torch.Tensor:
    """What a linear map without bias multiplies with, `[out, in]`, from a call of it."""
    return module(torch.eye(module.in_features, dtype=torch.bfloat16)).T.float()


@torch.no_grad()
def test_a_branch_of_neurons_is_that_of_the_dequantised_weights(load: Load) -> None:
    model = routed(load(), branch="neurons", branch_rank=16)
    fit_branches(model, [{"input_ids": tokens(8, 32, seed=5)}])
    draw = torch.Generator().manual_seed(3)
    for routing in routings_of(model):
        branch, ffn = routing.depth_route_branch["default"], routing.ffn
        gate, up, down = (_as_matrix(getattr(ffn, f"{n}_proj")) for n in ("gate", "up", "down"))
        x = torch.randn(64, routing.width, generator=draw).to(torch.bfloat16)
        hidden = torch.nn.functional.silu(x.float() @ gate.T) * (x.float() @ up.T)
        pairs = {
            "features": (branch.features(x), hidden[:, branch.neurons]),
            "outputs": (branch.outputs(branch.neurons), down.T[branch.neurons]),
            "energy": (
                branch.energy(x, torch.ones(64)),
                hidden.square().sum(0) * down.square().sum(0),
            ),
        }
        for name, (found, expected) in pairs.items():
            off = (found.float() - expected).norm() / expected.norm()
            assert off < 0.02, (name, float(off))


def test_sft_trains_routers_over_a_quantised_base(load: Load, tmp_path: Path) -> None:
    """The trainer of TRL casts trainable weights of such a model to bfloat16."""
    pytest.importorskip("trl")
    from sft_runs import sft, token_data

    trainer = sft(tmp_path, token_data(), model=load())
    trainer.train()
    assert all(entry["loss_budget"] >= 0 and entry["loss"] > 0 for entry in step_logs(trainer))
    with torch.no_grad():
        assert trainer.model.eval()(tokens(2, 9)).logits.isfinite().all()

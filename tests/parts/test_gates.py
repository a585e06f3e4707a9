"""Gates: the paper's parameter counts, float32 scores,
and weights that depend on the seed alone."""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import FAMILY_NAMES, GATES, build_base
from peft import get_peft_model_state_dict
from places import HELPERS, ROOT
from transformers import GPT2Config, GPT2LMHeadModel

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.parts.gates import GATES as GATE_CLASSES
from hf_depthroute.parts.gates import TargetProjection

BASE_PARAMETERS = 156_640_640
# METHODS section 1: gate fields -> trainable, total
PARAMETERS = {
    "mlp": ({"gate": "mlp"}, 828_484, 157_469_124),
    "jepa": ({"gate": "jepa"}, 849_348, 157_530_948),
    "mlp, cost-matched": ({"gate": "mlp", "gate_hidden": 189}, 902_956, 157_543_596),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_parameter_counts_are_the_papers(case: str) -> None:
    fields, trainable, total = PARAMETERS[case]
    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=151_665, n_positions=768, n_embd=640, n_layer=12, n_head=10, n_inner=2560
            )
        )
        assert sum(p.numel() for p in model.parameters()) == BASE_PARAMETERS
        routed = get_depth_routed_model(
            model, DepthRouteConfig(layers="last:4", branch_rank=80, **fields)
        )
    counts = [(p.numel(), p.requires_grad) for p in routed.parameters()]
    shown_trainable, shown_total = (
        sum(n for n, trains in counts if trains),
        sum(n for n, _ in counts),
    )
    # The paper counts one target projection and compares it with a total that includes the frozen
    # one.
    assert (shown_trainable, shown_total) == (trainable, total)


def test_defaults_are_the_papers_sizes() -> None:
    model = get_depth_routed_model(build_base("gpt2"), DepthRouteConfig())
    config = model.peft_config["default"]
    assert (config.gate_hidden, config.branch_rank) == (32 // 4, 32 // 8)
    assert (config.context_dim, config.summary_dim, config.action_dim, config.gate_temperature) == (
        128,
        64,
        16,
        2.0,
    )


def adapter(gate: str, seed: int = 0, family: str = "llama") -> dict[str, torch.Tensor]:
    config = DepthRouteConfig(
        layers=[1, 3], gate=gate, seed=seed, context_dim=16, summary_dim=8, action_dim=4
    )
    return get_peft_model_state_dict(get_depth_routed_model(build_base(family), config))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_float32_whatever_the_input(gate: str, dtype: torch.dtype) -> None:
    module = GATE_CLASSES[gate](32, DepthRouteConfig(gate=gate))
    x = torch.randn(2, 5, 32)
    plain = module(x)["scores"]
    scores = module(x.to(dtype))["scores"]
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, plain, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        scores = module(x.to(dtype))["scores"]
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, plain, atol=0.05)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapter_weights_are_float32_over_a_low_precision_base(
    gate: str, dtype: torch.dtype
) -> None:
    model = get_depth_routed_model(build_base("llama", dtype=dtype), DepthRouteConfig(gate=gate))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if "depth_route" not in n} == {dtype}


def test_jepa_gate_gives_the_stream_no_gradient() -> None:
    x = torch.randn(2, 5, 32, requires_grad=True)
    scores = GATE_CLASSES["jepa"](32, DepthRouteConfig(gate="jepa"))(x)["scores"]
    assert torch.autograd.grad(scores.sum(), x, allow_unused=True) == (None,)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("gate", GATES)
def test_gates_take_any_length(gate: str, length: int) -> None:
    assert GATE_CLASSES[gate](32, DepthRouteConfig(gate=gate))(torch.zeros(3, length, 32))[
        "scores"
    ].shape == (
        3,
        length,
    )


def test_target_projection_is_orthogonal_frozen_and_shared() -> None:
    model = get_depth_routed_model(
        build_base("llama"), DepthRouteConfig(gate="jepa", layers="all", summary_dim=8)
    )
    projections = [module for module in model.modules() if isinstance(module, TargetProjection)]
    assert len(projections) == 1
    assert not projections[0].weight.requires_grad
    assert torch.allclose(projections[0].weight @ projections[0].weight.T, torch.eye(8), atol=1e-5)


def test_layers_draw_different_gates() -> None:
    weights = [value for key, value in adapter("mlp").items() if key.endswith("gate.hidden.weight")]
    assert len(weights) == 2
    assert not torch.equal(*weights)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("gate", GATES)
def test_seed_alone_decides_the_initial_weights(gate: str) -> None:
    torch.manual_seed(1)
    first = digest(adapter(gate))
    torch.manual_seed(2)
    state = copy.copy(torch.get_rng_state())
    get_depth_routed_model(build_base("llama"), DepthRouteConfig(gate=gate))
    torch.set_rng_state(state)
    assert digest(adapter(gate)) == first
    assert digest(adapter(gate, seed=1)) != first


def test_same_seed_gives_the_same_weights_in_another_process() -> None:
    expected = [digest(adapter(gate, 3, family)) for family in FAMILY_NAMES for gate in GATES]
    program = (
        "import torch; torch.manual_seed(77); from test_gates import *;"
        "print(*[digest(adapter(g, 3, f)) for f in FAMILY_NAMES for g in GATES])"
    )
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import sys; sys.path[:0] = "
                f"{[str(HELPERS), str(Path(__file__).parent), str(ROOT)]}; {program}"
            ),
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.stdout.split() == expected

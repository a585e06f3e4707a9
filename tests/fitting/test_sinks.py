"""Attention sinks: a token whose stream is 100 times the others' runs in full,
and nothing is fitted to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build_base, decoder_layers, tokens
from protocol import gap

from hf_depthroute import DepthRouteConfig, fit_router, record_routes, set_budget
from hf_depthroute.inference.fitting import fit_branches
from hf_depthroute.parts.regression import norms_and_sinks, separating_unit
from hf_depthroute.training.record import remembered

SINK, MAKER = 1, 1  # the token that becomes one, and the layer whose FFN makes it


@torch.no_grad()
def base_with_sinks(size: float = 100.0) -> Any:
    """A tiny Llama in which the FFN of layer `MAKER` multiplies the stream of token `SINK`,
    as large models do."""
    base: Any = build_base("llama")
    embeddings, mlp = base.model.embed_tokens.weight, decoder_layers(base)[MAKER].mlp
    embeddings[:, 0] = 0.0
    embeddings[SINK, 0] = 2.0
    for layer in decoder_layers(base)[: MAKER + 1]:  # no other token gets there
        layer.self_attn.o_proj.weight[0] = 0.0
    decoder_layers(base)[0].mlp.down_proj.weight[0] = 0.0
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.weight[0] = 0.0
        projection.weight[0, 0] = 1.0
    mlp.down_proj.weight[:, 0] = 0.0
    mlp.down_proj.weight[0] = 0.0
    mlp.down_proj.weight[1, 0] = size
    return base


def text(rows: int = 32, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    ids = tokens(rows, 64, seed=seed)
    ids[:, 0] = SINK
    return [{"input_ids": part} for part in ids.split(8)]


@torch.no_grad()
def dense_sinks(base: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    states = base(ids, output_hidden_states=True).hidden_states
    return {
        index: norms_and_sinks(state.flatten(0, 1))[1] for index, state in enumerate(states[1:-1])
    }


def test_the_base_has_sinks() -> None:
    found = dense_sinks(base_with_sinks(), text()[0]["input_ids"])
    assert not found[0].any()
    for index in (1, 2):
        assert found[index].view(8, 64)[:, 0].all() and found[index].sum() == 8


@pytest.mark.parametrize("gate", ["mlp", "affine"])
def test_sinks_run_in_full_on_any_text(gate: str) -> None:
    """Also at another budget, and in a prompt of one token, as in a longer one."""
    config = DepthRouteConfig(layers="all", gate=gate)
    model = fit_router(base_with_sinks(), text(), keep=0.5, config=config)
    routed = [index for index in model.peft_config["default"].gated_layers() if index >= MAKER]
    assert routed
    ids = text(8, seed=7)[0]["input_ids"]
    for budget in (0.5, 0.2):
        set_budget(model, budget)
        with torch.no_grad(), record_routes(model) as trace:
            logits = model(ids).logits
        for index in routed:
            assert trace[index].mask[:, 0].all()
            assert trace[index].mask.float().mean() < 0.9
        with torch.no_grad():
            assert gap(model(ids[:, :1]).logits, logits[:, :1]) < 1e-3
    layers = remembered(model, "default").training["fit"]["layers"]  # type: ignore[index]
    assert layers[str(routed[0])]["sinks"] > 0


def test_what_is_fitted_does_not_follow_the_sinks() -> None:
    """The branch explains the other tokens as well as it does where no sink is in the text."""

    def explained(base: Any) -> float:
        model = fit_router(
            base, text(), keep=0.5, config=DepthRouteConfig(layers="all", gate="affine"), rounds=1
        )
        layer = remembered(model, "default").training["fit"]["layers"][str(MAKER)]  # type: ignore[index]
        return float(layer["branch_r2"])

    assert explained(base_with_sinks()) == pytest.approx(explained(base_with_sinks(1.0)), abs=0.1)


def test_a_static_layer_is_fitted_to_all_tokens_and_a_gated_one_to_all_but_the_sinks() -> None:
    from hf_depthroute import get_depth_routed_model

    found = {}
    for gate in ("none", "mlp"):
        config = DepthRouteConfig(layers=[2], gate=gate)
        found[gate] = fit_branches(get_depth_routed_model(base_with_sinks(), config), text())[2]
    assert found["none"] != found["mlp"]
    assert found["mlp"] < 1


def test_a_separating_unit_tells_two_kinds_of_rows_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, apart = torch.randn(500, 12, generator=generator), torch.randn(5, 12, generator=generator)
    apart[:, 3] += 12.0
    weight, bias = separating_unit(rows, apart)
    assert float((rows @ weight + bias).max()) < -19 and float((apart @ weight + bias).min()) > 19
    mixed = torch.cat([rows, rows[:1] + 0.01])  # one of them is like the others
    weight, bias = separating_unit(rows, mixed[-1:])
    assert float(mixed[-1] @ weight + bias) > 19


def test_a_row_that_looks_like_the_others_is_left_there() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, apart = torch.randn(500, 12, generator=generator), torch.randn(5, 12, generator=generator)
    apart[:4, 3] += 12.0
    apart[4, 3] = -1.0  # below the others' middle: it was told apart by all of them
    weight, bias = separating_unit(rows, apart)
    assert float((rows @ weight + bias).max()) < -19
    assert float((apart[:4] @ weight + bias).min()) > 19 and float(apart[4] @ weight + bias) < -19


@pytest.mark.parametrize("seed", range(10))
def test_at_most_a_hundredth_of_the_others_is_taken(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, apart = (
        torch.randn(500, 12, generator=generator),
        torch.randn(50, 12, generator=generator),
    )
    weight, bias = separating_unit(rows, apart)  # no different at all
    assert float((rows @ weight + bias > 0).float().mean()) <= 0.01
    rows[:220, 3] += 10.0  # two kinds, and what is apart lies a little behind the second
    apart = rows[:4].clone()
    apart[:, 3] = 11.0 + rows[:220, 3].max()
    weight, bias = separating_unit(rows, apart)
    assert float((rows @ weight + bias > 0).float().mean()) <= 0.01

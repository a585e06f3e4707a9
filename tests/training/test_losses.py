"""Routing losses and diagnostics against their formulas, on small tensors with padding."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from made_traces import REAL, TAU, average, made_trace, p_bar, real_entries
from models import FAMILY_NAMES, GATES, build_routed, tokens
from torch import nn

from hf_depthroute.execution.masked import masked_update
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import record_routes, replay_routes
from hf_depthroute.training.losses import (
    LOSSES,
    diagnostics,
    mean_probability,
    routing_losses,
    token_mean,
)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    dot, norms = (a * b).sum().item(), math.sqrt((a * a).sum().item() * (b * b).sum().item())
    return dot / norms


def test_every_row_of_the_table_has_a_formula_in_the_tests() -> None:
    defaults = {
        "lm": 1.0,
        "jepa": 1.0,
        "util": 1.0,
        "rank": 0.2,
        "budget": 1.0,
        "alive": 0.5,
        "predictor": 1.0,
    }
    # The others are off until a weight turns them on.
    oracle = ("cgs", "z", "distill")  # in test_oracle_losses.py
    # in test_losses_baselines.py
    others = ("capacity", "depth", "squared_depth", "similarity", "recoverability", "exit")
    assert {name: term.weight for name, term in LOSSES.items()} == defaults | dict.fromkeys(
        (*oracle, *others), 0.0
    )


def test_budget_loss_is_the_mean_squared_distance_of_p_bar_from_the_budget() -> None:
    trace = made_trace(budget=0.25)
    expected = average([(p_bar(trace, i) - 0.25) ** 2 for i in (1, 3)])
    assert routing_losses(trace)["budget"].item() == pytest.approx(expected, abs=1e-6)


def test_budget_loss_uses_the_budget_that_each_record_was_made_with() -> None:
    trace = made_trace(budget=0.25)
    trace[3].budget = 0.9
    expected = average([(p_bar(trace, 1) - 0.25) ** 2, (p_bar(trace, 3) - 0.9) ** 2])
    assert routing_losses(trace)["budget"].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("alive_min", [0.05, 0.5, 0.95])
def test_alive_loss_is_the_mean_shortfall_of_p_bar(alive_min: float) -> None:
    trace = made_trace()
    expected = average([max(0.0, alive_min - p_bar(trace, i)) for i in (1, 3)])
    loss = routing_losses(trace, weights={"alive": 1.0}, alive_min=alive_min)["alive"]
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert (expected > 0) == (alive_min > 0.05)


def test_jepa_loss_is_the_mean_cosine_distance_of_both_predictions() -> None:
    trace = made_trace(outcomes=True)
    distances = []
    for index in (1, 3):
        r = trace[index]
        for b in range(2):
            for t in range(4):
                if REAL[b, t]:
                    full = 1 - cosine(r.q_full[b, t], r.z_full[b, t])
                    distances.append(full + 1 - cosine(r.q_cheap[b, t], r.z_cheap[b, t]))
    assert routing_losses(trace)["jepa"].item() == pytest.approx(average(distances), abs=1e-6)


def test_jepa_loss_is_zero_for_perfect_predictions_and_four_for_opposite_ones() -> None:
    trace = made_trace(outcomes=True)
    for record in trace.values():
        record.extras |= {"q_full": 3 * record.z_full, "q_cheap": 0.1 * record.z_cheap}
    assert routing_losses(trace)["jepa"].item() == pytest.approx(0.0, abs=1e-6)
    for record in trace.values():
        record.extras |= {"q_full": -record.z_full, "q_cheap": -record.z_cheap}
    assert routing_losses(trace)["jepa"].item() == pytest.approx(4.0, abs=1e-6)


def test_jepa_loss_does_not_apply_without_predicted_outcomes() -> None:
    assert set(routing_losses(made_trace())) == {"budget", "alive"}


def test_lm_loss_is_the_one_given() -> None:
    lm = torch.tensor(3.5)
    assert routing_losses(made_trace(), lm=lm)["lm"] == lm
    assert "lm" not in routing_losses(made_trace())


def test_terms_come_multiplied_by_their_weights() -> None:
    trace, lm = made_trace(outcomes=True), torch.tensor(3.5)
    plain = routing_losses(
        trace, lm, {"lm": 1.0, "jepa": 1.0, "budget": 1.0, "alive": 1.0}, alive_min=0.9
    )
    weighted = routing_losses(
        trace, lm, {"lm": 2.0, "jepa": 0.25, "budget": 3.0, "alive": 0.5}, alive_min=0.9
    )
    for name, factor in {"lm": 2.0, "jepa": 0.25, "budget": 3.0, "alive": 0.5}.items():
        torch.testing.assert_close(weighted[name], factor * plain[name])
    assert all(value > 0 for value in plain.values())


def test_missing_weights_are_the_defaults() -> None:
    trace = made_trace(outcomes=True)
    for name, value in routing_losses(trace, weights={"budget": 7.0}, alive_min=0.9).items():
        one = routing_losses(trace, weights={name: 1.0}, alive_min=0.9)[name]
        torch.testing.assert_close(value, (7.0 if name == "budget" else LOSSES[name].weight) * one)


def test_a_term_with_weight_zero_is_left_out() -> None:
    weights = {"lm": 0.0, "jepa": 0.0, "alive": 0.0}
    assert set(routing_losses(made_trace(outcomes=True), torch.tensor(1.0), weights)) == {"budget"}


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        KeyError, match="unknown loss 'budgte'; known: lm, jepa, util, rank, budget"
    ):
        routing_losses(made_trace(), weights={"budgte": 1.0})


def test_token_mean_averages_real_tokens_per_layer() -> None:
    values = torch.arange(16.0).view(2, 2, 4)
    result = token_mean(values, torch.stack([REAL, REAL]))
    assert result.tolist() == pytest.approx(
        [average([0, 1, 2, 3, 5, 6]), average([8, 9, 10, 11, 13, 14])]
    )


def test_token_mean_without_a_single_token_is_zero() -> None:
    assert token_mean(torch.ones(2, 2, 4), torch.zeros(2, 2, 4, dtype=torch.bool)).tolist() == [
        0.0,
        0.0,
    ]


def test_token_mean_weighs_tokens_and_not_sequences() -> None:
    values, real = (
        torch.tensor([[[1.0, 1.0, 1.0], [5.0, 9.0, 9.0]]]),
        torch.tensor([[[1, 1, 1], [1, 0, 0]]]).bool(),
    )
    assert token_mean(values, real).item() == 2.0


def test_without_a_token_mask_every_token_is_real() -> None:
    trace = made_trace(token_mask=None)
    torch.testing.assert_close(
        mean_probability(trace), torch.stack([trace[1].probs.mean(), trace[3].probs.mean()])
    )


def test_padding_gets_no_gradient_from_any_loss() -> None:
    trace = made_trace(outcomes=True)
    sum(routing_losses(trace, alive_min=0.95).values()).backward()
    for record in trace.values():
        for leaf in (record.scores, record.q_full, record.q_cheap):
            assert leaf.grad is not None
            assert (leaf.grad[~REAL] == 0).all()
            assert (leaf.grad[REAL] != 0).any()


def test_targets_of_the_jepa_loss_get_no_gradient() -> None:
    model = build_routed("llama", "jepa").train()
    with record_routes(model) as trace:
        model(tokens(2, 8))
    for record in trace.values():
        assert not record.z_full.requires_grad and not record.z_cheap.requires_grad
        assert record.q_full.requires_grad and record.q_cheap.requires_grad


def test_jepa_targets_are_the_projected_stream_after_either_path() -> None:
    model = build_routed("llama", "jepa", layers=[3]).train()
    [routing], seen = routings_of(model), {}
    layer = model.get_base_model().model.layers[3]
    layer.post_attention_layernorm.register_forward_pre_hook(
        lambda _, args: seen.update(a=args[0].detach())
    )
    layer.mlp.register_forward_hook(lambda _, __, out: seen.update(ffn=out.detach()))
    with record_routes(model) as trace:
        model(tokens(2, 8))
    weight = routing.depth_route_target["default"].weight
    cheap = seen["a"] + routing.depth_route_branch["default"](seen["a"])
    torch.testing.assert_close(trace[3].z_full, F.linear(seen["a"] + seen["ffn"], weight))
    torch.testing.assert_close(trace[3].z_cheap, F.linear(cheap, weight))
    torch.testing.assert_close(weight @ weight.T, torch.eye(weight.shape[0]), atol=1e-5, rtol=0)


def test_diagnostics_are_the_statistics_of_the_real_tokens() -> None:
    trace = made_trace(outcomes=True)
    result = diagnostics(trace)
    names = ("full_ratio", "gate_prob", "score_var", "q_distance", "q_cosine")
    assert list(result) == [f"{name}/layer_{index}" for index in (1, 3) for name in names]
    for index in (1, 3):
        record = trace[index]
        u = real_entries(record.scores)
        expected = {
            "full_ratio": average(real_entries(record.mask.float())),
            "gate_prob": p_bar(trace, index),
            "score_var": average([(x - average(u)) ** 2 for x in u]),
            "q_distance": average(
                real_entries((record.q_full - record.q_cheap).square().sum(-1).sqrt())
            ),
            "q_cosine": average(
                [
                    cosine(record.q_full[b, t], record.q_cheap[b, t])
                    for b in range(2)
                    for t in range(4)
                    if REAL[b, t]
                ]
            ),
        }
        for name in names:
            assert float(result[f"{name}/layer_{index}"]) == pytest.approx(
                expected[name], abs=1e-5
            ), name


def test_diagnostics_hold_no_graph() -> None:
    assert not any(value.requires_grad for value in diagnostics(made_trace(outcomes=True)).values())


def test_the_straight_through_mask_has_hard_values_and_the_gradient_of_p() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 4, 3, generator=generator)
    grad_out = torch.randn(2, 4, 3, generator=generator)
    scores = torch.randn(2, 4, generator=generator).requires_grad_()
    mask = scores > 0
    full, cheap = nn.Linear(3, 3), nn.Linear(3, 3)
    after_full, after_cheap = a + full(a), a + cheap(a)
    out = masked_update(a, after_full, after_cheap, mask, torch.sigmoid(scores / TAU))
    assert torch.equal(out, torch.where(mask[..., None], a + full(a), a + cheap(a)))
    out.backward(grad_out)
    p = torch.sigmoid(scores / TAU)
    expected = (grad_out * (after_full - after_cheap)).sum(-1) * p * (1 - p) / TAU
    torch.testing.assert_close(scores.grad, expected)
    # The unchosen path gets no gradient through the stream: the derivative of the chosen one is
    # exactly the mask.
    torch.testing.assert_close(
        cheap.weight.grad, (grad_out * ~mask[..., None]).flatten(0, 1).T @ a.flatten(0, 1)
    )


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_lm_gradient_reaches_the_scores_only_through_p(family: str, gate: str) -> None:
    model, ids = build_routed(family, gate).train(), tokens(2, 8)
    with record_routes(model) as trace:
        loss = model(input_ids=ids, labels=ids).loss
    last = trace[3]
    through_p = torch.autograd.grad(loss, last.probs, retain_graph=True)[0]
    through_u = torch.autograd.grad(loss, last.scores)[0]
    tau = model.peft_config["default"].gate_temperature
    torch.testing.assert_close(through_u, through_p * last.probs * (1 - last.probs) / tau)
    assert (through_u != 0).any()


def test_the_gradient_of_p_is_the_first_order_effect_of_the_other_path() -> None:
    """Moving one token's output by `eps * (full - cheap)` moves the loss by `eps` times the
    gradient of its `p`."""
    model, ids = build_routed("gpt2", layers=[3]).double().train(), tokens(2, 8)

    def lm_loss() -> torch.Tensor:  # in float64 throughout; the model's own loss is float32
        return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    layer, eps = model.get_base_model().transformer.h[3], 1e-6
    [routing] = routings_of(model)
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        layer.ln_2.register_forward_pre_hook(lambda _, args: seen.update(a=args[0].detach())),
        layer.mlp.register_forward_hook(lambda _, __, out: seen.update(ffn=out.detach())),
    ]
    with record_routes(model) as trace:
        loss = lm_loss()
    for hook in hooks:
        hook.remove()
    gradient = torch.autograd.grad(loss, trace[3].probs)[0]
    difference = seen["ffn"] - routing.depth_route_branch["default"](seen["a"]).detach()

    for b, t in ((0, 0), (0, 5), (1, 3)):
        shift = torch.zeros_like(difference)
        shift[b, t] = eps * difference[b, t]
        hook = layer.register_forward_hook(lambda _, __, out, shift=shift: out + shift)
        with torch.no_grad(), replay_routes(model, trace):
            moved = (lm_loss() - loss).item() / eps
        hook.remove()
        assert moved == pytest.approx(gradient[b, t].item(), rel=1e-3)
        assert moved != 0


def test_a_loop_of_ones_own_holds_the_budget_that_the_adapter_has() -> None:
    """A global budget is held over all layers, whatever each of them does."""
    model = build_routed("llama", budget_scope="global").train()
    ids = tokens(2, 8)
    with record_routes(model) as trace:
        lm = model(input_ids=ids, labels=ids).loss
    found = routing_losses(trace, lm, {"budget": 1.0})["budget"]
    means = mean_probability(trace)
    assert found.item() == pytest.approx((means.mean() - 0.5).square().item(), abs=1e-7)
    assert found.item() != pytest.approx((means - 0.5).square().mean().item(), abs=1e-7)

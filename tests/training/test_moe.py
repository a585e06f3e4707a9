"""Mixture-of-experts bases: their routers observed, balanced by losses and by a bias,
and their load counted."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import build_routed, tokens
from moe.balance import BalanceBias, expert_load
from moe.plots import plot_expert_load
from moe.routers import (
    ROWS,
    RouterTrace,
    load_balance,
    observe_routers,
    router_z,
    routers,
)
from training import make_trainer, rows, step_logs
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.routing.trace import record_routes
from hf_depthroute.training.losses import LOSSES
from hf_depthroute.training.objective import RoutingArguments, RoutingObjective

EXPERTS, CHOSEN, DEPTH = 4, 2, 3
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": CHOSEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "olmoe": lambda: OlmoeConfig(**_SIZES, num_experts=EXPERTS),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=EXPERTS),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_SIZES, num_experts=EXPERTS, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SIZES, num_experts=EXPERTS, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True
    ),
}

# The worked example of METHODS section 5: eight tokens, four experts.
EXAMPLE = torch.tensor(
    [
        [0.60, 0.10, 0.20, 0.10],
        [0.55, 0.05, 0.30, 0.10],
        [0.15, 0.10, 0.65, 0.10],
        [0.50, 0.10, 0.30, 0.10],
        [0.20, 0.10, 0.60, 0.10],
        [0.45, 0.10, 0.35, 0.10],
        [0.10, 0.10, 0.70, 0.10],
        [0.10, 0.60, 0.20, 0.10],
    ]
)


def build(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    with torch.no_grad():
        for router in routers(model).values():
            router.weight.normal_(std=1.0)  # far from even
    return model.eval()


def skewed(shift: float = 2.0) -> PreTrainedModel:
    """A model whose routers prefer experts 0 and 1: their logits are `shift` above the
    others', on average."""
    model = build("olmoe")

    def prefer(router: Any, args: tuple[torch.Tensor]) -> None:
        mean = args[0].flatten(0, -2).mean(0)
        router.weight.mul_(0.1)
        router.weight[:2] += shift * mean / mean.square().sum()

    hooks = [router.register_forward_pre_hook(prefer) for router in routers(model).values()]
    with torch.no_grad():
        model(tokens(16, 12))
    for hook in hooks:
        hook.remove()
    return model


def mean_imbalance(model: Any, ids: torch.Tensor) -> float:
    return sum(one.imbalance for one in expert_load(model, [{"input_ids": ids}]).values()) / DEPTH


def made_routers(
    probs: torch.Tensor, choices: int = 1, token_mask: torch.Tensor | None = None
) -> RouterTrace:
    """A trace of one layer whose router has these probabilities."""
    trace, logits = RouterTrace(), probs.log().requires_grad_()
    trace.keep(0, (logits, probs.topk(choices).values, probs.topk(choices).indices))
    trace.token_mask = token_mask
    return trace


def batch_with_padding() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, 5:] = 0
    mask[2, :2] = 0
    return {"input_ids": tokens(3, 8) * mask, "attention_mask": mask}


# Observation


@pytest.mark.parametrize("family", CONFIGS)
def test_observed_logits_are_those_of_every_layer_with_experts(family: str) -> None:
    model, ids = build(family), tokens(2, 8)
    expected = model(ids)
    with observe_routers(model) as trace:
        output = model(ids, output_router_logits=True)
    assert torch.equal(output.logits, expected.logits)
    assert list(trace) == list(range(DEPTH))
    for index, logits in trace.items():
        assert torch.equal(logits, output.router_logits[index])
        assert torch.equal(trace.chosen[index], logits.softmax(-1).topk(CHOSEN).indices)
        assert logits.requires_grad


def test_layers_without_experts_have_no_router() -> None:
    config = CONFIGS["qwen3_moe"]()
    config.mlp_only_layers = [1]
    model = AutoModelForCausalLM.from_config(config)
    assert list(routers(model)) == [0, 2]


def test_a_model_without_experts_is_refused() -> None:
    sizes = {name: value for name, value in _SIZES.items() if "experts" not in name}
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layer with experts"):
        routers(LlamaForCausalLM(LlamaConfig(**sizes)))


def test_observation_ends_with_the_block() -> None:
    model = build("olmoe")
    with observe_routers(model):
        pass
    assert not any(router._forward_hooks for router in routers(model).values())
    assert not model.model._forward_pre_hooks


def test_routers_are_observed_under_an_adapter() -> None:
    model = build("olmoe")
    with observe_routers(model) as plain:
        model(**batch_with_padding())
    routed = get_depth_routed_model(model, DepthRouteConfig(layers=[2]))
    with observe_routers(routed) as trace, routed.disable_adapter():
        routed(**batch_with_padding())
    for index in plain:
        assert torch.equal(plain[index], trace[index])
        assert torch.equal(plain.real(index), trace.real(index))
        assert plain.real(index).sum() == 24 - 5


# Losses


def test_balance_of_the_worked_example() -> None:
    assert load_balance(made_routers(EXAMPLE)).item() == pytest.approx(1.359375, abs=1e-6)


def test_balance_of_uniform_routers_is_one() -> None:
    eye = torch.eye(4).repeat(2, 1).clamp(min=1e-9)
    assert load_balance(made_routers(eye)).item() == pytest.approx(1.0, abs=1e-5)
    assert load_balance(made_routers(eye), dispatch="topk").item() == pytest.approx(1.0, abs=1e-5)


def test_balance_of_a_collapsed_router_is_the_number_of_experts() -> None:
    probs = torch.tensor([[1.0, 0, 0, 0]]).repeat(8, 1).clamp(min=1e-9)
    assert load_balance(made_routers(probs)).item() == pytest.approx(4.0, abs=1e-5)


def test_topk_dispatch_counts_all_pairs() -> None:
    # Second choices: t0 E2, t1 E2, t2 E0, t3 E2, t4 E0, t5 E2, t6 E0 or a tie, t7 E2.
    trace = made_routers(EXAMPLE, choices=2)
    counts = torch.zeros(4).index_add_(0, trace.chosen[0].flatten(), torch.ones(16))
    expected = 4 * (counts / 16 * EXAMPLE.mean(0)).sum().item()
    assert load_balance(trace, dispatch="topk").item() == pytest.approx(expected, abs=1e-6)
    assert load_balance(trace).item() == pytest.approx(1.359375, abs=1e-6)


def test_dispatch_fractions_carry_no_gradient() -> None:
    trace = made_routers(EXAMPLE)
    gradient = torch.autograd.grad(load_balance(trace), trace[0])[0]
    f = torch.tensor([0.5, 0.125, 0.375, 0.0])
    by_hand = 4 * EXAMPLE * (f - (EXAMPLE * f).sum(-1, keepdim=True)) / 8
    torch.testing.assert_close(gradient, by_hand)


def test_padding_counts_in_no_router_loss() -> None:
    padded = torch.cat([EXAMPLE, torch.tensor([[0.01, 0.01, 0.01, 0.97]] * 4)])
    real = torch.arange(12).view(2, 6) < 8
    trace = made_routers(padded, token_mask=real)
    assert load_balance(trace).item() == pytest.approx(1.359375, abs=1e-6)
    torch.testing.assert_close(router_z(trace), router_z(made_routers(EXAMPLE)), atol=1e-7, rtol=0)
    (load_balance(trace) + router_z(trace)).backward()
    assert (trace[0].grad[8:] == 0).all()


def test_router_z_is_the_mean_squared_logsumexp() -> None:
    trace, logits = RouterTrace(), torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    trace.keep(0, (logits, logits[:, :1], torch.zeros(2, 1, dtype=torch.long)))
    expected = (math.log(math.e + math.e**2 + 1) ** 2 + math.log(3) ** 2) / 2
    assert router_z(trace).item() == pytest.approx(expected, abs=1e-6)


def test_balance_agrees_with_transformers_for_one_expert_per_token() -> None:
    from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

    logits = torch.randn(24, EXPERTS)
    trace, mask = RouterTrace(), batch_with_padding()["attention_mask"]
    trace.keep(0, (logits, logits[:, :1], logits.argmax(-1, keepdim=True)))
    trace.token_mask = mask.bool()
    theirs = load_balancing_loss_func((logits,), EXPERTS, top_k=1, attention_mask=mask)
    torch.testing.assert_close(load_balance(trace), theirs)


@pytest.fixture
def rows_of_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in ROWS.items():
        monkeypatch.setitem(LOSSES, name, row)


def test_joint_training_with_balance_evens_the_load(rows_of_losses: None, tmp_path: Path) -> None:
    ids, examples = tokens(16, 12), rows(16)

    def trained(**fields: Any) -> tuple[float, Any]:
        model = get_depth_routed_model(skewed(), DepthRouteConfig(layers=[2], budget=1.0))
        model.requires_grad_(True)
        sizes = {"num_train_epochs": 10, "per_device_train_batch_size": 8, "learning_rate": 3e-3}
        trainer, _ = make_trainer(model, examples, tmp_path, **sizes, **fields)
        trainer.train()
        return mean_imbalance(model, ids), step_logs(trainer)

    without, _ = trained()
    with_loss, logs = trained(loss_weights={"balance": 1.0, "router_z": 0.01})
    assert with_loss < 0.9 * without
    assert logs[-1]["loss_balance"] < 0.9 * logs[0]["loss_balance"]
    assert logs[-1]["loss_router_z"] < logs[0]["loss_router_z"]


def test_router_losses_pass_through_a_checkpoint() -> None:
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        model = build("olmoe").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with observe_routers(model) as trace:
            model(**batch_with_padding(), use_cache=False)
            assert trace.with_graph
            loss = load_balance(trace) + router_z(trace)
        loss.backward()
        return [router.weight.grad for router in routers(model).values()]

    for plain, recomputed in zip(gradients(False), gradients(True)):
        torch.testing.assert_close(plain, recomputed)


# The load of the experts


def test_load_is_the_share_of_the_real_tokens_pairs() -> None:
    model, batch = build("olmoe"), batch_with_padding()
    with observe_routers(model) as trace:
        model(**batch)
    real = batch["attention_mask"].flatten().bool()
    load = expert_load(model.train(), [batch])
    assert model.training  # as it was
    for index, one in load.items():
        chosen = trace.chosen[index][real].flatten().tolist()
        expected = [chosen.count(expert) / len(chosen) for expert in range(EXPERTS)]
        assert one.assigned.tolist() == pytest.approx(expected)
        assert torch.equal(one.assigned, one.ran)
        assert one.imbalance == pytest.approx(max(expected) * EXPERTS)


def test_load_sums_batches() -> None:
    model = build("mixtral")
    one, two = {"input_ids": tokens(1, 8, 1)}, {"input_ids": tokens(3, 8, 2)}
    both = expert_load(model, iter([one, two]))
    for index, load in both.items():
        parts = [expert_load(model, [batch])[index].assigned for batch in (one, two)]
        torch.testing.assert_close(load.assigned, 0.25 * parts[0] + 0.75 * parts[1])


def test_load_after_routing_leaves_out_the_dropped_pairs() -> None:
    config = DepthRouteConfig(
        layers=[1, 2], target="experts", gate="none", branch="none", dropped_experts=[[0], [1, 3]]
    )
    model = get_depth_routed_model(build("olmoe"), config).eval()
    load = expert_load(model, [batch_with_padding()])
    for index, dropped in ((0, []), (1, [0]), (2, [1, 3])):
        expected = load[index].assigned.clone()
        expected[dropped] = 0
        torch.testing.assert_close(load[index].ran, expected)


def test_load_after_routing_agrees_with_the_trace() -> None:
    config = DepthRouteConfig(layers=[1], target="experts", gate="mlp", branch="none", budget=0.5)
    model, batch = get_depth_routed_model(build("olmoe"), config).eval(), batch_with_padding()
    with record_routes(model) as trace, torch.no_grad():
        model(**batch)
    load = expert_load(model, [batch])
    assert float(load[1].ran.sum()) == pytest.approx(trace.full_ratio()[1], abs=1e-6)
    assert (load[1].ran <= load[1].assigned).all()


def test_a_plot_of_the_load(tmp_path: Path) -> None:
    load = {
        index: one.assigned.tolist()
        for index, one in expert_load(build("olmoe"), [batch_with_padding()]).items()
    }
    plot_expert_load(tmp_path / "load.png", {"before": load, "after": load})
    assert (tmp_path / "load.png").stat().st_size > 1000


# Balancing by a bias


@pytest.mark.parametrize("family", CONFIGS)
def test_a_bias_of_zero_changes_nothing(family: str) -> None:
    model, ids = build(family), tokens(2, 8)
    expected = model(ids).logits
    with BalanceBias(model).applied():
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_bias_changes_the_choice_and_not_the_weights(family: str) -> None:
    model, ids = build(family), tokens(2, 8)
    bias = BalanceBias(model)
    bias.bias[:, 3] = 10.0  # everyone takes expert 3
    router, seen = routers(model)[1], {}
    with bias.applied():
        router.register_forward_hook(lambda _, args, out: seen.update(out=out))
        model(ids)
    logits, weights, chosen = seen["out"]
    assert (chosen == 3).any(-1).all()
    picked = logits.softmax(-1).gather(-1, chosen)
    if family in ("mixtral", "qwen3_moe"):
        picked = picked / picked.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, picked)


def test_no_gradient_passes_through_the_bias() -> None:
    model, ids = build("olmoe").train(), tokens(2, 8)
    bias = BalanceBias(model)
    with bias.applied():
        model(ids, labels=ids).loss.backward()
    assert not bias.bias.requires_grad
    assert all(router.weight.grad is not None for router in routers(model).values())
    assert not list(bias.parameters())


def test_an_update_moves_biases_against_the_sign_of_the_load_error() -> None:
    model, batch = build("olmoe").train(), batch_with_padding()
    bias = BalanceBias(model, step=0.01)
    with observe_routers(model) as trace, bias.applied():
        model(**batch)
    real = batch["attention_mask"].flatten().bool()
    counts = torch.stack(
        [F.one_hot(trace.chosen[i][real], EXPERTS).sum((0, 1)) for i in range(DEPTH)]
    ).float()
    assert torch.equal(bias.sent, counts)
    bias.update()
    torch.testing.assert_close(bias.bias, -0.01 * torch.sign(counts - counts.mean(1, keepdim=True)))
    before = bias.bias.clone()
    bias.update()  # nothing was sent since
    assert torch.equal(bias.bias, before)


def test_inference_does_not_count_towards_an_update() -> None:
    model = build("olmoe")
    bias = BalanceBias(model)
    with bias.applied():
        model(tokens(2, 8))
    assert (bias.sent == 0).all()


def test_updates_even_the_load() -> None:
    model, ids = skewed().train(), tokens(16, 12)
    bias = BalanceBias(model, step=0.01)
    assert mean_imbalance(model, ids) > 1.6
    with bias.applied():
        for _ in range(60):
            with torch.no_grad():
                model(ids)
            bias.update()
        assert mean_imbalance(model, ids) < 1.2
    assert mean_imbalance(model, ids) > 1.6  # the model itself is as it was


def test_a_recomputed_forward_pass_leaves_the_update_the_same() -> None:
    def moved(checkpointing: bool) -> torch.Tensor:
        model = build("olmoe").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        bias, batch = BalanceBias(model), batch_with_padding()
        with bias.applied():
            model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
            bias.update()
        return bias.bias

    assert torch.equal(moved(False), moved(True))


def test_the_bias_is_stored_alone() -> None:
    model = build("olmoe")
    bias = BalanceBias(model)
    bias.bias.normal_()
    state = copy.deepcopy(bias.state_dict())
    assert list(state) == ["bias"]
    restored = BalanceBias(model)
    restored.load_state_dict(state)
    assert torch.equal(restored.bias, bias.bias)
    assert "bias" not in {name.split(".")[-1] for name in model.state_dict() if "gate" in name}


def test_router_losses_without_a_graph_are_refused(rows_of_losses: None) -> None:
    objective = RoutingObjective(
        RoutingArguments(loss_weights={"balance": 0.01}), build_routed("olmoe").train()
    )
    with objective.watching() as watched:
        with torch.no_grad():
            objective.model(tokens(2, 8))
        assert isinstance(watched.observed[observe_routers], RouterTrace)
        with pytest.raises(ValueError, match="'use_reentrant': False"):
            ROWS["balance"].compute(watched)

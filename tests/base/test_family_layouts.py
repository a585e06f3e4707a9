"""What else has to know how a layer adds its sublayers up: oracle, logits, early exit,
importance, cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family_cases import IDS, LAYOUTS, TARGETS, every_family, run, shared
from models import EXTENDED, build_base, build_routed, decoder_layers
from moe.balance import BalanceBias
from moe.routers import load_balance, observe_routers, router_z
from protocol import gap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_depthroute import record_routes, replay_routes, route_cost
from hf_depthroute.base.cache import kv_cache_bytes
from hf_depthroute.base.families import FAMILIES, find_family
from hf_depthroute.base.lm_head import LMHead
from hf_depthroute.inference.importance import layer_importance
from hf_depthroute.routing.trace import RouteTrace
from hf_depthroute.training.forks import fork_losses, observe_prefix, run_forks
from hf_depthroute.training.fused_loss import fused_loss_obstacle


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.parametrize("target", TARGETS)
def test_forks_repeat_the_model_itself(family: str, target: str) -> None:
    """The oracle's trunk ends in the loss of the forward pass, padding included,
    and a fork in that of another run."""
    model = build_routed(family, "mlp" if target == "ffn" else target, layers=[1, 2]).train()
    real = torch.ones_like(IDS)
    real[0, :4] = 0
    labels = IDS.masked_fill(real == 0, -100)
    labels[0, 4] = -100  # padding predicts nothing
    with observe_prefix(model) as prefix, record_routes(model) as trace:
        loss = model(IDS, attention_mask=real, labels=labels).loss
        with prefix.replaying():
            trunk, made = run_forks(
                prefix, on_policy=True, fork=lambda full, cheap, out: torch.stack([full, cheap])
            )
            losses, counted = fork_losses(prefix, trunk, labels)
    assert float(losses[0].sum() / counted.sum()) == pytest.approx(float(loss.detach()), abs=1e-5)
    assert not trace[1].mask[0, :4].any()
    flipped = {
        i: replace(r, mask=torch.ones_like(r.mask), token_mask=None) for i, r in trace.items()
    }
    for layer in (2,):  # the last routed layer: what it decides changes nothing below
        follow = RouteTrace({i: flipped[i] if i == layer else r for i, r in trace.items()})
        with torch.no_grad(), replay_routes(model, follow):
            other = model(IDS, attention_mask=real, labels=labels).loss
        fork = losses[made[layer][0]]
        assert float(fork.sum() / counted.sum()) == pytest.approx(float(other), abs=1e-5)


@pytest.mark.parametrize(
    "family", [name for name in EXTENDED if FAMILIES[EXTENDED[name][0]].logits]
)
def test_logits_are_read_out_as_the_model_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = build_base(family)
    with torch.no_grad():
        out = base(IDS, output_hidden_states=True)
        last = base.model(IDS, output_hidden_states=True)
        lm_head = LMHead(base)
        # The last hidden state is normed already.
        monkeypatch.setattr(LMHead, "norm", torch.nn.Identity())
        changed = lm_head(last.last_hidden_state)
    torch.testing.assert_close(changed, out.logits)
    if lm_head.change is not None:
        assert gap(base.lm_head(last.last_hidden_state), out.logits) > 1e-2
        assert "after the LM head" in str(fused_loss_obstacle(base))


@pytest.mark.parametrize("family", ["granite", "cohere2", "gemma2", "olmo2"])
def test_early_exit_is_as_sure_as_the_models_own_logits(family: str) -> None:
    model = build_routed(
        family, gate="exit", target="block", branch="none", gate_input="residual", layers=[2]
    )
    with model.disable_adapter(), torch.no_grad():
        stream = model(IDS, output_hidden_states=True).hidden_states[2]
        logits = LMHead(model)(stream)
    _, trace = run(model)
    torch.testing.assert_close(trace[2].scores, -logits.softmax(-1).amax(-1))


@pytest.mark.parametrize("family", LAYOUTS)
def test_importance_is_the_cosine_of_the_streams(family: str) -> None:
    base = build_base(family)
    found = layer_importance(base, [{"input_ids": IDS}], "attention")
    row, layer = find_family(base), decoder_layers(base)[0]
    with torch.no_grad():
        hidden = base(IDS, output_hidden_states=True).hidden_states
        silent = getattr(layer, row.ffn).register_forward_hook(
            lambda m, a, out: torch.zeros_like(out)
        )
        # The first layer without its FFN.
        after = base(IDS, output_hidden_states=True).hidden_states[1]
        silent.remove()
    cosine = torch.cosine_similarity(hidden[0].double(), after.double(), dim=-1)
    assert found[0] == pytest.approx(float((1 - cosine).mean()), abs=1e-6)


def test_balancing_refuses_routers_that_choose_in_groups() -> None:
    base = build_base("deepseek_v3")
    with pytest.raises(ValueError, match="a bias of their own"):
        BalanceBias(base)
    with observe_routers(base) as found:
        base(IDS)
    with pytest.raises(ValueError, match="in groups"):
        load_balance(found)
    assert bool(torch.isfinite(router_z(found)))


@every_family
def test_counted_cost_is_what_runs(family: str) -> None:
    """FLOPs of the base's matrix products at one position, and bytes of its KV cache."""
    model = shared(family, "ffn")
    with model.disable_adapter(), torch.no_grad():
        # Window: 4.
        caches = {
            length: model(IDS[:, :length], use_cache=True).past_key_values for length in (3, 7)
        }
        if hasattr(model.config, "num_experts_per_tok"):
            model.get_base_model().set_experts_implementation("eager")
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(IDS[:, :1], use_cache=False)
    counts = {name: sum(by_op.values()) for name, by_op in counter.get_flop_counts().items()}
    # Transformers 5.17 computes the rotary angles by a matrix product, which is no weight's.
    angles = sum(flops for name, flops in counts.items() if name.endswith("rotary_emb"))
    assert (
        route_cost(model, batch_size=3, length=1).flops_dense == counter.get_total_flops() - angles
    )
    for length, cache in caches.items():
        assert route_cost(model, batch_size=3, length=length).kv_bytes == kv_cache_bytes(cache)

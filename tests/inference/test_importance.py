"""Importance of layers and experts: exact on a plain model, the same with an adapter around it."""

import pytest
import torch
from models import DEPTH, FAMILY_NAMES, build_base, decoder_layers, routed, tokens

from hf_depthroute.base.families import find_family
from hf_depthroute.inference.importance import expert_importance, layer_importance, least_important

PADDED = {"input_ids": tokens(2, 8), "attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3])}
MOE_FAMILIES = tuple(name for name in FAMILY_NAMES if "moe" in name or name == "mixtral")


def streams(model, batch):
    """`(h, a, out)` of every decoder layer, `[B, T, d]` each,
    from forward passes cut off after each layer."""
    layers, family = decoder_layers(model), find_family(model)
    seen = {}

    def keep(index, name):
        def hook(module, args, kwargs, output):
            seen[index, name] = output[0] if isinstance(output, tuple) else output
            if name == "out":
                seen[index, "h"] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = []
    for i, layer in enumerate(layers):
        attention = getattr(layer, family.attention)
        for module, name in ((layer, "out"), (attention, "update")):
            handles.append(module.register_forward_hook(keep(i, name), with_kwargs=True))
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return [
        (seen[i, "h"], seen[i, "h"] + seen[i, "update"], seen[i, "out"]) for i in range(len(layers))
    ]


def distance(before, after, real):
    return (
        (1 - torch.cosine_similarity(before.double(), after.double(), dim=-1))[real].mean().item()
    )


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_importance_is_one_minus_the_mean_cosine_over_real_tokens(family):
    model = build_base(family)
    real = PADDED["attention_mask"].bool()
    expected = {"attention": [], "ffn": [], "block": []}
    for h, a, out in streams(model, PADDED):
        expected["attention"].append(distance(h, a, real))
        expected["ffn"].append(distance(a, out, real))
        expected["block"].append(distance(h, out, real))
    for target, values in expected.items():
        found = layer_importance(model, [PADDED], target)
        assert list(found) == list(range(DEPTH))
        assert list(found.values()) == pytest.approx(values, rel=1e-6)


def test_a_layer_that_changes_nothing_has_importance_zero():
    model = build_base("llama")
    layer = decoder_layers(model)[2]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for target in ("attention", "ffn", "block"):
        found = layer_importance(model, [PADDED], target)
        assert found[2] == pytest.approx(0, abs=1e-12)
        assert least_important(found, 1) == [2]


def test_batches_count_by_their_tokens():
    model = build_base("llama")
    parts = [{"input_ids": tokens(1, 12, seed=1)}, {"input_ids": tokens(3, 12, seed=2)}]
    whole = [{"input_ids": torch.cat([part["input_ids"] for part in parts])}]
    one, two = (layer_importance(model, batches, "ffn") for batches in (parts, whole))
    assert list(one.values()) == pytest.approx(list(two.values()), rel=1e-6)


@pytest.mark.parametrize("target", ["attention", "ffn", "block"])
def test_a_routed_model_is_measured_as_its_base(target):
    expected = layer_importance(build_base("llama"), [PADDED], target)
    model = routed(build_base("llama"), target=target).train()
    assert layer_importance(model, [PADDED], target) == pytest.approx(expected)
    assert model.training
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in decoder_layers(model)
    )


def test_bad_arguments_are_refused():
    model = build_base("llama")
    with pytest.raises(ValueError, match="target='mlp' must be one of: attention, ffn, block"):
        layer_importance(model, [PADDED], "mlp")
    empty = {"input_ids": tokens(1, 4), "attention_mask": torch.zeros(1, 4)}
    with pytest.raises(ValueError, match="no real token"):
        layer_importance(model, [empty], "ffn")
    with pytest.raises(ValueError, match="no mixture-of-experts layer"):
        expert_importance(model, [PADDED])


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_expert_importance_is_the_mean_routing_weight_over_real_tokens(family):
    model = build_base(family)
    routers = {
        i: getattr(layer, find_family(model).ffn).gate
        for i, layer in enumerate(decoder_layers(model))
    }
    seen = {}
    handles = [
        router.register_forward_hook(lambda module, args, output, i=i: seen.update({i: output}))
        for i, router in routers.items()
    ]
    with torch.no_grad():
        model(**PADDED)
    for handle in handles:
        handle.remove()
    found = expert_importance(model, [PADDED])
    assert list(found) == list(range(DEPTH))
    for index, (logits_NE, weights_NK, experts_NK) in seen.items():
        expected = torch.zeros(logits_NE.shape[1], dtype=torch.float64)
        for token in PADDED["attention_mask"].reshape(-1).nonzero().flatten():
            for weight, expert in zip(weights_NK[token], experts_NK[token]):
                expected[expert] += weight.double()
        assert torch.allclose(found[index], expected / PADDED["attention_mask"].sum())
    everywhere = torch.stack(list(found.values()))
    assert everywhere.sum(dim=1).max() <= 1 + 1e-6


def test_least_important_layers_come_in_layer_order():
    importance = {0: 0.9, 1: 0.1, 2: 0.5, 3: 0.1, 4: 0.05}
    assert least_important(importance, 3) == [1, 3, 4]
    assert least_important(importance, 2) == [1, 4]  # a tie goes to the earlier layer
    assert least_important(importance, 0) == []
    for count in (-1, 6):
        with pytest.raises(ValueError, match="must be from 0 to 5"):
            least_important(importance, count)

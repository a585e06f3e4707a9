"""The family table: one row is enough for a new family, and a family without a row is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    ATTENTIONS,
    FAMILY_NAMES,
    GATES,
    build_base,
    decoder_layers,
    randomised,
    routed,
    tokens,
)
from peft import PeftModel
from protocol import assert_free, assert_pinned, gap
from row_counts import assert_only_decided_rows_ran, counted_rows
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CwmConfig,
    CwmForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_depthroute import (
    DepthRouteConfig,
    get_depth_routed_model,
    record_routes,
    replay_routes,
    set_budget,
)
from hf_depthroute.adapter.base_check import describe_base
from hf_depthroute.base import projections
from hf_depthroute.base.families import (
    FAMILIES,
    Family,
    UnsupportedModelError,
    find_decoder,
    find_family,
    row_of,
)
from hf_depthroute.routing.trace import RouteTrace

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Families that are not in the table but share its layout.
NEW_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "cwm": lambda: CwmForCausalLM(CwmConfig(**SIZES, head_dim=8)),
    "hunyuan_v1_dense": lambda: HunYuanDenseV1ForCausalLM(
        HunYuanDenseV1Config(**SIZES, head_dim=8)
    ),
}
UNSUPPORTED: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    ),
    "falcon with alibi": lambda: FalconForCausalLM(
        FalconConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
        )
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
    "gpt2 with cross-attention": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True)
    ),
}


@pytest.fixture(params=NEW_FAMILIES)
def new_base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A random model of a family that only this test's row describes."""
    monkeypatch.setitem(FAMILIES, request.param, Family())
    return randomised(NEW_FAMILIES[request.param](), "sdpa", torch.float32, seed=0)


@torch.no_grad()
def run(model: PeftModel, **inputs: Any) -> tuple[torch.Tensor, RouteTrace]:
    with record_routes(model) as trace:
        return model(**inputs).logits, trace


@pytest.mark.parametrize("gate", GATES)
def test_one_row_adds_a_family(new_base: PreTrainedModel, gate: str, tmp_path: Path) -> None:
    ids = tokens(3, 12)
    with torch.no_grad():
        base_logits = new_base(ids).logits
    keys = list(new_base.state_dict())
    model = routed(new_base, gate)
    whole, trace = run(model, input_ids=ids)
    assert gap(whole, base_logits) > 0.1

    with counted_rows(model) as counts:
        run(model, input_ids=ids)
    assert_only_decided_rows_ran(counts)

    def decode(pinned: RouteTrace | None) -> tuple[torch.Tensor, RouteTrace]:
        cache, pieces = None, []
        for t in range(12):
            with torch.no_grad(), record_routes(model) as step:
                inputs = {
                    "input_ids": ids[:, t : t + 1],
                    "past_key_values": cache,
                    "use_cache": True,
                }
                if pinned is None:
                    out = model(**inputs)
                else:
                    with replay_routes(model, pinned.positions(t, t + 1)):
                        out = model(**inputs)
            cache = out.past_key_values
            pieces.append((out.logits, step))
        return torch.cat([piece[0] for piece in pieces], dim=1), RouteTrace.cat(
            [piece[1] for piece in pieces]
        )

    assert_pinned(gap(decode(trace)[0], whole), base_gap=0.0)
    assert_free(model, trace, decode(None)[1])

    model.save_pretrained(tmp_path)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(ids).logits, base_logits)
    set_budget(model, 1.0)
    assert torch.equal(run(model, input_ids=ids)[0], base_logits)
    base = model.unload()
    with torch.no_grad():
        assert torch.equal(base(ids).logits, base_logits)
    assert list(base.state_dict()) == keys
    assert torch.equal(run(PeftModel.from_pretrained(base, tmp_path), input_ids=ids)[0], whole)


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_model_is_refused_and_untouched(kind: str) -> None:
    model = UNSUPPORTED[kind]()
    classes = [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    values = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [set(vars(module)) for module in model.modules()]
    trains = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(UnsupportedModelError) as caught:
        get_depth_routed_model(model, DepthRouteConfig())
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == classes
    assert list(model.state_dict()) == keys
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert [parameter.requires_grad for parameter in model.parameters()] == trains


def test_refusal_lists_the_supported_families() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        get_depth_routed_model(UNSUPPORTED["bloom"](), DepthRouteConfig())
    for name in ("bloom", *FAMILIES):
        assert name in str(caught.value)


def test_module_without_a_config_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="supported families"):
        find_family(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_row_names_the_parts_of_the_layer(family: str) -> None:
    base = build_base(family)
    row = find_family(base)
    assert len(decoder_layers(base)) == len(getattr(find_decoder(base, row), row.layers)) == 4
    for layer in decoder_layers(base):
        for name in (row.attention_norm, row.attention, row.ffn_norm, row.ffn):
            assert isinstance(getattr(layer, name), torch.nn.Module)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_routed_layer_with_every_token_full_is_the_familys_layer(
    family: str, attention: str
) -> None:
    """Replaying an all-full decision runs the generic forward, not the base's own,
    and must equal it."""
    base, ids = build_base(family, attention), tokens(2, 8)
    with torch.no_grad():
        expected = base(ids).logits
    model = routed(base, layers="all")
    set_budget(model, 1.0)
    assert torch.equal(run(model, input_ids=ids)[0], expected)


def test_base_is_described_by_its_sizes_and_some_of_its_weights() -> None:
    base: Any = build_base("gpt2")
    description = describe_base(base)
    sampled = description.pop("sampled_weights")
    assert len(sampled) == 37 and sampled.keys() >= {"embeddings.weight", "h.3.mlp.c_fc.bias"}
    held = base.transformer.h[3].mlp.c_fc.bias.to(torch.bfloat16).tolist()
    assert sampled["h.3.mlp.c_fc.bias"] in held
    assert description == {
        "model_type": "gpt2",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "vocab_size": 64,
    }


@pytest.mark.parametrize("target", ["attention", "block"])
def test_family_without_known_queries_masks_its_attention_and_says_so(
    new_base: PreTrainedModel, target: str
) -> None:
    with pytest.warns(UserWarning, match="nothing is saved there"):
        model = routed(new_base, target=target)
    ids = tokens(3, 12)
    rows = []
    handle = decoder_layers(model)[1].self_attn.q_proj.register_forward_pre_hook(
        lambda _, x: rows.append(x[0].shape)
    )
    sparse, trace = run(model, input_ids=ids)
    handle.remove()
    assert rows == [(3, 12, 32)]
    assert 0 < int(trace[1].mask.sum()) < trace[1].mask.numel()
    with replay_routes(model, trace), torch.no_grad():
        assert gap(model.train()(ids).logits, sparse) < 1e-5


def test_gpt2_projects_the_chosen_queries_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its projection is fused, so no module's rows can be counted:
    the columns that are computed are."""
    ids, seen = tokens(3, 12), {"q": 0, "kv": 0}
    style = projections.STYLES["fused"]

    def counted(attention: Any, x: torch.Tensor, names: str) -> Any:
        parts = style.project(attention, x, names)
        seen[names] += sum(part.numel() for part in parts) // int(attention.embed_dim)
        return parts

    monkeypatch.setitem(projections.STYLES, "fused", replace(style, project=counted))
    model = routed(build_base("gpt2"), target="attention")
    seen.update(q=0, kv=0)
    _, trace = run(model, input_ids=ids)
    chosen = sum(int(record.mask.sum()) for record in trace.values())
    assert seen == {"q": chosen, "kv": 2 * 3 * ids.numel()}
    assert 0 < chosen < 3 * ids.numel()


def test_bidirectional_attention_is_refused() -> None:
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, use_bidirectional_attention=True
    )
    with pytest.raises(UnsupportedModelError, match="routing is causal"):
        row_of(config)

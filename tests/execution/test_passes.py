"""What a forward pass is told of its tokens: by masks of any length, by `run_in_full`,
by adapters that are active."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build_base, build_routed, decoder_layers, routed, tokens
from peft import PeftModel
from protocol import gap
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_depthroute import DepthRouteConfig, record_routes
from hf_depthroute.base.sublayers import hidden_of
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.execution.context import CONTEXT
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import full_depth, run_in_full

PROMPT, LENGTH, ROOM = 6, 9, 16


@torch.no_grad()
def in_steps(model: PeftModel, ids: torch.Tensor, cache: Any, columns: int | None) -> torch.Tensor:
    """Logits of a prompt, a token and two more, with masks of `columns` columns; None:
    as many as positions."""
    found, mask = [], torch.zeros(len(ids), ROOM, dtype=torch.long)
    for start, end in ((0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, LENGTH)):
        mask[:, start:end] = 1
        given = {"attention_mask": mask[:, : columns or end], "past_key_values": cache}
        found.append(model(ids[:, start:end], **given).logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"phases": "prefill"}, {"branch": "memory", "memory_width": 4, "memory_heads": 1}],
    ids=["all", "prefill", "memory"],
)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_a_mask_for_a_whole_cache_says_what_a_mask_of_what_was_read_says(
    family: str, fields: dict[str, Any], static: bool
) -> None:
    """transformers reads a mask's columns as positions,
    so one that was made for all of a cache is longer."""
    model, ids = build_routed(family, "mlp", **fields), tokens(2, LENGTH)

    def run(columns: int | None) -> torch.Tensor:
        cache = StaticCache(config=model.config, max_cache_len=ROOM) if static else DynamicCache()
        return in_steps(model, ids, cache, columns)

    assert gap(run(ROOM), run(None)) < 1e-5


def test_one_token_that_is_to_run_in_full_does() -> None:
    model = build_routed("llama", "mlp", phases="prefill")
    differ = 0
    for seed in range(5):
        ids, logits = tokens(1, LENGTH, seed), []
        for around in (run_in_full(model, torch.ones(1, 1, dtype=torch.bool)), full_depth(model)):
            cache = DynamicCache()
            with torch.no_grad():
                model(ids[:, :-1], past_key_values=cache)
                with around:
                    logits.append(model(ids[:, -1:], past_key_values=cache).logits)
        differ += gap(*logits) > 1e-5
    assert differ == 0


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_a_layer_that_is_called_by_itself_knows_nothing_of_the_pass_before(family: str) -> None:
    """Which tokens were real, and which adapter was on."""
    model: Any = build_routed(family, "mlp", layers=[1, 2])
    routing = routings_of(model)[0]
    layer = decoder_layers(model)[routing.layer_index]
    h, calls = torch.randn(2, 4, routing.width), []
    handle = layer.register_forward_pre_hook(
        lambda layer, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(tokens(2, 4), use_cache=False)
        handle.remove()
        (args, kwargs), *_ = calls
        given = {name: value for name, value in kwargs.items() if name != CONTEXT}
        given.pop("hidden_states", None)
        expected = hidden_of(layer(h, *args[1:], **given))
        model(tokens(1, 6), attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1]]))
        with record_routes(model) as trace:
            found = hidden_of(layer(h, *args[1:], **given))
        assert torch.equal(found, expected)
        assert trace[routing.layer_index].token_mask is None
        with model.disable_adapter():
            assert not torch.equal(hidden_of(layer(h, *args[1:], **given)), expected)


def test_adapters_with_other_tails_are_not_active_together() -> None:
    model = routed(build_base("llama"), "mlp", layers=[0, 1], phases="prefill", prompt_tail=1)
    model.add_adapter("other", DepthRouteConfig(layers=[2, 3], phases="prefill", prompt_tail=4))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match=r"one prompt_tail, not \[1, 4\]"):
        model(tokens(1, LENGTH))


def test_prompts_alone_are_told_from_text_by_the_cache() -> None:
    model, ids = build_routed("llama", "mlp", phases="prefill"), tokens(1, PROMPT)
    with pytest.raises(ConfigError, match="use_cache=False"):
        model.generate(input_ids=ids, max_new_tokens=2, use_cache=False)
    with pytest.raises(ConfigError, match="use_cache=False"):
        model.generate(ids, GenerationConfig(max_new_tokens=2, use_cache=False))
    with model.disable_adapter():
        model.generate(input_ids=ids, max_new_tokens=2, use_cache=False)


def test_drafted_tokens_are_not_read_as_a_prompt() -> None:
    """The first ones are verified in one pass with the prompt, whose end they would be."""
    model, ids = build_routed("llama", "mlp", phases="prefill", prompt_tail=4), tokens(1, PROMPT)
    for option in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": build_base("llama")}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))}: several drafted tokens"):
            model.generate(input_ids=ids, max_new_tokens=2, **option)
        with model.disable_adapter():
            model.generate(input_ids=ids, max_new_tokens=2, **option)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"phases": "prefill"}, {"granularity": "sequence"}, {"causal_rule": "running"}]
)
def test_a_model_that_checkpoints_gradients_generates_in_training_mode(
    fields: dict[str, Any], reentrant: bool
) -> None:
    """As a callback of a Trainer does. There is no gradient to save memory for, and without the KV
    cache every step would read one token alone."""
    model, ids = build_routed("llama", "mlp", **fields), tokens(2, PROMPT)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(input_ids=ids, **options)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert torch.equal(model.train().generate(input_ids=ids, **options), expected)


def test_a_mask_by_place_is_read_as_one_by_name() -> None:
    """`AutoModel` gives people the bare decoder."""
    model = build_routed("llama", "block", phases="prefill").get_base_model().model
    ids, mask = tokens(2, 20, seed=3), torch.ones(2, 20, dtype=torch.long)
    mask[0, 14:] = 0
    with torch.no_grad():
        by_name = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        by_place = model(ids, mask, use_cache=False).last_hidden_state
        alone = model(ids[:1, :14], use_cache=False).last_hidden_state
    torch.testing.assert_close(by_place, by_name)
    torch.testing.assert_close(by_place[:1, :14], alone, atol=1e-5, rtol=1e-5)

"""Outputs that are recorded by hooks have the shape that the base gives them,
and are those of every token."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import CONFIGS, EXTENDED, MOE_FAMILIES, build_base, decoder_layers, routed, tokens
from peft import PeftModel
from protocol import gap
from transformers.cache_utils import DynamicCache

from hf_depthroute.base.families import find_family
from hf_depthroute.base.sublayers import router_of
from hf_depthroute.routing.stack import state_of
from hf_depthroute.routing.trace import record_routes

KINDS: dict[str, dict[str, Any]] = {
    "ffn": {},
    "attention": {"target": "attention"},
    "block": {"target": "block"},
    "ffn of sequences": {"granularity": "sequence"},
    "block of sequences": {"target": "block", "granularity": "sequence"},
    "no ffn": {"gate": "none"},
    "no attention": {"gate": "none", "target": "attention", "branch": "none"},
    "no block": {"gate": "none", "target": "block"},
    "experts": {"target": "experts"},
}
NONE = ("llama", "experts")
NAMES = ("attentions", "router_logits", "hidden_states")
MASK = torch.ones(2, 9, dtype=torch.long)
MASK[0, :3] = 0


def built(family: str, kind: str) -> PeftModel:
    return routed(build_base(family, "eager"), layers=[1, 2], **KINDS[kind])


@torch.no_grad()
def recorded(model: Any, executor: str = "auto") -> list[tuple[torch.Tensor, ...]]:
    """Everything that is recorded of a padded prompt, of a training step,
    and of a prompt and two decoding steps."""
    asked = {
        f"output_{name}": True for name in NAMES if name != "router_logits" or has_routers(model)
    }
    ids, cache, found = tokens(2, 9), DynamicCache(config=model.config), []
    with (
        state_of(model).override(executor=executor)
        if isinstance(model, PeftModel)
        else nullcontext()
    ):
        outputs = [model(ids, attention_mask=MASK, **asked), model.train()(ids, **asked)]
        model.eval()
        for part in ids[:1, :7], ids[:1, 7:8], ids[:1, 8:]:
            outputs.append(model(part, past_key_values=cache, **asked))
    for output in outputs:
        found += [(output.logits,), *(tuple(output[name]) for name in NAMES if name in output)]
    return found


def has_routers(model: Any) -> bool:
    family = find_family(model)
    return any(router_of(layer, family) is not None for layer in decoder_layers(model))


def shapes(found: list[tuple[torch.Tensor, ...]]) -> list[list[torch.Size]]:
    return [[part.shape for part in parts] for parts in found]


@pytest.mark.parametrize("family", [*CONFIGS, *EXTENDED])
def test_every_family_records_what_its_base_records(family: str) -> None:
    expected = shapes(recorded(build_base(family, "eager")))
    assert all(len(parts) for parts in expected)
    for kind in ("ffn", "block of sequences", "no attention"):
        assert shapes(recorded(built(family, kind))) == expected, kind


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        (f, k)
        for f in ("llama", "olmoe", "deepseek_v3", "qwen2_moe")
        for k in KINDS
        if (f, k) != NONE
    ],
)
def test_what_is_recorded_is_what_both_paths_of_every_token_record(family: str, kind: str) -> None:
    model = built(family, kind)
    with torch.no_grad():
        silent = model(tokens(2, 9), attention_mask=MASK).logits
    found, expected = recorded(model), recorded(model, "masked")
    assert shapes(found) == shapes(recorded(build_base(family, "eager")))
    for parts, wanted in zip(found, expected):
        assert all(gap(one, other) < 1e-5 for one, other in zip(parts, wanted))
    assert gap(found[0][0], silent) < 1e-5


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("mask", [None, MASK])
def test_the_loss_of_the_balance_is_that_of_every_token(
    family: str, mask: torch.Tensor | None
) -> None:
    model, ids = built(family, "ffn"), tokens(2, 9)
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask, "output_router_logits": True}
    with torch.no_grad():
        found = model(**inputs)
        with state_of(model).override(executor="masked"):
            expected = model(**inputs)
    assert gap(found.aux_loss, expected.aux_loss) < 1e-6 and gap(found.loss, expected.loss) < 1e-5


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_skipped_ffn_is_skipped_while_router_logits_are_recorded(family: str) -> None:
    model, rows = built(family, "ffn"), []
    layer = decoder_layers(model)[1]
    experts = getattr(layer, find_family(model).ffn).experts
    counting = experts.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    with torch.no_grad(), counting, record_routes(model) as trace:
        model(tokens(2, 9), output_router_logits=True)
    assert rows == [int(trace[1].mask.sum())] and 0 < rows[0] < 18


def test_what_a_cache_does_not_hold_is_refused() -> None:
    model, cache = built("llama", "no attention"), DynamicCache()
    with torch.no_grad():
        model(tokens(1, 5), past_key_values=cache)
        with pytest.raises(ValueError, match="ask for them from the prompt on"):
            model(tokens(1, 1), past_key_values=cache, output_attentions=True)

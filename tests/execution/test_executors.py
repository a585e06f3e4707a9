"""An executor from outside the package, by the public table alone; and who runs a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import build_routed, decoder_layers, tokens
from peft import PeftModel

from hf_depthroute import record_routes, tune_execution
from hf_depthroute.execution import attention, targets
from hf_depthroute.execution.call import Executor, RoutedCall
from hf_depthroute.execution.decode import run_base
from hf_depthroute.execution.executors import EXECUTORS
from hf_depthroute.execution.gathered import cpu_slice
from hf_depthroute.routing.stack import routings_of, state_of


class Chosen(Executor):
    """Both paths of every token, and one of them taken."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def supports(self, call: RoutedCall) -> bool:
        return (
            not call.needs_both_paths and not call.plan.target.per_pair and call.plan.mix == "hard"
        )

    def run(self, call: RoutedCall) -> torch.Tensor:
        self.layers.append(call.layer)
        return call.finish(torch.where(call.mask[..., None], call.full(), call.cheap()))


@pytest.fixture
def chosen() -> Iterator[Chosen]:
    rows, executor = dict(EXECUTORS), Chosen()
    EXECUTORS["chosen"] = executor
    yield executor
    EXECUTORS.clear()
    EXECUTORS.update(rows)


@torch.no_grad()
def logits(model: PeftModel, executor: str, ids: torch.Tensor | None = None) -> torch.Tensor:
    with state_of(model).override(executor=executor):
        return model(input_ids=tokens(3, 8) if ids is None else ids).logits


@pytest.mark.parametrize("family", ["llama", "olmoe", "gpt2", "phi"])
@pytest.mark.parametrize("target", ["ffn", "attention", "block"])
def test_row_of_another_package_is_chosen_by_its_name_and_equals_masked(
    chosen: Chosen, family: str, target: str
) -> None:
    model = build_routed(family, "mlp", target=target, layers=[1, 2]).eval()
    found = logits(model, "chosen")
    assert chosen.layers == [
        layer for layer in decoder_layers(model) if "routing" in layer._modules
    ]
    assert torch.equal(found, logits(model, "masked"))
    assert len(chosen.layers) == len(routings_of(model))


def test_auto_takes_the_first_row_that_supports_the_call(chosen: Chosen) -> None:
    model = build_routed("llama", "mlp").eval()
    expected = logits(model, "masked")
    logits(model, "auto")
    assert not chosen.layers  # it stands behind the others
    rows = {name: EXECUTORS.pop(name) for name in list(EXECUTORS) if name != "chosen"}
    EXECUTORS.update(rows)
    assert torch.equal(logits(model, "auto"), expected)
    assert len(chosen.layers) == len(routings_of(model))


def test_call_that_a_row_does_not_support_runs_as_auto_says(chosen: Chosen) -> None:
    model = build_routed("olmoe", "mlp", target="experts").eval()
    assert torch.equal(logits(model, "chosen"), logits(model, "auto"))
    model = build_routed("llama", "mlp").train()
    with state_of(model).override(executor="chosen"), record_routes(model):
        model(input_ids=tokens(2, 4)).logits.sum().backward()
    assert not chosen.layers


def test_tuning_times_the_rows_that_support_the_prompts(chosen: Chosen) -> None:
    model = build_routed("llama", "mlp").eval()
    choices = tune_execution(model, tokens(2, 4), steps=1, repeats=1)
    assert {name for choice in choices for name in choice.milliseconds} == {
        "full",
        "gathered",
        "masked",
        "chosen",
    }
    chosen.layers.clear()
    tuned = tune_execution(
        model, tokens(2, 4), steps=0, repeats=1, executors=["chosen"], keep_decisions=True
    )
    assert {choice.executor for choice in tuned} == {"chosen"}
    chosen.layers.clear()
    logits(model, "auto", tokens(2, 4))
    assert len(chosen.layers) == len(routings_of(model))


def test_name_that_is_not_in_the_table_is_refused() -> None:
    model = build_routed("llama", "mlp").eval()
    with pytest.raises(ValueError, match=r"executor='chosen' must be one of: auto, .*gathered"):
        logits(model, "chosen")
    with pytest.raises(ValueError, match="executor='chosen' must be one of"):
        tune_execution(model, tokens(2, 4), executors=["chosen"])


def test_narrow_ffns_run_more_rows_at_once() -> None:
    assert cpu_slice(4864) == cpu_slice(14_336) == 256
    assert cpu_slice(2048) == 608 and cpu_slice(768) == 1621


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_the_ffn_is_called_in_slices_of_its_width(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices are as long as the FFN's own width says,
    hold the chosen rows and change nothing but rounding."""
    model = build_routed(family, "mlp")
    whole, widths, rows = logits(model, "gathered"), [], []

    def four(width: int) -> int:
        widths.append(width)
        return 4

    monkeypatch.setattr(targets.ffn, "cpu_slice", four)
    ffn = getattr(decoder_layers(model)[1], routings_of(model)[0].family.ffn)
    ffn.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[:-1].numel()))
    sliced = logits(model, "gathered")
    with record_routes(model) as trace:
        logits(model, "gathered")
    chosen = int(trace[1].mask.sum())
    inner = max(weight.numel() for weight in ffn.parameters()) // routings_of(model)[0].width
    assert set(widths) == {inner} and inner > routings_of(model)[0].width
    assert max(rows) == 4 and sum(rows) == 2 * chosen
    torch.testing.assert_close(sliced, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", ["attention", "block"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_slices_of_queries_see_all_keys_in_front_of_them_and_no_others(
    family: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = build_routed(family, target), tokens(3, 24)
    whole = logits(model, "gathered", ids)
    with record_routes(model) as trace:
        logits(model, "gathered", ids)
    # Not as many of each sequence.
    assert any(len(set(record.mask.sum(1).tolist())) > 1 for record in trace.values())
    monkeypatch.setattr(attention, "_CAUSAL_SLICE", 3)
    torch.testing.assert_close(logits(model, "gathered", ids), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(model, "masked", ids), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prepares", [False, True])
def test_row_of_another_package_may_make_decoding_steps_and_runs_them_without(
    chosen: Chosen, prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[Any] = []

    def prepare(layer: Any, plan: Any, batch: int) -> Any:
        def step(
            layer: Any, h: torch.Tensor, kwargs: dict[str, Any], context: Any
        ) -> torch.Tensor | None:
            stepped.append(layer)
            return run_base(layer, h, kwargs, context)

        return step if prepares else None

    monkeypatch.setattr(chosen, "prepare", prepare)
    model = build_routed("llama", "mlp", layers=[1, 2]).eval()
    ids = tokens(2, 6)
    with state_of(model).override(executor="chosen"), torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
        chosen.layers.clear()
        model(ids[:, 5:], past_key_values=cache)
    routed = [layer for layer in decoder_layers(model) if "routing" in layer._modules]
    assert (stepped, chosen.layers) == ((routed, []) if prepares else ([], routed))

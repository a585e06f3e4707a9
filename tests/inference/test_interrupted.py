"""Whatever changes a model leaves it as it was if it is interrupted,
at every forward pass that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_base, build_routed, decoder_layers, logits, routed, tokens
from peft import PeftModel
from torch import nn

from hf_depthroute import calibrate, calibrate_budgets, fit_router, tune_execution
from hf_depthroute.adapter import loading
from hf_depthroute.inference.fitting import fit_branches
from hf_depthroute.inference.importance import layer_importance
from hf_depthroute.routing.routing import Routing

BATCHES = [{"input_ids": tokens(2, 8, seed)} for seed in range(2)]


@contextmanager
def interrupted(model: nn.Module, at: int, error: type[BaseException]) -> Iterator[list[int]]:
    """Raise `error` in the forward pass number `at` through the last decoder layer;
    yields a list of one per pass."""
    passes: list[int] = []

    def count(*_: Any) -> None:
        passes.append(1)
        if len(passes) == at:
            raise error("interrupted")

    with decoder_layers(model)[-1].register_forward_pre_hook(count):
        yield passes


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that somebody could find changed."""
    routings = [module for module in model.modules() if isinstance(module, Routing)]
    found: dict[str, Any] = {
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "modes": [module.training for module in model.modules()],
        "trains": [parameter.requires_grad for parameter in model.parameters()],
        "tensors": {name: value.clone() for name, value in model.state_dict().items()},
        "attributes": [
            sorted(vars(module)) for module in model.modules() if not isinstance(module, Routing)
        ],
        "settings": [routing.state.settings for routing in routings],
        "tuned": [dict(routing.tuned) for routing in routings],
        "measured": [routing.active_quantiles().measured for routing in routings],
        "configs": [routing.active_config().to_dict() for routing in routings],
    }
    return found


def assert_same(found: dict[str, Any], before: dict[str, Any]) -> None:
    tensors, expected = found.pop("tensors"), before["tensors"]
    assert tensors.keys() == expected.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []
    for name, value in found.items():
        assert value == before[name], name


def calibrated() -> PeftModel:
    model = build_routed("llama", selection="controller")
    calibrate(model, BATCHES)
    return model


def in_training(model: nn.Module) -> nn.Module:
    """A part of it in training mode, and a part of it frozen otherwise than the rest."""
    decoder_layers(model)[0].train()
    decoder_layers(model)[1].mlp.requires_grad_(False)
    return model


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "calibrate": (calibrated, lambda model: calibrate(model, BATCHES, budget=0.2)),
    "calibrate_budgets": (
        calibrated,
        lambda model: calibrate_budgets(model, BATCHES, [0.25, 0.75]),
    ),
    "fit_branches": (calibrated, lambda model: fit_branches(model, BATCHES)),
    "fit_branches of memories": (
        lambda: build_routed("llama", branch="memory", memory_slots=8192, memory_width=4),
        lambda model: fit_branches(model, BATCHES),
    ),
    "tune_execution": (
        calibrated,
        lambda model: tune_execution(model, tokens(1, 6), steps=1, repeats=1),
    ),
    "layer_importance": (calibrated, lambda model: layer_importance(model, BATCHES, "ffn")),
    "fit_router": (
        lambda: build_base("llama"),
        lambda model: fit_router(
            model, [{"input_ids": tokens(24, 32, seed)} for seed in range(1)], rounds=1
        ),
    ),
}


@pytest.mark.nightly(unless=lambda name, error: name != "fit_router" or error is RuntimeError)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("name", CHANGES)
def test_an_interruption_at_any_forward_pass_leaves_the_model_as_it_was(
    name: str, error: type[BaseException]
) -> None:
    make, change = CHANGES[name]
    model = make()
    with interrupted(model, 0, error) as passes:
        change(model)
    every = range(1, len(passes) + 1)
    points = [*every] if error is KeyboardInterrupt else [*every][:: max(1, len(passes) // 3)]
    assert points
    model = in_training(make())
    before, outputs = state_of(model), logits(model)
    for at in points:
        with pytest.raises(error, match="interrupted"), interrupted(model, at, error):
            change(model)
        assert_same(state_of(model), before)
    assert torch.equal(logits(model), outputs)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_interruption_of_loading_leaves_no_router(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed(build_base("llama")).save_pretrained(tmp_path)
    base = in_training(build_base("llama"))
    before = state_of(base)
    match = loading.match_tensors

    def interrupt(*args: Any) -> Any:
        match(*args)
        raise error("interrupted")

    for path in (
        "hf_depthroute.adapter.tuner.match_tensors",
        "hf_depthroute.adapter.loading.match_tensors",
    ):
        monkeypatch.setattr(path, interrupt)
    for load in (
        lambda: PeftModel.from_pretrained(base, tmp_path),
        lambda: PeftModel.from_pretrained(base, tmp_path, is_trainable=True),
        lambda: base.load_adapter(tmp_path),
    ):
        with pytest.raises(error, match="interrupted"):
            load()
        assert_same(state_of(base), before)

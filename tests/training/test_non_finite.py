"""Training stops in front of the first optimizer step that would do harm, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_routed
from training import adapter_state, assert_same_tensors, make_trainer, rows
from transformers import Trainer, TrainerCallback

from hf_depthroute import DepthRouteCallback, DepthRouteTrainer
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.training.objective import NonFiniteLossError


class At(TrainerCallback):
    """Calls `act` when step `number` begins, and keeps the adapter as it is then."""

    def __init__(self, number: int, act: Any) -> None:
        self.number, self.act = number, act
        self.state: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.number:
            self.state = adapter_state(kwargs["model"])
            self.act(kwargs["model"])


def poisoned(layer: int, value: float) -> Any:
    """From now on the scores of `layer` are `value`."""

    def act(model: Any) -> None:
        routing = next(h for h in routings_of(model) if h.layer_index == layer)
        gate: Any = routing.depth_route_gate["default"]
        gate.register_forward_hook(
            lambda module, args, out: {**out, "scores": out["scores"] * value}
        )

    return act


def bad_logits(model: Any) -> None:
    model.get_base_model().lm_head.register_forward_hook(lambda module, args, out: out * torch.nan)


def bad_gradient(model: Any) -> None:
    """Every loss is finite, and a gradient is not."""
    parameter = next(
        p
        for name, p in model.named_parameters()
        if "depth_route_branch" in name and p.requires_grad
    )
    parameter.register_hook(lambda gradient: gradient / 0)


CASES: dict[str, tuple[Any, str]] = {
    "scores": (
        poisoned(2, torch.nan),
        r"step 3: not finite: loss terms .*budget.*; the scores of layer 2 are the first",
    ),
    "infinite scores": (
        poisoned(1, torch.inf),
        r"step 3: not finite: .*; the scores of layer 1 are the first",
    ),
    "language model": (bad_logits, r"step 3: not finite: loss terms lm; all scores are finite"),
    "gradient": (bad_gradient, r"step 3: not finite: a gradient \(every loss term is finite\)"),
}


@pytest.mark.nightly(
    unless=lambda case, kind, accumulate: case == "scores" or (kind, accumulate) == ("trainer", 1)
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["trainer", "callback"])
@pytest.mark.parametrize("case", CASES)
def test_the_step_is_refused_and_named(
    case: str, kind: str, accumulate: int, tmp_path: Path
) -> None:
    act, said = CASES[case]
    model = build_routed("llama", "mlp")
    cls = DepthRouteTrainer if kind == "trainer" else Trainer
    fields = {"gradient_accumulation_steps": accumulate, "max_grad_norm": 1.0, "fused_loss": False}
    trainer, _ = make_trainer(model, rows(16), tmp_path, cls, **fields)
    if kind == "callback":
        trainer.add_callback(DepthRouteCallback(trainer))
    look = At(3, act)
    trainer.add_callback(look)
    with pytest.raises(NonFiniteLossError, match=said) as caught:
        trainer.train()
    assert "\n" not in str(caught.value) and "as after step 2" in str(caught.value)
    assert trainer.state.global_step == 2
    now = adapter_state(model)
    weights = {name: value for name, value in now.items() if "quantiles" not in name}
    assert_same_tensors(weights, {name: look.state[name] for name in weights})
    assert all(value.isfinite().all() for value in now.values())


def test_a_run_of_a_finite_loss_is_not_touched(tmp_path: Path) -> None:
    trainer, _ = make_trainer(build_routed("llama", "mlp"), rows(6), tmp_path)
    trainer.train()
    assert trainer.state.global_step == 3
    assert not trainer.routing_objective._pending


ERRORS = [
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory."),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_out_of_memory_names_what_was_being_done(
    error: Exception, where: str, tmp_path: Path
) -> None:
    model = build_routed("llama", "mlp")
    fields: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    if where == "evaluation":
        fields |= {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows(2)}

    def fail(module: Any, args: Any) -> None:
        if module.training == (where == "step") and trainer.state.global_step == 2:
            raise error

    trainer, _ = make_trainer(model, rows(8), tmp_path, **fields)
    model.register_forward_pre_hook(fail)
    doing = "in training step 3" if where == "step" else "evaluating"
    with pytest.raises(
        (MemoryError, torch.OutOfMemoryError), match=f"out of memory while {doing}"
    ) as caught:
        trainer.train()
    last = 2 if where == "step" else 1
    assert str(caught.value).endswith(f"checkpoint-{last}")

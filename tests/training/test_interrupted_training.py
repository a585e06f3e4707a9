"""A training run that does not come to its end leaves nothing in force,
wherever in a step it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_routed, logits
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training import adapter_state, assert_same_tensors, make_trainer, rows
from transformers import Trainer, TrainerCallback

from hf_depthroute import DepthRouteCallback, DepthRouteTrainer
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.state import RunSettings

STEPS = 4
# All that is in force while training runs: two schedules that do not end, gates that are frozen,
# and a save.
FIELDS: dict[str, Any] = {
    "max_steps": STEPS,
    "train_gates": False,
    "budget_schedule_steps": 100,
    "temperature_schedule_steps": 100,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
}
EVENTS = [
    "train_begin",
    "step_begin",
    "pre_optimizer_step",
    "optimizer_step",
    "step_end",
    "log",
    "evaluate",
    "save",
    "train_end",
]
PLACES = ["forward", "backward", "optimizer", "writing", *EVENTS]


class Raise(TrainerCallback):
    """Raises `error` at one event, from step `after` on."""

    def __init__(self, event: str, error: type[BaseException], after: int) -> None:
        def raises(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= after:
                raise error("interrupted")

        setattr(self, f"on_{event}", raises)


@contextmanager
def interrupted(
    place: str, trainer: Any, error: type[BaseException], patch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Raise `error` at one place of a training step, the second where there are several."""
    calls: list[int] = []

    def raises(*_: Any, **__: Any) -> None:
        calls.append(1)
        if len(calls) == 2 or place == "writing":
            raise error("interrupted")

    if place == "forward":
        with list(trainer.model.modules())[-1].register_forward_pre_hook(raises):
            yield
    elif place == "backward":
        learns = next(
            p for n, p in trainer.model.named_parameters() if "branch" in n and p.requires_grad
        )
        handle = learns.register_hook(raises)
        yield
        handle.remove()
    elif place == "optimizer":
        handle = register_optimizer_step_pre_hook(raises)
        yield
        handle.remove()
    elif place == "writing":
        with patch.context() as patched:
            patched.setattr(Trainer, "_save", raises)
            yield
    else:
        yield


def in_force(model: nn.Module) -> dict[str, Any]:
    """Everything that a training run changes for its time."""
    states = [routing.state for routing in routings_of(model)]
    return {
        "scheduled": [(state.scheduled_budget, state.scheduled_temperature) for state in states],
        "settings": [state.settings for state in states],
        "trains": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    }


def by_day(place: str, cls: type[Trainer], error: type[BaseException]) -> bool:
    """Every place of our Trainer once, and two places with the rest."""
    return place in ("backward", "writing") or (
        cls is DepthRouteTrainer and error is KeyboardInterrupt
    )


@pytest.mark.nightly(unless=by_day)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("cls", [DepthRouteTrainer, Trainer])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_ends_a_training_ends_what_it_put_in_force(
    place: str,
    cls: type[Trainer],
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_routed("llama")
    before = in_force(model)
    assert before["scheduled"] == [(None, None)] * len(routings_of(model))
    assert before["settings"] == [RunSettings()] * len(routings_of(model))
    trainer, _ = make_trainer(model, rows(8), tmp_path, cls, eval_dataset=rows(2), **FIELDS)
    if place in EVENTS:
        trainer.add_callback(Raise(place, error, after=0 if place == "train_begin" else 1))
    with interrupted(place, trainer, error, monkeypatch), pytest.raises(error, match="interrupted"):
        trainer.train()
    assert in_force(model) == before
    assert "compute_loss" not in vars(trainer)
    model.train()
    trained = logits(model)
    fresh = build_routed("llama").train()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(trained, logits(fresh))


@pytest.mark.parametrize("cls", [DepthRouteTrainer, Trainer])
def test_a_training_that_does_not_begin_leaves_the_gates_to_train(
    cls: type[Trainer], tmp_path: Path
) -> None:
    """Such as one that is to go on from a checkpoint that is not there,
    or whose losses would be added twice."""
    model = build_routed("llama")
    before = in_force(model)
    for callbacks in (0, 2):
        trainer, _ = make_trainer(model, rows(2), tmp_path, cls, eval_dataset=rows(2), **FIELDS)
        for _ in range(callbacks):
            trainer.add_callback(DepthRouteCallback())
        with pytest.raises(Exception, match=r"nothing|\d times"):
            trainer.train(resume_from_checkpoint=None if callbacks else str(tmp_path / "nothing"))
        assert in_force(model) == before


@pytest.mark.nightly(
    unless=lambda place, cls: (
        (place, cls) in (("forward", DepthRouteTrainer), ("step_end", Trainer))
    )
)
@pytest.mark.parametrize("cls", [DepthRouteTrainer, Trainer])
@pytest.mark.parametrize(
    "place", ["forward", "backward", "optimizer", "pre_optimizer_step", "step_end"]
)
def test_a_training_resumed_in_its_own_process_equals_one_that_was_not_interrupted(
    place: str, cls: type[Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step that did not end has counted is no part of the first step after it."""
    fields = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": 1,
        "gradient_accumulation_steps": 2, "logging_steps": 10, "budget_schedule_steps": 100,
    }  # fmt: skip
    whole, _ = make_trainer(
        build_routed("llama", selection="controller"), rows(16), tmp_path / "a", cls, **fields
    )
    whole.train()
    trainer, _ = make_trainer(
        build_routed("llama", selection="controller"), rows(16), tmp_path / "b", cls, **fields
    )
    raises = Raise(place, KeyboardInterrupt, after=1 if place == "pre_optimizer_step" else 2)
    trainer.add_callback(raises)
    with (
        interrupted(place, trainer, KeyboardInterrupt, monkeypatch),
        pytest.raises(KeyboardInterrupt),
    ):
        trainer.train()
    trainer.remove_callback(raises)
    first = tmp_path / "b" / "checkpoint-1"
    if first.exists():
        trainer.train(resume_from_checkpoint=str(first))
    else:  # interrupted in the first step, which accumulates two batches
        trainer.model.load_state_dict(build_routed("llama", selection="controller").state_dict())
        trainer.train()
    assert_same_tensors(adapter_state(whole.model), adapter_state(trainer.model))


@pytest.mark.parametrize("cls", [DepthRouteTrainer, Trainer])
def test_copies_of_the_model_in_threads_are_refused(cls: type[Trainer], tmp_path: Path) -> None:
    """`DataParallel`, which a Trainer takes for several GPUs in one process:
    settings belong to the calling thread."""
    trainer, _ = make_trainer(build_routed("llama"), rows(2), tmp_path, cls)
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match=r"2 GPUs in one process.*accelerate launch, torchrun"):
        trainer.train()

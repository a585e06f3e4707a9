"""A Trainer that nobody told about routing trains routers with the routing losses all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_routed
from places import HELPERS, ROOT
from torch.utils.data import ChainDataset, IterableDataset
from training import Row, adapter_state, assert_same_tensors, make_trainer, rows, stacked, step_logs
from transformers import Trainer

from hf_depthroute import DepthRouteCallback, DepthRouteTrainer
from hf_depthroute.training.callbacks import RoutingCallback
from hf_depthroute.training.record import remembered
from hf_depthroute.training.trainer import RoutingArguments

PATHS = os.pathsep.join(map(str, (ROOT, HELPERS)))


def test_a_trainer_that_was_told_nothing_equals_ours(tmp_path: Path) -> None:
    """Weights and schedules among its arguments count."""
    examples, logs, states = rows(8, padding=(0, 3)), [], []
    for cls in (DepthRouteTrainer, Trainer):
        model = build_routed("llama")
        trainer, _ = make_trainer(
            model, examples, tmp_path, cls, budget_weight=2.0, gradient_accumulation_steps=2
        )
        trainer.train()
        trainer.train()  # a second time: still one callback
        assert (
            sum(
                isinstance(callback, RoutingCallback)
                for callback in trainer.callback_handler.callbacks
            )
            == 1
        )
        logs.append(step_logs(trainer))
        states.append(adapter_state(model))
    for one, two in zip(*logs, strict=True):
        for name in ("loss", "loss_lm", "loss_budget", "full_ratio/layer_1"):
            assert one[name] == pytest.approx(two[name], abs=1e-5), name
    assert_same_tensors(*states, tolerance=1e-5)


def test_wrapping_the_trainer_twice_wraps_it_once() -> None:
    build_routed("llama")
    before = Trainer.train
    build_routed("llama")
    assert Trainer.train is before and hasattr(before, "__wrapped__")


# One process imports what takes seconds; each case goes on from there in a fork of its own.
IN_ANY_ORDER = """
import itertools, os, sys
from hf_depthroute import DepthRouteConfig
assert "transformers.trainer" not in sys.modules
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("hf_depthroute")]
from models import build_base
from peft import get_peft_model
assert "transformers.trainer" not in sys.modules
for order, trains in itertools.product(("import inject", "inject import"), (True, False)):
    child = os.fork()
    if child == 0:
        for step in order.split():
            if step == "import":
                from transformers import Trainer, TrainingArguments
            else:
                model = get_peft_model(build_base("llama"), DepthRouteConfig(inference_mode=not trains))
        Trainer(model, TrainingArguments("unused", use_cpu=True, report_to="none"))
        print(order, trains, hasattr(Trainer.train, "__wrapped__"), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_the_trainer_is_wrapped_whenever_it_is_imported() -> None:
    """And importing the library puts nothing into Python's import system,
    nor imports the Trainer."""
    ended = subprocess.run(
        [sys.executable, "-c", IN_ANY_ORDER],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": PATHS},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "import inject True True",
        "import inject False True",
        "inject import True True",
        "inject import False True",
    ]


def test_a_callback_that_nobody_told_its_trainer_learns_it(tmp_path: Path) -> None:
    model, callback = (
        build_routed("llama"),
        DepthRouteCallback(arguments=RoutingArguments(budget_weight=0.0)),
    )
    trainer, _ = make_trainer(model, rows(2), tmp_path, Trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.trainer is trainer
    assert "loss_budget" not in step_logs(trainer)[0] and "loss_alive" in step_logs(trainer)[0]


def test_a_callback_serves_one_trainer_after_another(tmp_path: Path) -> None:
    callback = DepthRouteCallback()
    for _ in range(2):
        trainer, _ = make_trainer(build_routed("llama"), rows(2), tmp_path, Trainer)
        trainer.add_callback(callback)
        trainer.train()
        assert "loss_budget" in step_logs(trainer)[0]


@pytest.mark.parametrize("cls", [DepthRouteTrainer, Trainer])
def test_losses_that_would_be_added_twice_are_refused(cls: type[Trainer], tmp_path: Path) -> None:
    trainer, _ = make_trainer(build_routed("llama"), rows(2), tmp_path, cls)
    trainer.add_callback(DepthRouteCallback())
    if cls is Trainer:
        trainer.add_callback(DepthRouteCallback())
    with pytest.raises(ValueError, match="would add the routing losses 2 times"):
        trainer.train()


def test_a_loop_without_the_routing_losses_is_warned() -> None:
    model, batch = build_routed("llama").train(), stacked(rows(2))
    with pytest.warns(UserWarning, match="trains routers without the routing losses"):
        model(**batch)
    for routing in (module for module in model.modules() if hasattr(module, "depth_route_gate")):
        routing.depth_route_gate.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch)
        with torch.no_grad():
            model.eval()(**batch)


class Stream(IterableDataset[Row]):
    """Examples without a number of them."""

    def __iter__(self) -> Iterator[Row]:
        return iter(rows(4))


class Unknowable(Stream):
    """Whatever is asked of it but its examples raises."""

    def __len__(self) -> int:
        raise TypeError("the server does not say")

    @property
    def info(self) -> Any:
        raise OSError("the server is gone")


@pytest.mark.parametrize("cls", [Trainer, DepthRouteTrainer])
@pytest.mark.parametrize("make", [lambda: ChainDataset([Stream(), Stream()]), Stream, Unknowable])
def test_no_training_stops_for_a_fact_of_the_model_card(
    make: Callable[[], Any], cls: type[Trainer], tmp_path: Path
) -> None:
    model = build_routed("llama")
    trainer, _ = make_trainer(
        model, make(), tmp_path, cls, max_steps=2, accelerator_config={"dispatch_batches": False}
    )
    trainer.train()
    record = remembered(model, "default").training
    assert record is not None and record["hyperparameters"]["steps"] == 2
    assert record["examples"] is None and record["dataset"] is None
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "README.md").is_file()


@pytest.mark.parametrize("cls", [DepthRouteTrainer, Trainer])
def test_a_smaller_batch_after_out_of_memory_trains_as_from_the_start(
    cls: type[Trainer], tmp_path: Path
) -> None:
    """`auto_find_batch_size` begins anew inside one `train`: the routing losses count once, what a
    step without an end had counted is forgotten, and gates that were frozen train afterwards."""

    class Small(cls):  # type: ignore[misc,valid-type]
        def training_step(self, model: Any, inputs: Row, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, inputs, *args, **kwargs)
            if len(inputs["input_ids"]) > 4:
                model.zero_grad()
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

    logs = []
    for rows_per_batch in (4, 5):
        model = build_routed("llama", selection="controller")
        trainer, _ = make_trainer(
            model,
            rows(8),
            tmp_path,
            Small,
            per_device_train_batch_size=rows_per_batch,
            auto_find_batch_size=True,
            train_gates=False,
        )
        trainer.train()
        names = ("loss", "loss_lm", "grad_norm", "full_ratio/layer_1", "threshold/layer_1")
        logs.append([{n: log[n] for n in names if n in log} for log in step_logs(trainer)])
        assert any(p.requires_grad for n, p in model.named_parameters() if "gate" in n)
        assert "compute_loss" not in vars(trainer)
    assert logs[0] == logs[1]

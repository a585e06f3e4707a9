"""How many times as long a step of one config takes as one of another:
short trainings of both, in turn.

A run's own seconds will not do: runs share the machine with each other, and one slow run would
change what is compared.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PrinterCallback, TrainerCallback

from hf_depthroute.adapter.tuner import get_depth_routed_model
from hf_depthroute.files.shown import say
from hf_depthroute.files.staged import write_json
from hf_depthroute.training.trainer import DepthRouteTrainer

from .blocks import Blocks, OrderedBlocks, draw_order, read_blocks
from .grid import RunSpec
from .run import Start, load_base, read_json, unfreeze

STEPS = 40  # of a training
ROUNDS = 7  # and one to warm up
WARM_UPS = ("oracle_warmup", "cgs_warmup")


class Stopwatch(TrainerCallback):
    """Seconds from the first step to the end of the last; on a CPU, which is often shared,
    of processor time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = self._now()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = self._now() - self._began

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


def in_equal_time(start: Start, spec: RunSpec) -> RunSpec:
    """A run with `iso_compute` gets its steps, by a ratio of times that is measured once,
    before anything runs.

    It is measured again where one of its two configs was changed.
    """
    if spec.iso_compute is None:
        return spec
    study = start.study
    timed, counted = (
        next(
            config.spec(study.seeds[0])
            for config in study.configs
            if config.name == spec.iso_compute[key]
        )
        for key in ("same_time_as", "steps_of")
    )
    assert timed.steps is not None
    file, name = start.out / "step_ratios.json", f"{timed.config} / {counted.config}"
    known, trained = read_json(file) or {}, [_trained(timed), _trained(counted)]
    # Earlier versions wrote none.
    if name not in known or known[name].get("specs", trained) != trained:
        measured = step_ratio(start, read_blocks(start.out / "blocks.safetensors"), timed, counted)
        known[name] = measured | {"specs": trained}
        write_json(file, known)
        say(
            f"{study.name}: a step of {timed.config} takes {known[name]['ratio']:.3f} of one of "
            f"{counted.config}"
        )
    return dataclasses.replace(spec, steps=max(1, round(timed.steps * known[name]["ratio"])))


def _trained(spec: RunSpec) -> dict[str, Any]:
    """The settings that the step time of a config depends on, as JSON values."""
    content: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(spec)))
    return {name: content[name] for name in ("steps", "adapter", "training", "joint")}


def step_ratio(start: Start, blocks: Blocks, spec: RunSpec, other: RunSpec) -> dict[str, Any]:
    """Time of a step of `spec` over that of `other`.

    Warm-ups without labels get their share of the short trainings, so that the ratio is that of
    whole runs.

    Returns:
        `ratio`, the median over the rounds, `quartiles`, and how it was measured.
    """
    torch.set_num_threads(start.threads)
    models = [_model(start, one) for one in (spec, other)]
    ratios = []
    for _ in range(ROUNDS + 1):
        mine, base = (
            _seconds(start, blocks, one, model) for one, model in zip((spec, other), models)
        )
        ratios.append(mine / base)
    quartiles = statistics.quantiles(ratios[1:], n=4)
    return {
        "ratio": round(quartiles[1], 4),
        "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)], "rounds": ROUNDS,
        "steps": STEPS,
    }  # fmt: skip


def _model(start: Start, spec: RunSpec) -> Any:
    model = get_depth_routed_model(load_base(start.base), spec.adapter_config())
    if spec.joint:
        unfreeze(model)
    return model


def _seconds(start: Start, blocks: Blocks, spec: RunSpec, model: Any) -> float:
    """The seconds of a short training of `model`."""
    assert spec.steps is not None
    arguments = spec.training_arguments(start.study.batch_size, Path(tempfile.gettempdir()))
    shares = {name: round(STEPS * getattr(arguments, name) / spec.steps) for name in WARM_UPS}
    short = dataclasses.replace(
        spec, steps=STEPS, training={**spec.training, **shares, "warmup_steps": 0}
    )
    arguments = short.training_arguments(start.study.batch_size, Path(tempfile.gettempdir()))
    wanted = STEPS * start.study.batch_size * arguments.gradient_accumulation_steps
    watch = Stopwatch()
    trainer = DepthRouteTrainer(
        model=model,
        args=arguments,
        train_dataset=OrderedBlocks(blocks.train, draw_order(len(blocks.train), wanted, spec.seed)),
        data_collator=transformers.default_data_collator,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return watch.seconds

"""Saves and trains in forked children that are killed with signal 9, and says what was left;
for test_kill.py.

    python kill_worker.py FOLDER saves|renames|writers|checkpoints|overwrites ROUNDS [...]

Prints one JSON object, by name; each has a folder of its own below FOLDER.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import build_base, logits, routed
from peft import PeftModel

from hf_depthroute.training.checkpoints import checkpoints_in, fault_of, last_complete


def child(run: Callable[[], None]) -> int:
    """Fork, run, and leave without any clean-up."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return number


def adapter(seed: int, name: str = "default") -> PeftModel:
    model = routed(build_base("llama"), "mlp", seed=seed, adapter_name=name)
    for parameter in model.parameters():  # large enough that a save takes some milliseconds
        parameter.requires_grad_(False)
    return model


def which(folder: Path, expected: dict[str, torch.Tensor]) -> str:
    """The name of the adapter that `folder` holds."""
    loaded = logits(PeftModel.from_pretrained(build_base("llama"), folder).eval())
    return next((name for name, value in expected.items() if torch.equal(value, loaded)), "a mix")


def saves(folder: Path, rounds: int) -> dict[str, int]:
    """Kill at random moments while two adapters are saved over each other."""
    models = {"one": adapter(1), "two": adapter(2)}
    expected = {name: logits(model) for name, model in models.items()}
    models["one"].save_pretrained(folder)

    def forever() -> None:
        while True:
            for model in (models["two"], models["one"]):
                model.save_pretrained(folder)

    found: Counter[str] = Counter()
    for _ in range(rounds):
        number = child(forever)
        time.sleep(random.uniform(0.002, 0.08))
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        found[which(folder, expected)] += 1
    models["one"].save_pretrained(folder)
    found["leftovers"] = len(list(folder.glob(".saving-*")))
    return dict(found)


def dies(call: str, at: int, folder: Path | None = None) -> None:
    """Let the call number `at` of `os.<call>` kill the process; given a folder,
    of those with a target in it."""
    real, count = getattr(os, call), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if folder is not None and Path(args[-1]).parent != folder:
            return real(*args, **kwargs)
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return real(*args, **kwargs)

    setattr(os, call, counted)


def dying(model: PeftModel, folder: Path, call: str, at: int) -> None:
    """Save, and die at the call number `at` of `os.<call>`."""
    dies(call, at)
    model.save_pretrained(folder)


def renames(folder: Path, rounds: int) -> dict[str, Any]:
    """Die at every single system call of the save that changes the folder,
    and in the save after that."""
    found: dict[str, Any] = {}
    for name in ("default", "named"):
        models = {"old": adapter(1, name), "new": adapter(2, name), "third": adapter(3, name)}
        expected = {key: logits(model) for key, model in models.items()}
        place = folder if name == "default" else folder / name
        for call in ("replace", "fsync"):
            for at in range(rounds):
                models["old"].save_pretrained(folder)
                number = child(functools.partial(dying, models["new"], folder, call, at))
                if os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0:
                    break  # fewer calls than that
                again = child(functools.partial(dying, models["third"], folder, "fsync", 0))
                os.waitpid(again, 0)
                found[f"{name} {call} {at}"] = which(place, expected)
    return found


def writers(folder: Path, rounds: int) -> dict[str, int]:
    """Two processes save different adapters into one folder."""
    models = {"one": adapter(1), "two": adapter(2)}
    expected = {name: logits(model) for name, model in models.items()}
    found: Counter[str] = Counter()
    for _ in range(rounds):
        numbers = []
        for model in models.values():

            def ten(model: PeftModel = model) -> None:
                for _ in range(10):
                    model.save_pretrained(folder)

            numbers.append(child(ten))
        for number in numbers:
            _, status = os.waitpid(number, 0)
            found[f"exit code {os.waitstatus_to_exitcode(status)}"] += 1
        found[which(folder, expected)] += 1
    return dict(found)


def checkpoints(folder: Path, rounds: int) -> dict[str, Any]:
    """Kill training that saves every step; resume; compare the end with an uninterrupted run."""
    from training import adapter_state, make_trainer, rows

    def run(out: Path, resume: bool | None = None) -> Any:
        model = routed(build_base("llama"), "jepa", seed=0)
        fields = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 8}
        trainer, _ = make_trainer(model, rows(16), out, train_sampling_strategy="random", **fields)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train(resume_from_checkpoint=resume)
        return adapter_state(model)

    expected = run(folder / "whole")
    found: Counter[str] = Counter()
    for number in range(rounds):
        out = folder / f"killed-{number}"
        process = child(lambda out=out: run(out) and None)
        time.sleep(random.uniform(0.1, 1.2))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        there = checkpoints_in(out) if out.is_dir() else []
        found["checkpoints that were not whole"] += sum(fault_of(c) is not None for c in there)
        whole = [c for c in there if fault_of(c) is None]
        found["with a whole checkpoint"] += bool(whole)
        if there and not whole:
            continue  # killed while the first was written
        last, _ = last_complete(out) if there else (None, [])
        state = run(out, resume=True if last else None)
        same = all(torch.equal(value, state[name]) for name, value in expected.items())
        found["equal at the end" if same else "different at the end"] += 1
    return dict(found)


def overwrites(folder: Path, rounds: int) -> dict[str, Any]:
    """Die at every rename of `train --overwrite`, in a folder that holds more than the adapter."""
    from text_models import save_base, write_text

    from hf_depthroute.cli import main

    base, text, out = save_base(folder / "base"), write_text(folder / "text.txt"), folder / "out"

    def command(*words: object) -> int:
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            return int(ended.code or 0)

    def train(seed: int, at: int | None = None) -> int:
        def run() -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if at is not None:
                dies("replace", at, out)
            arguments = (
                "--model",
                base,
                "--dataset",
                text,
                "--out",
                out,
                "--overwrite",
                "--seed",
                seed,
            )
            assert (
                command("train", *arguments, "--steps", 1, "--batch-size", 1, "--length", 16) == 0
            )

        return os.waitstatus_to_exitcode(os.waitpid(child(run), 0)[1])

    def weights() -> bytes:
        return (out / "adapter_model.safetensors").read_bytes()

    names = {}
    for seed in (2, 1):
        train(seed)
        names[weights()] = f"seed {seed}"
    (out / ".git").mkdir()
    (out / ".git" / "config").write_text("[core]")
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    found: dict[str, Any] = {}
    for at in range(rounds):
        for name, content in before.items():
            (out / name).write_bytes(content)
        ended = train(2, at)
        with contextlib.redirect_stdout(sys.stderr):
            doctor = command("doctor", out)
        found[str(at)] = [
            names.get(weights(), "another"),
            doctor,
            (out / ".git" / "config").read_text(),
        ]
        if ended != -signal.SIGKILL:
            found["ended"] = ended
            break
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    random.seed(0)
    place, *wanted = sys.argv[1:]
    print(
        json.dumps(
            {
                name: globals()[name](Path(place) / name, int(n))
                for name, n in zip(wanted[::2], wanted[1::2])
            }
        )
    )

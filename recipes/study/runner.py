"""`run_study`: every run of a study, once, into one folder; started again, it does what is missing.

    OUT/study.json             what the study is, and the fingerprint that a later start must have
    OUT/blocks.safetensors     the token blocks of every run
    OUT/step_ratios.json       where a config has `iso_compute`: measured times of a step, one config's over another's
    OUT/runs/CONFIG/SEED/      one run each: see `run.py`

A process killed at any moment leaves complete runs, which are kept, and incomplete ones, which
start again from nothing: the results are the same as without the kill.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import importlib.util
import os
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.files.locks import locked
from hf_depthroute.files.remote_code import trust_remote_code
from hf_depthroute.files.shown import say
from hf_depthroute.files.staged import write_bytes, write_json

from .blocks import prepare_blocks, read_blocks, to_batches
from .fingerprint import CODE, combine, explain, hash_model, versions
from .grid import RunSpec, Study
from .measure import autocast
from .run import (
    RunError,
    Start,
    StudyError,
    device_type,
    is_finished,
    load_base,
    read_json,
    run_folder,
    train_run,
)
from .step_ratio import in_equal_time

ENGINES = ("processes", "ray")
# As study.json has them.
_DESCRIBED = ("name", "margin", "thresholds", "steps", "eval_every", "batch_size", "seeds")
# What all runs share: under other settings, a finished run is worth nothing.
_SETTINGS = (
    "steps",
    "batch_size",
    "eval_every",
    "thresholds",
    "margin",
    "adapter",
    "training",
    "data",
)
FAILED = "failed.json"  # in the folder of a run that ended in an exception
_PATIENCE = 60.0  # seconds that a start waits for the processes of a killed one to end
_OWN = (
    ".lock",
    ".workers",
    "blocks.safetensors",
    ".blocks.safetensors.partial",
    ".study.json.partial",
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run is not complete: one line, and the traceback if there was an exception in it."""

    reason: str
    traceback: str = ""


def run_study(
    study: Study,
    out: Path,
    jobs: int = 1,
    engine: str = "processes",
    only: Collection[str] | None = None,
    seeds: Collection[int] | None = None,
    debug: bool = False,
) -> dict[str, Failure]:
    """Run what is missing of a study.

    Args:
        study: From `read_study`.
        out: Folder of the results; made if need be.
        jobs: Runs at one time. The first start fixes the threads of every run, cores / jobs,
            because results depend on them.
        engine: `"processes"` of this machine, or `"ray"`.
        only: Names of configs; default: all.
        seeds: Some of the study's seeds; default: all.
        debug: Show the warnings of the libraries.

    Returns:
        The runs that failed, by name (`"g3/42"`). All others are complete.

    Raises:
        StudyError: `out` is in use, or holds results of other code, data, base or settings.
        ConfigError: A config does not fit the base model, or there is no such config or seed.
        DataError: The data cannot be used.
    """
    specs = study.specs(only, seeds)
    _check_installed(engine)
    new = out.is_dir() and not (out / "study.json").exists()
    if new and not all(path.name.startswith(_OWN) for path in out.iterdir()):
        raise StudyError(f"--out {out}: holds files but no study; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    twice = StudyError(f"--out {out}: another start of this study is running; wait for it to end")
    going = StudyError(f"--out {out}: runs of an earlier start are still going; wait")
    with locked(out / ".lock", twice):
        with locked(out / ".workers", going, _PATIENCE):
            pass
        say(f"{study.name}: reading the data and measuring the dense base", sys.stderr)
        start = _prepare(
            study, out, jobs, engine, debug, tuple(run_folder(out, spec) for spec in specs)
        )
        for spec in specs:
            # What was made otherwise is refused before times are measured.
            is_finished(out, spec, start.fingerprint)
        specs = [in_equal_time(start, spec) for spec in specs]
        pending = [spec for spec in specs if not is_finished(out, spec, start.fingerprint)]
        say(
            f"{study.name}: {len(specs) - len(pending)} of {len(specs)} runs are complete; "
            f"{jobs} at a time, {start.threads} threads each"
        )
        for folder in (run_folder(out, spec) for spec in pending):
            if folder.exists():
                shutil.rmtree(folder)
        failures: dict[str, Failure] = {}
        _run_all(pending, start, jobs, failures)
    return failures


def _check_installed(engine: str) -> None:
    if engine not in ENGINES:
        raise StudyError(f"--engine {engine}: use one of: {', '.join(ENGINES)}")
    for module, package in (("joblib", "joblib"), ("sklearn", "scikit-learn")):
        if importlib.util.find_spec(module) is None:
            raise StudyError(
                f"{package} is not installed: pip install joblib scikit-learn adjustText"
            )
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise StudyError("--engine ray: ray is not installed: pip install ray")


def _prepare(
    study: Study, out: Path, jobs: int, engine: str, debug: bool, selected: tuple[Path, ...]
) -> Start:
    """Check everything that all runs share against an earlier start,
    and write the blocks and `study.json`."""
    import joblib

    before = read_json(out / "study.json")
    if before is None and (out / "study.json").exists():
        raise StudyError(f"{out / 'study.json'}: cannot be read; pass another --out")
    base = study.resolve(study.base)
    model = load_base(base)
    for spec in study.specs():
        try:
            spec.adapter_config().routed_layers(model.config.num_hidden_layers)
        except ConfigError as error:
            raise ConfigError(f"config {spec.config}: {error}") from error
    stored = out / "blocks.safetensors"
    if before is not None and "dataset" in study.data and stored.exists():
        # Text is read once: later starts use what the first one made of it.
        blocks = read_blocks(stored)
    else:
        source = study.resolve(study.data["blocks" if "blocks" in study.data else "dataset"])
        blocks = prepare_blocks(study.data, source, base, debug)
    blocks.check(model.config)
    parts = {
        "code": CODE,
        "data": blocks.fingerprint(),
        "base": hash_model(model),
        "settings": {**{name: getattr(study, name) for name in _SETTINGS}, "device": device_type()},
        "versions": versions(),
    }
    if before is not None and before.get("fingerprint") != combine(parts):
        other = explain(before.get("parts", {}), parts)
        raise StudyError(f"--out {out}: its runs were made with {other}; pass another --out")

    if before:
        machine, dense_loss, created = (
            before["machine"],
            before["base"]["dense_loss"],
            before["created"],
        )
        # Those of the first start: results depend on them.
        torch.set_num_threads(machine["threads"])
    else:
        name = torch.cuda.get_device_name() if device_type() == "cuda" else "cpu"
        machine = {"device": name, "threads": max(1, joblib.cpu_count() // jobs)}
        torch.set_num_threads(machine["threads"])
        dense = RunSpec("dense", 0, study.steps, study.adapter, study.training)
        arguments = dense.training_arguments(study.batch_size, study.folder)
        with autocast(arguments):
            dense_loss = mean_loss(
                model, to_batches(blocks.validation, study.batch_size, arguments.device)
            )
        created = datetime.datetime.now().astimezone().isoformat("T", "seconds")
    if not stored.exists():
        write_bytes(stored, blocks.to_bytes())
    size = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "width": model.config.hidden_size,
    }
    described = {
        **{name: getattr(study, name) for name in _DESCRIBED},
        "fingerprint": combine(parts),
        "created": created,
        "length": blocks.train.shape[1],
        "configs": [dataclasses.asdict(config) for config in study.configs],
        "base": {"name": study.base, **size, "dense_loss": dense_loss},
        "data": {
            **study.data,
            "tokens": blocks.train.numel(),
            "validation_tokens": blocks.validation.numel(),
        },
        "versions": versions(),
        "machine": machine,
        "parts": parts,
    }
    write_json(out / "study.json", described)
    return Start(
        study, out, base, combine(parts), dense_loss, machine["threads"], selected, engine, debug
    )


def _run_all(
    specs: Sequence[RunSpec], start: Start, jobs: int, failures: dict[str, Failure]
) -> None:
    """Execute runs until each is complete or has failed.

    The folder says which: workers may die without a word.
    """
    import joblib

    left = list(specs)
    while left:
        ended: BaseException | None = None
        try:
            with _engine(start.engine, jobs):
                joblib.Parallel(n_jobs=min(jobs, len(left)), batch_size=1)(
                    joblib.delayed(_execute)(start, spec) for spec in left
                )
        except Exception as error:  # of the engine: `_execute` keeps those of a run
            ended = error
        unstarted = []
        for spec in left:
            folder = run_folder(start.out, spec)
            if not folder.exists():
                unstarted.append(spec)
            elif not (folder / "summary.json").exists():
                known = read_json(folder / FAILED) or {
                    "reason": "its process died; is there enough memory?"
                }
                failures[spec.name] = Failure(**known)
        if len(unstarted) == len(left):
            raise ended or StudyError(
                f"--engine {start.engine}: it ended without having started a run"
            )
        left = unstarted


def _execute(start: Start, spec: RunSpec) -> None:
    """Train a run and print a line about it; what goes wrong is not raised,
    but written to the run's folder."""
    if start.engine == "processes" and os.getpid() != start.owner:
        _end_with(start.owner)
    if not start.debug:
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    folder = run_folder(start.out, spec)
    busy = StudyError("the study is being started again")
    with locked(start.out / ".workers", busy, patience=60.0, shared=True):
        began = time.monotonic()
        try:
            if start.code != CODE:
                raise RunError(
                    "the code of hf_depthroute was changed after the study was started; start it "
                    "again"
                )
            if start.device != device_type():
                raise RunError(f"this process runs on {device_type()}, the study on {start.device}")
            with trust_remote_code() if start.trust else nullcontext():
                summary = train_run(start, spec)
            said = f"endpoint {summary['endpoint']:.3f} in {time.monotonic() - began:.0f} s"
            if summary["refresh_over_forward"] is not None:
                said += (
                    f"; a refresh of the labels costs {summary['refresh_over_forward']:.1f} "
                    "forward passes"
                )
        except Exception as error:
            reason = " ".join(str(error).split())
            if not isinstance(error, RunError | ConfigError):
                reason = f"{type(error).__name__}: {reason}"
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / FAILED, {"reason": reason, "traceback": traceback.format_exc()})
            said = f"failed: {reason}"
        complete = sum((folder / "summary.json").exists() for folder in start.selected)
        say(f"[{complete}/{len(start.selected)}] {spec.name} {said}")
    gc.collect()  # a Trainer and its model hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _end_with(owner: int) -> None:
    """End this process soon after process `owner`, its parent: a killed study leaves no runs."""

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(0.2)
        os._exit(1)

    name = "ends with the study"
    if not any(thread.name == name for thread in threading.enumerate()):
        threading.Thread(target=watch, name=name, daemon=True).start()


def _engine(name: str, jobs: int) -> Any:
    """Settings for joblib, as a context manager."""
    import joblib

    if name == "processes":
        return joblib.parallel_config(backend="loky")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # every run's line is printed
    import ray
    from ray.util.joblib import register_ray

    register_ray()
    here = {"py_modules": [str(Path(__file__).parent)]}  # the cluster has `hf_depthroute` only
    ray.init(ignore_reinit_error=True, logging_level="ERROR", runtime_env=here)
    gpus = min(1.0, torch.cuda.device_count() / jobs)
    return joblib.parallel_config(
        backend="ray", ray_remote_args={"num_gpus": gpus} if gpus else None
    )

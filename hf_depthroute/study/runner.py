"""`run_study`: every run of a study, once, into one folder; started again, it does what is missing.

    OUT/study.json             what the study is, and the fingerprint that a later start must have
    OUT/blocks.safetensors     the token blocks of every run
    OUT/runs/CONFIG/SEED/      one run each: see `run.py`

A process killed at any moment leaves complete runs, which are kept, and incomplete ones, which start again from
nothing: the results are the same as without the kill.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..config import ConfigError
from ..evaluation.perplexity import mean_loss
from ..remote_code import trusts_remote_code
from ..shown import say
from ..staged_files import write_bytes, write_json
from .data import Blocks, prepare_blocks, read_blocks, to_batches
from .fingerprint import CODE, combine, explain, hash_model, versions
from .folder import StudyError, finished_summary, locked, read_json, run_folder
from .grid import RunSpec, Study
from .measure import autocast
from .run import SharedSetting, load_base
from .worker import FAILED, Start, device_type, execute

ENGINES = ("processes", "ray")
_PATIENCE = 60.0  # seconds that a start waits for the processes of a killed one to end
_OWN = (".lock", ".workers", "blocks.safetensors", ".blocks.safetensors.partial", ".study.json.partial")


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
        jobs: Runs at one time. The first start fixes the threads of every run, cores / jobs, because results depend
            on them.
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
    if (
        out.is_dir()
        and not (out / "study.json").exists()
        and not all(path.name.startswith(_OWN) for path in out.iterdir())
    ):
        raise StudyError(f"--out {out}: holds files but no study; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / ".lock", f"--out {out}: another start of this study is running; wait for it to end"):
        with locked(out / ".workers", f"--out {out}: runs of an earlier start are still going; wait", _PATIENCE):
            pass
        say(f"{study.name}: reading the data and measuring the dense base", sys.stderr)
        shared = _prepare(study, out, jobs, debug)
        pending = [spec for spec in specs if finished_summary(out, spec, shared.fingerprint) is None]
        say(
            f"{study.name}: {len(specs) - len(pending)} of {len(specs)} runs are complete; "
            f"{jobs} at a time, {shared.threads} threads each"
        )
        for spec in pending:
            if run_folder(out, spec).exists():
                shutil.rmtree(run_folder(out, spec))
        folders = tuple(run_folder(out, s) for s in specs)
        trust = trusts_remote_code()
        start = Start(out, folders, os.getpid(), engine, CODE, device_type(), debug, trust)
        failures: dict[str, Failure] = {}
        _run_all([spec for spec in pending if spec.iso_compute is None], shared, start, jobs, failures)
        timed = []
        for spec in pending:
            if spec.iso_compute is not None:
                steps = _steps_in_time(out, spec, shared.fingerprint)
                if steps is None:
                    needed = " and ".join(f"{name}/{spec.seed}" for name in spec.iso_compute.values())
                    failures[spec.name] = Failure(f"needs {needed}, which are not both complete")
                else:
                    timed.append(dataclasses.replace(spec, steps=steps))
        _run_all(timed, shared, start, jobs, failures)
    return failures


def _check_installed(engine: str) -> None:
    if engine not in ENGINES:
        raise StudyError(f"--engine {engine}: use one of: {', '.join(ENGINES)}")
    for module, package, extra in (("joblib", "joblib", "study"), ("sklearn", "scikit-learn", "study")):
        if importlib.util.find_spec(module) is None:
            raise StudyError(f"{package} is not installed: pip install 'hf-depthroute[{extra}]'")
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise StudyError("--engine ray: ray is not installed: pip install 'hf-depthroute[ray]'")


def _prepare(study: Study, out: Path, jobs: int, debug: bool) -> SharedSetting:
    """Check everything that all runs share against an earlier start, and write the blocks and `study.json`."""
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
    blocks = _blocks(study, out, base, before is not None, debug)
    blocks.check(model.config)
    parts = {
        "code": CODE,
        "data": blocks.fingerprint(),
        "base": hash_model(model),
        "settings": {**study.settings(), "device": device_type()},
        "versions": versions(),
    }
    if before is not None and before.get("fingerprint") != combine(parts):
        other = explain(before.get("parts", {}), parts)
        raise StudyError(f"--out {out}: its runs were made with {other}; pass another --out")

    machine = (
        before["machine"]
        if before
        else {
            "device": torch.cuda.get_device_name() if device_type() == "cuda" else "cpu",
            "threads": max(1, joblib.cpu_count() // jobs),
        }
    )
    torch.set_num_threads(machine["threads"])
    dense_loss = before["base"]["dense_loss"] if before else _dense_loss(study, model, blocks)
    if not (out / "blocks.safetensors").exists():
        write_bytes(out / "blocks.safetensors", blocks.to_bytes())
    content = {
        "name": study.name,
        "fingerprint": combine(parts),
        "created": before["created"] if before else datetime.datetime.now().astimezone().isoformat("T", "seconds"),
        "margin": study.margin,
        "thresholds": study.thresholds,
        "steps": study.steps,
        "eval_every": study.eval_every,
        "batch_size": study.batch_size,
        "length": blocks.train.shape[1],
        "seeds": study.seeds,
        "configs": [dataclasses.asdict(config) for config in study.configs],
        "base": {
            "name": study.base,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "layers": model.config.num_hidden_layers,
            "width": model.config.hidden_size,
            "dense_loss": dense_loss,
        },
        "data": {**study.data, "tokens": blocks.train.numel(), "validation_tokens": blocks.validation.numel()},
        "versions": versions(),
        "machine": machine,
        "parts": parts,
    }
    write_json(out / "study.json", content)
    return SharedSetting(
        blocks=str(out / "blocks.safetensors"),
        base=base,
        fingerprint=combine(parts),
        dense_loss=dense_loss,
        batch_size=study.batch_size,
        eval_every=study.eval_every,
        thresholds=tuple(study.thresholds),
        threads=machine["threads"],
    )


def _blocks(study: Study, out: Path, base: str, started: bool, debug: bool) -> Blocks:
    """The study's blocks. Text is read once: later starts use what the first one made of it."""
    if started and "dataset" in study.data and (out / "blocks.safetensors").exists():
        return read_blocks(out / "blocks.safetensors")
    source = study.resolve(study.data["blocks" if "blocks" in study.data else "dataset"])
    return prepare_blocks(study.data, source, base, debug)


def _dense_loss(study: Study, model: Any, blocks: Blocks) -> float:
    spec = RunSpec("dense", 0, study.steps, study.adapter, study.training)
    arguments = spec.training_arguments(study.batch_size, study.folder)
    with autocast(arguments):
        return mean_loss(model, to_batches(blocks.validation, study.batch_size, arguments.device))


def _steps_in_time(out: Path, spec: RunSpec, fingerprint: str) -> int | None:
    """The steps of `steps_of` that fit in the time of `same_time_as`; None while either is incomplete."""
    assert spec.iso_compute is not None
    summaries = []
    for key in ("same_time_as", "steps_of"):
        folder = run_folder(out, dataclasses.replace(spec, config=spec.iso_compute[key]))
        summaries.append(read_json(folder / "summary.json"))
    timed, counted = summaries
    if timed is None or counted is None or {timed["fingerprint"], counted["fingerprint"]} != {fingerprint}:
        return None
    clock = "train_seconds" if device_type() == "cuda" else "train_cpu_seconds"  # CPUs are often shared
    return max(1, round(counted["steps"] * timed[clock] / counted[clock]))


def _run_all(
    specs: Sequence[RunSpec], shared: SharedSetting, start: Start, jobs: int, failures: dict[str, Failure]
) -> None:
    """Execute runs until each is complete or has failed. The folder says which: workers may die without a word."""
    import joblib

    left = list(specs)
    while left:
        ended: BaseException | None = None
        try:
            with _engine(start.engine, jobs):
                joblib.Parallel(n_jobs=min(jobs, len(left)), batch_size=1)(
                    joblib.delayed(execute)(shared, spec, start) for spec in left
                )
        except Exception as error:  # of the engine: `execute` keeps those of a run
            ended = error
        unstarted = []
        for spec in left:
            folder = run_folder(start.out, spec)
            if not folder.exists():
                unstarted.append(spec)
            elif not (folder / "summary.json").exists():
                known = read_json(folder / FAILED) or {"reason": "its process died; is there enough memory?"}
                failures[spec.name] = Failure(**known)
        if len(unstarted) == len(left):
            raise ended or StudyError(f"--engine {start.engine}: it ended without having started a run")
        left = unstarted


@contextmanager
def _engine(name: str, jobs: int) -> Iterator[None]:
    import joblib

    if name == "processes":
        with joblib.parallel_config(backend="loky"):
            yield
        return
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # every run's line is printed
    import ray
    from ray.util.joblib import register_ray

    register_ray()
    ray.init(ignore_reinit_error=True, logging_level="ERROR")
    gpus = min(1.0, torch.cuda.device_count() / jobs)
    with joblib.parallel_config(backend="ray", ray_remote_args={"num_gpus": gpus} if gpus else None):
        yield

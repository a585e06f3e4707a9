"""One run in whatever process it was sent to: reported on one line, and failing alone."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from ..config import ConfigError
from ..remote_code import trust_remote_code
from ..shown import say
from ..staged_files import write_json
from .fingerprint import CODE
from .folder import locked, run_folder
from .grid import RunSpec
from .run import RunError, SharedSetting, train_run

FAILED = "failed.json"  # in the folder of a run that ended in an exception


@dataclass(frozen=True)
class Start:
    """What a run needs to know of the start that it belongs to.

    Attributes:
        out: The study's folder.
        selected: Folders of all runs of this start.
        owner: Process id.
        engine: `"processes"` or `"ray"`.
        code: Hash of the package's code.
        device: `"cpu"` or `"cuda"`.
        debug: Show the warnings of the libraries.
        trust: The base's own code may run.
    """

    out: Path
    selected: tuple[Path, ...]
    owner: int
    engine: str
    code: str
    device: str
    debug: bool
    trust: bool

    def complete(self) -> int:
        """How many of the runs are."""
        return sum((folder / "summary.json").exists() for folder in self.selected)

    def label(self, spec: RunSpec) -> str:
        """`"[run 3 of 8] g3, seed 42"`."""
        number = self.selected.index(run_folder(self.out, spec)) + 1
        return f"[run {number} of {len(self.selected)}] {spec.config}, seed {spec.seed}"


def execute(shared: SharedSetting, spec: RunSpec, start: Start) -> None:
    """Train a run and print a line about it; what goes wrong is not raised, but written to the run's folder."""
    if start.engine == "processes" and os.getpid() != start.owner:
        _end_with(start.owner)
    if not start.debug:
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    folder = run_folder(start.out, spec)
    with locked(start.out / ".workers", "the study is being started again", patience=60.0, shared=True):
        began = time.monotonic()
        try:
            _check(start)
            with trust_remote_code() if start.trust else nullcontext():
                summary = train_run(shared, spec, folder, start.label(spec))
            said = f"endpoint {summary['endpoint']:.3f} in {time.monotonic() - began:.0f} s"
            if summary["refresh_over_forward"] is not None:
                said += f"; a refresh of the labels costs {summary['refresh_over_forward']:.1f} forward passes"
        except Exception as error:
            reason = " ".join(str(error).split())
            if not isinstance(error, RunError | ConfigError):
                reason = f"{type(error).__name__}: {reason}"
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / FAILED, {"reason": reason, "traceback": traceback.format_exc()})
            said = f"failed: {reason}"
        say(f"[{start.complete()}/{len(start.selected)}] {spec.name} {said}")
    gc.collect()  # a Trainer and its model hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check(start: Start) -> None:
    if start.code != CODE:
        raise RunError("the code of hf_depthroute was changed after the study was started; start it again")
    if start.device != device_type():
        raise RunError(f"this process runs on {device_type()}, the study on {start.device}")


def _end_with(owner: int) -> None:
    """End this process soon after process `owner`, its parent: a killed study leaves no runs behind."""

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(0.2)
        os._exit(1)

    if not any(thread.name == _WATCH for thread in threading.enumerate()):
        threading.Thread(target=watch, name=_WATCH, daemon=True).start()


_WATCH = "ends with the study"

"""The result folder of a study: locks, and which runs are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import ConfigError
from .fingerprint import differences
from .grid import RunSpec


class StudyError(ConfigError):
    """A study cannot be started or continued. The message is one line."""


def run_folder(out: Path, spec: RunSpec) -> Path:
    return out / "runs" / spec.config / str(spec.seed)


def finished_summary(out: Path, spec: RunSpec, fingerprint: str) -> dict[str, Any] | None:
    """The summary of a complete run; None when there is none.

    Raises:
        StudyError: The run was made with another specification or in another study; it is left as it is.
    """
    folder = run_folder(out, spec)
    summary, made = read_json(folder / "summary.json"), read_json(folder / "run.json")
    if summary is None or made is None:
        return None
    wanted = json.loads(json.dumps(dataclasses.asdict(spec)))
    if spec.iso_compute is not None:
        del wanted["steps"]  # follow from times
    other = differences({name: made.get(name) for name in wanted}, wanted)
    if made.get("fingerprint") != fingerprint:
        other.append("the fingerprint of the study")
    if other:
        raise StudyError(
            f"{folder}: made with another specification ({', '.join(other)}); "
            "rename the config, or pass another --out, or delete the folder"
        )
    return summary


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file that holds a mapping; None when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@contextlib.contextmanager
def locked(path: Path, busy: str, patience: float = 0.0, shared: bool = False) -> Iterator[None]:
    """Hold the lock file `path` inside the block; the system frees it when the process ends, however it ends.

    Args:
        path: Made if need be.
        busy: Message for when it is held elsewhere.
        patience: Seconds to wait for it.
        shared: Several holders that are all `shared` do not exclude each other.

    Raises:
        StudyError: It is held elsewhere.
    """
    import fcntl  # not on Windows

    deadline = time.monotonic() + patience
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StudyError(busy) from None
                time.sleep(0.1)
        yield

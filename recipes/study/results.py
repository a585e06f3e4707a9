"""Reader of the files of a study, as one structure that fits in a small `results.json`:
`study.json`, and `runs/CONFIG/SEED/` with `summary.json` (its presence means that the run is
complete), `eval.jsonl` and `metrics.jsonl`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from hf_depthroute.files.shown import OneLine

FORMAT = "hf-depthroute study 1"
WINDOWS = 100  # points of a training series in results.json
SERIES = ("grad_norm", "loss_lm", "gate_prob")
_SERIES_DIGITS = 5  # significant digits
_SUMMARY_DIGITS = 7  # paired differences of losses need more than the figures do


class ResultsError(OneLine, ValueError):
    """A folder without readable results; one line with the path, what is wrong and the remedy."""


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        summary: `summary.json`; numbers that are not finite are None.
        eval: `step` and `lm_loss`, equally long.
        training: `step`, `grad_norm`, `loss_lm` and `gate_prob` (mean over the layers), averaged in
            windows of steps.
    """

    summary: Mapping[str, Any]
    eval: Mapping[str, Sequence[Any]]
    training: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class StudyRuns:
    """A study with its finished runs, in the order of `study.json`.

    Attributes:
        info: `study.json`.
        runs: Per config and seed.
        unfinished: Per config and seed, the last step in `metrics.jsonl` of a run that has no
            summary.
    """

    info: Mapping[str, Any]
    runs: Mapping[str, Mapping[int, Run]]
    unfinished: Mapping[str, Mapping[int, int]]

    @property
    def seeds(self) -> list[int]:
        return list(self.info["seeds"])

    @property
    def names(self) -> list[str]:
        return [config["name"] for config in self.info["configs"]]

    def config(self, name: str) -> Mapping[str, Any]:
        """The entry of `study.json`; empty for a name that is not in the study."""
        return next((config for config in self.info["configs"] if config["name"] == name), {})

    def label(self, name: str) -> str:
        return str(self.config(name).get("label") or name)

    def missing(self) -> dict[str, list[int]]:
        """Seeds without a finished run, per config that has such seeds."""
        absent = {
            name: [seed for seed in self.seeds if seed not in self.runs.get(name, {})]
            for name in self.names
        }
        return {name: seeds for name, seeds in absent.items() if seeds}


def read_results(folder: Path) -> StudyRuns:
    """Read a result folder, or, where it has no `runs/`, the `results.json` of an earlier report.

    Raises:
        ResultsError: It is no such folder, it holds no finished run, or one of its files is broken.
    """
    if not folder.is_dir():
        raise ResultsError(
            f"{folder}: {'is a file, not a folder' if folder.exists() else 'no such folder'}"
        )
    if not any(folder.iterdir()):
        raise ResultsError(f"{folder}: the folder is empty; give the --out folder of a study")
    path = folder / "results.json"
    if not (folder / "runs").is_dir() and path.is_file():
        study = _from_results(path)
    elif (folder / "study.json").is_file():
        path, study = folder, _from_folder(folder)
    else:
        raise ResultsError(
            f"{folder}: no study folder, it has no study.json; give the --out of a study"
        )
    if not study.runs:
        total = len(study.names) * len(study.seeds)
        raise ResultsError(
            f"{path}: none of the {total} runs is finished; finish one with `python recipes/study "
            "run`"
        )
    return study


def dump_results(study: StudyRuns) -> str:
    """The text of `results.json`, one line per run, so that a rerun shows up as a
    small difference."""
    lines = ["{", f' "format": {json.dumps(FORMAT)},', f' "study": {_dump(study.info)},']
    lines += [f' "unfinished": {_dump(study.unfinished)},', ' "runs": [']
    entries = [
        " "
        + _dump(
            {
                "config": name,
                "seed": seed,
                "summary": r.summary,
                "eval": r.eval,
                "training": r.training,
            }
        )
        for name in study.names
        for seed, r in study.runs.get(name, {}).items()
    ]
    return "\n".join([*lines, ",\n".join(entries), " ]", "}", ""])


def number(value: Any) -> float | None:
    """`value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None


def _from_folder(folder: Path) -> StudyRuns:
    info = _check_info(folder / "study.json", _clean(_load(folder / "study.json")))
    runs: dict[str, dict[int, Run]] = {}
    unfinished: dict[str, dict[int, int]] = {}
    for name, seed in itertools.product(
        [config["name"] for config in info["configs"]], info["seeds"]
    ):
        place = folder / "runs" / name / str(seed)
        if (place / "summary.json").is_file():
            runs.setdefault(name, {})[seed] = _read_run(place)
        elif (place / "metrics.jsonl").is_file():
            rows = _load_lines(place / "metrics.jsonl", complete=False)
            unfinished.setdefault(name, {})[seed] = (
                int(number(rows[-1].get("step")) or 0) if rows else 0
            )
    return StudyRuns(info, runs, unfinished)


def _from_results(path: Path) -> StudyRuns:
    loaded = _clean(_load(path))
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        raise ResultsError(f"{path}: not the report of a study; its format is not {FORMAT!r}")
    info = _check_info(path, loaded.get("study"))
    runs: dict[str, dict[int, Run]] = {}
    try:
        for entry in loaded.get("runs") or []:
            run = Run(*(_mapping(entry[key]) for key in ("summary", "eval", "training")))
            runs.setdefault(str(entry["config"]), {})[int(entry["seed"])] = run
        unfinished = {
            name: {int(seed): int(number(step) or 0) for seed, step in _mapping(steps).items()}
            for name, steps in _mapping(loaded.get("unfinished") or {}).items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(
            f"{path}: a run without {error}; write it again from the result folder"
        ) from error
    return StudyRuns(info, runs, unfinished)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a mapping (found {type(value).__name__})")
    return value


def _check_info(path: Path, info: Any) -> Mapping[str, Any]:
    """`study.json` with `thresholds` and `margin` filled in.

    Raises:
        ResultsError: It does not list configs with usable, distinct names, or seeds.
    """
    if not isinstance(info, dict):
        raise ResultsError(f"{path}: must describe a study, not be a {type(info).__name__}")
    for key, kind, wanted in (("configs", dict, "configs"), ("seeds", int, "seeds, whole numbers")):
        listed = info.get(key)
        if (
            not isinstance(listed, list)
            or not listed
            or any(type(value) is not kind for value in listed)
        ):
            raise ResultsError(f"{path}: '{key}' must list the study's {wanted}")
    names = [config.get("name") for config in info["configs"]]
    for name in names:
        # The name is a folder in runs/; a path would lead out of it.
        if not isinstance(name, str) or not name or name in (".", "..") or Path(name).name != name:
            raise ResultsError(f"{path}: config name {name!r} must be the name of a folder")
    if len(set(names)) < len(names):
        raise ResultsError(f"{path}: config names must be distinct: {', '.join(map(str, names))}")
    thresholds = [value for value in info.get("thresholds") or [] if number(value) is not None]
    margin = number(info.get("margin"))
    return {**info, "thresholds": thresholds, "margin": 0.005 if margin is None else margin}


def _read_run(folder: Path) -> Run:
    summary = _load(folder / "summary.json")
    if not isinstance(summary, dict):
        raise ResultsError(
            f"{folder / 'summary.json'}: must be a mapping, not a {type(summary).__name__}"
        )
    curve = _load_lines(folder / "eval.jsonl")
    losses = {
        key: [_round(row.get(key), _SUMMARY_DIGITS) for row in curve] for key in ("step", "lm_loss")
    }
    return Run(_clean(summary), losses, _windows(_load_lines(folder / "metrics.jsonl")))


def _windows(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | int | None]]:
    """Averages over at most `WINDOWS` windows of consecutive steps;
    `step` is the middle of each."""
    frame = pd.DataFrame(rows).map(number).astype(float)
    frame["gate_prob"] = frame.filter(regex="^gate_prob/").mean(axis="columns")
    count = min(WINDOWS, len(frame))
    window = [((index + 1) * count - 1) // len(frame) for index in range(len(frame))]
    means = frame.reindex(columns=["step", *SERIES]).groupby(window).mean()
    return {str(key): [_round(value, _SERIES_DIGITS) for value in means[key]] for key in means}


def _round(value: Any, digits: int) -> float | int | None:
    finite = number(value)
    if finite is None or isinstance(value, int):
        return None if finite is None else value
    return float(f"{finite:.{digits}g}")


def _clean(value: Any) -> Any:
    """`value` with every float rounded, and those that are not finite replaced by None."""
    if isinstance(value, dict):
        return {str(key): _clean(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_clean(part) for part in value]
    return _round(value, _SUMMARY_DIGITS) if isinstance(value, float) else value


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(path, error, getattr(error, "lineno", 1)) from error


def _load_lines(path: Path, complete: bool = True) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file; of a run that was cut short (`complete` false),
    without a broken last line."""
    rows: dict[int, Any] = {}
    index = 0
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for index, line in enumerate(lines, start=1):
            if line.strip():
                rows[index] = json.loads(line)
    except (OSError, ValueError, RecursionError) as error:
        if complete or not 0 < index == len(lines):
            raise _broken(path, error, index) from error
    for index, row in rows.items():
        if not isinstance(row, dict):
            raise ResultsError(
                f"{path}: line {index} must be a mapping, not a {type(row).__name__}"
            )
    return list(rows.values())


def _broken(path: Path, error: Exception, line: int) -> ResultsError:
    if isinstance(error, (OSError, UnicodeDecodeError)):
        return ResultsError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        )
    message = getattr(error, "msg", None) or "cannot be parsed"
    return ResultsError(
        f"{path}: broken JSON, line {line}: {message}; remove the file to run it again"
    )


def _dump(value: Any) -> str:
    return json.dumps(
        value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=dict
    )

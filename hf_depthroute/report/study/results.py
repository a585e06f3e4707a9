"""A study's result folder, read into one structure that also fits in a small `results.json`.

The folder is what `hf-depthroute study` writes: `study.json`, and `runs/CONFIG/SEED/` with `summary.json` (its presence
means that the run is complete), `eval.jsonl` and `metrics.jsonl`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...shown import OneLine
from ...staged_files import write_text

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
        training: `step`, `grad_norm`, `loss_lm` and `gate_prob` (mean over the layers), averaged in windows of steps.
    """

    summary: Mapping[str, Any]
    eval: Mapping[str, Sequence[Any]]
    training: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Study:
    """A study with its finished runs, in the order of `study.json`.

    Attributes:
        info: `study.json`.
        runs: Per config and seed.
        unfinished: Per config and seed, the last step in `metrics.jsonl` of a run that has no summary.
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
        absent = {name: [seed for seed in self.seeds if seed not in self.runs.get(name, {})] for name in self.names}
        return {name: seeds for name, seeds in absent.items() if seeds}


def read_study(folder: Path) -> Study:
    """Read a result folder, or, where it has no `runs/`, the `results.json` of an earlier report.

    Raises:
        ResultsError: It is no such folder, it holds no finished run, or one of its files is broken.
    """
    if not folder.is_dir():
        raise ResultsError(f"{folder}: {'is a file, not a folder' if folder.exists() else 'no such folder'}")
    if not any(folder.iterdir()):
        raise ResultsError(f"{folder}: the folder is empty; give the --out folder of hf-depthroute study")
    if not (folder / "runs").is_dir() and (folder / "results.json").is_file():
        return _from_results(folder / "results.json")
    if not (folder / "study.json").is_file():
        raise ResultsError(f"{folder}: no study folder, it has no study.json; give the --out of hf-depthroute study")
    info = _check_info(folder / "study.json", _clean(_load(folder / "study.json")))
    runs: dict[str, dict[int, Run]] = {}
    unfinished: dict[str, dict[int, int]] = {}
    for config in info["configs"]:
        for seed in info["seeds"]:
            run_folder = folder / "runs" / config["name"] / str(seed)
            if (run_folder / "summary.json").is_file():
                runs.setdefault(config["name"], {})[seed] = _read_run(run_folder)
            elif (run_folder / "metrics.jsonl").is_file():
                rows = _load_lines(run_folder / "metrics.jsonl", complete=False)
                unfinished.setdefault(config["name"], {})[seed] = int(number(rows[-1].get("step")) or 0) if rows else 0
    return _with_runs(folder, Study(info, runs, unfinished))


def write_results(path: Path, study: Study) -> None:
    """Write `results.json`."""
    write_text(path, dump_results(study))


def dump_results(study: Study) -> str:
    """The text of `results.json`, one line per run, so that a rerun shows up as a small difference."""
    lines = ["{", f' "format": {json.dumps(FORMAT)},', f' "study": {_dump(study.info)},']
    lines += [f' "unfinished": {_dump(study.unfinished)},', ' "runs": [']
    entries = [
        " " + _dump({"config": name, "seed": seed, "summary": r.summary, "eval": r.eval, "training": r.training})
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


def _from_results(path: Path) -> Study:
    loaded = _clean(_load(path))
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        raise ResultsError(f"{path}: not written by hf-depthroute report; its format is not {FORMAT!r}")
    info = _check_info(path, loaded.get("study"))
    runs: dict[str, dict[int, Run]] = {}
    for entry in loaded.get("runs") or []:
        try:
            run = Run(*(_mapping(entry[key]) for key in ("summary", "eval", "training")))
            runs.setdefault(str(entry["config"]), {})[int(entry["seed"])] = run
        except (KeyError, TypeError, ValueError) as error:
            raise ResultsError(f"{path}: a run without {error}; write it again from the result folder") from error
    unfinished = {
        str(name): {int(seed): int(number(step) or 0) for seed, step in steps.items() if seed.isdecimal()}
        for name, steps in _mapping(loaded.get("unfinished") or {}).items()
        if isinstance(steps, dict)
    }
    return _with_runs(path, Study(info, runs, unfinished))


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a mapping (found {type(value).__name__})")
    return value


def _with_runs(path: Path, study: Study) -> Study:
    if not study.runs:
        total = len(study.names) * len(study.seeds)
        raise ResultsError(f"{path}: none of the {total} runs is finished; finish one with hf-depthroute study")
    return study


def _check_info(path: Path, info: Any) -> Mapping[str, Any]:
    """`study.json` with `thresholds` and `margin` filled in.

    Raises:
        ResultsError: It does not list configs with usable, distinct names, or seeds.
    """
    if not isinstance(info, dict):
        raise ResultsError(f"{path}: must describe a study, not be a {type(info).__name__}")
    configs, seeds = info.get("configs"), info.get("seeds")
    if not isinstance(configs, list) or not configs or not all(isinstance(config, dict) for config in configs):
        raise ResultsError(f"{path}: 'configs' must list the study's configs")
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise ResultsError(f"{path}: 'seeds' must list the study's seeds, whole numbers")
    names = [config.get("name") for config in configs]
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
        raise ResultsError(f"{folder / 'summary.json'}: must be a mapping, not a {type(summary).__name__}")
    curve = _load_lines(folder / "eval.jsonl")
    metrics = _load_lines(folder / "metrics.jsonl")
    return Run(
        summary=_clean(summary),
        eval={key: [_round(row.get(key), _SUMMARY_DIGITS) for row in curve] for key in ("step", "lm_loss")},
        training=_windows(metrics),
    )


def _windows(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Averages over at most `WINDOWS` windows of consecutive steps; `step` is the middle of each."""
    count = min(WINDOWS, len(rows))
    bounds = [len(rows) * i // count for i in range(count + 1)] if count else [0]
    windows = [rows[start:end] for start, end in itertools.pairwise(bounds)]
    return {
        key: [_round(_mean([_point(row, key) for row in window]), _SERIES_DIGITS) for window in windows]
        for key in ("step", *SERIES)
    }


def _point(row: Mapping[str, Any], key: str) -> float | None:
    if key != "gate_prob":
        return number(row.get(key))
    return _mean([number(value) for name, value in row.items() if name.startswith("gate_prob/")])


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


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
    return _parse(path, _text(path))


def _load_lines(path: Path, complete: bool = True) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file; of a run that was cut short (`complete` false), without a broken last line."""
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    lines = _text(path).splitlines()
    for index, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parse(path, line, index)
        except ResultsError:
            if complete or index < len(lines):
                raise
            continue
        if not isinstance(row, dict):
            raise ResultsError(f"{path}: line {index} must be a mapping, not a {type(row).__name__}")
        rows.append(row)
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error


def _parse(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"line {line or getattr(error, 'lineno', 1)}"
        message = getattr(error, "msg", None) or "cannot be parsed"
        raise ResultsError(f"{path}: broken JSON, {where}: {message}; remove the file to run it again") from error


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=dict)

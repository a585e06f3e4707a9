"""A study as one plain table: a row per config, with means and standard errors over its seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
from pages import markdown_table, markdown_text

from hf_depthroute.files.staged import write_files

from .results import StudyRuns, dump_results, number, read_results

LOSSES = {
    "best": "best",
    "avg_first_half": "avg first half",
    "avg_whole": "avg whole",
    "endpoint": "endpoint",
}
_SUFFIXES = {"mean": "", "std": "std", "sem": "se"}  # of the columns of `summarize`
_LEGEND = (
    "Validation losses in nats, under the training rule: mean ± standard error over the seeds. avg "
    "first half and avg whole: mean over the evaluations after step 0. Tokens are those of "
    "training."
)


def write_study_report(source: Path, folder: Path) -> StudyRuns:
    """Write `report.md`, `results.csv` and `results.json` of a study into `folder`.

    Args:
        source: The result folder of a study, or one with the `results.json` of an earlier report.
        folder: Made if it is missing.

    Raises:
        ResultsError: `source` holds no readable results.
        OSError: `folder` cannot be written.
    """
    study = read_results(source)
    folder.mkdir(parents=True, exist_ok=True)
    title, facts, notes = study_title(study), study_facts(study), study_notes(study)
    frame = summarize(study)
    table = loss_table(study, frame)
    text = "\n".join([
        f"# {markdown_text(title)}",
        "",
        *(f"* **{name}**: {markdown_text(value)}" for name, value in facts),
        "",
        *(f"> **Note.** {markdown_text(note)}\n" for note in notes),
        *markdown_table(list(table), table.map(markdown_text).to_numpy().tolist()),
        "",
        _LEGEND,
        "",
    ])  # fmt: skip
    files = {"report.md": text, "results.csv": frame.to_csv(), "results.json": dump_results(study)}
    write_files({folder / name: content.encode() for name, content in files.items()})
    return study


def summarize(study: StudyRuns) -> pd.DataFrame:
    """A row per config with a finished run: the number of `seeds`, and of the `tokens` trained on
    and of every number in the summaries the mean over them, `NAME std` (sample standard deviation)
    and `NAME se` (standard error of the mean).

    Numbers inside a summary's mappings are named by their path, such as `cost/training_ffn_ratio`.
    """
    found = [(name, run) for name in study.names for run in study.runs.get(name, {}).values()]
    names = pd.Series([name for name, _ in found], name="config")
    frame = pd.json_normalize([dict(run.summary) for _, run in found], sep="/")
    frame = (
        frame.drop(columns=["config", "seed", "seeds", "tokens"], errors="ignore")
        .map(number)
        .astype(float)
    )
    batch, length = (number(study.info.get(key)) or math.nan for key in ("batch_size", "length"))
    trainings = names.map(lambda name: study.config(name).get("training"))
    accumulated = [
        number(t.get("gradient_accumulation_steps")) if isinstance(t, dict) else None
        for t in trainings
    ]
    tokens = [batch * length * (steps or 1.0) for steps in accumulated]
    frame.insert(0, "tokens", frame.get("steps", math.nan) * pd.Series(tokens))
    runs = frame.dropna(axis="columns", how="all").groupby(names, sort=False)
    summary = runs.agg(["mean", "std", "sem"])
    summary.columns = [f"{name} {_SUFFIXES[how]}".strip() for name, how in summary.columns]
    summary.insert(0, "seeds", runs.size())
    return summary


def loss_table(study: StudyRuns, frame: pd.DataFrame) -> pd.DataFrame:
    """Losses by config as text, from `summarize`, without the columns that nothing
    was measured for."""
    rows = []
    for name, values in frame.iterrows():
        row = {"config": study.label(str(name)), "seeds": f"{values['seeds']:.0f}"}
        row |= {key: _cell(values, key, ",.0f") for key in ("steps", "tokens")}
        # The value alone where all seeds have the same, or there is one.
        for key, title in LOSSES.items():
            error = values.get(f"{key} se", math.nan)
            row[title] = _cell(values, key, ".4f") + (f" ± {error:.4f}" if error > 0 else "")
        rows.append(row)
    table = pd.DataFrame(rows)
    return table.loc[:, (table != "-").any()]


def _cell(values: pd.Series, key: str, how: str) -> str:
    value = values.get(key, math.nan)
    return "-" if pd.isna(value) else f"{value:{how}}"


def study_title(study: StudyRuns) -> str:
    return f"Study: {study.info.get('name') or 'unnamed'}"


def study_facts(study: StudyRuns) -> list[tuple[str, str]]:
    """The study's settings, as names and text; values missing in `study.json` are left out."""
    info = study.info
    base, data, machine = (info.get(key) or {} for key in ("base", "data", "machine"))
    finished = sum(len(runs) for runs in study.runs.values())
    steps, batch, length = (number(info.get(key)) for key in ("steps", "batch_size", "length"))
    scale = [] if steps is None else [f"{steps:,.0f} steps"]
    if batch is not None and length is not None:
        scale.append(f"batches of {batch:.0f} x {length:.0f} tokens")
    facts = [
        ("Base", _listed(base)),
        ("Data", _listed(data)),
        ("Scale", ", ".join(scale)),
        ("Seeds", ", ".join(map(str, study.seeds))),
        (
            "Runs",
            (
                f"{finished} of {len(study.names) * len(study.seeds)} finished, {len(study.names)} "
                "configs"
            ),
        ),
        ("Margin", f"{info['margin']:g}"),
        ("Thresholds", ", ".join(f"{threshold:g}" for threshold in info["thresholds"])),
        ("Machine", _listed(machine)),
        ("Versions", _listed(info.get("versions") or {})),
        ("Started", str(info.get("created") or "")),
    ]
    return [(name, text) for name, text in facts if text]


def _listed(values: Any) -> str:
    if not isinstance(values, dict):
        return ""
    return ", ".join(
        f"{str(key).replace('_', ' ')} {_plain(value)}"
        for key, value in values.items()
        if value is not None
    )


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict | list):
        return json.dumps(value)
    text = str(value)
    return Path(text).name if text.startswith("/") else text  # a report is for other machines


def study_notes(study: StudyRuns, rest: str = "means") -> list[str]:
    """Notes about runs that are missing or went wrong;
    `rest` names the part that does not count them."""
    notes = []
    missing = study.missing()
    if missing:
        alike: dict[str, list[str]] = {}  # configs that miss the same seeds
        for name, seeds in missing.items():
            steps = {
                seed: f" (at step {step})" for seed, step in study.unfinished.get(name, {}).items()
            }
            alike.setdefault(
                ", ".join(f"{seed}{steps.get(seed, '')}" for seed in seeds), []
            ).append(name)
        told = "; ".join(f"{', '.join(names)}: {seeds}" for seeds, names in alike.items())
        notes.append(f"{count_missing(study)}; {rest} rest on the others. Missing seeds: {told}.")
    diverged = [
        f"{name} seed {seed}"
        for name, runs in study.runs.items()
        for seed, run in runs.items()
        if number(run.summary.get("endpoint")) is None
    ]
    if diverged:
        notes.append(f"No finite endpoint loss, left out of {rest}: {', '.join(diverged)}.")
    known = (None, study.info.get("fingerprint"))
    others = sorted(
        name
        for name, runs in study.runs.items()
        if known[1] is not None
        and any(run.summary.get("fingerprint") not in known for run in runs.values())
    )
    if others:
        notes.append(
            f"Runs of another study, by their fingerprint: {', '.join(others)}. Do not compare "
            "them."
        )
    return notes


def count_missing(study: StudyRuns) -> str:
    """`"2 runs are missing"`; empty when none is."""
    count = sum(len(seeds) for seeds in study.missing().values())
    return "" if not count else "1 run is missing" if count == 1 else f"{count} runs are missing"

"""`report.html` (one self-contained file), `report.md`, the figures and `results.json` of a study.

"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study" (arXiv:2604.17228).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...shown import shown
from ...staged_files import write_files
from .claims import CONTRADICTED, REPRODUCED, REVERSED, SOURCES, SUPPORTED, UNDETECTABLE, Verdict, judge, untested
from .plots import Plot, plot_study
from .results import Run, Study, dump_results, number, read_study
from .rules import describe_rules
from .tables import ALL_LOSSES, Table, build_tables
from .values import read, significant, uneven_times

# A symbol besides the colour; the word stands next to it.
SYMBOLS = {REPRODUCED: "✓", SUPPORTED: "✓", REVERSED: "✗", CONTRADICTED: "✗", UNDETECTABLE: "○"}
_KINDS = {REPRODUCED: "yes", SUPPORTED: "yes", REVERSED: "no", CONTRADICTED: "no", UNDETECTABLE: "open"}
_LEGEND = (
    "Losses are validation losses in nats, under the training rule (top-k). Tables show mean ± sample standard "
    "deviation over seeds. avg first half and avg whole: mean over the evaluations after step 0. hit: first evaluation "
    "under the threshold. grad norm: mean over training. q distance, q cosine, score variance, gate prob: last tenth "
    "of training, mean over routed layers. oracle AUC: the gate probability against the sign of the counterfactual "
    "difference."
)


def write_report(source: Path, folder: Path) -> tuple[Study, list[Verdict]]:
    """Write the report of the result folder `source` into `folder`, which is made if it is missing.

    Returns:
        The study and its verdicts.

    Raises:
        ResultsError: `source` holds no readable results.
        OSError: `folder` cannot be written.
    """
    study = read_study(source)
    folder.mkdir(parents=True, exist_ok=True)
    plots, verdicts, tables = plot_study(study), judge(study), build_tables(study)
    files = {plot.file: plot.png for plot in plots}
    files["results.json"] = dump_results(study).encode()
    files["report.md"] = render_markdown(study, verdicts, tables, plots).encode()
    files["report.html"] = render_html(study, verdicts, tables, plots).encode()
    write_files({folder / name: content for name, content in files.items()})
    return study, verdicts


def render_html(study: Study, verdicts: Sequence[Verdict], tables: Sequence[Table], plots: Sequence[Plot]) -> str:
    """The page, with the figures inside."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    images = {plot.key: base64.b64encode(plot.png).decode() for plot in plots}
    return environment.get_template("page.html").render(
        title=_title(study),
        facts=_facts(study),
        notes=_notes(study),
        counts=_counts(verdicts),
        groups=_groups(verdicts),
        kinds=_KINDS,
        symbols=SYMBOLS,
        rules=describe_rules(study.info["margin"]),
        untested=untested(study),
        legend=_LEGEND,
        first=_losses(tables),
        tables=tables,
        plots=plots,
        images=images,
    )


def render_markdown(study: Study, verdicts: Sequence[Verdict], tables: Sequence[Table], plots: Sequence[Plot]) -> str:
    """The same text, with links to the figures."""
    lines = [f"# {_escape(_title(study))}", ""]
    lines += [f"* **{name}**: {_escape(value)}" for name, value in _facts(study)]
    lines += ["", *(f"> **Note.** {_escape(note)}\n" for note in _notes(study))]
    legend = [_escape(_LEGEND), ""]
    if verdicts:
        lines += _verdict_lines(study, verdicts)
    elif tables:
        lines += ["## Losses", "", *legend, *_table_lines(_losses(tables))]
    lines += ["## Figures", ""]
    for plot in plots:
        lines += [f"### {plot.title}", "", f"![{_escape(plot.alt)}]({plot.file})", "", plot.caption, ""]
    lines += ["## Tables", "", *(legend if verdicts else [])]
    for table in tables:
        if verdicts or table is not _losses(tables):
            lines += _table_lines(table)
    return "\n".join(lines)


def _verdict_lines(study: Study, verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["## Verdicts", "", _escape(_counts(verdicts)), ""]
    for group, members in _groups(verdicts):
        lines += [f"### {_escape(group)}", ""]
        lines += [f"* {SYMBOLS[v.word]} **{v.word}**: {_escape(v.statement)} {_escape(v.sentence)}" for v in members]
        lines.append("")
    if untested(study):
        lines += ["### Not tested by this study", "", *(f"* {_escape(text)}" for text in untested(study)), ""]
    rules = (f"* {_escape(rule)}" for rule in describe_rules(study.info["margin"]))
    return [*lines, "### How the verdicts come about", "", *rules, ""]


def _table_lines(table: Table) -> list[str]:
    ruled = [table.columns, ["---"] * len(table.columns), *table.rows]
    lines = [f"### {_escape(table.title)}", ""]
    lines += ["| " + " | ".join(_escape(cell) for cell in cells) + " |" for cells in ruled]
    return [*lines, "", _escape(table.note), ""] if table.note else [*lines, ""]


def _losses(tables: Sequence[Table]) -> Table:
    """The table that a study of none of the papers' configs begins with."""
    return next(table for table in tables if table.key == ALL_LOSSES)


def _title(study: Study) -> str:
    return f"Study: {study.info.get('name') or 'unnamed'}"


def _facts(study: Study) -> list[tuple[str, str]]:
    """What was run, as names and text; what `study.json` does not say is left out."""
    info = study.info
    base, data, machine = (_mapping(info.get(key)) for key in ("base", "data", "machine"))
    finished = sum(len(runs) for runs in study.runs.values())
    scale = [f"{steps:,.0f} steps" for steps in [number(info.get("steps"))] if steps is not None]
    batch, length = number(info.get("batch_size")), number(info.get("length"))
    if batch is not None and length is not None:
        scale.append(f"batches of {batch:.0f} x {length:.0f} tokens")
    thresholds = ", ".join(f"{threshold:g}" for threshold in info["thresholds"])
    facts = [
        ("Base", _listed(base)),
        ("Data", _listed(data)),
        ("Scale", ", ".join(scale)),
        ("Seeds", ", ".join(map(str, study.seeds))),
        ("Runs", f"{finished} of {len(study.names) * len(study.seeds)} finished, {len(study.names)} configs"),
        ("Margin", f"{info['margin']:g}"),
        ("Thresholds", thresholds),
        ("Machine", _listed(machine)),
        ("Versions", _listed(_mapping(info.get("versions")))),
        ("Started", str(info.get("created") or "")),
    ]
    return [(name, text) for name, text in facts if text]


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{str(key).replace('_', ' ')} {_plain(value)}" for key, value in values.items() if value is not None
    )


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict | list):
        return json.dumps(value)
    text = str(value)
    return Path(text).name if text.startswith("/") else text  # a report is for other machines


def _notes(study: Study) -> list[str]:
    """What the reader must know about runs that are missing or went wrong."""
    notes = []
    missing = study.missing()
    if missing:
        total = sum(len(seeds) for seeds in missing.values())
        alike: dict[str, list[str]] = {}  # configs that miss the same seeds
        for name, seeds in missing.items():
            alike.setdefault(", ".join(_seed(study, name, seed) for seed in seeds), []).append(name)
        told = "; ".join(f"{', '.join(names)}: {seeds}" for seeds, names in alike.items())
        notes.append(f"{count_runs(total)} missing; means and verdicts rest on the others. Missing seeds: {told}.")
    diverged = [
        f"{name} seed {seed}"
        for name, runs in study.runs.items()
        for seed, run in runs.items()
        if read(run.summary, "endpoint") is None
    ]
    if diverged:
        notes.append(f"No finite endpoint loss, left out of means and verdicts: {', '.join(diverged)}.")
    times = uneven_times(study)
    if times is not None:
        notes.append(
            f"Times by the clock are noisy: configs with the same steps and the same cost in the paper's accounting "
            f"took {significant(times[0])} to {significant(times[1])} s on average. Verdicts on time, and configs that "
            "were given the time of another, are as uncertain."
        )
    others = sorted({name for name, runs in study.runs.items() for run in runs.values() if _is_other(study, run)})
    if others:
        notes.append(f"Runs of another study, by their fingerprint: {', '.join(others)}. Do not compare them.")
    return notes


def count_runs(number: int) -> str:
    return "1 run is" if number == 1 else f"{number} runs are"


def _is_other(study: Study, run: Run) -> bool:
    prints = study.info.get("fingerprint"), run.summary.get("fingerprint")
    return None not in prints and prints[0] != prints[1]


def _seed(study: Study, name: str, seed: int) -> str:
    step = study.unfinished.get(name, {}).get(seed)
    return str(seed) if step is None else f"{seed} (at step {step})"


def _counts(verdicts: Sequence[Verdict]) -> str:
    words = [verdict.word for verdict in verdicts]
    claims = ", ".join(f"{words.count(w)} {w}" for w in (REPRODUCED, REVERSED, SUPPORTED, CONTRADICTED) if w in words)
    rest = f"{words.count(UNDETECTABLE)} {UNDETECTABLE}"
    return f"{len(words)} claims and open questions {SOURCES}: {', '.join(filter(None, [claims, rest]))}."


def _groups(verdicts: Sequence[Verdict]) -> list[tuple[str, list[Verdict]]]:
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.group, []).append(verdict)
    return list(groups.items())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _escape(text: str) -> str:
    """Text as Markdown text: on one line, with nothing that starts markup, a link or a cell."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", shown(" ".join(text.split()))).replace("&", "&amp;").replace("<", "&lt;")

"""`report.html` (one self-contained file), `report.md`, the figures,
`results.json` and the step ratios of a study.

"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
(arXiv:2604.17228).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from pages import markdown_table, markdown_text
from study.claims import tell_states
from study.intervals import AGREES, DISAGREES, OPEN
from study.results import StudyRuns, dump_results, read_results
from study.table import study_facts, study_notes, study_title

from hf_depthroute.files.staged import write_files

from .claims import SOURCES, Verdict, judge, untested
from .plots import Plot, plot_study
from .rules import describe_rules
from .tables import ALL_LOSSES, Table, build_tables
from .values import significant, uneven_times

# A symbol besides the colour; the word stands next to it.
SYMBOLS = {AGREES: "✓", DISAGREES: "✗", OPEN: "○"}
_KINDS = {AGREES: "yes", DISAGREES: "no", OPEN: "open"}  # classes of the page's style
_LEGEND = (
    "Losses are validation losses in nats, under the training rule (top-k). Tables show mean ± "
    "standard error over seeds. avg first half and avg whole: mean over the evaluations after step "
    "0. hit: first evaluation under the threshold. grad norm: mean over training. q distance, q "
    "cosine, score variance, gate prob: last tenth of training, mean over routed layers. oracle "
    "AUC: the gate probability against the sign of the counterfactual difference."
)


def write_report(source: Path, folder: Path) -> tuple[StudyRuns, list[Verdict]]:
    """Write the report of the result folder `source` into `folder`, which is made if it is missing.

    Returns:
        The study and its verdicts.

    Raises:
        ResultsError: `source` holds no readable results.
        OSError: `folder` cannot be written.
    """
    study = read_results(source)
    folder.mkdir(parents=True, exist_ok=True)
    plots, verdicts, tables = plot_study(study), judge(study), build_tables(study)
    files = {plot.file: plot.png for plot in plots}
    files["results.json"] = dump_results(study).encode()
    files["report.md"] = render_markdown(study, verdicts, tables, plots).encode()
    files["report.html"] = render_html(study, verdicts, tables, plots).encode()
    # What the steps of an `iso_compute` config come from.
    if (ratios := source / "step_ratios.json").is_file():
        files[ratios.name] = ratios.read_bytes()
    write_files({folder / name: content for name, content in files.items()})
    return study, verdicts


def render_html(
    study: StudyRuns, verdicts: Sequence[Verdict], tables: Sequence[Table], plots: Sequence[Plot]
) -> str:
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
        title=study_title(study),
        facts=study_facts(study),
        notes=_notes(study),
        counts=_counts(verdicts),
        groups=_groups(verdicts),
        kinds=_KINDS,
        symbols=SYMBOLS,
        rules=describe_rules(study, len(verdicts)),
        untested=untested(study),
        legend=_LEGEND,
        first=_losses(tables),
        tables=tables,
        plots=plots,
        images=images,
    )


def render_markdown(
    study: StudyRuns, verdicts: Sequence[Verdict], tables: Sequence[Table], plots: Sequence[Plot]
) -> str:
    """The same text, with links to the figures."""
    lines = [f"# {markdown_text(study_title(study))}", ""]
    lines += [f"* **{name}**: {markdown_text(value)}" for name, value in study_facts(study)]
    lines += ["", *(f"> **Note.** {markdown_text(note)}\n" for note in _notes(study))]
    legend = [markdown_text(_LEGEND), ""]
    if verdicts:
        lines += _verdict_lines(study, verdicts)
    elif tables:
        lines += ["## Losses", "", *legend, *_table_lines(_losses(tables))]
    lines += ["## Figures", ""]
    for plot in plots:
        lines += [
            f"### {plot.title}",
            "",
            f"![{markdown_text(plot.alt)}]({plot.file})",
            "",
            plot.caption,
            "",
        ]
    lines += ["## Tables", "", *(legend if verdicts else [])]
    for table in tables:
        if verdicts or table is not _losses(tables):
            lines += _table_lines(table)
    return "\n".join(lines)


def _verdict_lines(study: StudyRuns, verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["## Verdicts", "", markdown_text(_counts(verdicts)), ""]
    for group, members in _groups(verdicts):
        lines += [f"### {markdown_text(group)}", ""]
        lines += [
            f"* {SYMBOLS[v.state]} **{v.state}**: {markdown_text(v.statement)} "
            f"{markdown_text(v.sentence)}"
            for v in members
        ]
        lines.append("")
    if untested(study):
        lines += [
            "### Not tested by this study",
            "",
            *(f"* {markdown_text(text)}" for text in untested(study)),
            "",
        ]
    rules = (f"* {markdown_text(rule)}" for rule in describe_rules(study, len(verdicts)))
    return [*lines, "### How the verdicts come about", "", *rules, ""]


def _table_lines(table: Table) -> list[str]:
    cells = [[markdown_text(cell) for cell in row] for row in (table.columns, *table.rows)]
    lines = [f"### {markdown_text(table.title)}", "", *markdown_table(cells[0], cells[1:])]
    return [*lines, "", markdown_text(table.note), ""] if table.note else [*lines, ""]


def _losses(tables: Sequence[Table]) -> Table:
    """The table that a study of none of the papers' configs begins with."""
    return next(table for table in tables if table.key == ALL_LOSSES)


def _notes(study: StudyRuns) -> list[str]:
    """What the reader must know about runs that are missing or went wrong,
    and about their times."""
    notes = study_notes(study, "means and verdicts")
    times = uneven_times(study)
    if times is not None:
        notes.append(
            "Times by the clock are noisy: configs with the same steps and the same cost in the "
            f"paper's accounting took {significant(times[0])} to {significant(times[1])} s on "
            "average. Verdicts on time, and configs that were given the time of another, are as "
            "uncertain."
        )
    return notes


def _counts(verdicts: Sequence[Verdict]) -> str:
    states = tell_states(verdict.state for verdict in verdicts)
    return f"{len(verdicts)} claims and open questions {SOURCES}: {states}."


def _groups(verdicts: Sequence[Verdict]) -> list[tuple[str, list[Verdict]]]:
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.group, []).append(verdict)
    return list(groups.items())

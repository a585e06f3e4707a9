"""The tables of a study's report: the paper's six, those its open questions ask for, and all runs.

"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
(arXiv:2604.17228). A table is plain text cells; `page` renders it to HTML and Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from study.results import StudyRuns, number

from .layouts import LAYOUTS, LOSSES, Layout
from .values import (
    fixed,
    hits,
    layers,
    mean,
    paired,
    signed,
    significant,
    spread,
    spread_hits,
    training_clock,
    values,
)

ALL_LOSSES = "all-loss"  # key of the table of all runs' losses

Cell = Callable[[StudyRuns, str], str]


@dataclass(frozen=True)
class Table:
    """A rendered table.

    Attributes:
        key: Short name, also its anchor in the page.
        title: Heading.
        columns: Heads; the first column names the row.
        rows: Cells, as long as `columns`.
        note: Sentences under the table; may be empty.
    """

    key: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def metric(name: str, show: Callable[[float], str]) -> Cell:
    return lambda study, config: spread(list(values(study, config, name).values()), show)


COLUMNS: dict[str, Cell] = {
    "best": metric("best", fixed(4)),
    "avg first half": metric("avg_first_half", fixed(4)),
    "avg whole": metric("avg_whole", fixed(4)),
    "endpoint": metric("endpoint", fixed(4)),
    "grad norm": metric("grad_norm_mean", significant),
    "q distance": metric("layers/q_distance", significant),
    "q cosine": metric("layers/q_cosine", fixed(4)),
    "score variance": metric("layers/score_var", significant),
    "gate prob": metric("layers/gate_prob", fixed(3)),
    "full ratio": metric("layers/full_ratio", fixed(3)),
    "oracle AUC": metric("layers/oracle_auc", fixed(3)),
    "oracle AUC, all-full": metric("layers/oracle_auc_all_full", fixed(3)),
    "frequent": metric("frequent_loss", fixed(4)),
    "rare": metric("rare_loss", fixed(4)),
    "frequent - rare": metric("frequent_minus_rare", fixed(4)),
    "threshold loss": metric("threshold_loss", fixed(4)),
    "threshold - top-k": metric("threshold_minus_topk", signed),
    "threshold ratio": metric("threshold_full_ratio", fixed(3)),
    "train cost (paper)": metric("cost/training_ffn_ratio", fixed(3)),
    "inference cost (paper)": metric("cost/inference_ffn_ratio", fixed(4)),
    "wall (s)": metric("train_seconds", significant),
    "CPU (s)": metric("train_cpu_seconds", significant),
    "step, median (s)": metric("step_seconds_median", significant),
    "trainable": metric("trainable_parameters", fixed(0)),
    "steps": metric("steps", fixed(0)),
    "correlation": metric("layers/fork_bias/correlation", fixed(3)),
    "sign agreement": metric("layers/fork_bias/sign_agreement", fixed(3)),
    "mean, layer-wide": metric("layers/fork_bias/mean_layer_wide", significant),
    "mean, exact": metric("layers/fork_bias/mean_exact", significant),
    "JEPA weight": lambda study, name: setting(study, name, "training", "jepa_weight", 1.0),
    "util weight": lambda study, name: setting(study, name, "training", "util_weight", 1.0),
    "rank weight": lambda study, name: setting(study, name, "training", "rank_weight", 0.2),
    "budget": lambda study, name: setting(study, name, "adapter", "budget", 0.5),
    "seeds": lambda study, name: str(len(study.runs.get(name, {}))),
    "name": lambda study, name: name,
    "about": lambda study, name: str(study.config(name).get("about") or ""),
}


def build_tables(study: StudyRuns) -> list[Table]:
    """All tables that have data, in the report's order."""
    tables = [
        build(study, layout)
        for layout in LAYOUTS
        if any(name in study.runs for name in layout.needs)
    ]
    return [*tables, *_general_tables(study)]


def loss_table(study: StudyRuns) -> Table:
    """The losses of every config with a finished run: mean ± standard error over its seeds,
    and their number."""
    names = [name for name in study.names if name in study.runs]
    return build(study, Layout("losses", "Losses", names, LOSSES, names))


def build(study: StudyRuns, layout: Layout) -> Table:
    """One row per config of the layout that has a finished run."""
    columns = [
        pair for column in ("seeds", *layout.columns) for pair in _expand(study, layout, column)
    ]
    note = layout.note
    if "difference" in layout.columns and "endpoint" in layout.columns:
        note = f"{note} {_explain_difference(study, layout)}".strip()
    return _fill(study, layout, columns, note)


def _fill(
    study: StudyRuns, layout: Layout, columns: Sequence[tuple[str, Cell]], note: str
) -> Table:
    names = [name for name in layout.configs if name in study.runs]
    rows = [[study.label(name), *(cell(study, name) for _, cell in columns)] for name in names]
    head = ["config", *(title for title, _ in columns)]
    kept = [i for i in range(len(head)) if i < 2 or any(row[i] not in ("-", "") for row in rows)]
    return Table(
        layout.key,
        layout.title,
        [head[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        note,
    )


def _expand(study: StudyRuns, layout: Layout, column: str) -> Iterator[tuple[str, Cell]]:
    if column == "hits":
        for threshold in study.info["thresholds"]:
            yield f"hit {threshold:g}", _hit_cell(threshold)
    elif column == "difference":
        yield "endpoint diff.", lambda s, name: _difference(s, name, layout.baseline.get(name))
    else:
        yield column, COLUMNS[column]


def _hit_cell(threshold: float) -> Cell:
    return lambda study, name: spread_hits(list(hits(study, name, threshold).values()))


def _difference(study: StudyRuns, name: str, baseline: str | None) -> str:
    if baseline is None or baseline == name:
        return "-"
    return spread(list(paired(study, name, baseline, "endpoint").values()), signed)


def _explain_difference(study: StudyRuns, layout: Layout) -> str:
    bases: dict[str, list[str]] = {}
    for name, base in layout.baseline.items():
        if name in study.runs and base in study.runs and name != base:
            bases.setdefault(base, []).append(study.label(name))
    pairs = "; ".join(
        f"{', '.join(names)} against {study.label(base)}" for base, names in bases.items()
    )
    return f"Endpoint diff., paired by seed: {pairs}." if pairs else ""


def setting(study: StudyRuns, name: str, part: str, key: str, default: float) -> str:
    """A number of the config's adapter or training settings, as text."""
    return f"{setting_value(study, name, part, key, default):g}"


def setting_value(study: StudyRuns, name: str, part: str, key: str, default: float) -> float:
    """A number of the config's adapter or training settings; `default` is the library's own."""
    settings = study.config(name).get(part)
    value = number(settings.get(key)) if isinstance(settings, dict) else None
    return default if value is None else value


def _general_tables(study: StudyRuns) -> Iterator[Table]:
    names = [name for name in study.names if name in study.runs]
    judged = [name for name in names if values(study, name, "layers/oracle_auc")]
    if judged:
        yield _auc_table(study, judged)
    cost = (
        "steps",
        "train cost (paper)",
        "inference cost (paper)",
        "wall (s)",
        "CPU (s)",
        "step, median (s)",
        "endpoint",
        "trainable",
    )
    yield build(
        study,
        Layout(
            "cost",
            "Cost in the paper's accounting, time by the clock, and the loss they buy",
            sorted(
                names,
                key=lambda name: mean(
                    list(values(study, name, training_clock(study)).values()) or [0.0]
                ),
            ),
            cost,
            needs=names,
            note=(
                "Accounting: full FFNs per token and routed layer, weights only, without the "
                "target projection, which the paper counts. Wall and CPU: optimizer steps only, no "
                "evaluation; the median step leaves out what comes every few steps, as the oracle "
                "does. Sorted by CPU time, or by wall on a GPU."
            ),
        ),
    )
    biased = [name for name in names if values(study, name, "layers/fork_bias/correlation")]
    if biased:
        forks = ("correlation", "sign agreement", "mean, layer-wide", "mean, exact")
        note = (
            "The label forks a whole layer at once: all positions take the cheap path together. "
            "Exact forks each position alone. Correlation and agreement in sign are over "
            "positions, averaged over the routed layers."
        )
        yield build(
            study, Layout("fork-bias", "Bias of the layer-wide fork", biased, forks, biased, note)
        )
    everything = Layout(
        ALL_LOSSES, "All runs: loss", names, ("name", *LOSSES, "hits", "about"), names
    )
    yield build(study, everything)
    gates = ("name", "gate prob", "full ratio", "score variance", "q distance", "q cosine", "grad norm",
               "threshold loss", "threshold - top-k", "threshold ratio", "frequent", "rare")  # fmt: skip
    note = (
        "Threshold: the causal rule after calibration; its difference is to the endpoint loss "
        "under top-k."
    )
    yield build(
        study, Layout("all-gates", "All runs: gates and the causal rule", names, gates, names, note)
    )


def _auc_table(study: StudyRuns, names: Sequence[str]) -> Table:
    columns = [("seeds", COLUMNS["seeds"])]
    for kind, key in (("on-policy", "oracle_auc"), ("all-full", "oracle_auc_all_full")):
        for layer in layers(study, names):
            columns.append((f"{kind}, layer {layer}", metric(f"layers/{layer}/{key}", fixed(3))))
        columns.append((f"{kind}, mean", metric(f"layers/{key}", fixed(3))))
    note = (
        "ROC-AUC of the gate probability against the sign of the counterfactual loss difference on "
        "held-out tokens; 0.5 is chance. On-policy: later layers follow the gate, window 1. "
        "All-full: the sign of the oracle's label."
    )
    return _fill(
        study, Layout("oracle-auc", "Oracle AUC per layer", names, (), names), columns, note
    )

"""Write the figures of the README and of the documentation from the committed result files.

python recipes/tables.py

The README has where routing pays, the papers and six results, `docs/results.md` a row a study and
the tables, `docs/how-to/pick-a-gate.md` the comparison of two gates, `fit_router` and `demo` a
picture each. A number after ± is a standard error everywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import gates
import headlines
import numpy as np
import when_it_pays
from aux_losses import page as aux_losses
from demo import page as demo
from demo import report as demo_report
from engram import page as engram
from fit_router import page as fit_router
from fit_router import report as fit_report
from lora import page as lora
from moe import page as moe
from pages import markdown_table
from peers import page as peers
from peers_smollm2 import page as peers_smollm2
from router_tuning import page as router_tuning
from smollm2 import page as smollm2
from speed import page as speed
from stories260k import page as stories260k
from study.page import RECIPES, Study, read
from token_selective import page as token_selective
from vllm_load import page as vllm_load

README = RECIPES.parent / "README.md"
RESULTS_PAGE = RECIPES.parent / "docs" / "results.md"
GATE_PAGE = RECIPES.parent / "docs" / "how-to" / "pick-a-gate.md"
BRIEF = (
    "A number after ± is a standard error: of a mean over seeds, or of a median over rounds. "
    "Quality figures are of "
    'models of at most 18 million weights where no other size is named; speed figures "at the '
    'shape" or "of the width" of a larger one are of random weights. Times are of the processor '
    "that is named, and differ on others."
)
# The names of the generated parts' markers.
RESULTS, GATES, PAPERS, PAYS = "results", "gates", "papers", "pays"


def part(lines: list[str], name: str) -> str:
    """A page's generated part, between its two markers."""
    return "\n".join([f"<!-- {name} -->", "", *lines, "", f"<!-- /{name} -->"])


def studies() -> list[Study]:
    """In the order of the page."""
    pages = (
        smollm2,
        fit_router,
        stories260k,
        speed,
        peers_smollm2,
        peers,
        demo,
        vllm_load,
        token_selective,
        moe,
        router_tuning,
        lora,
        aux_losses,
        engram,
    )
    return [page.study() for page in pages if page is not peers_smollm2 or peers_smollm2.results()]


def results() -> list[tuple[Path, str, list[str]]]:
    """Page, marker and lines of every generated part but the gates': the README's,
    and the page of results."""
    found = studies()
    rows = [[f"[{s.title}](#{anchor(s.title)})", f"`{s.command}`", s.brief] for s in found]
    sections = [BRIEF, "", *markdown_table(["study", "command", "what came out"], rows)]
    for s in found:
        made = (
            f"From [`recipes/{s.folder}`](../recipes/{s.folder}/README.md), which has the exact "
            "commands."
        )
        sections += ["", f"## {s.title}", "", made, "", *s.section]
    return [
        (README, PAYS, when_it_pays.lines()),
        (README, PAPERS, headlines.papers()),
        (README, RESULTS, headlines.results()),
        (RESULTS_PAGE, RESULTS, sections),
    ]


def anchor(title: str) -> str:
    """The link to a heading, as GitHub makes it."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def draw() -> None:
    """The demo's picture, and the README's: fits for each share,
    with the times that the demo measured on that base."""
    measured = read("demo/results.json")
    prefill = measured["bench"]["prefill"]
    shares, ratios = zip(
        *sorted((row["full_ratio"], row["ratio"]) for row in prefill["budgets"].values()),
        (1.0, 1.0),
    )

    def time(kind: str, share: float) -> float:
        return (
            demo_report.static_time(prefill, share)
            if kind == "static"
            else float(np.interp(share, shares, ratios))
        )

    fit_report.draw_time(
        read("fit_router/results.json")["wide"], time, RECIPES / "fit_router" / "time.png"
    )
    demo_report.plot_quality(RECIPES / "demo" / "quality.png", measured)


def parts() -> list[tuple[Path, str]]:
    """Every page with a part as it must stand there, markers included."""
    found = [*results(), (GATE_PAGE, GATES, gates.gate_comparison())]
    return [(page, part(lines, name)) for page, name, lines in found]


def main() -> None:
    for page, written in parts():
        first, *_, last = written.splitlines()
        head, rest = page.read_text().split(first)
        page.write_text(head + written + rest.split(last)[-1])
    draw()


if __name__ == "__main__":
    main()

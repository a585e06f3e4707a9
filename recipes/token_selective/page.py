"""Token-selective routing on the page of results."""

from __future__ import annotations

from pages import markdown_table
from study.page import Study
from token_selective import report as selective_report


def study() -> Study:
    """TSA beside the paper's figures."""
    result = selective_report.read("paper")
    runs, rows = selective_report.seeds_of(result, "tsa"), []
    settings = runs[0]["settings"]
    for name, label in selective_report.KINDS.items():
        paper = selective_report.PAPER["shakespeare" if name == "tsa" else name]
        over = f"{100 * paper['loss_over_dense']:+.1f} %"
        alpha, most = (
            (f"{paper['alpha']:.3f}", over) if "alpha" in paper else ("", f"less than {over}")
        )
        rows += [
            [f"paper, {label}", alpha, f"{100 * paper['saved']:.1f} %", most],
            [f"soft, {label}", *selective_report.costs(result, name)],
            [
                f"tokens below 1/2 really skip, {label}",
                *selective_report.costs(result, name, hard=True),
            ],
        ]
    brief = (
        f"operations saved, and loss over dense: {rows[1][2]} at {rows[1][3]} counted on soft "
        f"scaling, where nothing is skipped; {rows[2][2]} at {rows[2][3]} where tokens really skip"
    )
    section = [
        (
            "The model of the TSA paper (arXiv:2605.05222) on Tiny-Shakespeare from scratch, in as "
            f"many steps: {settings['steps']:,} of {settings['batch']} sequences. Mean ± standard "
            f"error of {len(runs)} seeds, at the end of the training."
        ),
        "",
        *markdown_table(["", "alpha", "operations saved", "validation loss over dense"], rows),
    ]
    command = "python recipes/token_selective/run.py recipes/token_selective/paper.yaml --out OUT"
    return Study("Token-selective routing", "token_selective", command, brief, section)

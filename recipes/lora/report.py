"""Write the table of `results.md`; with `--out`, of what `run.py` left there,
which becomes `results.json`.

python recipes/lora/report.py [--out OUT]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

from pages import markdown_table
from study.claims import Judged, claims_table, judge
from study.intervals import tell_mean

from hf_depthroute.files.staged import write_text

HERE = Path(__file__).parent
EQUAL = 0.005  # nats; differences up to this count as none
WAYS = {
    "lora": "LoRA, dense",
    "routing": "FFN routing",
    "two_step": "half of the steps LoRA, half FFN routing",
    "joint": "LoRA and FFN routing jointly",
    "router_tuning": "Router-Tuning",
    "joint_router_tuning": "LoRA and Router-Tuning jointly",
}


def lines(results: dict[str, Any]) -> list[str]:
    """A line for the base and each way, and the claims."""
    seeds = list(results["seeds"].values())
    rows = [["base", "0", "1", f"{results['base']:.3f}", f"{results['base']:.3f}", ""]]
    for way, title in WAYS.items():
        found = [seed[way] for seed in seeds]
        shares = tell_mean([row["share"] for row in found]) if "share" in found[0] else "1"
        dense = tell_mean([row.get("loss_at_budget_1", row["loss"]) for row in found])
        trained = f"{found[0]['trainable']:,}"
        seconds = f"{statistics.mean(row['cpu_seconds'] for row in found):.0f} s"
        rows.append(
            [title, trained, shares, tell_mean([row["loss"] for row in found]), dense, seconds]
        )
    head = [
        "",
        "trained weights",
        "share run full",
        "validation loss",
        "with nothing skipped",
        "training",
    ]
    setting = results["setting"]
    note = (
        f"{setting['steps']} steps of {setting['batch']} x {setting['length']} tokens each; mean ± "
        f"standard error of {len(seeds)} seeds. Training: processor time of one core."
    )
    return [*markdown_table(head, rows), "", note, "", *claims_table(claims(results))]


def page(results: dict[str, Any]) -> str:
    """`results.md`."""
    return "\n".join([*lines(results), ""])


def claims(results: dict[str, Any]) -> list[Judged]:
    """Table 7 of Router-Tuning: what routing costs LoRA, within each seed."""

    def share(way: str) -> str:
        return f"{statistics.mean(seed[way]['share'] for seed in results['seeds'].values()):.2f}"

    stated = [
        ("LoRA with Router-Tuning loses nothing over LoRA", "-0.1 points", "joint_router_tuning", "lora", "not higher"),
        (f"LoRA with Router-Tuning is better than Router-Tuning alone ({share('joint_router_tuning')} and "
         f"{share('router_tuning')} run)", "+1.4 points", "joint_router_tuning", "router_tuning", "lower"),
        ("The same with FFNs and a branch: nothing lost over LoRA", "", "joint", "lora", "not higher"),
        (f"FFN routing: LoRA jointly is better than before it ({share('joint')} and {share('two_step')} run)", "",
         "joint", "two_step", "lower"),
    ]  # fmt: skip
    rows = []
    for claim, paper, one, other, expected in stated:
        differences = [
            seed[one]["loss"] - seed[other]["loss"] for seed in results["seeds"].values()
        ]
        rows.append(judge(f"{claim} (loss)", paper, differences, expected, len(stated), EQUAL))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder of run.py; default: the committed results.json"
    )
    args = parser.parse_args()
    if args.out is not None:
        write_text(HERE / "results.json", (args.out / "results.json").read_text())
    write_text(HERE / "results.md", page(json.loads((HERE / "results.json").read_text())))


if __name__ == "__main__":
    main()

"""Write the report of the study: tables, figures, and a verdict on each of the papers' claims,
on one page.

    python recipes/aux_losses/report.py OUT --out recipes/aux_losses/results

OUT is the folder of a study, or one with the `results.json` of an earlier report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

from paper.page import write_report
from paper.tables import loss_table
from study.results import ResultsError
from study.table import count_missing

from hf_depthroute.cli.output import print_table


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, help="default: STUDY/report")
    args = parser.parse_args(words)
    folder = args.out or args.study / "report"
    try:
        study, verdicts = write_report(args.study, folder)
    except ResultsError as error:
        sys.exit(f"error: {error}")
    losses = loss_table(study)
    print_table(tuple(losses.columns), [tuple(row) for row in losses.rows])
    print_table(("verdict", "claim"), [(verdict.state, verdict.statement) for verdict in verdicts])
    print(*filter(None, [count_missing(study), folder / "report.html"]), sep="\n")


if __name__ == "__main__":
    main()

"""Measure a suite of cases: models with random weights, routed against their dense base,
in one process.

    python recipes/speed/bench.py recipes/speed/cpu.yaml --threads 2 --out cpu.json --plot plots

`hf-depthroute bench --compare OLD NEW` compares two results, and `hf-depthroute bench ADAPTER`
measures an adapter.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `speed` is there

import torch
from speed.lora import loading_rows, training_rows
from speed.memory import memory_rows
from speed.roofline import roofline_rows
from speed.suites import read_suite, run_suite

from hf_depthroute.bench.measurements import TIMED
from hf_depthroute.bench.result_tables import brief, tables
from hf_depthroute.cli.output import print_table
from hf_depthroute.files.staged import write_text


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="draw the result into this folder"
    )
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--rounds", type=int, help="of every case; default: the suite's")
    parser.add_argument("--depth", type=int, help="keep so many decoder layers, to try a suite out")
    parser.add_argument("--shape", help="of every model, to try a suite out, as the next three")
    parser.add_argument("--batch", type=int, help="sequences of every case")
    parser.add_argument("--length", type=int, help="tokens of every prompt")
    parser.add_argument("--steps", type=int, help="decoding steps of every case")
    parser.add_argument("--vocabulary", type=int, help="of every model")
    parser.add_argument("--dtype", help="of every model")
    parser.add_argument("--phases", help="what is routed: all or prefill")
    parser.add_argument("--baselines", help="how models run, some of eager,static,compiled")
    args = parser.parse_args(words)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    names = (
        "rounds",
        "depth",
        "shape",
        "batch",
        "length",
        "steps",
        "vocabulary",
        "dtype",
        "phases",
        "baselines",
    )
    try:
        name, cases = read_suite(args.suite, **{field: getattr(args, field) for field in names})
    except (ValueError, OSError) as error:
        parser.error(str(error))
    result = run_suite(cases, name, progress=lambda line: print(line, file=sys.stderr))
    if args.out is not None:
        write_text(args.out, json.dumps(result, indent=2) + "\n")
    others = {
        roofline_rows: TIMED, memory_rows: ("memory",), training_rows: ("train",),
        loading_rows: ("load",),
    }  # fmt: skip
    for rows in map(brief, tables(result, others)):
        print_table(list(rows[0]), [list(row.values()) for row in rows], wide=True)
    if args.plot is not None:
        from speed.result_plots import plot_result

        for path in plot_result(args.plot, result):
            print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()

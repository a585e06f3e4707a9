"""Time this library beside its peers, in turn: each system is a process of its own that waits
while another runs.

    bash recipes/peers/prepare.sh
    python recipes/peers/run.py
    python recipes/peers/report.py

`prepare.sh` gets the peers' environment and code (no part of this project); `worker.py` says what
the systems are. Each is compared with the dense model of its own version of transformers, in the
same round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from worker import PEERS, SYSTEMS

from hf_depthroute.bench import describe_machine
from hf_depthroute.bench.timing import interleave
from hf_depthroute.files.staged import write_text

HERE = Path(__file__).parent
PEERS_PYTHON = HERE.parents[1] / ".peers" / "venv" / "bin" / "python"
WORKLOADS = {
    "prompt, 1 x 1,024": ("prefill", 1, 1024),
    "prompt, 4 x 256": ("prefill", 4, 256),
    "a token after 1,024": ("decode", 1, 1024),
}


def dense_of(system: str) -> str:
    """The model that a system is compared with."""
    return "dense, 4.40" if system in PEERS else "dense"


class Worker:
    """A system in its process."""

    def __init__(self, system: str, threads: int) -> None:
        python = str(PEERS_PYTHON) if system in PEERS else sys.executable
        command = [
            python,
            "-W",
            "ignore",
            str(HERE / "worker.py"),
            system,
            "--threads",
            str(threads),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, work: str, batch: int, length: int) -> dict[str, Any]:
        """The worker's answer; one that takes ten minutes is killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        clock = threading.Timer(600, self.process.kill)
        clock.start()
        try:
            print(
                json.dumps({"work": work, "batch": batch, "length": length}),
                file=self.process.stdin,
                flush=True,
            )
            return dict(json.loads(self.process.stdout.readline()))
        finally:
            clock.cancel()

    def seconds(self, work: str, batch: int, length: int) -> float:
        return float(self.ask(work, batch, length)["seconds"])


def measure(workers: Mapping[str, Worker], rounds: int) -> dict[str, Any]:
    """By system: what it computes, how far decode is from prefill,
    and its times over its dense model's."""
    found: dict[str, Any] = {
        name: {
            "own": name not in PEERS and name not in ("dense", "early exit"),
            "computed": worker.ask("computed", 1, 1024),
            "difference": worker.ask("difference", 1, 64),
            "times": {label: worker.ask(*workload) for label, workload in WORKLOADS.items()},
        }
        for name, worker in workers.items()
    }
    for label, workload in WORKLOADS.items():
        able = {
            name: workers[name] for name, row in found.items() if "error" not in row["times"][label]
        }
        samples = interleave(
            {name: partial(worker.seconds, *workload) for name, worker in able.items()}, rounds
        )
        for name in able:
            ratio, error = samples.ratio(name, dense_of(name)).rounded()
            found[name]["times"][label] = {
                "seconds": round(samples.median(name), 4),
                "ratio": ratio,
                "error": error,
            }
        print(label, {name: found[name]["times"][label]["ratio"] for name in able}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        default=list(SYSTEMS),
        choices=SYSTEMS,
        help="and their dense models",
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    wanted = {*args.systems, *(dense_of(name) for name in args.systems)}
    workers = {name: Worker(name, args.threads) for name in SYSTEMS if name in wanted}
    path = HERE / "results.json"
    known = (
        json.loads(path.read_text())["systems"] if path.exists() and wanted < set(SYSTEMS) else {}
    )
    try:
        known |= {
            name: row for name, row in measure(workers, args.rounds).items() if name in args.systems
        }
    finally:
        for worker in workers.values():
            worker.process.kill()
    results = {
        "machine": describe_machine(torch.device("cpu")) | {"threads": args.threads},
        "rounds": args.rounds,
        "systems": {name: known[name] for name in SYSTEMS if name in known},
    }
    write_text(path, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

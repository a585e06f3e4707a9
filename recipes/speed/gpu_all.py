"""What a GPU has to show, in twenty minutes: parts in the order of their worth,
each with a result file of its own.

    python recipes/speed/gpu_all.py --out gpu_results
    python recipes/speed/gpu_all.py --out tried --small   # every part at a tiny size, on a CPU

A part runs in a process of its own and leaves `PART.json` when it ends well, so that a run that is
cut off keeps what it has: run again, it goes on with the first part that is missing. A part that
fails, or has no more time, leaves `PART.log` and makes the exit code 1; the next ones run all the
same. Parts of tests write what pytest said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOG_LINES = 60


@dataclass(frozen=True)
class Part:
    """A command that measures or tests.

    Attributes:
        name: Its result's file, without the ending.
        command: What follows `python`; `{out}` stands for the result file. Parts without it are
            tests.
        small: What is added, or for tests put in the place of all that follows `-m pytest`, to try
            the part out.
        seconds: The most that it may take on a GPU.
        needs: A package without which the part is left out.
    """

    name: str
    command: tuple[str, ...]
    small: tuple[str, ...]
    seconds: int
    needs: str | None = None

    @property
    def tests(self) -> bool:
        return self.command[0] == "-m"

    def words(self, out: Path, small: bool) -> list[str]:
        if self.tests:
            return ["-m", "pytest", "-q", *(self.small if small else self.command[2:])]
        words = (*self.command, *(self.small if small else ()))
        return [word.replace("{out}", str(out)) for word in words]


def _suite(name: str, seconds: int) -> Part:
    tiny = (
        "--shape",
        "embedded",
        "--depth",
        "1",
        "--dtype",
        "float32",
        "--batch",
        "1",
        "--length",
        "16",
    )
    tiny += ("--steps", "2", "--rounds", "1", "--vocabulary", "64", "--baselines", "eager")
    return Part(
        name, (str(HERE / "bench.py"), str(HERE / f"{name}.yaml"), "--out", "{out}"), tiny, seconds
    )


def _tests(
    name: str, files: Sequence[str], small: str, seconds: int, *more: str, needs: str | None = None
) -> Part:
    paths = [f"tests/{file}.py" for file in files]
    return Part(name, ("-m", "pytest", *paths, *more), (small,), seconds, needs)


KERNEL = "tests/execution/test_kernels.py::test_skipped_rows_and_weights_are_not_read"
INVARIANTS = ("invariants_execution", "invariants_causal", "sequences")
PARTS = (
    _tests("kernels", ["execution/test_kernels"], KERNEL, 180, "-n", "4"),
    _suite("gpu-prompts", 240),
    _suite("gpu-decode", 300),
    Part(
        "row-ops",
        (str(HERE / "row_ops.py"), "--json", "{out}", "--rounds", "9"),
        ("--small", "--dtype", "float32", "--rounds", "1"),
        120,
    ),
    Part(
        "launches",
        (str(HERE / "launches.py"), "--json", "{out}"),
        ("--shape", "embedded", "--depth", "1", "--dtype", "float32"),
        60,
    ),
    _tests("graphs", ["execution/test_compile", "parts/test_memory"],
           "tests/execution/test_costs.py::test_two_measurements_make_a_cost_model", 180, "-k", "replay or captured",
           "-n", "4"),
    _suite("gpu-compiled", 240),
    _suite("gpu-train", 90),
    _tests("families", [f"execution/test_{file}" for file in INVARIANTS], KERNEL, 400, "-n", "8"),
    _tests("vllm", ["vllm/test_vllm"], KERNEL, 240, needs="vllm"),
)  # fmt: skip


def run(part: Part, out: Path, small: bool, seconds: float) -> str:
    """Run a part and leave its file; `"done"`, `"failed"` or `"left out"`."""
    result, log = out / f"{part.name}.json", out / f"{part.name}.log"
    if part.needs is not None and importlib.util.find_spec(part.needs) is None:
        return f"left out: {part.needs} is not installed"
    new = out / f"{part.name}.part"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    if not small:
        environment["TEST_DEVICE"] = "cuda"
    start, words = time.monotonic(), part.words(new, small)
    with log.open("w", encoding="utf-8") as file:
        try:
            ended = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
                timeout=seconds,
            )
            problem = f"exit code {ended.returncode}" if ended.returncode else None
        except subprocess.TimeoutExpired:
            problem = f"no result after {seconds:.0f} s"
    if problem is not None:
        return f"failed: {problem}; see {log.name}"
    if part.tests:
        said = log.read_text(encoding="utf-8").splitlines()[-LOG_LINES:]
        took = round(time.monotonic() - start, 1)
        new.write_text(
            json.dumps({"command": words, "seconds": took, "pytest": said}, indent=2) + "\n"
        )
    os.replace(new, result)
    log.unlink()
    return "done"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--minutes", type=float, default=20, help="all parts together end after them"
    )
    parser.add_argument("--only", help="names of parts, with commas between")
    parser.add_argument("--small", action="store_true", help="tiny sizes, also without a GPU")
    args: Any = parser.parse_args(words)
    names = [part.name for part in PARTS]
    only = names if args.only is None else args.only.split(",")
    if unknown := [name for name in only if name not in names]:
        parser.error(f"--only {unknown[0]}: use some of: {', '.join(names)}")
    if not args.small:
        import torch

        if not torch.cuda.is_available():
            parser.error("no GPU is there; --small tries the parts out without one")
    args.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + 60 * args.minutes, False
    for part in PARTS:
        if part.name not in only:
            continue
        left = end - time.monotonic()
        if (args.out / f"{part.name}.json").exists():
            said = "there already"
        elif left <= 0:
            said, failed = "no time left; run again to go on", True
        else:
            said = run(part, args.out, args.small, left if args.small else min(part.seconds, left))
            failed |= said.startswith("failed")
        print(f"{part.name}: {said}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()

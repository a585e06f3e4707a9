"""The main job on the embedded default, as `make demo` runs it; needs no network.

    python recipes/demo/demo.py --out demo_output

Every step is one command of `hf-depthroute`, in a process of its own, so what is evaluated and generated with is
always the adapter as loaded from disk. The folder gets the adapter, `results.json`, `report.html` with a
token view, and `report.md` with plots.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from report import write_report

# Relative to the working directory, so that no result names a folder of this machine.
HERE = Path(os.path.relpath(Path(__file__).parent))
BASE = Path(os.path.relpath(HERE.parent / "embedded_base" / "model"))
BUDGETS = "0.25,0.5,0.75"
PROMPT = "def read_lines(path):\n"


def command(*arguments: object) -> str:
    """Run `hf-depthroute ARGUMENTS`; what it printed on stdout, which is shown line by line."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ hf-depthroute {shlex.join(words)}", flush=True)
    start = [sys.executable, "-m", "hf_depthroute"]
    printed = []
    with subprocess.Popen([*start, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    if process.returncode:
        sys.exit(process.returncode)
    return "".join(printed)


def faster_dtype() -> str:
    """`"bfloat16"` unless this processor only emulates it: there float32 is many times faster."""

    def seconds(dtype: torch.dtype) -> float:
        x = torch.ones(512, 512, dtype=dtype)
        x @ x
        start = time.perf_counter()
        for _ in range(5):
            x @ x
        return time.perf_counter() - start

    return "bfloat16" if seconds(torch.bfloat16) < seconds(torch.float32) else "float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output"))
    parser.add_argument("--config", type=Path, default=HERE / "train.yaml")
    args = parser.parse_args()
    start = time.time()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    adapter = args.out / "adapter"

    dtype = faster_dtype()
    command("train", "--config", args.config, "--model", BASE, "--dtype", dtype, "--out", adapter)
    command(
        "eval", "--model", BASE, "--adapter", adapter, "--dataset", "python-stdlib", "--split", "validation",
        "--length", 256, "--blocks", 128, "--budgets", BUDGETS, "--json", args.out / "eval.json",
    )  # fmt: skip
    command(
        "bench", "--model", BASE, "--adapter", adapter, "--budgets", BUDGETS, "--dtype", dtype,
        "--batch", 4, "--length", 256, "--json", args.out / "bench.json",
    )  # fmt: skip
    generate = ("generate", "--model", BASE, "--adapter", adapter, "--prompt", PROMPT, "--max-new-tokens", 60)
    samples = [
        {"label": "full model", "text": command(*generate, "--full")},
        {"label": "routed, budget 0.5", "text": command(*generate, "--budget", 0.5)},
    ]

    results = {
        "title": "Demo: routing a small Llama on Python source code",
        "training": json.loads((adapter / "training.json").read_text()),
        "eval": json.loads((args.out / "eval.json").read_text()),
        "bench": json.loads((args.out / "bench.json").read_text()),
        "samples": samples,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    write_report(args.out, results)
    command(
        "report", "--model", BASE, "--adapter", adapter, "--dataset", "python-stdlib", "--split", "validation",
        "--length", 256, "--blocks", 32, "--prompt", PROMPT, "--title", results["title"],
        "--eval", args.out / "eval.json", "--bench", args.out / "bench.json", "--out", args.out,
    )  # fmt: skip
    print(f"\nDone in {time.time() - start:.0f} s. Open {args.out / 'report.html'}")


if __name__ == "__main__":
    main()

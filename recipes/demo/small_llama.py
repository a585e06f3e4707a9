"""The longer job on the wider embedded base, every token routed; needs no network.

    python recipes/demo/small_llama.py --out demo_output

A router is fitted without training, for half and for a quarter of the FFN calls, compared with the
best layers left out at as many FFN calls and in as much time, trained a little, and timed: on this
base, and with random weights at the width of Qwen2.5-0.5B. Every step but the layers left out is
one command of `hf-depthroute` or of a recipe, in a process of its own, so what is evaluated and
generated with is always the adapter as loaded from disk. The folder gets the adapters,
`results.json`, `report.html` with a token view, and `report.md` with plots.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `speed` is there

import torch
from report import write_report

# Relative to the working directory, so that no result names a folder of this machine.
HERE = Path(os.path.relpath(Path(__file__).parent))
BASE = Path(os.path.relpath(HERE.parent / "embedded_base" / "wide"))
RECIPE = HERE.parent / "fit_router"
LEFT_OUT = (3, 2, 1)  # of four FFNs: shares of 1/4, 1/2 and 3/4 of the calls
TEXT = ("--dataset", "python-stdlib", "--length", 256)
WIDE = {"shape": "qwen2.5-0.5b", "depth": 3, "layers": "all", "vocabulary": 2048}
REPEATS = 7
BLOCKS = 64  # to fit on, and to report the loss on
PROMPT = "def read_lines(path):\n"


def command(*arguments: object, reads: Path | None = None) -> str:
    """Run `hf-depthroute ARGUMENTS`; what it printed on stdout, which is shown line by line."""
    return run("hf-depthroute", ["-m", "hf_depthroute"], arguments, reads)


def run(
    name: str, program: list[str], arguments: Sequence[object], reads: Path | None = None
) -> str:
    """Run a program of Python under a name, with a file as its input; what it printed."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ {name} {shlex.join(words)}{f' < {reads}' if reads else ''}", flush=True)
    printed = []
    with (
        open(reads or os.devnull) as source,
        subprocess.Popen(
            [sys.executable, *program, *words], stdin=source, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
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


def budgets_of(adapter: Path) -> dict[int, float]:
    """By the number of FFNs left out, the budget of an adapter that runs as many FFN calls."""
    routed = len(json.loads((adapter / "adapter_config.json").read_text())["layers"])
    return {left_out: round(1 - left_out / routed, 3) for left_out in LEFT_OUT if left_out < routed}


def with_rows_of(results: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Results of `eval`, with the rows of routers in `other` in place of those of
    the same budgets."""
    rows = {row["budget"]: row for row in other["rows"] if row["rule"] == "threshold"}
    taken = [
        rows.get(row["budget"], row) if row["rule"] == "threshold" else row
        for row in results["rows"]
    ]
    return results | {"rows": taken}


def layers_left_out(adapter: Path) -> list[dict[str, Any]]:
    """Rows as of `eval`: the base with some FFNs left out for fitted branches,
    at the budgets of `budgets_of`.

    The layers are those that cost least of all subsets, which recipes/fit_router has tried.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_depthroute import DepthRouteConfig, get_depth_routed_model
    from hf_depthroute.cli.loading import to_batches
    from hf_depthroute.data import load_text, pack
    from hf_depthroute.evaluation.perplexity import mean_loss
    from hf_depthroute.inference.fitting import fit_branches

    known = json.loads((RECIPE / "results.json").read_text())["wide"]
    tokenizer = AutoTokenizer.from_pretrained(BASE, trust_remote_code=False)
    fit_on, held_out = (  # what `fit` and `eval` take
        to_batches(pack(load_text("python-stdlib", split=split), tokenizer, 256), 8, BLOCKS)
        for split in ("train", "validation")
    )
    rows = []
    for count, budget in budgets_of(adapter).items():
        layers = known[f"subset {count}"]["layers"]
        base = AutoModelForCausalLM.from_pretrained(
            BASE, dtype=torch.float32, trust_remote_code=False
        ).eval()
        model = get_depth_routed_model(base, DepthRouteConfig(layers=layers, gate="none")).eval()
        fit_branches(model, fit_on)
        loss = mean_loss(model, held_out)
        print(
            f"FFNs of layers {layers} left out, as many calls as budget {budget}: loss {loss:.4f}",
            flush=True,
        )
        rows.append({
            "budget": budget, "rule": "static", "loss": loss, "perplexity": math.exp(loss),
            "full_ratio": budget, "layers": layers,
        })  # fmt: skip
    return rows


def wide_times(
    folder: Path, budgets: list[float], dtype: str, rounds: int = REPEATS
) -> dict[str, Any]:
    """The times of random weights at the width of Qwen2.5-0.5B,
    in the form of `hf-depthroute bench --out`."""
    from hf_depthroute.bench.measurements import as_single

    decode = {"case": "decode", "batch": 1, "steps": 48}
    suite = {**WIDE, "dtype": dtype, "budgets": budgets, "length": 256, "rounds": rounds}
    suite |= {"cases": [{"case": "prefill", "batch": 4}, decode]}
    file, out = folder / "wide.yaml", folder / "bench_wide.json"
    file.write_text(json.dumps(suite))  # which YAML reads
    script = str(HERE.parent / "speed" / "bench.py")
    run(f"python {script}", [script], (file, "--out", out))
    return as_single(
        json.loads(out.read_text()),
        {"batch": 4, "length": 256, "decode_batch": 1, "decode_steps": 48},
    )


def without_ffns(adapter: Path, dtype: str, base: Path = BASE, rounds: int = REPEATS) -> float:
    """Time of prompts over dense where the base runs without the FFNs that an adapter routes."""
    from peft import PeftModel
    from speed.variants import SpeedVariants, add_variants
    from transformers import AutoModelForCausalLM

    from hf_depthroute.bench import dense_view
    from hf_depthroute.bench.cases import Case
    from hf_depthroute.bench.inference import measure_inference
    from hf_depthroute.bench.modes import random_tokens

    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=getattr(torch, dtype), trust_remote_code=False
    ).eval()
    plain = dense_view(model)
    variants = SpeedVariants(PeftModel.from_pretrained(model, adapter), plain, budgets=())
    case = Case(case="prefill", batch=4, length=256, rounds=rounds)
    measured = measure_inference(variants, case, random_tokens(plain, 4, 256), add_variants)
    return float(measured["without_ffns"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo_output"))
    parser.add_argument("--config", type=Path, default=HERE / "train.yaml")
    args = parser.parse_args()
    start = time.time()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    fitted, trained, dtype = args.out / "fitted", args.out / "trained", faster_dtype()
    held_out = (*TEXT, "--split", "validation", "--blocks", BLOCKS)

    def budgets() -> str:
        return ",".join(map(str, budgets_of(fitted).values()))

    def fit(keep: float, adapter: Path) -> None:
        command(
            "fit",
            "--model",
            BASE,
            *TEXT,
            "--blocks",
            BLOCKS,
            "--dtype",
            dtype,
            "--keep",
            keep,
            "--out",
            adapter,
        )

    def evaluated(adapter: Path, budgets: str) -> dict[str, Any]:
        file = args.out / f"eval_{adapter.name}.json"
        command("eval", adapter, "--model", BASE, *held_out, "--budgets", budgets, "--out", file)
        return json.loads(file.read_text())

    print("\n# A router without training, and the best layers left out instead\n")
    fit(0.5, fitted)
    without_training = evaluated(fitted, budgets())
    # Thresholds follow a budget, branches and gates do not: far from a half, a router of its own is
    # worth its minute.
    quarter = args.out / "fitted_quarter"
    fit(0.25, quarter)
    if 0.25 in budgets_of(quarter).values():  # it routes as many layers as the other
        without_training = with_rows_of(without_training, evaluated(quarter, "0.25"))
    static = layers_left_out(fitted)
    print("\n# A short training on top\n")
    command(
        "train",
        fitted,
        "--config",
        args.config,
        "--model",
        BASE,
        "--dtype",
        dtype,
        "--out",
        trained,
    )
    after_training = evaluated(trained, budgets())
    after_training["rows"] += static
    (args.out / "eval.json").write_text(json.dumps(after_training, indent=2) + "\n")
    print("\n# The clock\n")
    command(
        "bench", trained, "--model", BASE, "--budgets", budgets(), "--dtype", dtype, "--batch", 4,
        "--length", 256, "--decode-steps", 48, "--repeats", REPEATS, "--out",
        args.out / "bench.json",
    )  # fmt: skip
    bench = json.loads((args.out / "bench.json").read_text())
    bench["prefill"]["without_ffns"] = without_ffns(trained, dtype)
    wide = wide_times(args.out, list(budgets_of(fitted).values()), dtype)
    generate = ("generate", trained, "--model", BASE, "--prompt", PROMPT, "--max-new-tokens", 60)
    samples = [
        {"label": "full model", "text": command(*generate, "--full")},
        {"label": "routed, budget 0.5", "text": command(*generate, "--budget", 0.5)},
    ]

    results = {
        "title": "Demo: routing a small Llama on Python source code",
        "fit": json.loads((fitted / "training.json").read_text()),
        "training": json.loads((trained / "training.json").read_text()),
        "eval_fitted": without_training,
        "eval": after_training,
        "bench": bench,
        "bench_wide": wide,
        "samples": samples,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    write_report(args.out, results)
    command(
        "report", trained, "--model", BASE, *TEXT, "--split", "validation", "--blocks", 32,
        "--prompt", PROMPT, "--title", results["title"], "--eval", args.out / "eval.json",
        "--bench", args.out / "bench.json", "--out", args.out,
    )  # fmt: skip
    print(f"\nDone in {time.time() - start:.0f} s. Open {args.out / 'report.html'}")


if __name__ == "__main__":
    main()

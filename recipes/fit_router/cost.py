"""What a fit takes, in forward passes of its text: random weights at the shape of Qwen2.5-0.5B.

    python recipes/fit_router/cost.py

A forward pass of the whole text is timed before and after the fit, in the same process. Memory is
the highest resident set of the process: after the first pass, and after the fit.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `speed` is there

import torch
from speed.shapes import random_model

from hf_depthroute import DepthRouteConfig, fit_router
from hf_depthroute.base.stack import stack_of
from hf_depthroute.bench.modes import random_tokens
from hf_depthroute.bench.timing import describe_machine
from hf_depthroute.files.staged import write_json

HERE = Path(__file__).parent


def seconds_of_a_pass(model: Any, batches: list[dict[str, torch.Tensor]]) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        for batch in batches:
            model(**batch, use_cache=False)
    return time.perf_counter() - start


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--depth", type=int, help="keep so many layers")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--gate", default="mlp")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=HERE / "cost.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = random_model(
        args.shape, getattr(torch, args.dtype), depth=args.depth, vocabulary=args.vocabulary
    )
    batches = [
        {"input_ids": ids}
        for ids in random_tokens(model, args.tokens // args.length, args.length).split(8)
    ]
    passes = [seconds_of_a_pass(model, batches) for _ in range(2)]
    before, start = resident_bytes(), time.perf_counter()
    routed = fit_router(
        model, batches, keep=0.5, config=DepthRouteConfig(layers="all", gate=args.gate)
    )
    fitting, after = time.perf_counter() - start, resident_bytes()
    with routed.disable_adapter():
        passes += [seconds_of_a_pass(routed, batches) for _ in range(2)]
    one = statistics.median(passes)
    print(
        f"{fitting:.0f} s, {fitting / one:.1f} forward passes of {one:.1f} s; "
        f"{(after - before) / 2**20:.0f} MiB more"
    )
    write_json(args.out, {
        "shape": args.shape, "layers": len(stack_of(model).layers), "vocabulary": args.vocabulary,
        "gate": args.gate, "dtype": args.dtype, "tokens": args.tokens,
        "machine": describe_machine(torch.device("cpu")), "fit_seconds": fitting,
        "pass_seconds": passes, "passes": fitting / one, "resident_bytes_before": before,
        "resident_bytes_after": after,
    })  # fmt: skip


if __name__ == "__main__":
    main()

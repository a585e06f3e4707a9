"""What a prompt and a decoding step take with each branch: two FFNs left out,
medians of interleaved rounds.

    python recipes/fit_router/branch_time.py

The branches are those that `run.py` compares: the default rank, the rank that multiplies a token
with as many weights as an n-gram table and its projection do beside the default one, and that
table. Values do not matter to the time, so nothing is fitted. Ratios are to the default rank, each
within its round.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run import Base, branch_of, embedded, stories

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.bench.timing import Estimate, describe_machine, seconds_of
from hf_depthroute.evaluation.flops import branch_weights
from hf_depthroute.files.staged import write_json
from hf_depthroute.inference.calibration import active_routings

HERE = Path(__file__).parent
KINDS = ("static", "static_rank", "static_memory")
CPU = torch.device("cpu")
STEPS = 32


def left_out(base: Base, kind: str, layers: list[int]) -> Any:
    model = base.model()
    branch = branch_of(kind, model.config.hidden_size)
    return get_depth_routed_model(
        model, DepthRouteConfig(layers=layers, gate="none", **branch)
    ).eval()


def multiplied(model: Any) -> float:
    """The weights that a skipped token is multiplied with, per layer."""
    return statistics.mean(
        branch_weights(routing, model.config) for routing in active_routings(model)
    )


@torch.no_grad()
def prompt(model: Any, ids: torch.Tensor) -> None:
    """All rows of `ids` at once."""
    model(input_ids=ids, use_cache=False)


@torch.no_grad()
def decode(model: Any, ids: torch.Tensor) -> None:
    """`STEPS` steps of one sequence behind 16 tokens, which count too."""
    made = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    model.generate(input_ids=ids[:1, :16], attention_mask=torch.ones_like(ids[:1, :16]), **made)


def ratios(
    models: dict[str, Any], work: Callable[[Any], None], rounds: int
) -> dict[str, dict[str, float | None]]:
    """Milliseconds, and the ratio to the first of `KINDS` with its standard error,
    for each kind."""
    order, found = random.Random(0), {}
    seconds: dict[str, list[float]] = {kind: [] for kind in models}
    for _ in range(rounds):
        for kind in order.sample(sorted(models), len(models)):
            work(models[kind])  # untimed: another model ran before
            seconds[kind].append(seconds_of(functools.partial(work, models[kind]), CPU))
    for kind, taken in seconds.items():
        value, error = Estimate.of([a / b for a, b in zip(taken, seconds[KINDS[0]])]).rounded()
        found[kind] = {
            "milliseconds": round(1000 * statistics.median(taken), 3),
            "ratio": value,
            "error": error,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=HERE / "branch_time.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, Any] = {"machine": describe_machine(CPU), "rounds": args.rounds, "bases": {}}
    for name, base in {"embedded": embedded(), "stories260k": stories(args.data)}.items():
        models = {kind: left_out(base, kind, [1, 2]) for kind in KINDS}
        ids = base.text.report[:4]
        found["bases"][name] = {
            "weights": {kind: multiplied(model) for kind, model in models.items()},
            "prompt": ratios(models, functools.partial(prompt, ids=ids), args.rounds),
            "decode": ratios(models, functools.partial(decode, ids=ids), args.rounds),
        }
        print(name, found["bases"][name])
    write_json(args.out, found)


if __name__ == "__main__":
    main()

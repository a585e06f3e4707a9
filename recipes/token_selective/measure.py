"""Measure what `run.py` trained: soft and hard loss, active share,
early exit at equal share, and time.

    OMP_NUM_THREADS=1 python recipes/token_selective/measure.py recipes/token_selective/paper.yaml --out OUT

Every run that is there is measured, into `OUT/NAME.measured.json`; `dense`, `exit` and `tsa` of a
seed are compared and timed, into `OUT/exit_sweep.measured.json` and `OUT/time.measured.json` (of
the second seed `exit_sweep_1`, and so on).

"Soft" is how the model trains: both updates of a routed block scaled by `p`. "Hard" is inference: a
token with `p < 0.5` skips the block's feed-forward network for real, and its attention update is
left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from run import DEVICE, TEXT, build_model, read_runs, soft_loss, task_loss
from safetensors.torch import load_model
from tasks import KINDS, Task, kinds, load_task

from hf_depthroute import DepthRouteConfig, get_depth_routed_model, record_routes
from hf_depthroute.bench.timing import interleave, seconds_of
from hf_depthroute.inference.calibration import use_selection
from hf_depthroute.routing.trace import count_routes

SEEDS = ("", "_1", "_2")  # ends of the names of the runs of one kind
CONFIDENCES = (0.6, 0.8, 0.95)
THRESHOLDS = (0.0, -1.0, 1.0)  # of the halting router: p = 0.5, 0.27, 0.73


def saved(active: float, layers: int) -> float:
    """Token-layer operations saved, `1 - (1 + (L - 1) alpha) / L`."""
    return 1 - (1 + (layers - 1) * active) / layers


@torch.no_grad()
def hard_loss(
    model: Any, tokens: torch.Tensor, batch: int, first: int
) -> tuple[float, dict[int, float]]:
    """Loss of real inference over `tokens` `[N, T + 1]`,
    and the share of tokens that ran full in each routed layer."""
    total = 0.0
    with count_routes(model) as counter:
        for part in tokens.split(batch):
            total += float(task_loss(model(input_ids=part[:, :-1]).logits, part, first)) * len(part)
    return total / len(tokens), counter.full_ratio()


@torch.no_grad()
def accuracy(model: Any, task: Task, rule: str | None) -> float:
    """Share of target tokens predicted right; with `rule="soft"`, as in training."""
    tokens = task.validation
    if rule is None:
        logits = model(input_ids=tokens[:, :-1]).logits
    else:
        with use_selection(model, rule):
            logits = model(input_ids=tokens[:, :-1]).logits
    right = logits.argmax(-1)[:, task.first - 1 :] == tokens[:, task.first :]
    return float(right.float().mean())


def measure(model: Any, run: dict[str, Any], task: Task, judge: Any) -> dict[str, Any]:
    """The figures of one run on all of its validation data, or on its first `measure_blocks`.

    `judge` is the dense model of the same task and seed.
    """
    task = replace(task, validation=task.validation[: run.get("measure_blocks")])
    loss, alpha = soft_loss(model, task, run["batch"])
    result: dict[str, Any] = {"loss": loss}
    if run["method"] == "tsa" and alpha is not None:
        hard, shares = hard_loss(model, task.validation, run["batch"], task.first)
        share = statistics.mean(shares.values())
        result |= {"alpha": alpha, "saved": saved(alpha, run["layers"])}
        result |= where_depth_goes(model, task, run["batch"], judge)
        result |= {
            "hard_loss": hard,
            "hard_share": share,
            "hard_saved": saved(share, run["layers"]),
        }
        result |= {"hard_share_by_layer": shares}
    if run["task"] != "shakespeare":
        result["accuracy"] = accuracy(model, task, "soft" if run["method"] == "tsa" else None)
        if run["method"] == "tsa":
            result["hard_accuracy"] = accuracy(model, task, "threshold")
    return result


@torch.no_grad()
def where_depth_goes(model: Any, task: Task, batch: int, judge: Any) -> dict[str, Any]:
    """`p` over the soft model by layer; of text also by kind of character that is read,
    and by difficulty.

    Difficulty is the entropy of what `judge`, a dense model, says next: quarters of the positions,
    the easiest first.
    """
    probs_CNT, entropy_NT = [], []
    for part in task.validation.split(batch):
        with record_routes(model) as trace, use_selection(model, "soft"):
            model(input_ids=part[:, :-1])
        probs_CNT.append(torch.stack([record.probs for record in trace.values()]))
        if task.characters:
            logits = judge(input_ids=part[:, :-1]).logits
            entropy_NT.append(torch.distributions.Categorical(logits=logits).entropy())
    probs = torch.cat(probs_CNT, dim=1)
    found: dict[str, Any] = {"alpha_by_layer": probs.mean((1, 2)).tolist()}
    if task.characters:
        kind = kinds(task.validation[:, :-1], task.characters)
        found["alpha_by_kind"] = {
            name: probs[:, kind == i].mean(1).tolist() for i, name in enumerate(KINDS)
        }
        found["share_of_kind"] = {
            name: float((kind == i).float().mean()) for i, name in enumerate(KINDS)
        }
        entropy = torch.cat(entropy_NT)
        quarter = torch.bucketize(entropy, entropy.quantile(entropy.new_tensor([0.25, 0.5, 0.75])))
        found["alpha_by_difficulty"] = [probs[:, quarter == i].mean(1).tolist() for i in range(4)]
    return found


def set_threshold(model: Any, threshold: float) -> None:
    model.peft_config["default"].threshold = threshold


@torch.no_grad()
def threshold_for(exits: Any, tokens: torch.Tensor, share: float) -> float:
    """The confidence, negated, that leaves about the share `share` of `tokens` in
    the routed blocks.

    Read off one pass in which no token leaves; the stream of those that stay differs a little when
    others leave.
    """
    set_threshold(exits, -2.0)
    with record_routes(exits) as trace:
        exits(input_ids=tokens[:, :-1])
    lowest = torch.stack([record.scores for record in trace.values()]).cummin(dim=0).values
    return float(lowest.quantile(1 - share))


def point(model: Any, tokens: torch.Tensor, batch: int, threshold: float) -> dict[str, float]:
    set_threshold(model, threshold)
    loss, shares = hard_loss(model, tokens, batch, 1)
    return {"threshold": threshold, "share": statistics.mean(shares.values()), "loss": loss}


def compare(
    dense: Any, exits: Any, tsa: Any, task: Task, batch: int, shares: list[float]
) -> dict[str, Any]:
    """Hard loss over the share of tokens run full: early exit by confidence,
    and the halting router by its score.

    Everything on every sixth block of the validation text, with the dense and the soft loss on the
    same blocks.
    """
    length = task.validation.shape[1]
    text = task.train[: 32 * length].view(32, length)
    sixth = replace(task, validation=task.validation[::6])
    equal = [
        point(exits, sixth.validation, batch, threshold_for(exits, text, share)) for share in shares
    ]
    by_confidence = [
        point(exits, sixth.validation, batch, -confidence) for confidence in CONFIDENCES
    ]
    by_threshold = [point(tsa, sixth.validation, batch, threshold) for threshold in THRESHOLDS]
    soft, alpha = soft_loss(tsa, sixth, batch)
    return {
        "dense": soft_loss(dense, sixth, batch)[0],
        "tsa_soft": {"share": alpha, "loss": soft},
        "tsa_by_threshold": by_threshold,
        "exit_by_confidence": by_confidence,
        "exit_at_equal_share": equal,
    }


@torch.no_grad()
def times(variants: dict[str, Callable[[], Any]], rounds: int = 15) -> dict[str, float]:
    """Median over interleaved rounds of each variant's time over that of `dense`
    in the same round."""
    samples = interleave(
        {name: lambda run=run: seconds_of(run, DEVICE) for name, run in variants.items()}, rounds
    )
    return {name: samples.ratio(name, "dense").rounded()[0] for name in variants}


def time_over_dense(
    dense: Any, tsa: Any, task: Task, points: list[dict[str, float]]
) -> dict[str, Any]:
    """Time of a forward pass over 64 blocks: soft, and hard at the thresholds of `points`,
    the first of them 0."""
    tokens = task.validation[:64, :-1]

    def at(threshold: float) -> None:
        set_threshold(tsa, threshold)
        tsa(input_ids=tokens)

    def soft() -> None:
        with use_selection(tsa, "soft"):
            tsa(input_ids=tokens)

    variants: dict[str, Callable[[], Any]] = {
        "dense": lambda: dense(input_ids=tokens),
        "soft": soft,
    }
    for row in points:
        name = f"{row['share']:.2f}" if row["threshold"] else "hard"
        variants[name] = lambda threshold=row["threshold"]: at(threshold)
    return {"batch": len(tokens), "length": tokens.shape[1], "over_dense": times(variants)}


def load(out: Path, name: str, runs: dict[str, dict[str, Any]], task: Task) -> Any:
    model = build_model(runs[name], task)
    load_model(model, str(out / f"{name}.safetensors"))
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=TEXT)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    if DEVICE.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as in training
    runs = read_runs(args.study)

    def keep(name: str, make: Callable[[], dict[str, Any]]) -> None:
        path = args.out / f"{name}.measured.json"
        if not path.exists():
            print(name, flush=True)
            path.write_text(json.dumps(make(), indent=1) + "\n")

    def measured(name: str) -> dict[str, Any]:
        run = runs[name]
        task = load_task(run["task"], args.text, run["length"], DEVICE)
        judge = next(
            other
            for other, dense in runs.items()
            if dense["method"] == "dense"
            and (dense["task"], dense["seed"]) == (run["task"], run["seed"])
        )
        return measure(
            load(args.out, name, runs, task), run, task, load(args.out, judge, runs, task)
        )

    def compare_seed(seed: str) -> None:
        task = load_task("shakespeare", args.text, runs["tsa"]["length"], DEVICE)
        dense, tsa = (load(args.out, name + seed, runs, task) for name in ("dense", "tsa"))
        figures = json.loads((args.out / f"tsa{seed}.measured.json").read_text())
        config = DepthRouteConfig(
            gate="exit", target="block", branch="none", layers=[*range(1, runs["tsa"]["layers"])]
        )
        exits = get_depth_routed_model(load(args.out, f"exit{seed}", runs, task), config).eval()
        shares = [figures["alpha"], figures["hard_share"]]
        keep(
            f"exit_sweep{seed}",
            lambda: compare(dense, exits, tsa, task, runs["tsa"]["batch"], shares),
        )
        sweep = json.loads((args.out / f"exit_sweep{seed}.measured.json").read_text())
        keep(f"time{seed}", lambda: time_over_dense(dense, tsa, task, sweep["tsa_by_threshold"]))

    trained = [name for name in runs if (args.out / f"{name}.json").exists()]
    for name in trained:
        keep(name, lambda name=name: measured(name))
    for seed in SEEDS:
        if {f"dense{seed}", f"exit{seed}", f"tsa{seed}"} <= set(trained):
            compare_seed(seed)


if __name__ == "__main__":
    main()

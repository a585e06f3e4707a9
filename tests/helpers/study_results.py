"""Synthetic result folders of a study, with planted numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

SEEDS = (42, 123, 7)
LAYERS = ("3", "4")

Plan = Mapping[str, Mapping[str, Any]]


def write_study(
    folder: Path,
    plan: Plan,
    *,
    seeds: Sequence[int] = SEEDS,
    steps: int = 20,
    eval_every: int = 5,
    thresholds: Sequence[float] = (3.2, 3.1),
    layers: Sequence[str] = LAYERS,
    missing: Collection[tuple[str, int]] = (),
    **study: Any,
) -> Path:
    """Write a result folder.

    Args:
        folder: Made if it is missing.
        plan: Per config, metrics of its summaries: a number, or a list with one value per seed.
            `layers/NAME` is given to every layer, `hits/THRESHOLD` to that threshold. `label`,
            `about`, `adapter`, `training` and `joint` describe the config.
        seeds: Of the study.
        steps: Optimizer steps of a run.
        eval_every: Steps between evaluations.
        thresholds: Of the study.
        layers: Routed layers.
        missing: `(config, seed)` of runs that were cut short.
        study: Further fields of `study.json`.
    """
    words = ("label", "about", "adapter", "training", "joint")
    configs = [
        {
            "name": name,
            "label": name.upper().replace("_", "-"),
            "about": "",
            "adapter": {},
            "training": {},
        }
        | {key: value for key, value in metrics.items() if key in words}
        for name, metrics in plan.items()
    ]
    info = {
        "name": "synthetic", "fingerprint": "f", "created": "2026-01-01T00:00:00", "margin": 0.005,
        "thresholds": list(thresholds), "steps": steps, "eval_every": eval_every,
        "seeds": list(seeds), "configs": configs, "batch_size": 8, "length": 128,
        "data": {"dataset": "words", "tokens": 12345},
        "base": {"name": "tiny", "parameters": 1000, "layers": 6, "width": 64, "dense_loss": 2.9},
        "versions": {"torch": "2.13.0"}, "machine": {"device": "cpu", "threads": 1}, **study,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(info))
    for name, metrics in plan.items():
        for index, seed in enumerate(seeds):
            run = folder / "runs" / name / str(seed)
            run.mkdir(parents=True, exist_ok=True)
            chosen = {
                key: value[index] if isinstance(value, list) else value
                for key, value in metrics.items()
                if key not in words
            }
            done = steps // 2 if (name, seed) in missing else steps
            summary = summarize(name, seed, chosen, steps, thresholds, layers)
            _write_lines(
                run / "metrics.jsonl",
                [_metrics_row(summary, step, steps) for step in range(1, done + 1)],
            )
            _write_lines(
                run / "eval.jsonl",
                [_eval_row(summary, s, steps) for s in range(0, done + 1, eval_every)],
            )
            if (name, seed) not in missing:
                (run / "summary.json").write_text(json.dumps(summary))
    return folder


def summarize(
    name: str,
    seed: int,
    chosen: Mapping[str, Any],
    steps: int,
    thresholds: Sequence[float],
    layers: Sequence[str],
) -> dict[str, Any]:
    layer = {
        "gate_prob": 0.5, "full_ratio": 0.5, "score_var": 0.1, "q_distance": None, "q_cosine": None,
        "oracle_auc": 0.55, "oracle_auc_all_full": 0.56,
        "fork_bias": {"correlation": 0.9, "sign_agreement": 0.8, "mean_layer_wide": 0.02, "mean_exact": 0.01},
    }  # fmt: skip
    layer |= {
        key.removeprefix("layers/"): value
        for key, value in chosen.items()
        if key.startswith("layers/")
    }
    endpoint = chosen.get("endpoint", 3.0)
    summary = {
        "config": name, "seed": seed, "fingerprint": "f", "steps": steps, "dense_loss": 2.9,
        "avg_first_half": 3.2, "avg_whole": 3.1, "best": endpoint, "best_step": steps,
        "endpoint": endpoint, "hits": {str(t): chosen.get(f"hits/{t}") for t in thresholds},
        "grad_norm_mean": 1.0, "layers": {key: layer for key in layers},
        "threshold_loss": endpoint + 0.01 if endpoint is not None else None,
        "threshold_full_ratio": 0.49, "frequent_loss": 2.0, "rare_loss": 5.0,
        "train_seconds": 100.0, "step_seconds_median": 0.2, "trainable_parameters": 1234,
        "cost": {"inference_ffn_ratio": 0.547, "training_ffn_ratio": 1.054},
    }  # fmt: skip
    cost = {
        key.removeprefix("cost/"): value for key, value in chosen.items() if key.startswith("cost/")
    }
    summary["cost"] = {**summary["cost"], **cost}
    return summary | {key: value for key, value in chosen.items() if "/" not in key}


def _metrics_row(summary: Mapping[str, Any], step: int, steps: int) -> dict[str, Any]:
    noise = 1 + 0.3 * math.sin(step * 1.7 + summary["seed"])
    probability = (
        0.5 + (summary["layers"][next(iter(summary["layers"]))]["gate_prob"] - 0.5) * step / steps
    )
    return {
        "step": step, "loss": 4.0, "loss_lm": _loss(summary, step, steps) * noise,
        "learning_rate": 1e-3, "grad_norm": summary["grad_norm_mean"] * noise, "seconds": 0.2,
        **{f"gate_prob/layer_{layer}": probability for layer in summary["layers"]},
    }  # fmt: skip


def _eval_row(summary: Mapping[str, Any], step: int, steps: int) -> dict[str, Any]:
    return {"step": step, "lm_loss": _loss(summary, step, steps)}


def _loss(summary: Mapping[str, Any], step: int, steps: int) -> float:
    """Falls to the endpoint; the steeper, the lower the average of the first half."""
    end = summary["endpoint"] or 3.0
    height = max(summary["avg_first_half"] - end, 0.001) * 4
    return end + height * (math.exp(-6 * step / steps) - math.exp(-6))


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

"""Scores as the files from which the Hub fills the leaderboards of its benchmarks: `.eval_results/*.yaml`.

A dataset of the Hub is a benchmark where its owner registered it as one. Of those, lm-eval has tasks for three; their
scores go into a file each, beside the `model-index` of the card, which holds every score. Only whole test sets count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
from huggingface_hub.constants import EVAL_RESULTS_FOLDER

from ..adapter_file import AdapterMismatchError
from ..staged_files import write_files
from .results import Score

OURS = f"{EVAL_RESULTS_FOLDER}/depth_routing_*.yaml"  # what others have put there stays

# (task, metric) of lm-eval -> (benchmark's dataset, its task).
BENCHMARKS = {
    ("gsm8k", "exact_match"): ("openai/gsm8k", "gsm8k"),
    ("gsm8k_cot", "exact_match"): ("openai/gsm8k", "gsm8k"),
    ("mmlu_pro", "exact_match"): ("TIGER-Lab/MMLU-Pro", "mmlu_pro"),
    ("gpqa_diamond_zeroshot", "acc"): ("Idavidrein/gpqa", "gpqa_diamond"),
    ("gpqa_diamond_n_shot", "acc"): ("Idavidrein/gpqa", "gpqa_diamond"),
    ("gpqa_diamond_cot_zeroshot", "exact_match"): ("Idavidrein/gpqa", "gpqa_diamond"),
    ("gpqa_diamond_cot_n_shot", "exact_match"): ("Idavidrein/gpqa", "gpqa_diamond"),
}


def entries(scores: Sequence[Score]) -> dict[str, EvalResultEntry]:
    """By file name, the routed model's scores on whole test sets of benchmarks, in percent."""
    found = {}
    for score in scores:
        dataset, task = BENCHMARKS.get((score.task, score.metric), (None, ""))
        if dataset is None or score.dataset != dataset or not score.whole or score.run == "dense":
            continue
        shots = "" if score.shots is None else f", {score.shots}-shot"
        name = re.sub(r"[^A-Za-z0-9.]+", "_", f"depth_routing {score.task} {score.run}")
        found[f"{name}.yaml"] = EvalResultEntry(
            dataset_id=dataset,
            task_id=task,
            value=round(100 * score.value, 2),
            notes=f"depth routing, {score.run}; lm-eval task {score.task}{shots}",
        )
    return found


def write_entries(folder: Path, scores: Sequence[Score]) -> None:
    """Make the files of ours in `folder` those of `scores`."""
    wanted = entries(scores)
    place = folder / EVAL_RESULTS_FOLDER
    if place.is_symlink():
        raise AdapterMismatchError(f"{place}: is a link; put a folder there")
    if wanted:
        place.mkdir(exist_ok=True)
    files = {place / name: eval_result_entries_to_yaml([entry]) for name, entry in wanted.items()}
    write_files({path: yaml.safe_dump(rows, sort_keys=False).encode() for path, rows in files.items()}, follow=False)
    for stale in folder.glob(OURS):
        if stale.name not in wanted:
            stale.unlink()

"""Scores on benchmarks of the Hub as the files that its leaderboards read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmark_scores import scores
from huggingface_hub import parse_eval_result_entries
from models import build_routed

from hf_depthroute.card import add_results, write_card
from hf_depthroute.card.metadata import BENCHMARKS

PLACE = ".eval_results"


def written(folder: Path) -> dict[str, Any]:
    """By file, what the Hub's client reads in it."""
    files = sorted((folder / PLACE).glob("*"))
    return {
        file.name: parse_eval_result_entries(yaml.safe_load(file.read_text())) for file in files
    }


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    build_routed("llama").save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_benchmark_gets_a_file_of_the_routed_score(adapter: Path) -> None:
    write_card(adapter, [scores()])
    ((name, (entry,)),) = written(adapter).items()
    assert name == "depth_routing_gsm8k_budget_0.5.yaml"
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "gsm8k", 41.26)
    assert (
        entry.notes == "depth routing, budget 0.5; lm-eval task gsm8k, 5-shot, filter strict-match"
    )
    text = (adapter / "README.md").read_text()
    assert "model-index" in text
    # A lenient filter's score is another.
    assert "| `exact_match,strict-match` | `dense` | 0.7500 |" in text
    assert "|  | `exact_match,flexible-extract` | `dense` |" in text.replace(
        "| `gsm8k` | `exact_m", "|  | `exact_m"
    )


def test_a_group_of_tasks_is_one_benchmark(adapter: Path) -> None:
    parts = ["mmlu_pro_law", "mmlu_pro_math"]
    group = {
        "group_subtasks": {"mmlu_pro": parts},
        "configs": {part: {"dataset_path": "TIGER-Lab/MMLU-Pro"} for part in parts},
        "n-samples": {part: {"original": 10, "effective": 10} for part in parts},
    }
    write_card(adapter, [scores("mmlu_pro", **group)])
    ((entry,),) = written(adapter).values()
    assert (entry.dataset_id, entry.task_id) == ("TIGER-Lab/MMLU-Pro", "mmlu_pro")
    assert "| 20 |" in (adapter / "README.md").read_text()  # documents


@pytest.mark.parametrize(
    "measured",
    [
        scores(left_out=1),  # part of the test set
        scores("piqa", "baber/piqa"),  # no benchmark of the Hub's
        scores(dataset="me/gsm8k"),  # another dataset under a benchmark's name
        scores(
            configs={
                "gsm8k": {
                    "dataset_path": "openai/gsm8k",
                    "dataset_kwargs": {"data_files": "mine.json"},
                }
            }
        ),
        scores(**{"n-samples": {}}),
    ],
)
def test_what_is_no_score_on_a_whole_benchmark_gets_none(
    measured: dict[str, Any], adapter: Path
) -> None:
    write_card(adapter, [measured])
    assert not (adapter / PLACE).exists()
    assert "model-index" in (adapter / "README.md").read_text()


def test_files_stay_and_go_with_the_results_of_the_card(tmp_path: Path) -> None:
    model, folder = build_routed("llama"), tmp_path / "adapter"
    add_results(model, scores(), scores("gpqa_diamond_zeroshot", "Idavidrein/gpqa"))
    model.save_pretrained(folder)
    both = [
        "depth_routing_gpqa_diamond_zeroshot_budget_0.5.yaml",
        "depth_routing_gsm8k_budget_0.5.yaml",
    ]
    assert list(written(folder)) == both
    theirs = "- dataset: {id: cais/hle, task_id: default}\n  value: 1.0\n"
    (folder / PLACE / "hle.yaml").write_text(theirs)
    write_card(folder)  # nothing new: the card keeps its results
    assert list(written(folder)) == [*both, "hle.yaml"]
    write_card(folder, [scores()])
    assert list(written(folder)) == [both[1], "hle.yaml"]
    # Another adapter, of which nothing was measured.
    build_routed("llama", seed=1).save_pretrained(folder)
    assert (
        list(written(folder)) == ["hle.yaml"]
        and (folder / PLACE / "hle.yaml").read_text() == theirs
    )


def test_every_benchmark_is_a_task_of_lm_eval_on_that_dataset() -> None:
    lm_eval = pytest.importorskip("lm_eval")
    tasks = Path(lm_eval.__file__).parent / "tasks"
    for place, dataset in (
        ("gsm8k", "openai/gsm8k"),
        ("mmlu_pro", "TIGER-Lab/MMLU-Pro"),
        ("gpqa", "Idavidrein/gpqa"),
    ):
        files = [
            file for file in (tasks / place).rglob("*") if file.is_file() and "yaml" in file.name
        ]
        text = "\n".join(file.read_text() for file in files)
        assert f"dataset_path: {dataset}" in text
        for task, metric in (key for key, (found, _) in BENCHMARKS.items() if found == dataset):
            assert metric.partition(",")[2] in text
            assert (
                f"task: {task}\n" in text
                or f"group: {task}\n" in text
                or f"task: {task}" in text.splitlines()
            ), task

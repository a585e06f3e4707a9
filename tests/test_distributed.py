"""Two processes train as one does: the statistics are global, and every rank holds the same adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import RUNS, SHARDED, STEPS, Result
from models import build_routed
from training import adapter_state, assert_same_tensors

TESTS = Path(__file__).parent


def load(folder: Path, name: str) -> tuple[Result, Result]:
    one, two = (torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1))
    return one, two


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("distributed")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # --multi_gpu stands for the launcher of several processes; with --cpu, accelerate starts one process only.
    options = "--multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--dynamo_backend", "no"]
    command = [*launcher, str(TESTS / "distributed_worker.py"), str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def assert_equal_one_process(results: Path, scenario: Any) -> None:
    expected = scenario(0, 1)
    first, second = load(results, scenario.__name__)
    assert_same_tensors(first["gradients"], second["gradients"])
    assert_same_tensors(expected["gradients"], first["gradients"], tolerance=1e-6)
    for name, value in expected["terms"].items():
        assert (first["terms"][name] + second["terms"][name]) / 2 == pytest.approx(value, abs=1e-6), name
        if name != "lm":  # the routing terms are global: the same on every rank
            assert first["terms"][name] == second["terms"][name]
    assert expected["terms"]["alive"] > 0


@pytest.mark.parametrize("scenario", STEPS, ids=lambda scenario: scenario.__name__)
def test_two_processes_have_the_loss_and_the_gradients_of_one(results: Path, scenario: Any) -> None:
    assert_equal_one_process(results, scenario)


@pytest.mark.parametrize("scenario", SHARDED, ids=lambda scenario: scenario.__name__)
def test_sharded_processes_have_the_loss_and_the_gradients_of_one(results: Path, scenario: Any) -> None:
    assert_equal_one_process(results, scenario)


def test_labels_of_two_processes_give_every_loss_that_needs_them(results: Path) -> None:
    first, _ = load(results, "oracle")
    assert {"util", "rank", "cgs", "z"} <= set(first["terms"])


def test_other_methods_of_two_processes_give_every_loss(results: Path) -> None:
    first, _ = load(results, "other_methods")
    expected = {"capacity", "depth", "similarity", "predictor", "exit", "balance", "router_z"}
    assert expected <= set(first["terms"]) and all(first["terms"][name] > 0 for name in expected - {"capacity"})


def test_a_rank_really_routed_nothing(results: Path) -> None:
    first, second = load(results, "one_rank_routes_nothing")
    assert set(first["ratio"].values()) == {1.0} and set(second["ratio"].values()) == {0.0}


def test_a_rank_of_padding_adds_nothing_to_the_loss(results: Path) -> None:
    first, second = load(results, "one_rank_is_padding")
    assert second["terms"]["lm"] == 0.0 < first["terms"]["lm"]
    assert all(torch.isfinite(value).all() for value in second["gradients"].values())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_trainer_in_two_processes_trains_the_adapter_of_one(results: Path, run: Any) -> None:
    expected = run(0, 1)
    first, second = load(results, run.__name__)
    assert_same_tensors(first["state"], second["state"])
    assert_same_tensors(expected["gradients"], first["gradients"], tolerance=1e-6)
    parameters = {name for name in expected["state"] if ".depth_route_quantiles." not in name}
    assert_same_tensors(
        {name: expected["state"][name] for name in parameters},
        {name: first["state"][name] for name in parameters},
        tolerance=1e-4,
    )
    for log, expected_log in zip(first["logs"], expected["logs"], strict=True):
        for name in ("loss", "loss_jepa", "loss_budget", "loss_alive"):
            assert log[name] == pytest.approx(expected_log[name], abs=1e-5), name


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_thresholds_of_two_processes_see_the_tokens_of_both(results: Path, run: Any) -> None:
    """Not the same as one process's, which ranks all scores together, but close, and equal on both ranks."""
    expected = run(0, 1)["state"]
    first, second = load(results, run.__name__)
    names = [name for name in expected if name.endswith("depth_route_quantiles.default.values")]
    assert len(names) == 3
    for name in names:
        assert torch.equal(first["state"][name], second["state"][name])
        middle = slice(20, 181)  # the extremes of a few tokens are those of either rank
        gap = (first["state"][name] - expected[name])[middle].abs().mean() / expected[name].std()
        assert gap < 0.15, name


def test_an_accelerate_loop_ends_with_the_same_adapter_on_both_ranks(results: Path) -> None:
    first, second = load(results, "accelerate_loop")
    assert first["world"] == second["world"] == 2
    assert first["wrapped"] == "DistributedDataParallel"
    assert_same_tensors(first["state"], second["state"])
    initial = adapter_state(build_routed("llama", "jepa"))
    moved = [name for name, value in initial.items() if not torch.equal(value, first["state"][name])]
    trained = [name for name in initial if ".depth_route_gate." in name or ".depth_route_branch." in name]
    assert moved == trained
    assert first["losses"] != second["losses"] and len(first["losses"]) == 4

"""The token-selective recipe trains, has the paper's sizes, and says what its results say."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "recipes" / "token_selective"


@pytest.fixture
def load_script(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # the scripts import each other

    def load(name):
        spec = importlib.util.spec_from_file_location(f"token_selective_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_tables_are_made_from_the_committed_results(load_script):
    made = load_script("report").tables(json.loads((FOLDER / "results.json").read_text()))
    for table in made.split("\n\n"):
        assert table in (FOLDER / "README.md").read_text()


def test_models_have_the_papers_sizes(load_script):
    script = load_script("run")
    runs = script.read_runs(FOLDER / "small.yaml")
    task = script.Task(torch.zeros(0), torch.zeros(0), vocab_size=65)
    sizes = {
        name: sum(p.numel() for p in script.build_model(runs[name], task).parameters()) for name in ("dense", "tsa")
    }
    assert sizes == {"dense": 4_788_480, "tsa": 4_788_480 + 82_565}


@pytest.mark.parametrize("method", ["dense", "tsa", "exit"])
def test_every_method_trains(load_script, method):
    script = load_script("run")
    run = {
        "task": "copy", "method": method, "depth_weight": 0.001, "width": 32, "layers": 3, "heads": 2, "ffn": 64,
        "length": 22, "batch": 8, "steps": 4, "lr": 1e-2, "warmup": 0, "weight_decay": 0.1, "seed": 0, "eval_every": 2,
        "eval_blocks": 8,
    }  # fmt: skip
    _, record = script.train(run, script.load_task("copy", Path(), 22), None)
    first, _, last = record["curve"]
    assert last["step"] == 4 and last["loss"] < first["loss"]
    assert (last["alpha"] is None) == (method != "tsa")

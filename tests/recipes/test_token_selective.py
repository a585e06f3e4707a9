"""The token-selective recipe trains, has the paper's sizes, and says what its results say."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT

FOLDER = ROOT / "recipes" / "token_selective"


@pytest.fixture
def load_script(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # the scripts import each other
    for name in ("run", "tasks"):  # which another study's may have been
        monkeypatch.delitem(sys.modules, name, raising=False)

    def load(name):
        spec = importlib.util.spec_from_file_location(
            f"token_selective_{name}", FOLDER / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in ("run", "tasks"):
        sys.modules.pop(name, None)


def test_tables_are_made_from_the_committed_results(load_script):
    script = load_script("report")
    made = script.tables(*map(script.read, script.FILES))
    for table in made.split("\n\n"):
        assert table in (FOLDER / "README.md").read_text()


def test_models_have_the_papers_sizes(load_script):
    script = load_script("run")
    runs = script.read_runs(FOLDER / "small.yaml")
    task = script.Task(torch.zeros(0), torch.zeros(0), vocab_size=65)
    sizes = {
        name: sum(p.numel() for p in script.build_model(runs[name], task).parameters())
        for name in ("dense", "tsa")
    }
    assert sizes == {"dense": 4_788_480, "tsa": 4_788_480 + 82_565}


@pytest.mark.parametrize("method", ["dense", "tsa", "exit"])
def test_every_method_trains(load_script, method):
    script = load_script("run")
    run = {
        "task": "copy", "method": method, "depth_weight": 0.001, "width": 32, "layers": 3,
        "heads": 2, "ffn": 64, "length": 22, "batch": 8, "steps": 4, "lr": 1e-2, "warmup": 0,
        "weight_decay": 0.1, "seed": 0, "eval_every": 2, "eval_blocks": 8,
    }  # fmt: skip
    _, record = script.train(run, script.load_task("copy", Path(), 22, script.DEVICE))
    first, _, last = record["curve"]
    assert last["step"] == 4 and last["loss"] < first["loss"]
    assert (last["alpha"] is None) == (method != "tsa")


def test_depth_is_told_by_kind_of_character(load_script, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Ab c,\nde " * 60)
    script = load_script("measure")
    task = script.load_task("shakespeare", text, 8, script.DEVICE)
    names = [script.KINDS[i] for i in script.kinds(task.train[None, :9], task.characters)[0]]
    first, inside = "first letter of a word", "inside a word"
    assert names == [
        first,
        inside,
        "space",
        first,
        "punctuation",
        "new line",
        first,
        inside,
        "space",
    ]
    run = {"method": "tsa", "width": 16, "layers": 3, "heads": 2, "ffn": 32, "length": 8, "seed": 0}
    model, judge = (
        script.build_model({**run, "method": method}, task).eval() for method in ("tsa", "dense")
    )
    found = script.where_depth_goes(model, task, 2, judge)
    assert sum(found["share_of_kind"].values()) == pytest.approx(1)
    for layer, mean in enumerate(found["alpha_by_layer"]):
        by_kind = [
            found["share_of_kind"][kind] * found["alpha_by_kind"][kind][layer]
            for kind in script.KINDS
        ]
        assert sum(by_kind) == pytest.approx(mean, abs=1e-4)
    tokens = task.validation[:, :-1]
    with torch.no_grad(), script.record_routes(model) as trace, script.use_selection(model, "soft"):
        model(input_ids=tokens)
        entropy = (
            torch.distributions.Categorical(logits=judge(input_ids=tokens).logits)
            .entropy()
            .flatten()
        )
    probs = torch.stack([record.probs.flatten() for record in trace.values()])
    for quarter, chosen in (
        (0, entropy <= entropy.quantile(0.25)),
        (3, entropy > entropy.quantile(0.75)),
    ):
        assert found["alpha_by_difficulty"][quarter] == pytest.approx(
            probs[:, chosen].mean(1).tolist(), abs=1e-4
        )


def test_claims_read_the_runs_the_right_way_round(load_script):
    script = load_script("report")

    def run(*bits, **more):
        return {
            "curve": [{"step": 50 * i, "loss": loss * math.log(2)} for i, loss in enumerate(bits)],
            **more,
        }

    at_2_5, _, at_1_8 = script.THRESHOLDS  # 2.5, 2.0 and 1.8 bits per character, in nats
    slow, fast = run(4.0, 2.6, 2.4, 2.2, 1.9), run(4.0, 2.4, 2.2, 1.9, 1.85)
    assert (
        script.steps_to(slow, at_2_5) == pytest.approx(75) and script.steps_to(slow, at_1_8) is None
    )
    # 1.8 is reached by one alone.
    assert script.later(slow, fast) == pytest.approx((28.125 + 50) / 2)
    kinds = {
        "inside a word": [0.9, 0.8, 0.6],
        "space": [0.9, 0.2, 0.4],
        "punctuation": [0.9, 0.4, 0.2],
    }
    assert script.kind_gap(run(alpha_by_kind=kinds)) == pytest.approx(0.3 - 0.7)
    easy_first = [[0.1, 0.3], [0.3, 0.3], [0.4, 0.4], [0.6, 0.8]]
    assert script.difficulty_gap(run(alpha_by_difficulty=easy_first)) == pytest.approx(0.7 - 0.2)

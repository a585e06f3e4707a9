"""`report.md` and its plots."""

import sys

import pytest
from demo.report import times, write_report
from models import routed
from places import ROOT
from text_models import save_base
from transformers import AutoModelForCausalLM

RECIPES = ROOT / "recipes"


def results():
    def row(budget, rule, loss, ratio):
        return {
            "budget": budget,
            "rule": rule,
            "loss": loss,
            "perplexity": 2.0,
            "full_ratio": ratio,
            "gap": None,
        }

    timed = {
        "ratio": 0.8,
        "full_ratio": 0.5,
        "flops_routed_over_dense": 0.79,
        "eta": 0.95,
        "tokens_per_s": 100.0,
    }
    part = {"dense_ms": 10.0, "without_ffns": 0.5, "budgets": {"0.5": timed}}
    log = [
        {"step": s, "loss_distill": 3.0 - s, "gate_prob/layer_4": 0.5, "gate_prob/layer_5": 0.6}
        for s in (1, 2)
    ]
    bench = {
        "prefill": part,
        "decode": part,
        "setting": {"batch": 4, "length": 256, "dtype": "bfloat16"},
        "machine": {"device": "a cpu", "threads": 2, "torch": "2", "transformers": "5"},
    }
    dense = row(1.0, "dense", 2.0, 1.0)
    return {
        "title": "A title",
        "fit": {"seconds": 60.0, "fit": {"tokens": 100, "held_out_tokens": 20}},
        "eval_fitted": {"rows": [dense, row(0.5, "threshold", 2.35, 0.51)]},
        "eval": {"rows": [dense, row(0.5, "threshold", 2.25, 0.49), row(0.5, "static", 2.5, 0.5)]},
        "bench": bench,
        "bench_wide": bench,
        "training": {
            "log_history": log,
            "arguments": {"steps": 2, "batch_size": 16, "length": 256},
            "seconds": 3.0,
            "trainable_parameters": 1234,
        },
        "samples": [{"label": "full", "text": "def f():"}],
    }


def test_the_report_states_cost_and_saving_per_budget(tmp_path):
    text = write_report(tmp_path, results()).read_text()
    assert "| 0.5 | +0.5000 (50.0%) | +0.3500 (51.0%) | +0.2500 (49.0%) |" in text
    assert "| 0.5 | 0.800 (50%) | 0.800 (50%) | 0.800 (50%) | 0.800 (50%) |" in text
    # A fifth of the time: two fifths of the FFNs, and so four fifths of what leaving half of them
    # out loses.
    assert "| 0.5 | 0.800 | +0.4000 | +0.3500 | +0.2500 |" in text
    assert "in 60 s on 120 tokens" in text
    assert "1,234 parameters train" in text
    assert "def f():" in text


def test_every_plot_that_the_report_shows_is_there(tmp_path):
    write_report(tmp_path, results())
    for name in ("training", "quality", "speed"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_layers_left_out_that_cannot_be_as_fast_have_no_loss(tmp_path):
    found = results()
    found["bench"]["prefill"] = {**found["bench"]["prefill"], "without_ffns": 0.7}
    assert (
        "| 0.5 | 0.800 | none is as fast | +0.3500 | +0.2500 |"
        in write_report(tmp_path, found).read_text()
    )


@pytest.mark.nightly
def test_the_demo_times_made_up_weights_in_the_form_of_bench(tmp_path, monkeypatch):
    # Which it imports as a script does.
    monkeypatch.setitem(sys.modules, "report", sys.modules["demo.report"])
    from demo import small_llama

    monkeypatch.chdir(RECIPES.parent)
    monkeypatch.setattr(small_llama, "HERE", RECIPES / "demo")
    monkeypatch.setattr(small_llama, "WIDE", small_llama.WIDE | {"depth": 1, "vocabulary": 64})
    wide = small_llama.wide_times(tmp_path, [0.5], "float32", rounds=1)
    assert (
        wide["setting"]["depth"] == 1
        and wide["prefill"]["batch"] == 4
        and wide["decode"]["steps"] == 48
    )
    (row,) = times({"bench": wide, "bench_wide": wide})
    assert row[0] == "0.5" and all("(" in cell for cell in row[1:])


def test_the_demo_times_the_base_without_the_ffns_that_an_adapter_routes(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "report", sys.modules["demo.report"])
    from demo import small_llama

    base = save_base(tmp_path / "base")
    routed(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "adapter")
    assert small_llama.without_ffns(tmp_path / "adapter", "float32", base, rounds=1) > 0

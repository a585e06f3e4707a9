"""The recipe that compares other packages with this library,
on a tiny model and without those packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from models import randomised
from places import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.fitting import option_times

FOLDER = ROOT / "recipes" / "peers_smollm2"
MODULES = ("systems", "measure", "run", "page")  # which another recipe's may have been


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def tiny():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, num_hidden_layers=5, **sizes))
    model = randomised(model, "sdpa", torch.float32, seed=0).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def ids(rows, length=256, seed=0):
    return torch.randint(1, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def setup(recipe, tmp_path):
    return recipe.systems.Setup(tiny, ids(8), ids(4, 512), 5, tmp_path)


@pytest.fixture
def texts():
    rows = {"a": ids(4, 512, seed=1), "b": ids(4, 512, seed=2)}
    return SimpleNamespace(report={"all": rows, "prompts": rows})


def test_the_dense_model_loses_nothing_and_answers_the_same_however_it_is_asked(
    recipe, setup, texts
):
    dense = recipe.run.Dense(setup, texts)
    lost = recipe.run.over_dense(dense.system, dense, "all")["texts"]
    assert lost["a"] == lost["b"] == {"more": 0, "error": 0, "rows": 8}
    found = recipe.run.measured("dense", setup, dense)
    assert (found["calls"]["pass"], found["calls"]["decode"]) == (1, 1)
    assert found["agreement"]["flips"] == 0 and found["agreement"]["difference"] < 1e-3
    assert found["batch"]["changed"] == found["padding"]["changed"] == 0


@pytest.mark.parametrize("name", ["exit", "shortgpt"])
def test_a_fifth_of_the_blocks_left_out_is_counted(recipe, setup, texts, name):
    dense = recipe.run.Dense(setup, texts)
    found = recipe.run.measured(name, setup, dense)
    assert found["calls"]["pass"] == found["calls"]["decode"] == pytest.approx(0.8)
    whole = recipe.run.measured("dense", setup, dense)["calls"]["flops"]
    assert 0.75 < found["calls"]["flops"] / whole < 0.9
    assert found["loss"]["texts"]["a"]["more"] != 0


@pytest.mark.parametrize(("name", "setting"), [("routed", "all"), ("prompts", "prompts")])
def test_a_fitted_router_is_kept_and_read_again(recipe, setup, texts, name, setting, monkeypatch):
    # The clock chooses what a prompt leaves out, and would choose by chance in a model of this
    # size.
    monkeypatch.setattr(
        option_times, "time_savings", lambda base, found, *given: dict.fromkeys(found[0], 0.11)
    )
    monkeypatch.setattr(
        option_times, "time_left", lambda base, chosen, *given: 1 - 0.11 * len(chosen)
    )
    found = recipe.run.measured(name, setup, recipe.run.Dense(setup, texts))
    assert found["setting"] == setting and found["loss"]["texts"]["a"]["more"] != 0
    assert setting == "prompts" or found["calls"]["pass"] < 1
    import hf_depthroute

    monkeypatch.setattr(hf_depthroute, "fit_router", None)  # a second fit would fail
    again = recipe.run.measured(name, setup, recipe.run.Dense(setup, texts))
    assert again["loss"] == found["loss"] and again["calls"] == found["calls"]


def test_flops_are_those_of_what_runs_without_hooks(recipe):
    """Torch's own counter hooks every module, and a branch of neurons then computes them all."""
    base = tiny()
    model = get_depth_routed_model(
        base, DepthRouteConfig(layers="all", gate="none", branch="neurons", branch_rank=16)
    ).eval()

    def flops(counter):
        with counter, torch.no_grad():
            model(ids(1))
        return counter

    plain, hooked = flops(recipe.measure.Flops()).total, flops(FlopCounterMode(display=False))
    neurons = 5 * 256 * 2 * (3 * 32 * 16)
    every = 5 * 256 * 2 * (2 * 32 * 64 + 32 * 16)
    assert hooked.get_total_flops() - plain == every - neurons
    with model.disable_adapter():
        plain, hooked = flops(recipe.measure.Flops()).total, flops(FlopCounterMode(display=False))
    assert hooked.get_total_flops() == plain


def test_a_batch_is_refused_by_a_draft_of_transformers_and_says_why(recipe, setup):
    system = recipe.systems.PEERS["exit-draft"].make(setup)
    found = recipe.measure.behaviour(system, ids(4, 256), 5)
    assert found["agreement"]["flips"] == 0  # its drafts are checked
    assert "batch" in found["batch"]["fails"]


def changed_by(recipe, **parts):
    """The tiny model with its pass or its generation exchanged."""
    system = recipe.systems.in_transformers(tiny())
    for name, value in parts.items():
        setattr(system, name, value)
    return system


def test_a_generation_that_takes_no_mask_is_found(recipe):
    model = tiny()

    def generate(rows, mask, new):
        return model.generate(
            rows, attention_mask=torch.ones_like(rows), max_new_tokens=new, do_sample=False
        )

    system = changed_by(recipe, base=model, generate=generate)
    assert recipe.measure.same_answers(system, ids(4), padding=0)["changed"] == 0
    assert recipe.measure.same_answers(system, ids(4), padding=8)["changed"] > 0


def test_a_choice_over_the_batch_is_found(recipe):
    model = tiny()

    def generate(rows, mask, new):
        out = model.generate(rows, attention_mask=mask, max_new_tokens=new, do_sample=False)
        return out.roll(1, 0) if len(rows) > 1 else out

    found = recipe.measure.same_answers(
        changed_by(recipe, base=model, generate=generate), ids(4), padding=0
    )
    assert found["changed"] > 0


def test_a_pass_that_decoding_does_not_follow_is_found(recipe):
    system = changed_by(recipe)
    read = system.logits
    system.logits = lambda rows: read(rows).roll(1, -1)
    found = recipe.measure.agreement(system, ids(4))
    assert found["flips"] == found["of"] and found["difference"] > 0


def test_an_absent_package_is_named_with_its_remedy(recipe, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    absent = [name for name in recipe.systems.PEERS if recipe.run.missing(name)]
    said = capsys.readouterr().out
    assert {"tide", "economize-mod", "mod-package", "int8"} <= set(absent)
    assert not {"dense", "routed", "prompts", "shortgpt", "exit"} & set(absent)
    for package in ("economize==0.3.2", "tide-inference==0.2.1", "mixture-of-depth==1.2.0"):
        assert f"pip install --no-deps {package}" in said


def test_what_a_package_cannot_do_is_its_result(recipe, setup, texts, monkeypatch):
    def broken(setup):
        raise ImportError("cannot import name 'X'\nmore")

    monkeypatch.setitem(recipe.systems.PEERS, "mod-package", recipe.systems.Peer(broken))
    found = recipe.run.measured("mod-package", setup, recipe.run.Dense(setup, texts))
    assert found == {"fails": "ImportError: cannot import name 'X'"}


def test_systems_are_timed_in_turn_over_dense(recipe, setup, texts):
    found = recipe.run.times(setup, texts, ["dense", "exit"], minutes=0)
    assert found["rounds"] >= 2
    assert found["over_dense"]["dense"] == {"prompt": 1, "one": 1, "eight": 1}
    assert all(ratio > 0 for ratio in found["over_dense"]["exit"].values())


def test_only_what_could_be_made_is_timed(recipe, tmp_path):
    for name, found in {"exit": {"trained": ""}, "tide": {"fails": "ImportError: X"}}.items():
        recipe.run.keep(tmp_path / f"{name}.json", found)
    assert [name for name in recipe.systems.PEERS if recipe.run.works(tmp_path, name)] == ["exit"]


def test_every_system_has_a_name_in_the_table_and_what_was_measured_is_whole(recipe):
    assert {"dense", *recipe.page.LABELS} == set(recipe.systems.PEERS)
    for name, row in recipe.page.results().items():
        assert "fails" in row or "texts" in row.get("loss", {"texts": row.get("nats")}), name
        if name in ("dense", "routed"):
            assert row["agreement"]["flips"] == row["padding"]["changed"] == 0, name


def test_the_table_has_a_line_for_what_ran_and_a_sentence_for_what_did_not(recipe):
    check = {"flips": 0, "of": 32, "difference": 2e-5}
    same, refused = {"changed": 0, "of": 4, "difference": 0.0}, {"fails": "ValueError: batch"}
    row = {
        "trained": "", "setting": "all", "calls": {"pass": 0.8, "decode": 0.8, "flops": 84.0},
        "agreement": check, "batch": same, "padding": refused,
        "loss": {"texts": {"a": {"more": 0.1, "error": 0.03, "rows": 4}}},
    }  # fmt: skip
    found = {"dense": {"calls": {"flops": 100.0}}, "exit": row, "tide": {"fails": "ImportError: X"}}
    timed = {"over_dense": {"exit": {"prompt": 0.81, "one": 0.82}}}
    *_, line = recipe.page.table(found, timed, ["exit"])
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == [
        "0.80 / 0.80",
        "0.84",
        "+0.100 ± 0.030",
        "0 of 32, 2e-05",
        "no",
        "refused",
        "0.81",
        "0.82",
        "",
    ]
    assert recipe.page.failures(found) == [
        "TIDE does not run on transformers 5.23: `ImportError: X`."
    ]
    both = {"routed": row, "int8": row, "int8-routed": row}
    assert "both +0.100 (the sum is +0.200)" in recipe.page.stacked(both)[0]

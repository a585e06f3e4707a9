"""Committed models and results are what their cards and recipes say."""

import dataclasses
import json
import re
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
import yaml
from aux_losses.paper.claims import CLAIMS, QUESTIONS, judge
from embedded_base.pretrain import fingerprint, sixteen
from gates import duels
from moe import page as moe
from places import ROOT
from scripts import load_script
from study.intervals import AGREES, DISAGREES, NOT_RUN, OPEN
from study.results import read_results
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    get_depth_routed_model,
)
from hf_depthroute.data.text import PYTHON_STDLIB, load_text, pack
from hf_depthroute.evaluation import evaluate_budgets, mean_loss
from hf_depthroute.routing.trace import RouteTrace
from hf_depthroute.training import losses
from hf_depthroute.training.oracle import UtilityLabels

RECIPES = ROOT / "recipes"
AUX = RECIPES / "aux_losses"
BASE = RECIPES / "embedded_base" / "model"
WIDE = RECIPES / "embedded_base" / "wide"
SHARED = ROOT.parent / "shared" / "data"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is absent")


def batches(source, folder, split, length, size):
    text = load_text(source, split=split)
    blocks = torch.tensor(pack(text, AutoTokenizer.from_pretrained(folder), length)["input_ids"])
    return [
        {"input_ids": block, "attention_mask": torch.ones_like(block)}
        for block in blocks.split(size)
    ]


@pytest.mark.nightly
def test_embedded_base_has_the_loss_its_card_says():
    stated = json.loads((BASE / "training.json").read_text())
    same_text = (
        fingerprint(list(load_text(PYTHON_STDLIB, split="validation")["text"]))
        == stated["validation_text"]
    )
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    loss = mean_loss(model, batches(PYTHON_STDLIB, BASE, "validation", stated["block_length"], 16))
    # Another Python release ships other sources.
    assert loss == pytest.approx(stated["validation_loss"], abs=0.002 if same_text else 0.2)


@pytest.mark.nightly
def test_wider_base_has_the_loss_of_its_record_on_a_part_of_its_text():
    stated = json.loads((WIDE / "training.json").read_text())
    same_text = (
        fingerprint(list(load_text(PYTHON_STDLIB, split="validation")["text"]))
        == stated["validation_text"]
    )
    blocks = torch.cat(
        [batch["input_ids"] for batch in batches(PYTHON_STDLIB, WIDE, "validation", 512, 64)]
    )
    model = AutoModelForCausalLM.from_pretrained(WIDE, dtype=torch.float32)
    loss = mean_loss(model, [{"input_ids": block[None]} for block in sixteen(blocks)])
    assert loss == pytest.approx(stated["probe_loss"], abs=0.002 if same_text else 0.5)


@pytest.mark.parametrize(("folder", "page"), [(BASE, "embedded_base.md"), (WIDE, "wide_base.md")])
def test_card_of_a_base_is_made_from_its_files(folder, page):
    card = load_script(RECIPES / "embedded_base" / "pretrain.py").card(folder)
    assert (ROOT / "model_cards" / page).read_text() == card


def test_figures_of_the_readme_and_of_the_results_are_made_from_the_committed_results():
    parts = load_script(RECIPES / "tables.py").parts()
    names = [page.name for page, _ in parts]
    assert names == ["README.md", "README.md", "README.md", "results.md", "pick-a-gate.md"]
    for page, written in parts:
        assert written in page.read_text(), page


def test_stories_are_compared_with_what_learns_nothing_on_the_same_branches():
    """As the page says: normed gates are below random routing and drops,
    residual ones are not below random routing."""
    result = json.loads((RECIPES / "stories260k" / "results.json").read_text())
    rows = {
        (r["gate"], r["gate_input"], len(r["layers"]), r["rule"], r["budget"]): r
        for r in result["summary"]
    }
    random = rows["random", "normed", 3, "threshold", 0.5]
    halfway = (
        rows["none", "normed", 1, "fixed", 0.5]["loss"]
        + rows["none", "normed", 2, "fixed", 0.5]["loss"]
    ) / 2
    for gate in ("mlp", "jepa"):
        normed, residual = (
            rows[gate, source, 3, "threshold", 0.5] for source in ("normed", "residual")
        )
        assert normed["loss"] < random["loss"] and normed["loss_max"] < halfway
        assert residual["loss"] >= random["loss"]
    assert rows["mlp", "normed", 3, "threshold", 0.5]["loss_max"] < random["loss_min"]
    assert rows["jepa", "normed", 3, "threshold", 0.5]["loss_max"] > random["loss_min"]
    flops = {case["gate"]: case["flops"] for case in result["flops_over_dense"]}
    assert flops["jepa"] > 1 > flops["mlp"]


def test_experts_are_compared_with_the_strongest_static_drop():
    """The page of results has the static choice with the lowest loss near the share of pairs that
    the routers run."""
    runs = json.loads((RECIPES / "moe" / "results.json").read_text())["runs"]
    static = [run for run in runs if "dropped" in run and abs(run["share"] - 0.5) < 0.08]
    best = min(static, key=lambda run: run["loss"])
    assert f"{best['loss']:.3f}" in "\n".join(moe.study().section)


def test_comparison_of_gates_is_made_from_the_committed_results():
    lower = {duel.lower()[0] for duel in duels()}
    assert lower == {"MLP", "JEPA"}, "one gate is ahead everywhere: say so on the page"


def test_fitted_routers_lose_less_than_the_best_layers_left_out():
    folder = RECIPES / "fit_router"
    report = load_script(folder / "report.py")
    results, phases = (
        json.loads((folder / name).read_text()) for name in ("results.json", "phases.json")
    )
    assert report.page(results, phases) == (folder / "results.md").read_text()
    for found in results.values():
        points = report.summary(found)
        for kind, count in points:
            if kind == "mlp":
                half = points["static", count]["share"] >= 0.5  # of the calls run, at least
                assert report.spared(points, points[kind, count]) > (0.25 if half else 0.2)


def test_n_grams_are_compared_with_as_many_weights_and_steps():
    folder = RECIPES / "fit_router"
    report = load_script(folder / "branch_report.py")
    assert report.page() == (folder / "branches.md").read_text()
    for row in json.loads((folder / "branch_time.json").read_text())["bases"].values():
        assert (
            row["weights"]["static_memory"]
            == row["weights"]["static_rank"]
            > row["weights"]["static"]
        )
    found = {
        "mlp_memory 2 0": {"more": 0.5, "share": 0.6, "trained": {"steps": 200, "more": 0.3}},
        "mlp_memory 2 1": {"more": 0.5, "share": 0.6, "trained": {"steps": 200, "more": 0.3}},
        "mlp_rank 2 0": {"more": 0.7, "share": 0.6, "trained": {"steps": 1500, "more": 0.1}},
        "static_memory 2 0": {"more": 0.9, "share": 0.6},
    }
    pairs = report.branch_pairs(found)
    assert {key: len(rows) for key, rows in pairs.items()} == {(0, "mlp", 2): 1}
    found["mlp_rank 2 0"]["trained"]["steps"] = 200
    (memory, rank), *rest = report.branch_pairs(found)[200, "mlp", 2]
    assert (memory["more"], rank["more"], rest) == (0.3, 0.1, [])


@pytest.mark.parametrize(
    ("name", "configs"),
    [("main", 7), ("long", 12), ("variants", 8), ("budget_25", 4), ("results", 30)],
)
def test_auxiliary_loss_report_is_made_from_its_results(name, configs):
    folder = AUX / name
    study, written = read_results(folder), (folder / "report.md").read_text()
    assert study.missing() == {} and len(study.names) == configs
    for verdict in judge(study):
        assert f"**{verdict.state}**: {verdict.statement} {verdict.sentence}" in written.replace(
            "\\", ""
        )


def test_every_claim_and_question_of_the_auxiliary_losses_is_tested():
    names = ("main", "long", "variants", "budget_25", "results")
    judged = {verdict.key for name in names for verdict in judge(read_results(AUX / name))}
    assert judged == {claim.key for claim in (*CLAIMS, *QUESTIONS)}


def test_claims_of_every_paper_are_made_from_the_committed_results():
    claims = load_script(RECIPES / "claims.py")
    assert claims.page() == claims.PAGE.read_text()


@pytest.mark.parametrize(
    ("name", "file"),
    [(name, "results") for name in ("engram", "peers", "router_tuning", "lora")]
    + [("engram", "packages")],
)
def test_page_of_a_study_is_made_from_its_results(name, file):
    folder = RECIPES / name
    report, results = (
        load_script(folder / "report.py"),
        json.loads((folder / f"{file}.json").read_text()),
    )
    page = report.page(results["systems"] if name == "peers" else results)
    assert page == (folder / f"{file}.md").read_text()


def test_every_row_of_the_claims_has_a_state_and_what_is_not_decided_says_why():
    claims = load_script(RECIPES / "claims.py")
    rows = [row for paper in claims.papers() for row in paper.rows()]
    for row in rows:
        assert bool(row.reason) == (row.state in (OPEN, NOT_RUN)), row
    known = yaml.safe_load((RECIPES / "not_run.yaml").read_text())
    assert sum(row.state == NOT_RUN for row in rows) == sum(map(len, known.values())) > 60
    text = claims.page().lower()
    missing = (
        "enwik8", "context of 256", "10,000 steps", "thirteen thresholds", "batches of 1 to 128",
        "alpaca", "deepseek-moe", "15 minutes", "skip transformer",
        "generation with attention skipped per sequence", "capacity factor", "re-routing",
        "annealed", "across devices", "orthogonal", "td-style", "0.5 b and 1 b", "expert choice",
    )  # fmt: skip
    assert [name for name in missing if name not in text] == []
    for word in (
        "reproduced",
        "reversed",
        "supported",
        "contradicted",
        "not comparable",
        "so here",
        "detectable",
    ):
        assert word not in text, word


def test_thresholds_of_token_selective_routing_are_bits_per_character():
    report = load_script(RECIPES / "token_selective" / "report.py")
    assert pytest.approx([1.733, 1.386, 1.248], abs=1e-3) == list(report.THRESHOLDS)  # nats
    results = report.read("paper")
    runs = [run for name in ("dense", "tsa") for run in report.seeds_of(results, name)]
    assert report.reached(runs) == [2.5]  # no model of this study gets to 2.0 bits
    (row,) = [row for row in report.claims(results) if "threshold" in row.claim]
    assert "2.5 bits per character" in row.claim and "enwik8" in row.claim


def test_routing_by_the_task_loss_alone_is_what_lambda_0_is_asked():
    report = load_script(RECIPES / "token_selective" / "report.py")
    results, small = report.read("paper"), report.read("small")
    (row,) = [row for row in report.single_claims(results, small) if "lambda 0)" in row.claim]
    assert "routes" in row.claim and "0.73" not in row.claim and "22.5 % saved" in row.here
    assert (row.state, row.reason) == (OPEN, "agrees in the one seed; cannot decide with 1 seed")


def test_arithmetic_is_not_counted_as_agreement():
    assert not [claim for claim in CLAIMS if "accounting" in claim.statement]
    page = load_script(RECIPES / "claims.py").page()
    for row in ("| G1 | 1.513 | 1.569 | 1.569 |", "| A3-G3 | 1.068 | 1.068 | 1.093 |"):
        assert row in page


def test_the_flip_has_the_papers_sign_and_cannot_be_mended_where_it_is_absent():
    report = load_script(RECIPES / "engram" / "report.py")
    # The flip is below zero.
    assert report.gap({"curve": [{"hot": 3.0, "cold": 2.9}]}) == pytest.approx(-0.1)

    def runs(cold):
        return {
            kind: {seed: {"curve": [{"loss": 3.0, "hot": 3.0, "cold": cold, "alpha_hot": [0.5], "alpha_cold": [0.4]}],
                          "areas": {"1": 0.5, "2": 0.5}} for seed in range(3)}
            for kind in ("memory", "cgs")
        }  # fmt: skip

    states = {cold: {row.claim: row for row in report.claims(runs(cold))} for cold in (2.9, 3.1)}
    assert states[2.9][report.FLIP].state == AGREES and states[2.9][report.LEFT].state == AGREES
    assert states[3.1][report.FLIP].state == DISAGREES and states[3.1][report.LEFT].state == OPEN
    assert "cannot be tested" in states[3.1][report.LEFT].reason


def test_experts_are_compared_with_expert_drop_as_published_and_with_the_best_order():
    verdicts = load_script(RECIPES / "moe" / "verdicts.py")
    result = json.loads((RECIPES / "moe" / "results.json").read_text())
    rows = verdicts.tuning_claims(result)
    assert (
        "all layers with the least routing weight"
        in next(row for row in rows if not row.ours).claim
    )
    for share in (0.5, 0.75):
        assert verdicts.strongest_at(result, share) == min(
            verdicts.dropped_at(result, order, share)
            for order in {run["method"] for run in result["runs"] if "dropped" in run}
        )


PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs").rglob("*.md"),
    *RECIPES.rglob("*.md"),
    *(ROOT / "model_cards").glob("*.md"),
]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "±" in p.read_text()], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_page_says_that_its_errors_are_standard_errors(page):
    text = " ".join(page.read_text().split())
    assert "tandard error" in text
    assert "standard deviation" not in text and "+-" not in text and "+/-" not in text


def test_eager_decoding_on_a_gpu_is_said_to_be_slower_with_the_number():
    headlines = load_script(RECIPES / "headlines.py")
    _, _, ratio = headlines.eager_decode(json.loads((RECIPES / "speed" / "h100.json").read_text()))
    assert 1.85 < ratio < 1.95
    for page in (
        "README.md",
        "docs/results.md",
        "docs/how-to/serving.md",
        "recipes/speed/README.md",
    ):
        assert "1.9 " in " ".join((ROOT / page).read_text().split()), page


def test_a_router_is_compared_with_as_much_dropped_and_in_the_right_direction():
    report = load_script(RECIPES / "router_tuning" / "report.py")
    place = {"target": "ffn", "granularity": "token", "layers": 3, "samples": 4096}
    dropped = [
        {"target": "ffn", "among": "candidates", "layers": [2], "loss": 3.1},
        {"target": "ffn", "among": "candidates", "layers": [2, 3], "loss": 3.6},
        {"target": "ffn", "among": "all", "layers": [1], "loss": 3.2},
        {"target": "ffn", "among": "all", "layers": [1, 3], "loss": 3.5},
    ]
    random = [{"target": "ffn", "granularity": "token", "seed": 1, "share": 2 / 3, "loss": 3.4}]
    results = {
        "dense": {"dense": 3.0, "dropped": dropped, "random": random},
        "runs": [{**place, "seed": 1, "at_budget": {"share": 0.5, "loss": 3.2}}],
    }
    # Half of three layers lies between one dropped, 0.1 at best, and two, 0.5 at best.
    assert report.over_dropping(results, "ffn", "token") == pytest.approx([0.2 - 0.3])
    assert report.over_dropping(results, "ffn", "token", trained=False) == pytest.approx(
        [0.4 - 0.1]
    )
    second = {"adapter": "b", "ratio": 1.0, "quartiles": [0.9, 1.1]}
    shapes = [
        {"adapters": [{"adapter": "a", "ratio": 0.8, "quartiles": [0.7, 0.85]}, second]}
        for _ in range(2)
    ]
    assert report.faster({"time": {"shapes": shapes}}, "a", "b") == (
        "1.25x against 1.00x, 1.25x against 1.00x",
        "agrees",
    )
    assert report.faster({"time": {"shapes": shapes}}, "b", "a")[1] == "disagrees"
    assert report.faster({"time": {"shapes": shapes}}, "b", "dense")[1] == "open"
    shapes[1]["adapters"][0]["quartiles"][1] = 0.95
    assert report.faster({"time": {"shapes": shapes}}, "a", "b")[1] == "open"


def test_runs_at_a_time_are_those_that_end_first(monkeypatch):
    monkeypatch.syspath_prepend(str(AUX))
    script = load_script(AUX / "gpu.py")
    throughput = {"1": 1.0, "2": 1.8, "3": 2.2, "4": 2.5}
    assert script.time_of_all(throughput, 1, 10) == 10
    assert script.time_of_all(throughput, 4, 10) == pytest.approx(4 / 2.5 * 2 + 2 / 1.8)


def test_only_this_librarys_routers_compute_the_chosen_rows_and_decode_what_they_prefill(
    monkeypatch,
):
    folder = RECIPES / "peers"
    systems = json.loads((folder / "results.json").read_text())["systems"]
    assert list(systems) == list(load_script(folder / "worker.py").SYSTEMS)
    assert list(systems) == list(load_script(folder / "report.py").LABELS)
    for name, row in systems.items():
        skips = min(row["computed"].values()) < 0.6
        assert skips == (row["own"] or name in ("mod", "early exit")), name
        assert (row["difference"]["difference"] < 1e-3) == (name != "mod"), name


def test_the_published_memory_has_the_published_size():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        script = load_script(RECIPES / "engram" / "run.py")
        assert script.parameters(script.SIZES["paper"]) == pytest.approx(332.9e6, abs=5e4)


def tiny_size(script):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=50, num_hidden_layers=4, **sizes)
    return script.Size(
        lambda: LlamaForCausalLM(config), 4096, [1, 2, 3], script.python_sources, 1e-2
    )


@pytest.mark.parametrize(
    "kind", ["none", "memory", "cgs", "weak", "smooth", "curriculum", "curriculum_slow"]
)
def test_a_memory_trains_from_scratch_as_the_study_does(kind, monkeypatch):
    script = load_script(RECIPES / "engram" / "run.py")
    monkeypatch.setattr(script, "POINTS", 2)
    rows = torch.randint(50, (48, 12), generator=torch.Generator().manual_seed(0))
    before = dict(losses.LOSSES)
    text = {"train": rows, "choose": rows[:4], "report": rows[:8]}
    found = script.train(kind, text, "report", seed=0, steps=20, rate=1e-2, size=tiny_size(script))
    assert before == losses.LOSSES
    assert [point["step"] for point in found["curve"]] == [10, 20]
    assert found["curve"][1]["loss"] < found["curve"][0]["loss"]
    assert list(found.get("areas", [])) == ([] if kind == "none" else ["1", "2", "3"])
    for point in found["curve"] if kind != "none" else []:
        assert min(point["hot"], point["cold"]) < point["loss"] < max(point["hot"], point["cold"])
        assert len(point["alpha_hot"]) == 3


def test_gradients_of_both_losses_are_measured_by_part():
    script = load_script(RECIPES / "engram" / "run.py")
    rows = torch.randint(50, (48, 12), generator=torch.Generator().manual_seed(0))
    before = dict(losses.LOSSES)
    found = script.gradients({"train": rows}, seed=0, steps=20, rate=1e-2, size=tiny_size(script))[
        "parts"
    ]
    assert before == losses.LOSSES and list(found) == [
        "embedding",
        "first layer",
        "projections",
        "table",
    ]
    assert all(min(norms.values()) > 0 for norms in found.values())


def test_a_training_takes_the_rate_of_the_search_nearest_in_steps(tmp_path):
    script = load_script(RECIPES / "engram" / "run.py")
    losses_of = {
        ("memory", 250, 0.002): 4.0,
        ("memory", 250, 0.004): 4.1,
        ("memory", 1000, 0.004): 3.0,
    }
    losses_of |= {("memory", 1000, 0.002): 3.1, ("cgs", 250, 0.008): 5.0}
    rows = {
        f"tuning {kind} {steps} {rate:g}": {"steps": steps, "rate": rate, "curve": [{"loss": loss}]}
        for (kind, steps, rate), loss in losses_of.items()
    }
    (tmp_path / "results.json").write_text(json.dumps(rows))
    results, size = script.Results(tmp_path / "results.json"), script.SIZES["small"]
    assert [results.rate("equal", size, steps) for steps in (120, 450, 600, 2000)] == [
        0.002,
        0.002,
        0.004,
        0.004,
    ]
    assert results.rate("smooth", size, 2000) == 0.008
    assert results.rate("none", size, 2000) == size.rate


def test_a_kept_training_at_another_rate_than_the_search_says_is_refused(tmp_path, monkeypatch):
    script = load_script(RECIPES / "engram" / "run.py")
    kept = {
        "step": {"ratio": 1.2},
        "text": {},
        "tuning memory 250 0.004": {"steps": 250, "rate": 0.004, "curve": [{"loss": 4.0}]},
    }
    monkeypatch.setitem(
        script.SIZES, "small", dataclasses.replace(script.SIZES["small"], texts=dict)
    )
    given = f"--kinds memory --seeds 0 --steps 450 --threads {torch.get_num_threads()} --out"
    monkeypatch.setattr(sys, "argv", ["run.py", *given.split(), str(tmp_path / "results.json")])
    for rate in (0.004, 0.002):
        kept["memory 0 450"] = {"rate": rate}
        (tmp_path / "results.json").write_text(json.dumps(kept))
        with nullcontext() if rate == 0.004 else pytest.raises(SystemExit, match="was trained at"):
            script.main()


def test_labels_are_means_over_neighbours_that_have_one(monkeypatch):
    script = load_script(RECIPES / "engram" / "run.py")
    utility = torch.arange(12.0)[None].clone()
    valid = torch.ones(1, 12, dtype=torch.bool)
    valid[0, -1] = False
    monkeypatch.setattr(losses, "cgs_loss", lambda inputs: inputs.counterfactual[1].utility)
    given = losses.LossInputs(RouteTrace(), counterfactual={1: UtilityLabels(utility, valid)})
    found = script.smoothed_loss(given)
    expected = [utility[0, max(0, t - 4) : min(11, t + 5)].mean() for t in range(12)]
    assert torch.allclose(found[0], torch.stack(expected))


def test_moe_report_is_made_from_its_results(monkeypatch):
    folder = RECIPES / "moe"
    monkeypatch.syspath_prepend(str(folder))  # the report imports its neighbours
    for name in ("pretrain", "route", "plots", "verdicts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    result = json.loads((folder / "results.json").read_text())
    assert load_script(folder / "report.py").markdown(result) == (folder / "results.md").read_text()


def test_experts_are_dropped_by_their_weight_in_each_layer_or_in_all(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES / "moe"))
    monkeypatch.delitem(sys.modules, "pretrain", raising=False)
    script = load_script(RECIPES / "moe" / "route.py")
    weights = {0: torch.tensor([0.1, 0.2, 0.3, 0.4]), 1: torch.tensor([0.7, 0.6, 0.15, 0.5])}
    monkeypatch.setattr(script, "expert_importance", lambda model, batches: weights)
    assert script.by_weight(None, [], 2, in_all=False) == [[0, 1], [2, 3]]
    assert script.by_weight(None, [], 4, in_all=True) == [[0, 1, 2], [2]]


def test_pairs_beyond_the_capacity_of_an_expert_are_dropped():
    script = load_script(RECIPES / "moe" / "pretrain.py")
    model = script.build(0).eval()
    batch = {"input_ids": torch.arange(64)[None]}
    counts, seen = {"all": 0, "dropped": 0}, {}
    keep = script.hooked_routers(
        model, script.RouterTrace(), lambda layer, router, args, out: seen.update({layer: out})
    )
    with torch.no_grad(), script.limited(model, 1.0, counts), keep:
        limited = model(**batch, use_cache=False).logits
    assert counts["all"] == 4 * 64 * 2 and 0 < counts["dropped"] < counts["all"]
    kept = 0
    for _, weights, chosen in seen.values():
        loads = torch.bincount(chosen[weights > 0], minlength=8)
        assert loads.max() == 16  # 64 tokens, 2 experts of each, 8 experts
        kept += int(loads.sum())
    assert kept == counts["all"] - counts["dropped"]
    with torch.no_grad(), script.limited(model, 8.0, counts):
        whole = model(**batch, use_cache=False).logits
    assert torch.equal(whole, model(**batch, use_cache=False).logits) and not torch.equal(
        whole, limited
    )


def test_conflict_is_the_angle_between_what_a_step_adds_for_the_balance_and_for_the_task():
    script = load_script(RECIPES / "moe" / "pretrain.py")
    model = script.build(0).eval()
    batch = {"input_ids": torch.arange(64)[None]}
    found = script.conflict(model, batch)
    steps = []
    for weight in (0.0, 1.0):
        model.zero_grad()
        with script.observe_routers(model) as trace:
            loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        (loss + weight * script.load_balance(trace)).backward()
        steps.append(
            torch.cat([router.weight.grad.flatten() for router in script.routers(model).values()])
        )
    task, balance = steps[0], steps[1] - steps[0]
    assert found["task_norm"] == pytest.approx(float(task.norm()), rel=1e-4)
    assert found["balance_norm"] == pytest.approx(float(balance.norm()), rel=1e-3)
    assert found["cosine"] == pytest.approx(
        float(torch.cosine_similarity(task, balance, dim=0)), abs=1e-3
    )


def test_weights_in_the_repository_stay_small():
    found = ROOT.glob("recipes/**/*.safetensors")
    # What a run keeps is ignored.
    found = [path for path in found if "work" not in path.relative_to(ROOT).parts]
    sizes = {path.parent: path.stat().st_size for path in found}
    assert sizes.pop(WIDE) < 64 * 2**20 and sum(sizes.values()) < 12e6


def test_row_operators_are_measured_by_what_they_have_to_do(tmp_path, monkeypatch, capsys):
    script = load_script(RECIPES / "speed/row_ops.py")
    monkeypatch.setattr(script, "measure_peaks", lambda *_: script.Peaks(1e10, 1e10))
    out = tmp_path / "row_ops.json"
    monkeypatch.setattr(sys, "argv", ["row_ops.py", "--json", str(out), "--small", "--rounds", "1"])
    script.main()
    rows = {
        (row["operation"], row["share"]): row for row in json.loads(out.read_text())["operations"]
    }
    assert len(rows) == len(capsys.readouterr().out.splitlines()) == 3 * (2 + 4) + 3 + 4
    ms = rows["linear_rows, 8 rows", 0.5]["ms"]
    rates = [rows["linear_rows, 8 rows", 0.5][name] for name in ("bandwidth", "matmul")]
    # Eight rows read, half of them multiplied and written, in bfloat16; the reported time is
    # rounded.
    assert rates == pytest.approx(
        [2 * (8 + 64 + 4) * 64 / ms / 1e7, 2 * 4 * 64 * 64 / ms / 1e7], rel=0.05, abs=2e-4
    )
    causal = rows["attend_rows, 1 x 16 queries, 16 keys", 1.0]
    assert causal["matmul"] == pytest.approx(
        4 * 136 * 4 * 16 / causal["ms"] / 1e7, rel=0.05, abs=2e-4
    )


def test_stories_results_meet_their_bars():
    result = json.loads((RECIPES / "stories260k" / "results.json").read_text())
    assert result["random_routing_without_branch"] == pytest.approx(2.77, abs=0.02)
    for run in result["runs"]:
        loss = {(row["rule"], row["budget"]): row["loss"] for row in run["rows"]}
        assert loss["dense", 1.0] == pytest.approx(1.448, abs=0.001)
        if run["gate"] in ("mlp", "jepa") and run["gate_input"] == DepthRouteConfig().gate_input:
            assert loss["topk", 0.5] <= 2.03
            assert loss["threshold", 0.5] <= 2.08


@needs_shared
@pytest.mark.nightly
def test_a_short_training_on_a_real_model_beats_random_routing(tmp_path):
    folder, text = SHARED / "stories260k", str(SHARED / "stories.txt")
    train = batches(text, folder, "train[:20%]", 128, 1)
    rows = [{"input_ids": b["input_ids"][0], "labels": b["input_ids"][0]} for b in train]
    config = DepthRouteConfig(layers=[2, 3, 4], branch_rank=8)
    model = get_depth_routed_model(AutoModelForCausalLM.from_pretrained(folder), config)
    arguments = DepthRouteTrainingArguments(
        output_dir=str(tmp_path), max_steps=60, per_device_train_batch_size=16, learning_rate=4e-3,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    DepthRouteTrainer(model=model, args=arguments, train_dataset=rows).train()

    dense, topk, threshold = evaluate_budgets(
        model, batches(text, folder, "train[98%:]", 256, 16), train[:64], [0.5]
    )
    # 1.45 without the beginning token, which tells this base that a story begins
    assert dense.loss == pytest.approx(1.545, abs=0.02)
    assert threshold.full_ratio == pytest.approx(0.5, abs=0.05)
    assert max(topk.loss, threshold.loss) < 2.6  # random routing without a branch: 2.77 there


def test_a_page_with_a_snippet_of_a_larger_model_says_that_quality_was_measured_on_small_ones():
    """The how-to pages start from the lines of their index, which says it."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = [p for p in pages if re.search(r"```[a-z]+\n(?:(?!```)[\s\S])*Qwen/", p.read_text())]
    assert len(shown) > 5
    for page in shown:
        text = page.read_text()
        assert "18 million" in text or "(index.md)" in text, page
    assert "18 million" in (ROOT / "docs/how-to/index.md").read_text()

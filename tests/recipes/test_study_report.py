"""The report of a study: what it reads, refuses, tabulates, concludes and draws.

All numbers are planted.
"""

from __future__ import annotations

import itertools
import json
import runpy
from html.parser import HTMLParser
from pathlib import Path

import adjustText
import pytest
from aux_losses.paper.claims import CLAIMS, QUESTIONS, judge, untested
from aux_losses.paper.layouts import LAYOUTS
from aux_losses.paper.page import render_markdown, write_report
from aux_losses.paper.tables import build_tables
from aux_losses.paper.values import hits, significant, spread, uneven_times, values
from places import ROOT
from study.__main__ import main
from study.claims import Judged, set_against, tell_states
from study.claims import judge as judge_one
from study.intervals import AGREES, DISAGREES, NOT_RUN, OPEN, STATES, answer, interval
from study.results import ResultsError, dump_results, read_results
from study.table import loss_table, summarize, write_study_report
from study_results import write_study

from hf_depthroute.cli import errors

CONFIGS = sorted({name for claim in (*CLAIMS, *QUESTIONS) for name in claim.needs})
HOSTILE = '<script>alert("1")</script> $\\frac$ | [a](javascript:b) **c**'
VOID = {"meta", "img", "br", "link", "hr", "input"}


def verdict(folder, key, plan, dense_loss=10.0, **study):
    """Word and sentence of one claim, of a study with this plan, in which skipping is free."""
    base = {"name": "tiny", "parameters": 1000, "layers": 6, "width": 64, "dense_loss": dense_loss}
    found = {v.key: v for v in judge(read_results(write_study(folder, plan, base=base, **study)))}
    return found[key].state, found[key].sentence


def table(study, key):
    """Rows of a table as dicts by column."""
    (found,) = [t for t in build_tables(study) if t.key == key]
    return [dict(zip(found.columns, row)) for row in found.rows]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The report of a study with every config, one run missing, and its folder."""
    jepa = {"layers/q_distance": 0.85, "layers/q_cosine": 0.999}
    plan = {
        name: {"endpoint": [3.0, 3.01, 3.02], **(jepa if "g1" not in name else {})}
        for name in CONFIGS
    }
    plan["g3"]["label"] = HOSTILE
    plan["joint_g3"]["joint"] = True
    results = write_study(tmp_path_factory.mktemp("study") / "results", plan, missing=[("a2", 7)])

    place = adjustText.adjust_text
    with pytest.MonkeyPatch.context() as patch:  # no test looks where names stand
        patch.setattr(adjustText, "adjust_text", lambda *a, **k: place(*a, **k | {"iter_lim": 2}))
        write_report(results, results / "report")
    return results / "report"


# Reading


def test_results_json_gives_the_same_report_as_the_folder(tmp_path):
    plan = {"g1": {"endpoint": [1 / 3, 2 / 3, 1.0]}, "g3": {"layers/q_distance": 0.85}}
    folder = write_study(tmp_path / "in", plan, missing=[("g3", 7)])
    write_report(folder, tmp_path / "first")
    assert not (tmp_path / "first/step_ratios.json").exists()
    (folder / "step_ratios.json").write_text('{"cgs / a3_g1": {"ratio": 1.16}}')
    write_report(folder, tmp_path / "first")
    write_report(tmp_path / "first", tmp_path / "again")
    for name in ("results.json", "report.md", "report.html", "step_ratios.json"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "first" / name).read_text()


def test_training_series_are_averaged_in_at_most_100_windows(tmp_path):
    study = read_results(
        write_study(tmp_path, {"g1": {"grad_norm_mean": 7.0}}, seeds=[1], steps=250)
    )
    series = study.runs["g1"][1].training
    rows = [
        json.loads(line) for line in (tmp_path / "runs/g1/1/metrics.jsonl").read_text().splitlines()
    ]
    assert {len(points) for points in series.values()} == {100}
    assert series["step"][:2] == [1.5, 4]  # steps 1-2 and 3-5
    assert series["grad_norm"][1] == float(f"{sum(row['grad_norm'] for row in rows[2:5]) / 3:.5g}")
    assert series["gate_prob"][0] == 0.5


def test_ninety_runs_fit_in_two_megabytes(tmp_path):
    study = read_results(
        write_study(tmp_path / "in", {"g3": {}}, seeds=[1], steps=500, eval_every=25)
    )
    (tmp_path / "results.json").write_text(dump_results(study))
    assert (tmp_path / "results.json").stat().st_size < 2e6 / 90


def test_a_run_without_a_summary_is_missing_and_its_last_step_is_known(tmp_path):
    folder = write_study(tmp_path, {"g1": {}}, missing=[("g1", 123)], steps=20)
    with (folder / "runs/g1/123/metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # killed while writing
    study = read_results(folder)
    assert study.missing() == {"g1": [123]}
    assert study.unfinished == {"g1": {123: 10}}


def test_numbers_that_are_not_finite_are_left_out_and_told(tmp_path):
    folder = write_study(tmp_path / "in", {"g1": {"endpoint": [3.0, float("nan"), 3.2]}})
    study = read_results(folder)
    assert values(study, "g1", "endpoint") == {42: 3.0, 7: 3.2}
    assert "left out of means and verdicts: g1 seed 123" in render_markdown(study, [], [], [])
    (tmp_path / "results.json").write_text(dump_results(study))
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)


def test_runs_of_another_study_are_told(tmp_path):
    study = read_results(write_study(tmp_path, {"g1": {}}, fingerprint="other"))
    assert "Runs of another study, by their fingerprint: g1." in render_markdown(study, [], [], [])


def broken(folder, path, text):
    write_study(folder, {"g1": {}})
    (folder / path).write_text(text)
    return folder


def listing(*names):
    return json.dumps({"configs": [{"name": name} for name in names], "seeds": [1]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", "no such folder"),
        (lambda folder: folder, "the folder is empty"),
        (lambda folder: broken(folder, "study.json", "{"), "study.json: broken JSON, line 1"),
        (lambda folder: broken(folder, "study.json", "[]"), "must describe a study"),
        (lambda folder: broken(folder, "study.json", "{}"), "'configs' must list"),
        (
            lambda folder: broken(folder, "study.json", '{"configs": [{"name": "a"}]}'),
            "'seeds' must list",
        ),
        (
            lambda folder: broken(folder, "study.json", listing("../a")),
            "'../a' must be the name of a folder",
        ),
        (lambda folder: broken(folder, "study.json", listing("a", "a")), "must be distinct"),
        (lambda folder: broken(folder, "study.json", listing("b")), "none of the 1 runs"),
        (
            lambda folder: broken(folder, "runs/g1/42/summary.json", "{"),
            "summary.json: broken JSON",
        ),
        (lambda folder: broken(folder, "runs/g1/42/summary.json", "[]"), "must be a mapping"),
        (
            lambda folder: broken(folder, "runs/g1/42/eval.jsonl", "{}\n{"),
            "eval.jsonl: broken JSON, line 2",
        ),
        (
            lambda folder: broken(folder, "runs/g1/42/metrics.jsonl", "3"),
            "line 1 must be a mapping",
        ),
    ],
)
def test_what_is_no_study_is_refused_in_one_line(make, message, tmp_path):
    folder = make(tmp_path)
    with pytest.raises(ResultsError) as refused:
        read_results(folder)
    assert message in str(refused.value)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"format": "hf-depthroute study 1", "study": {}, "runs": []}']
)
def test_broken_results_json_is_refused(text, tmp_path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ResultsError, match=r"results\.json"):
        read_results(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ResultsError, match=r"no study\.json"):
        read_results(tmp_path)


def test_times_that_differ_for_equal_work_are_told(tmp_path):
    plan = {"g1": {"train_seconds": 100.0}, "g3": {"train_seconds": [130.0, 120.0, 140.0]}}
    study = read_results(write_study(tmp_path / "noisy", plan))
    assert "took 100 to 130 s on average" in render_markdown(study, [], [], [])
    plan["g3"]["cost/training_ffn_ratio"] = 1.5
    assert uneven_times(read_results(write_study(tmp_path / "fine", plan))) is None


# Tables


def test_tables_hold_mean_and_standard_error_over_seeds(tmp_path):
    plan = {
        "g1": {
            "endpoint": [3.0, 3.1, 3.2],
            "grad_norm_mean": [80.0, 90.0, 82.0],
            "hits/3.2": [10, 15, None],
        },
        "g3": {"endpoint": [3.0, 3.0, 3.0], "best": [2.9, 2.9, 2.96], "hits/3.2": [5, 5, 5]},
    }
    g1, g3 = table(read_results(write_study(tmp_path, plan)), "table-1")
    assert g1["endpoint"] == "3.1000 ± 0.0577" and g1["seeds"] == "3"
    assert g1["grad norm"] == "84.0 ± 3.1"  # sqrt((16 + 36 + 4) / 2 / 3) = 3.06
    assert g1["hit 3.2"] == "12 ± 2 (2 of 3)"  # 12.5 and 2.5
    assert g1["hit 3.1"] == "never"
    assert g3["best"] == "2.9200 ± 0.0200"
    assert g3["hit 3.2"] == "5" and g3["endpoint"] == "3.0000"  # all seeds the same


def test_differences_are_paired_by_seed(tmp_path):
    plan = {
        "a3_g1": {"endpoint": [3.0, 3.1, 3.2]},
        "cgs": {"endpoint": [2.9, 3.1, 3.3]},
        "iso_cgs": {"endpoint": 3.0},
    }
    base, cgs, iso = table(
        read_results(write_study(tmp_path, plan, missing=[("iso_cgs", 7)])), "cgs"
    )
    assert base["endpoint diff."] == "-"
    assert cgs["endpoint diff."] == "+0.0000 ± 0.0577"
    assert iso["endpoint diff."] == "-0.0500 ± 0.0500" and iso["seeds"] == "2"


def test_layers_are_averaged_in_tables_and_apart_in_the_auc_table(tmp_path):
    folder = write_study(tmp_path, {"g3": {}, "a1": {"layers/q_distance": 0.004}}, seeds=[1])
    path = folder / "runs/a1/1/summary.json"
    summary = json.loads(path.read_text())
    summary["layers"]["4"] |= {"q_distance": 0.006, "oracle_auc": 0.65}
    path.write_text(json.dumps(summary))
    study = read_results(folder)
    assert table(study, "table-2")[1]["q distance"] == "0.00500"
    auc = table(study, "oracle-auc")[1]
    assert (auc["on-policy, layer 3"], auc["on-policy, layer 4"], auc["on-policy, mean"]) == (
        "0.550",
        "0.650",
        "0.600",
    )


def test_a_study_of_ones_own_gets_the_general_tables_only(tmp_path):
    folder = write_study(tmp_path / "in", {"mine": {"about": "my idea"}, "other": {}})
    study, verdicts = write_report(folder, tmp_path / "out")
    assert [t.key for t in build_tables(study)] == [
        "oracle-auc",
        "cost",
        "fork-bias",
        "all-loss",
        "all-gates",
    ]
    assert table(study, "all-loss")[0]["about"] == "my idea"
    assert verdicts == [] and len(untested(study)) == len(CLAIMS) + len(QUESTIONS)
    for page in ("report.html", "report.md"):
        text = (tmp_path / "out" / page).read_text()
        assert text.index("All runs: loss") < text.index(
            "learning.png" if page == "report.md" else "Figures</h2>"
        )
        assert not any(
            word in text
            for word in ("Verdicts", "Not tested", "verdicts come about", CLAIMS[0].statement)
        )
    assert (tmp_path / "out" / "learning.png").is_file()


def test_a_study_with_bare_summaries_is_still_reported(tmp_path):
    folder = write_study(tmp_path / "in", {"g1": {}, "g3": {}}, thresholds=[])
    for path in folder.glob("runs/*/*/*"):
        path.unlink() if path.suffix == ".jsonl" else path.write_text('{"endpoint": 3.0}')
    study, verdicts = write_report(folder, tmp_path / "out")
    assert [t.key for t in build_tables(study)] == ["table-1", "cost", "all-loss", "all-gates"]
    assert {v.key for v in verdicts if v.reason.startswith(AGREES)} == {"g3-endpoint"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(83.33, "83.3"), (0.5123, "0.512"), (1234.5, "1,234"), (1.2e-5, "1.2e-05"), (0.0, "0")],
)
def test_significant_digits(value, text):
    assert significant(value) == text


def test_one_value_has_no_deviation():
    assert spread([2.0], significant) == "2.00" and spread([], significant) == "-"


def test_thresholds_are_found_as_written(tmp_path):
    folder = write_study(tmp_path, {"g1": {}}, seeds=[1], thresholds=[3.2])
    path = folder / "runs/g1/1/summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hits": {"3.20": 15}}))
    assert hits(read_results(folder), "g1", 3.2) == {1: 15}


def test_the_reports_configs_are_those_of_the_recipe():
    recipe = {path.stem for path in (ROOT / "recipes/aux_losses/configs").glob("*.yaml")}
    tabulated = {
        name for layout in LAYOUTS for name in (*layout.configs, *layout.needs, *layout.baseline)
    }
    assert set(CONFIGS) | tabulated <= recipe


# Verdicts


def pair(a, b, metric, left, right):
    return {a: {metric: left}, b: {metric: right}}


EARLY = "avg_first_half"
THREE = [3.3, 3.31, 3.32]
HITS = ("hits/3.2", "hits/3.1")


def early(*differences):
    return pair("g3", "g1", EARLY, [x + d for x, d in zip(THREE, differences)], THREE)


def endpoint(*differences):
    return pair("g3", "g1", "endpoint", [x + d for x, d in zip(THREE, differences)], THREE)


def collapse(distance, variance=0.1, cosine=1.0):
    return {
        "g3": {"layers/q_distance": 0.8, "layers/score_var": 0.1, "layers/q_cosine": 0.995},
        "a1": {
            "layers/q_distance": distance,
            "layers/score_var": variance,
            "layers/q_cosine": cosine,
        },
    }


def reached(g3, g1):
    """First steps under the two thresholds, per seed."""
    return {
        name: {key: [steps[i] for steps in per_seed] for i, key in enumerate(HITS)}
        for name, per_seed in (("g3", g3), ("g1", g1))
    }


def probabilities(near, far):
    return pair("a3_g3", "a3_g1", "layers/gate_prob", near, far)


def aucs(cgs):
    return pair("cgs", "a3_g1", "layers/oracle_auc", cgs, 0.55)


def sweep(g3, small, medium, large):
    losses = {"a3_g3": 3.0, "g3": g3, "util_010": small, "util_025": medium, "util_050": large}
    return {name: {"avg_whole": value} for name, value in losses.items()}


def budgets(*differences):
    pairs = (("g3_b10", "g1_b10"), ("g3_b25", "g1_b25"), ("g3", "g1"), ("g3_b75", "g1_b75"))
    return {
        name: {EARLY: 3.3 + (d if name.startswith("g3") else 0.0)}
        for d, names in zip(differences, pairs)
        for name in names
    }


STEADY, SMALL, ANY = (-0.0101, -0.01, -0.0099), (-0.0004, 0.0004, 0.0), (-0.01, 0.02, -0.03)


def shifted(value, differences, sign=1):
    return [value + sign * difference for difference in differences]


CASES = [
    # Lower loss: the whole interval is.
    ("g3-early", early(*STEADY), AGREES),
    ("g3-early", early(*(-d for d in STEADY)), DISAGREES),
    ("g3-early", early(*ANY), OPEN),
    ("g3-early", early(-0.01, -0.03, -0.02), OPEN),  # all seeds agree, but not closely
    ("a1-loss", pair("g3", "a1", "best", 3.0, 3.01), AGREES),
    ("a1-loss", pair("g3", "a1", "best", 3.01, 3.0), DISAGREES),
    ("a1-loss", pair("g3", "a1", "best", 3.0, shifted(3.0, ANY)), OPEN),
    # Equal loss: the whole interval within the margin of 0.005, which belongs to it.
    ("g3-endpoint", endpoint(*SMALL), AGREES),
    ("g3-endpoint", endpoint(0.005, 0.005, 0.005), AGREES),
    ("g3-endpoint", endpoint(*STEADY), DISAGREES),
    ("g3-endpoint", endpoint(*(-d for d in STEADY)), DISAGREES),
    ("g3-endpoint", endpoint(-0.004, 0.004, 0.0), OPEN),
    ("a4-flat", {"g3": {"best": 3.0}, "a4_025": {"best": 3.004}, "a4_200": {"best": 2.996}}, AGREES),
    ("a4-flat", {"g3": {"best": 3.0}, "a4_025": {"best": 3.004}, "a4_200": {"best": 2.99}}, DISAGREES),
    ("a4-flat", {"g3": {"best": 3.0}, "a4_025": {"best": 3.0}, "a4_200": {"best": [2.99, 3.0, 3.01]}}, OPEN),
    # Not worse: only a higher loss speaks against it.
    ("cgs-compute", pair("iso_cgs", "cgs", "endpoint", [2.9, 2.901, 2.899], 3.0), AGREES),
    ("cgs-compute", pair("iso_cgs", "cgs", "endpoint", [3.01, 3.0101, 3.0099], 3.0) | {"a3_g1": {}}, DISAGREES),
    ("cgs-compute", pair("iso_cgs", "cgs", "endpoint", [2.9, 3.01, 3.0], 3.0), OPEN),
    # Ratios.
    ("g3-gradient", pair("g1", "g3", "grad_norm_mean", [40.0, 41.0, 42.0], 10.0), AGREES),
    ("g3-gradient", pair("g1", "g3", "grad_norm_mean", [8.0, 8.1, 8.2], 10.0), DISAGREES),
    ("g3-gradient", pair("g1", "g3", "grad_norm_mean", [29.0, 400.0, 500.0], 10.0), OPEN),
    ("a1-collapse", collapse([0.005, 0.004, 0.0045]), AGREES),
    ("a1-collapse", collapse(0.9), DISAGREES),
    ("a1-collapse", collapse([0.2, 0.004, 0.0]), OPEN),
    ("a1-scores", collapse(0.8, variance=[1.1e-5, 1e-5, 1.2e-5]), AGREES),
    ("a1-scores", collapse(0.8, variance=0.2), DISAGREES),
    ("a1-scores", collapse(0.8, variance=0.002), OPEN),
    ("a2-collapse", pair("g3", "a2", "layers/q_distance", 0.8, [0.6, 0.55, 0.5]), AGREES),
    ("a2-collapse", pair("g3", "a2", "layers/q_distance", 0.8, 0.01), DISAGREES),
    ("a2-collapse", pair("g3", "a2", "layers/q_distance", 0.8, [0.9, 0.01, 0.5]), OPEN),
    ("cosine-blind", collapse(0.005, cosine=1.002), AGREES),
    ("cosine-blind", collapse(0.005, cosine=0.5), DISAGREES),
    ("cosine-blind", collapse(0.005, cosine=0.95), OPEN),
    ("cosine-blind", collapse(0.7, cosine=0.995), OPEN),  # no collapse to show
    ("cost-clock", pair("a3_g3", "g3", "train_seconds", [60.0, 61.0, 59.0], 100.0), AGREES),
    ("cost-clock", pair("a3_g3", "g3", "train_seconds", [109.0, 110.0, 109.0], 100.0), DISAGREES),
    ("cost-clock", pair("a3_g3", "g3", "train_seconds", [60.0, 85.0, 79.0], 100.0), OPEN),
    # Thresholds: never counts as the end, and says nothing where both never got there.
    ("g3-hits", reached([(5, 10), (5, 10), (5, 10)], [(15, None), (15, None), (15, None)]), AGREES),
    ("g3-hits", reached([(15, None), (15, None), (15, None)], [(5, 10), (5, 10), (5, 10)]), DISAGREES),
    # One evaluation.
    ("g3-hits", reached([(5, 15), (5, 15), (5, 15)], [(10, None), (10, None), (10, None)]), OPEN),
    ("g3-hits", reached([(5, 15), (5, 15), (5, 15)], [(10, 10), (5, 10), (5, 20)]), OPEN),
    ("g3-hits", reached([(5, 15), (5, 15), (5, 15)], [(5, 15), (5, 15), (5, 15)]), OPEN),
    ("g3-hits", reached([(None, None)] * 3, [(None, None)] * 3), OPEN),
    # An advantage can only go where there was one.
    ("a3-equal-early", early(-0.01, -0.01, -0.01) | pair("a3_g1", "a3_g3", "avg_first_half", 5.0, 5.0), AGREES),
    ("a3-equal-early", early(-0.01, -0.01, -0.01) | pair("a3_g1", "a3_g3", "avg_first_half", 5.1, 5.0), DISAGREES),
    ("a3-equal-early", early(0.01, 0.01, 0.01) | pair("a3_g1", "a3_g3", "avg_first_half", 5.0, 5.0), OPEN),
    # Gate probability.
    ("a3-probability", probabilities([0.5, 0.501, 0.499], [0.61, 0.6, 0.59]), AGREES),
    ("a3-probability", probabilities([0.61, 0.6, 0.59], [0.5, 0.501, 0.499]), DISAGREES),
    ("a3-probability", probabilities([0.5, 0.501, 0.499], [0.6, 0.5, 0.3]), OPEN),
    # AUC.
    ("cgs-auc", aucs([0.53, 0.529, 0.531]), AGREES),
    ("cgs-auc", aucs([0.57, 0.571, 0.569]), DISAGREES),
    ("cgs-auc", aucs([0.542, 0.56, 0.53]), OPEN),
    # Open questions have their own words.
    ("h3", sweep(3.02, 3.002, 3.01, 3.01), AGREES),
    ("h3", sweep(3.02, 3.01, 3.02, 3.03), DISAGREES),
    ("h3", sweep(3.02, [2.9, 3.1, 3.0], 3.01, 3.01), OPEN),
    ("h3", sweep([3.001, 2.9, 3.1], 3.0, 3.0, 3.0), OPEN),  # no harm to explain
    ("budget-early", budgets(-0.01, -0.02, -0.01, -0.03), AGREES),
    ("budget-early", budgets(-0.01, 0.02, -0.01, -0.03), DISAGREES),
    ("budget-early", budgets(-0.01, 0.0, -0.01, -0.03), OPEN),
]  # fmt: skip


@pytest.mark.parametrize(("key", "plan", "word"), CASES)
def test_verdicts_follow_their_rules(key, plan, word, tmp_path):
    state, sentence = verdict(tmp_path, key, plan)
    # A gate of depth is another regime than a memory's: the sentence has what shows here.
    if key.startswith("cgs"):
        assert state == OPEN and (
            word == OPEN or f"{word.capitalize()} here, in another regime" in sentence
        )
    else:
        assert state == word


def test_every_rule_is_tried_in_every_direction():
    words = {}
    for key, _, word in CASES:
        words.setdefault(key, set()).add(word)
    assert all(len(found) == 3 for found in words.values())


def test_a_sentence_holds_the_mean_its_interval_and_the_papers_number(tmp_path):
    _, sentence = verdict(tmp_path, "g3-early", early(-0.01, -0.03, -0.02))
    # Four statements compare G1 and G3: t(2) at 1 - 0.05 / 4 / 2 is 8.86; 8.86 * 0.01 / sqrt(3) =
    # 0.0512.
    assert sentence == (
        "Average loss of the first half, G3 minus G1: -0.0200 (-0.0712 to +0.0312; alone -0.0448 "
        "to +0.0048), 3 seeds. Paper: -0.0067. Neither interval decides."
    )


def test_more_statements_make_wider_intervals(tmp_path):
    few = verdict(tmp_path / "few", "g3-early", early(-0.01, -0.011, -0.009))
    many = verdict(
        tmp_path / "many", "g3-early", {name: {} for name in CONFIGS} | early(-0.01, -0.011, -0.009)
    )
    assert few[0] == AGREES and many[0] == OPEN and few[1] != many[1]


def test_in_another_regime_neither_the_opposite_nor_agreement_is_decided(tmp_path):
    faster = pair("a3_g3", "g3", "train_seconds", [60.0, 61.0, 59.0], 100.0)
    for claimed, differences in ((DISAGREES, [-d for d in STEADY]), (AGREES, STEADY)):
        plan = early(*differences) | faster
        plan["g3"] |= early(*differences)["g3"]
        found = {}
        for free in (0, 1):
            study = read_results(write_study(tmp_path / f"{claimed} {free}", plan, **dense(free)))
            found[free] = {v.key: v for v in judge(study)}
        assert found[1]["g3-early"].state == claimed
        assert found[0]["g3-early"].state == OPEN
        assert (
            f"{claimed} here, in another regime: skipping costs 0.10 nats"
            in found[0]["g3-early"].reason
        )
        # Time is time in any regime.
        assert found[0]["cost-clock"].state == found[1]["cost-clock"].state == AGREES


def test_supervision_of_a_gate_of_depth_decides_nothing_about_that_of_a_memory(tmp_path):
    state, sentence = verdict(tmp_path, "cgs-auc", aucs([0.53, 0.529, 0.531]))
    assert state == OPEN and "Agrees here, in another regime: a gate of depth" in sentence


def dense(free):
    """A base that G1, whose endpoint is 3.0, is close to, or not."""
    return {
        "base": {
            "name": "tiny",
            "parameters": 1000,
            "layers": 6,
            "width": 64,
            "dense_loss": 2.99 if free else 2.9,
        }
    }


def test_a_never_reached_threshold_counts_as_the_end(tmp_path):
    _, sentence = verdict(tmp_path, "g3-hits", reached([(5, None)] * 3, [(20, None)] * 3))
    assert "G3 over G1: 0.25 (0.25 to 0.25), 3 seeds" in sentence
    _, sentence = verdict(tmp_path / "one", "g3-hits", reached([(5, 10)] * 3, [(5, None)] * 3))
    assert "G3 over G1: 0.71 (0.71 to 0.71), 3 seeds" in sentence  # sqrt(10 / 20)
    _, sentence = verdict(
        tmp_path / "none", "g3-hits", reached([(None, None)] * 3, [(None, None)] * 3)
    )
    assert "no threshold was reached" in sentence


def test_the_margin_is_that_of_the_study(tmp_path):
    assert (
        verdict(tmp_path / "a", "g3-endpoint", endpoint(0.003, 0.003, 0.003), margin=0.004)[0]
        == AGREES
    )
    assert (
        verdict(tmp_path / "b", "g3-endpoint", endpoint(0.003, 0.003, 0.003), margin=0.002)[0]
        == DISAGREES
    )


@pytest.mark.parametrize("seeds", [[42], [42, 123]])
def test_fewer_than_three_seeds_are_never_enough(seeds, tmp_path):
    plan = {name: {} for name in CONFIGS}
    study = read_results(write_study(tmp_path, plan, seeds=seeds))
    assert len(judge(study)) == len(CLAIMS) + len(QUESTIONS)
    assert {v.state for v in judge(study)} == {OPEN}


@pytest.mark.parametrize("missing", [[], [("g3", 42)], [("g3", 42), ("g1", 123)]])
def test_seeds_that_are_not_common_do_not_count(missing, tmp_path):
    word, sentence = verdict(
        tmp_path, "g3-early", early(-0.1, -0.1), seeds=[42, 123], missing=missing
    )
    told = ("only 2 common seeds", "only 1 common seed", "no common seed")[len(missing)]
    assert word == OPEN and told in sentence


def test_only_seeds_of_both_runs_are_compared(tmp_path):
    seeds, plan = [42, 123, 7, 11], {"g3": {EARLY: [3.29, 9.0, 3.29, 3.29]}, "g1": {EARLY: 3.3}}
    word, sentence = verdict(tmp_path, "g3-early", plan, seeds=seeds, missing=[("g3", 123)])
    assert word == AGREES and "3 seeds" in sentence


# The page


class Page(HTMLParser):
    """Every tag is closed in order; collects ids, links, resources, headings and images."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.resources, self.alts = (
            [],
            [],
            [],
            [],
            [],
            [],
        )
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "a":
            self.links.append(found["href"])
        self.resources += [
            found[key] for key in ("src", "srcset", "data", "action") if key in found
        ]
        if tag == "img":
            self.alts.append(found.get("alt"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(full):
    return Page((full / "report.html").read_text())


def test_the_page_is_well_formed(page):
    assert page.open == []
    assert page.tags.count("h1") == 1 and "main" in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    headings = [int(tag[1]) for tag in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert all(later - sooner <= 1 for sooner, later in itertools.pairwise(headings))


def test_the_page_needs_nothing_from_elsewhere(page, full):
    text = (full / "report.html").read_text()
    assert page.resources and all(
        source.startswith("data:image/png;base64,") for source in page.resources
    )
    assert "script" not in page.tags and "link" not in page.tags
    for far in ("http://", "https://", "url(", "@import", "src='"):
        assert far not in text


def test_every_figure_is_drawn_linked_and_described(page, full):
    pictures = sorted(path.name for path in full.glob("*.png"))
    assert pictures == sorted(
        f"{key}.png"
        for key in (
            "cost",
            "gate_probability",
            "gradients",
            "learning",
            "oracle_auc",
            "policies",
            "util_sweep",
        )
    )
    markdown = (full / "report.md").read_text()
    assert all(f"]({name})" in markdown for name in pictures)
    assert len(page.alts) == len(pictures) and all(page.alts)


def test_a_hostile_label_stays_text(full):
    html, markdown = (full / "report.html").read_text(), (full / "report.md").read_text()
    assert "<script>" not in html and "&lt;script&gt;alert(&#34;1&#34;)" in html
    assert "<script>" not in markdown and "\\[a\\](javascript:b)" in markdown


def test_markdown_tables_are_rectangular(full):
    lines = (full / "report.md").read_text().splitlines()
    for above, below in itertools.pairwise(lines):
        if above.startswith("| ") and below.startswith("| "):
            assert above.replace("\\|", "").count("|") == below.replace("\\|", "").count("|")


def test_a_missing_run_is_named(full):
    for name in ("report.html", "report.md"):
        text = (full / name).read_text()
        assert "1 run is missing" in text
        assert "Missing seeds: a2: 7 (at step 10)." in text


def test_both_files_hold_the_same_verdicts_and_numbers(full):
    html, markdown = (full / "report.html").read_text(), (full / "report.md").read_text()
    study = read_results(full)
    for found in judge(study):
        assert f'id="claim-{found.key}"' in html
    assert (
        html.count('class="badge')
        == len(judge(study))
        == sum(markdown.count(f"\n* {symbol}") for symbol in "✓✗≠○")
    )
    for built in build_tables(study):
        assert f'id="{built.key}"' in html and built.title in markdown


# The command


def run(*arguments):
    """The exit code of the command `report`."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    return ended.value.code or 0


def test_the_recipe_writes_the_report_next_to_the_results(tmp_path, capsys, monkeypatch):
    folder = write_study(
        tmp_path,
        {"g3": {EARLY: 3.29}, "g1": {EARLY: 3.3}},
        seeds=[42, 123, 7, 11],
        missing=[("g1", 11)],
    )
    script = ROOT / "recipes/aux_losses/report.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr("sys.argv", [str(script), str(folder)])
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert (
        " open " in out and "1 run is missing" in out and str(folder / "report/report.html") in out
    )
    assert {"report.html", "report.md", "results.json"} <= {
        path.name for path in (folder / "report").iterdir()
    }


def test_the_command_writes_one_table_next_to_the_results(tmp_path, capsys):
    plan = {"g1": {"endpoint": [3.0, 3.1, 3.2], "label": HOSTILE}, "g3": {"endpoint": 2.0}}
    folder = write_study(tmp_path, plan, missing=[("g3", 7)])
    run(folder)
    out = capsys.readouterr().out
    assert (
        "1 run is missing" in out
        and "agrees" not in out
        and str(folder / "report/report.md") in out
    )
    written = folder / "report"
    assert {path.name for path in written.iterdir()} == {"report.md", "results.csv", "results.json"}
    # 0.1 / sqrt(3).
    row = "| 3 | 20 | 20,480 | 3.1000 ± 0.0577 | 3.2000 | 3.1000 | 3.1000 ± 0.0577 |"
    markdown = (written / "report.md").read_text()
    assert (
        row in markdown
        and "<script>" not in markdown
        and "Missing seeds: g3: 7 (at step 10)." in markdown
    )


def test_the_table_has_every_measured_number(tmp_path):
    plan = {
        "g1": {"cost/training_ffn_ratio": [1.0, 2.0, 3.0], "hits/3.2": [5, None, None]},
        "g3": {},
    }
    plan["g3"]["training"] = {"gradient_accumulation_steps": 4}
    frame = summarize(read_results(write_study(tmp_path, plan)))
    assert list(frame.index) == ["g1", "g3"] and list(frame["tokens"]) == [20_480, 4 * 20_480]
    assert (
        frame.loc["g1", "cost/training_ffn_ratio"] == 2
        and frame.loc["g1", "cost/training_ffn_ratio std"] == 1
    )
    assert frame.loc["g1", "cost/training_ffn_ratio se"] == pytest.approx(3**-0.5)
    assert frame.loc["g1", "hits/3.2"] == 5 and frame.loc["g1", "layers/3/oracle_auc"] == 0.55


def test_the_tables_results_give_the_same_table_again(tmp_path):
    write_study_report(
        write_study(tmp_path / "in", {"g1": {"endpoint": [1 / 3, 2 / 3, 1.0]}}), tmp_path / "first"
    )
    write_study_report(tmp_path / "first", tmp_path / "again")
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_the_table_of_bare_summaries_has_what_they_have(tmp_path):
    folder = write_study(tmp_path / "in", {"g1": {}, "g3": {}}, thresholds=[])
    for path in folder.glob("runs/*/*/summary.json"):
        path.write_text('{"endpoint": 3.0}')
    study = read_results(folder)
    assert list(loss_table(study, summarize(study))) == ["config", "seeds", "endpoint"]


def test_the_command_prints_the_losses_of_a_study_of_ones_own_and_no_claim(tmp_path, capsys):
    folder = write_study(
        tmp_path, {"mine": {"endpoint": [3.0, 3.1, 3.2]}, "other": {"endpoint": 2.5}}
    )
    run(folder)
    out = capsys.readouterr().out
    assert "3.1000 ± 0.0577" in out and "2.5000" in out and "endpoint" in out and "seeds" in out
    assert "claim" not in out and "verdict" not in out


@pytest.mark.parametrize("arguments", [("absent",), ("file",), ("results", "--out", "file")])
def test_the_command_refuses_in_one_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    write_study(Path("results"), {"g1": {}})
    assert run(*arguments) == errors.USAGE
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ") and arguments[-1] in message


def test_a_refused_study_leaves_no_folder(tmp_path):
    (tmp_path / "results.json").write_text("{")
    assert run(tmp_path, "--out", tmp_path / "out") == errors.USAGE
    assert not (tmp_path / "out").exists()


# Intervals


def test_an_interval_is_students_and_wider_for_more_statements():
    found = interval([1.0, 2.0, 3.0])
    # 4.303 / sqrt(3).
    assert (found.mean, round(found.low, 3), round(found.high, 3)) == (2.0, -0.484, 4.484)
    assert interval([1.0, 2.0, 3.0], 5).high == pytest.approx(2 + 9.925 / 3**0.5, abs=1e-3)
    assert found.tell("{:.1f}".format) == "2.0 (-0.5 to 4.5), 3 seeds"


@pytest.mark.parametrize(
    ("numbers", "expected", "word"),
    [
        ((-1.0, -1.1, -0.9), "lower", AGREES),
        ((-1.0, -1.1, -0.9), "higher", DISAGREES),
        ((-1.0, -1.1, 0.9), "lower", OPEN),
        ((0.01, 0.0, -0.01), "equal", AGREES),
        ((-1.0, -1.1, -0.9), "equal", DISAGREES),
        ((0.5, 0.0, -0.5), "equal", OPEN),
        ((0.05, 0.11, 0.08), "equal", OPEN),  # above zero, but not outside the margin
        ((0.05, 0.11, 0.08), "not higher", OPEN),
        ((-9.0, -9.1, -8.9), "not higher", AGREES),
        ((1.0, 1.1, 0.9), "not higher", DISAGREES),
        ((-9.0, 9.0, 0.0), "not higher", OPEN),
        ((-1.0, -1.0), "lower", OPEN),  # of two seeds
    ],
)
def test_an_interval_answers_what_was_stated(numbers, expected, word):
    assert answer(interval(numbers), expected, margin=0.1) == word


def test_a_row_shows_both_intervals_and_says_where_the_seeds_cannot_decide():
    """Every seed falls, and the interval of all rows together holds zero:
    the balance loss of experts, three seeds."""
    falls = [-1.2, -0.8, -1.0]
    together, alone = (
        judge_one("evens the load", "", falls, "lower", statements) for statements in (10, 1)
    )
    assert (together.state, alone.state) == (OPEN, AGREES) and alone.reason == ""
    assert together.reason == "agrees alone; cannot decide with 3 seeds and 10 statements"
    assert "; alone -1.4968 to -0.5032)" in together.here and "alone" not in alone.here
    assert judge_one("", "", falls[:2], "lower", 1).reason == "cannot decide with 2 seeds"
    assert judge_one("", "", [-1.0, 1.0, 0.0], "lower", 1).reason == "neither interval decides"


def test_one_rule_sets_both_directions_against_a_paper():
    for state in (AGREES, DISAGREES):
        assert set_against(state, "", "smaller") == (
            OPEN,
            f"{state} here, in another regime: smaller",
        )
        assert set_against(state, "", "") == (state, "")
    assert set_against(OPEN, "cannot decide with 2 seeds", "smaller") == (
        OPEN,
        "cannot decide with 2 seeds",
    )


def test_a_claim_has_one_of_four_states():
    assert STATES == (AGREES, DISAGREES, OPEN, NOT_RUN)
    with pytest.raises(
        ValueError,
        match="'reproduced' of the claim 'a' must be one of agrees, disagrees, open, not run",
    ):
        Judged("a", "", "", "reproduced")
    assert tell_states([AGREES, AGREES, DISAGREES, OPEN]) == "2 agree, 1 disagrees, 1 open"

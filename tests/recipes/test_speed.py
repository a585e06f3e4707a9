"""`recipes/speed`: suites of models with random weights, LoRA beside routers,
and the pictures of a result."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import build_base, build_routed, decoder_layers, tokens
from places import ROOT
from speed import bench as program
from speed import gpu_all, roofline
from speed.lora import loading_rows, measure_training, training_rows
from speed.memory import memory_rows, peak_bytes
from speed.result_plots import plot_result
from speed.roofline import Peaks, count_work, roofline_rows
from speed.shapes import SHAPES, random_model
from speed.suites import SuiteCase, read_suite, run_suite
from speed.variants import SpeedVariants

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.bench import dense_view
from hf_depthroute.bench.measurements import TIMED, compare_results, measurements, read_result
from hf_depthroute.bench.result_tables import comparison_table, tables
from hf_depthroute.cli import main
from hf_depthroute.evaluation.flops import count_flops
from hf_depthroute.inference.calibration import active_routings

RECIPE = ROOT / "recipes" / "speed"
PEAKS = Peaks(bytes_per_s=1e10, flops_per_s=1e11)
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)


@pytest.fixture(autouse=True)
def small_peaks(monkeypatch):
    """The machine's peaks from small arrays; they are only bookkeeping here."""
    monkeypatch.setattr(roofline, "_BUFFER_BYTES", {"cpu": 1 << 18})
    monkeypatch.setattr(roofline, "_MATMUL_SIZE", {"cpu": 32})


def test_a_shape_can_be_cut_in_depth_and_vocabulary(tiny):
    model = random_model("tiny", torch.float32, depth=2, vocabulary=10)
    assert len(model.model.layers) == 2 and model.lm_head.out_features == 10
    for wrong in ({"depth": 4}, {"depth": 0}, {"vocabulary": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            random_model("tiny", **wrong)


def test_an_unknown_shape_lists_the_known_ones():
    with pytest.raises(ValueError, match=", ".join(SHAPES)):
        random_model("gpt-5")


SUITE = """
name: small
shape: tiny
dtype: float32
layers: last:1
budgets: [0.5]
rounds: 4
masked: true
cases:
  - {case: prefill, batch: [1, 2], length: [4, 8, 16]}
  - {case: decode, batch: 2, length: 8, steps: 2, target: attention, tune: true}
  - {case: train, batch: 1, length: 8, loss: [naive, fused]}
  - {case: load, rounds: 1}
  - {case: memory, batch: 2, length: 8}
"""


@pytest.fixture
def suite_file(tmp_path, tiny):
    path = tmp_path / "small.yaml"
    path.write_text(SUITE)
    return path


def test_lists_of_sizes_are_combined_and_overrides_win(suite_file):
    name, cases = read_suite(suite_file, rounds=2, depth=2, dtype=None)
    assert name == "small" and len(cases) == 6 + 1 + 2 + 1 + 1
    assert {(case.batch, case.length) for case in cases[:6]} == {
        (b, n) for b in (1, 2) for n in (4, 8, 16)
    }
    assert all(case.rounds == 2 and case.depth == 2 and case.dtype == "float32" for case in cases)
    assert len({case.describe() for case in cases}) == len(cases)


def test_a_depth_from_outside_keeps_the_share_of_routed_layers(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "shape: qwen2.5-0.5b\ncases:\n - {case: load, layers: 'last:12'}\n - {case: load, layers: "
        "all}\n"
    )
    _, cases = read_suite(path, depth=6)
    assert [case.layers for case in cases] == ["last:3", "all"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("- {case: prefil}", "case 1: case='prefil'"),
        ("- {case: prefill, lenght: 3}", "case 1: unknown key 'lenght'"),
        (
            "- {case: prefill}\n  - {case: decode, batch: 0}",
            "case 2: batch=0 must be a whole number",
        ),
        ("- {case: decode, steps: [1]}", r"case 1: steps=\[1\] must be a whole number"),
        ("- {case: prefill, budgets: [1.5]}", "case 1: budget=1.5"),
        ("- {case: prefill, budgets: [1.0]}", "budget 1 is always measured"),
        ("- {case: prefill, layers: 'last:9'}", "the model has only 3"),
        ("- {case: prefill, baselines: [fast]}", "baseline fast: use some of: eager"),
        ("- {case: prefill, shape: gpt-5}", "shape='gpt-5': use one of"),
        ("- {case: prefill, target: feet}", "target='feet'"),
        ("- {case: prefill, masked: 1}", "masked=1 must be true or false"),
        ("- prefill", "cases must be a list of mappings"),
    ],
)
def test_a_wrong_suite_is_refused_in_one_line(tmp_path, tiny, line, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(f"shape: tiny\nlayers: last:1\ncases:\n  {line}\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_suite(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted(RECIPE.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_suites_can_be_read(path):
    _, cases = read_suite(path)
    assert len({case.describe() for case in cases}) == len(cases)


@pytest.fixture(scope="module")
def suite_result(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", TINY)
        patch.setattr(roofline, "_BUFFER_BYTES", {"cpu": 1 << 18})
        patch.setattr(roofline, "_MATMUL_SIZE", {"cpu": 32})
        path = tmp_path_factory.mktemp("suite") / "small.yaml"
        path.write_text(SUITE)
        name, cases = read_suite(path)
        said = []
        result = run_suite(cases, name, progress=said.append)
    assert said == [case.describe() for case in cases]
    return result


def test_a_suite_measures_every_case(suite_result):
    assert json.loads(json.dumps(suite_result)) == suite_result
    assert [m["case"] for m in suite_result["measurements"]] == [
        *["prefill"] * 6,
        "decode",
        *["train"] * 2,
        "load",
        "memory",
    ]
    by_case = {m["case"]: m for m in suite_result["measurements"]}
    assert by_case["decode"]["setting"]["target"] == "attention"
    assert set(by_case["decode"]["tuned"]) == set(by_case["prefill"]["masked"]) == {"0.5"}
    assert by_case["train"]["routed_trained_parameters"] > 0 < by_case["train"]["routed_peak_bytes"]
    assert by_case["load"]["routed"]["bytes"] > 0 < by_case["load"]["lora"]["load_ms"]
    assert by_case["train"]["roofline"]["gflop"] > 0 < by_case["decode"]["roofline"]["gb"]
    assert suite_result["peaks"]["float32"]["gflop_per_s"] > 0
    for measured in (m for m in suite_result["measurements"] if m["case"] == "prefill"):
        row = measured["budgets"]["0.5"]
        free = (
            (1 - row["full_ratio"])
            * (1 - measured["without_ffns"])
            / (1 - row["flops_routed_over_dense"])
        )
        assert row["eta_free"] == pytest.approx(free, rel=5e-3, abs=0.01)
        if row["eta_roofline"] is not None:  # the report is rounded
            expected = (1 - row["ratio"]) / (1 - row["roofline_routed_over_dense"])
            assert row["eta_roofline"] == pytest.approx(expected, rel=5e-3, abs=0.01)


# Roofline


@pytest.mark.parametrize(
    "family, kind",
    [
        ("llama", "mlp"),
        ("gpt2", "attention"),
        ("llama", "block"),
        ("olmoe", "mlp"),
        ("olmoe", "experts"),
    ],
)
@pytest.mark.parametrize("length, cached", [(16, 0), (1, 20)])
def test_the_roofline_counts_the_flops_that_the_package_counts(family, kind, length, cached):
    model = build_routed(family, kind)
    layers = [routing.layer_index for routing in active_routings(model)]
    shares = {index: 0.2 + 0.1 * index for index in layers}
    sizes = {"batch": 2, "length": length, "cached": cached, "logits": 1}
    assert count_work(model, **sizes).flops == pytest.approx(count_flops(model, **sizes))
    passed = {index: (share, 1.0) for index, share in shares.items()}
    assert count_work(model, **sizes, shares=passed).flops == pytest.approx(
        count_flops(model, **sizes, shares=shares)
    )


def test_a_pass_that_skips_an_ffn_does_not_read_it():
    model = build_routed("llama", layers=[0, 1, 2, 3])
    sizes = {"batch": 1, "length": 1, "cached": 10, "logits": 1}
    dense = count_work(model, **sizes)
    nothing = count_work(model, **sizes, shares=dict.fromkeys(range(4), (0.0, 0.0)))
    everything = count_work(model, **sizes, shares=dict.fromkeys(range(4), (1.0, 1.0)))
    assert nothing.bytes["ffn"] == 0 and everything.bytes["ffn"] == dense.bytes["ffn"]
    # Layers, bytes, weights, one token in and out.
    assert dense.bytes["ffn"] == 4 * 4 * (3 * 32 * 64 + 3 * (32 + 64))
    assert nothing.bytes["attention core"] == dense.bytes["attention core"]


def test_a_skipped_query_reads_no_keys_in_decode():
    model = build_routed("llama", "attention", layers=[0, 1, 2, 3])
    sizes = {"batch": 1, "length": 1, "cached": 1000, "logits": 1}
    moved = count_work(model, **sizes, shares=dict.fromkeys(range(4), (0.0, 0.0))).bytes[
        "attention core"
    ]
    # Layers, bytes, keys and values, heads, width: the new token's are written.
    assert moved == 4 * 4 * 2 * 2 * 8


def test_the_larger_of_the_two_times_binds():
    model = build_base("llama")
    decode = count_work(model, batch=1, length=1, cached=8)
    assert decode.summary(Peaks(1e3, 1e12))["bound"] == "bandwidth"
    assert decode.summary(Peaks(1e12, 1e3))["bound"] == "compute"
    slow = Peaks(1e6, 1e6)
    parts = [max(decode.flops[p], decode.bytes[p]) / 1e6 for p in decode.flops]
    assert decode.seconds(slow) == pytest.approx(sum(parts))


# Variants


def test_a_mask_after_compute_router_runs_both_paths_and_chosen_executors_are_put_back():
    base = build_base("llama")
    view = dense_view(base)
    model = get_depth_routed_model(base, DepthRouteConfig(layers=[1, 2]))
    routing = active_routings(model)[0]
    routing.tuned = {("default", True, 9): "gathered"}
    variants = SpeedVariants(model, view, [0.5], tokens(4, 12), masked=True, tune=tokens(2, 8))
    assert variants.names[3:] == ["budget 0.5", "without FFNs", "masked 0.5", "tuned 0.5"]
    assert sum(variants.chosen[0.5].values()) == 2
    ids, logits, rows = tokens(3, 8), {}, {}
    for name in variants.names:
        with variants.using(name) as used, torch.no_grad():
            seen = []
            hooks = [
                layer.mlp.register_forward_hook(
                    lambda _, args, out, seen=seen: seen.append(args[0].numel() // 32)
                )
                for layer in (decoder_layers(used)[index] for index in (1, 2))
            ]
            logits[name] = used(ids).logits
            assert (routing.tuned == {("default", True, 9): "gathered"}) == (name != "tuned 0.5")
            for hook in hooks:
                hook.remove()
            rows[name] = sum(seen)
    assert torch.allclose(logits["masked 0.5"], logits["budget 0.5"], atol=1e-5)
    assert rows["masked 0.5"] == rows["base"] == 2 * ids.numel() > rows["budget 0.5"]
    variants.restore()
    assert (
        routing.tuned == {("default", True, 9): "gathered"}
        and routing.active_config().budget == 0.5
    )


def test_memory_says_what_the_cache_and_the_run_hold(suite_result):
    rows = next(m for m in suite_result["measurements"] if m["case"] == "memory")["variants"]
    # Sequences, tokens, layers, keys and values, heads, width, bytes.
    cached = 2 * 8 * 3 * 2 * 2 * 8 * 4
    for row in rows.values():
        assert row["kv_bytes"] == cached
        assert row["prefill_bytes"] > cached and row["decode_bytes"] > 0
    assert rows["masked 0.5"]["prefill_bytes"] >= rows["budget 0.5"]["prefill_bytes"]


def test_peak_memory_is_the_most_at_one_time():
    def run():
        first = torch.zeros(1 << 20)  # 4 MB
        second = first + 1
        del first
        return second * 2

    assert peak_bytes(run, torch.device("cpu")) == pytest.approx(8 << 20, abs=1 << 12)


def test_without_its_ffns_the_base_runs_none_and_has_them_back_afterwards():
    plain = build_base("llama")
    base = dense_view(plain)
    model = get_depth_routed_model(plain, DepthRouteConfig(layers=[1, 2]))
    variants, ids = SpeedVariants(model, base, [0.5], tokens(4, 12)), tokens(2, 8)
    routed = {routing.layer_index for routing in active_routings(model)}
    ran: list[int] = []
    for index, layer in enumerate(decoder_layers(base)):
        layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
    with torch.no_grad():
        before = base(ids).logits
        ran.clear()
        with variants.using("without FFNs") as without:
            assert not torch.equal(without(ids).logits, before)
        assert ran == [index for index in range(len(decoder_layers(base))) if index not in routed]
        assert torch.equal(base(ids).logits, before)


# Suites


def test_memory_that_runs_out_ends_one_case_only(tiny, monkeypatch):
    def too_large(*args, **kwargs):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("speed.suites.measure_memory", too_large)
    fields = {
        "shape": "tiny",
        "dtype": "float32",
        "layers": "last:1",
        "batch": 1,
        "length": 8,
        "rounds": 1,
    }
    cases = [SuiteCase(case=name, **fields) for name in ("memory", "load")]
    failed, done = run_suite(cases)["measurements"]
    assert failed["error"] == "out of memory" and "ratio" in done


def test_training_leaves_the_base_as_it_was(tiny):
    base = random_model("tiny", torch.float32)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    result = measure_training(
        base, DepthRouteConfig(layers=[2]), batch=1, length=8, rounds=1, peaks=PEAKS
    )
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    # Rank, the three matrices of one FFN.
    assert result["lora_trained_parameters"] == 8 * 3 * (32 + 64)
    with pytest.raises(ValueError, match="loss 'quick' is unknown"):
        measure_training(base, DepthRouteConfig(layers=[2]), loss="quick")


def test_a_result_equals_itself(suite_result):
    for result in (suite_result, read_result(RECIPE / "cpu.json")):
        comparison = compare_results(result, result)
        assert comparison.notes == []
        assert {change.verdict for change in comparison.changes} == {"same"}
        assert len(comparison_table(comparison)) == len(comparison.changes) >= 6


def test_changes_beyond_the_noise_are_told_from_those_within(suite_result):
    new = copy.deepcopy(suite_result)
    new["machine"]["threads"] = 64
    rows = [m["budgets"]["0.5"] for m in new["measurements"] if m["case"] == "prefill"]
    rows[0]["ratio"] += 10 * rows[0]["ratio_error"]
    rows[1]["ratio"] -= 10 * rows[1]["ratio_error"]
    rows[2]["ratio"] += 0.5 * rows[2]["ratio_error"]
    rows[3] |= {"ratio": 2.0, "ratio_error": None}
    gone = new["measurements"].pop()
    comparison = compare_results(suite_result, new)
    prefill = [
        c
        for c in comparison.changes
        if c.figure == "budget 0.5 / dense" and c.label.startswith("prefill")
    ]
    assert [change.verdict for change in prefill] == [
        "higher",
        "lower",
        "same",
        "noise unknown",
        "same",
        "same",
    ]
    assert any("threads" in note for note in comparison.notes)
    assert f"only in the old result: {gone['label']}" in comparison.notes


def test_tables_hold_every_measurement(suite_result):
    others = {
        roofline_rows: TIMED,
        memory_rows: ("memory",),
        training_rows: ("train",),
        loading_rows: ("load",),
    }
    found = tables(suite_result, others)
    times, overheads, least, memory, training, loading = found
    assert len(least) == 7 * 2
    assert len(times) == 6 * 2 + 3 and len(overheads) == 7
    assert len(training) == 2 and len(loading) == 2 and len(memory) == 5
    assert all(list(row) == list(rows[0]) for rows in found for row in rows)


def test_plots_show_what_there_is(tmp_path, suite_result):
    assert {path.stem for path in plot_result(tmp_path / "a", suite_result)} == {
        "times", "eta", "roofline", "sweep", "training", "memory",
    }  # fmt: skip
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "a").iterdir())
    assert plot_result(tmp_path / "c", {"measurements": []}) == []
    recipe = read_result(RECIPE / "cpu.json")
    assert {path.stem for path in plot_result(tmp_path / "d", recipe)} == {
        "times",
        "eta",
        "roofline",
        "memory",
    }


def test_the_program_measures_a_suite_and_draws_it_and_the_command_compares(
    capsys, suite_file, tmp_path
):
    suite_file.write_text(
        "shape: tiny\nlayers: last:1\nlength: 8\nbatch: 1\ncases: [{case: prefill}, {case: load}]\n"
    )
    out, plots = tmp_path / "result.json", tmp_path / "plots"
    options = ("--rounds", 1, "--dtype", "float32", "--out", out, "--plot", plots)
    program.main([str(word) for word in (suite_file, *options)])
    printed = capsys.readouterr().out
    assert "prefill 1 x 8" in printed and "inject ms" in printed
    assert len(measurements(read_result(out))) == 2 and (plots / "times.png").is_file()
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--compare", str(out), str(out), "--out", str(tmp_path / "compared.json")])
    assert ended.value.code == 0 and "same" in capsys.readouterr().out
    assert json.loads((tmp_path / "compared.json").read_text())["notes"] == []


def test_the_program_refuses_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["none.yaml"])
    assert (
        ended.value.code == 2
        and "none.yaml: No such file" in capsys.readouterr().err.splitlines()[-1]
    )


def tried(out: Path, *words: str) -> tuple[int, dict[str, str]]:
    """The exit code of `gpu_all.py --small`, and what it said of every part."""
    command = [sys.executable, str(RECIPE / "gpu_all.py"), "--out", str(out), "--small", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    lines = [line.split(": ", 1) for line in ended.stdout.splitlines()]
    return ended.returncode, {name: said for name, said in lines}


@pytest.mark.nightly
def test_all_that_a_gpu_has_to_show_is_tried_without_one_and_goes_on_where_it_ended(
    tmp_path: Path,
) -> None:
    code, said = tried(tmp_path)
    left_out = [name for name, text in said.items() if text.startswith("left out")]
    assert code == 0, said
    assert list(said) == [part.name for part in gpu_all.PARTS] and left_out in ([], ["vllm"])
    for name in set(said) - set(left_out):
        assert json.loads((tmp_path / f"{name}.json").read_text())
    added = json.loads((tmp_path / "launches.json").read_text())["added_per_layer"]
    assert added["rows"]["operators"] > 0 and added["as chosen"]["operators"] == 0
    (tmp_path / "launches.json").unlink()
    _, again = tried(tmp_path, "--only", "kernels,launches,row-ops")
    assert again == {"kernels": "there already", "row-ops": "there already", "launches": "done"}


def test_a_part_that_fails_leaves_its_log_and_the_next_ones_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = gpu_all.Part("bad", ("-c", "print('why'); raise SystemExit(3)"), (), 60)
    slow = gpu_all.Part("slow", ("-c", "import time; time.sleep(60)"), (), 1)
    good = gpu_all.Part("good", ("-c", "open('{out}', 'w').write('[]')"), (), 60)
    monkeypatch.setattr(gpu_all, "PARTS", (bad, slow, good))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as ended:
        gpu_all.main(["--out", str(tmp_path)])
    assert ended.value.code == 1
    assert "bad: failed: exit code 3; see bad.log" in capsys.readouterr().out
    assert (tmp_path / "bad.log").read_text() == "why\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.log", "good.json", "slow.log"]
    with pytest.raises(SystemExit) as ended:
        gpu_all.main(["--out", str(tmp_path / "none"), "--small", "--minutes", "0"])
    assert ended.value.code == 1

"""The benchmark's bookkeeping: what runs, what is counted, what is written. Times themselves are not tested."""

import copy
import json
from pathlib import Path

import pytest
import torch
from models import build_base, build_routed, decoder_layers, tokens

from hf_depthroute import DepthRouteConfig, get_depth_routed_model, route_cost
from hf_depthroute.bench import SHAPES, Case, bench, dense_view, random_model, read_suite, run_cases, timing
from hf_depthroute.bench.inference import Workload, measure_inference
from hf_depthroute.bench.measurements import compare_results, measurements, read_result
from hf_depthroute.bench.memory import peak_bytes
from hf_depthroute.bench.modes import fill_cache, new_cache, rewind_cache
from hf_depthroute.bench.result_plots import plot_result
from hf_depthroute.bench.result_tables import Table, comparison_table, tables
from hf_depthroute.bench.timing import Estimate, Samples, interleave
from hf_depthroute.bench.variants import Variants, count_passes
from hf_depthroute.cli import main
from hf_depthroute.cli.output import print_table
from hf_depthroute.evaluation.roofline import Peaks, count_work
from hf_depthroute.inference.calibration import active_routings
from hf_depthroute.routing.trace import record_routes

RECIPE = Path(__file__).parents[1] / "recipes" / "speed"
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


@pytest.fixture(autouse=True)
def small_peaks(monkeypatch):
    """The machine's peaks from small arrays; they are only bookkeeping here."""
    monkeypatch.setattr(timing, "_BUFFER_BYTES", {"cpu": 1 << 18})
    monkeypatch.setattr(timing, "_MATMUL_SIZE", {"cpu": 32})


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)


@pytest.fixture(scope="module")
def measured():
    base = build_base("llama")
    view = dense_view(base)
    model = get_depth_routed_model(base, DepthRouteConfig(layers="last:2", budget=0.7))
    holder = active_routings(model)[0]
    holder.tuned = {(True, 9): "gathered"}
    table = holder.active_quantiles().values.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_BUFFER_BYTES", {"cpu": 1 << 18})
        patch.setattr(timing, "_MATMUL_SIZE", {"cpu": 32})
        sizes = {"batch": 2, "length": 16, "decode_steps": 2, "repeats": 4}
        result = bench(
            model,
            base=view,
            budgets=[0.5, 0.25],
            masked=True,
            tune=True,
            parts=("prefill", "decode", "memory"),
            baselines=("eager", "static"),
            **sizes,
        )
    return model, table, result


def every_variant(model, base=None, budgets=(0.5,)):
    return Variants(model, base, budgets, masked=True, input_ids=tokens(4, 12))


# Models


def test_a_dense_view_shares_every_tensor_and_is_not_routed():
    base = build_base("gpt2")
    view = dense_view(base)
    get_depth_routed_model(base, DepthRouteConfig())
    ours, theirs = dict(base.named_parameters()), dict(view.named_parameters())
    assert all(theirs[name] is ours[name] for name in theirs)
    assert not any("routing" in name for name, _ in view.named_modules())


def test_a_shape_can_be_cut_in_depth_and_vocabulary(tiny):
    model = random_model("tiny", torch.float32, depth=2, vocabulary=10)
    assert len(model.model.layers) == 2 and model.lm_head.out_features == 10
    for wrong in ({"depth": 4}, {"depth": 0}, {"vocabulary": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            random_model("tiny", **wrong)


def test_an_unknown_shape_lists_the_known_ones():
    with pytest.raises(ValueError, match=", ".join(SHAPES)):
        random_model("gpt-5")


# Timing


def test_every_variant_runs_once_a_round():
    ran = []
    samples = interleave({name: lambda name=name: ran.append(name) or 1.0 for name in "abc"}, rounds=5)
    rounds = [ran[i : i + 3] for i in range(0, len(ran), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(map(tuple, rounds))) > 1  # not always in the same order
    assert all(len(values) == 5 for values in samples.seconds.values())


def test_ratios_are_taken_within_a_round():
    samples = Samples({"dense": [1.0, 2.0, 10.0], "routed": [0.5, 1.0, 5.0]})
    assert samples.ratio("routed", "dense") == Estimate(0.5, None)
    assert samples.median("routed") == 1.0


def test_the_error_of_a_median_is_that_of_normal_noise():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(400, 101, generator=generator)
    claimed = torch.tensor([Estimate.of(row.tolist()).error for row in draws])
    assert float(claimed.mean()) == pytest.approx(float(draws.median(dim=1).values.std()), rel=0.1)
    assert Estimate.of([1.0, 2.0, 3.0]).error is None


# Variants


def test_variants_run_what_their_names_say():
    base = build_base("llama")
    view = dense_view(base)
    variants = every_variant(get_depth_routed_model(base, DepthRouteConfig(layers=[1, 2])), view)
    assert variants.names == ("base", "disabled", "budget 1.0", "budget 0.5", "masked 0.5")
    ids, logits, rows = tokens(3, 8), {}, {}
    for name in variants.names:
        with variants.using(name) as model, torch.no_grad():
            seen = []
            hooks = [
                layer.mlp.register_forward_hook(lambda _, args, out, seen=seen: seen.append(args[0].numel() // 32))
                for layer in (decoder_layers(model)[index] for index in (1, 2))
            ]
            logits[name] = model(ids).logits
            for hook in hooks:
                hook.remove()
            rows[name] = sum(seen)
    assert torch.equal(logits["disabled"], logits["base"]) and torch.equal(logits["budget 1.0"], logits["base"])
    assert torch.allclose(logits["masked 0.5"], logits["budget 0.5"], atol=1e-5)
    assert not torch.allclose(logits["budget 0.5"], logits["base"], atol=1e-3)
    assert rows["masked 0.5"] == rows["base"] == 2 * ids.numel()
    assert rows["budget 0.5"] < 0.8 * rows["base"]


def test_budget_thresholds_and_tuned_executors_are_restored(measured):
    model, table, _ = measured
    holder = active_routings(model)[0]
    assert holder.active_config().budget == 0.7
    assert torch.equal(holder.active_quantiles().values, table)
    assert holder.tuned == {(True, 9): "gathered"}


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_a_rewound_cache_gives_the_same_logits_again(mode):
    model, ids = build_base("llama"), tokens(2, 12)
    cache = new_cache(model, mode, 12)
    fill_cache(model, cache, ids[:, :8])
    runs = []
    with torch.no_grad():
        for _ in range(2):
            out = [model(part, past_key_values=cache).logits for part in ids[:, 8:].split(1, dim=1)]
            runs.append(torch.cat(out, dim=1))
            rewind_cache(cache, 8)
        expected = model(ids).logits[:, 8:]
    assert torch.equal(*runs)
    assert torch.allclose(runs[0], expected, atol=1e-5)


def test_passes_are_counted_over_all_steps():
    model = build_routed("llama")
    rows, any_row = {}, {}
    with torch.no_grad(), count_passes(model) as counter:
        for seed in range(5):
            with record_routes(model) as trace:
                model(tokens(2, 1, seed))
            for index, record in trace.items():
                rows.setdefault(index, []).append(record.mask.float().mean().item())
                any_row.setdefault(index, []).append(float(record.mask.any()))
    for index, shares in counter.shares().items():
        assert shares == pytest.approx((sum(rows[index]) / 5, sum(any_row[index]) / 5))
    assert not any(holder.state.settings.recorders for holder in active_routings(model))


# Roofline


@pytest.mark.parametrize(
    "family, kind",
    [("llama", "mlp"), ("gpt2", "attention"), ("llama", "block"), ("olmoe", "mlp"), ("olmoe", "experts")],
)
@pytest.mark.parametrize("length, cached", [(16, 0), (1, 20)])
def test_counted_flops_are_those_of_route_cost(family, kind, length, cached):
    model = build_routed(family, kind)
    layers = [holder.layer_index for holder in active_routings(model)]
    shares = {index: (0.2 + 0.1 * index, 1.0) for index in layers}
    cost = route_cost(
        model, batch_size=2, length=length, cached=cached, full_ratio={i: r for i, (r, _) in shares.items()}
    )
    sizes = {"batch": 2, "length": length, "cached": cached, "logits": 1}
    assert count_work(model, **sizes).total_flops == pytest.approx(cost.flops_dense)
    assert count_work(model, **sizes, shares=shares).total_flops == pytest.approx(cost.flops_routed)


def test_a_pass_that_skips_an_ffn_does_not_read_it():
    model = build_routed("llama", layers=[0, 1, 2, 3])
    sizes = {"batch": 1, "length": 1, "cached": 10, "logits": 1}
    dense = count_work(model, **sizes)
    nothing = count_work(model, **sizes, shares=dict.fromkeys(range(4), (0.0, 0.0)))
    everything = count_work(model, **sizes, shares=dict.fromkeys(range(4), (1.0, 1.0)))
    assert nothing.bytes["ffn"] == 0 and everything.bytes["ffn"] == dense.bytes["ffn"]
    assert dense.bytes["ffn"] == 4 * 4 * (3 * 32 * 64 + 3 * (32 + 64))  # layers, bytes, weights, one token in and out
    assert nothing.bytes["attention core"] == dense.bytes["attention core"]


def test_a_skipped_query_reads_no_keys_in_decode():
    model = build_routed("llama", "attention", layers=[0, 1, 2, 3])
    sizes = {"batch": 1, "length": 1, "cached": 1000, "logits": 1}
    moved = count_work(model, **sizes, shares=dict.fromkeys(range(4), (0.0, 0.0))).bytes["attention core"]
    assert moved == 4 * 4 * 2 * 2 * 8  # layers, bytes, keys and values, heads, width: the new token's are written


def test_the_larger_of_the_two_times_binds():
    model = build_base("llama")
    decode = count_work(model, batch=1, length=1, cached=8)
    assert decode.summary(Peaks(1e3, 1e12))["bound"] == "bandwidth"
    assert decode.summary(Peaks(1e12, 1e3))["bound"] == "compute"
    slow = Peaks(1e6, 1e6)
    parts = [max(decode.flops[p], decode.bytes[p]) / 1e6 for p in decode.flops]
    assert decode.seconds(slow) == pytest.approx(sum(parts))


# One model


def test_results_are_json_with_all_parts(measured):
    _, _, result = measured
    assert json.loads(json.dumps(result)) == result
    for part in ("prefill", "decode"):
        for kind in ("budgets", "masked", "tuned"):
            assert set(result[part][kind]) == {"0.5", "0.25"}
        assert set(result[part]["dense_modes"]) == {"eager", "static"}
        assert sum(result[part]["tuned"]["0.5"]["executors"].values()) == 2
        assert set(result[part]["overheads"]) == {"disabled", "budget 1.0"}
    assert result["machine"]["torch"] == torch.__version__


def test_the_fastest_mode_counts(measured):
    _, _, result = measured
    for part in ("prefill", "decode"):
        modes = result[part]["dense_modes"]
        assert result[part]["dense_ms"] == min(modes.values()) == modes[result[part]["dense_mode"]]
        assert all(row["mode"] in row["modes"] for row in result[part]["budgets"].values())


def test_prefill_runs_the_share_that_was_asked_for(measured):
    _, _, result = measured
    for budget, row in result["prefill"]["budgets"].items():
        assert row["full_ratio"] == pytest.approx(float(budget), abs=0.1)


def test_eta_follows_from_the_reported_ratio_and_ideals(measured):
    _, _, result = measured
    for row in result["prefill"]["budgets"].values():
        for eta, ideal in (("eta", "flops_routed_over_dense"), ("eta_roofline", "roofline_routed_over_dense")):
            if row[eta] is not None:  # the report is rounded
                assert row[eta] == pytest.approx((1 - row["ratio"]) / (1 - row[ideal]), rel=5e-3, abs=0.01)
        assert row["speedup"] == pytest.approx(1 / row["ratio"], abs=0.001)
        share, without = row["full_ratio"], result["prefill"]["without_ffns"]
        free = (1 - share) * (1 - without) / (1 - row["flops_routed_over_dense"])
        assert row["eta_free"] == pytest.approx(free, rel=5e-3, abs=0.01)


def test_without_its_ffns_the_base_runs_none_and_has_them_back_afterwards():
    plain = build_base("llama")
    base = dense_view(plain)
    model = get_depth_routed_model(plain, DepthRouteConfig(layers=[1, 2]))
    variants, ids = every_variant(model, base), tokens(2, 8)
    routed = {holder.layer_index for holder in active_routings(model)}
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


def test_no_eta_where_nothing_can_be_saved():
    variants = every_variant(build_routed("llama"), budgets=[0.999])
    ids = tokens(2, 8)
    row = measure_inference(variants, Workload(ids), rounds=1, peaks=PEAKS)["budgets"]["0.999"]
    assert row["flops_routed_over_dense"] > 0.995
    assert row["eta"] is None


def test_memory_says_what_the_cache_and_the_run_hold(measured):
    _, _, result = measured
    rows = result["memory"]["variants"]
    cached = 2 * 16 * 4 * 2 * 2 * 8 * 4  # sequences, tokens, layers, keys and values, heads, width, bytes
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


# Suites


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
    assert {(case.batch, case.length) for case in cases[:6]} == {(b, n) for b in (1, 2) for n in (4, 8, 16)}
    assert all(case.rounds == 2 and case.depth == 2 and case.dtype == "float32" for case in cases)
    assert len({case.describe() for case in cases}) == len(cases)


def test_a_depth_from_outside_keeps_the_share_of_routed_layers(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("shape: qwen2.5-0.5b\ncases:\n - {case: load, layers: 'last:12'}\n - {case: load, layers: all}\n")
    _, cases = read_suite(path, depth=6)
    assert [case.layers for case in cases] == ["last:3", "all"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("- {case: prefil}", "case 1: case='prefil'"),
        ("- {case: prefill, lenght: 3}", "case 1: unknown key 'lenght'"),
        ("- {case: prefill}\n  - {case: decode, batch: 0}", "case 2: batch=0 must be a whole number"),
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


@pytest.fixture(scope="module")
def suite_result(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", TINY)
        patch.setattr(timing, "_BUFFER_BYTES", {"cpu": 1 << 18})
        patch.setattr(timing, "_MATMUL_SIZE", {"cpu": 32})
        path = tmp_path_factory.mktemp("suite") / "small.yaml"
        path.write_text(SUITE)
        name, cases = read_suite(path)
        said = []
        result = run_cases(cases, name=name, progress=said.append)
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
    assert by_case["train"]["roofline"]["gflop"] > 0


def test_memory_that_runs_out_ends_one_case_only(tiny, monkeypatch):
    def too_large(*args, **kwargs):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("hf_depthroute.bench.suite.measure_memory", too_large)
    fields = {"shape": "tiny", "dtype": "float32", "layers": "last:1", "batch": 1, "length": 8, "rounds": 1}
    cases = [Case(case=name, **fields) for name in ("memory", "load")]
    failed, done = run_cases(cases)["measurements"]
    assert failed["error"] == "out of memory" and "ratio" in done


def test_training_leaves_the_base_as_it_was(tiny):
    from hf_depthroute.bench.lora import measure_training

    base = random_model("tiny", torch.float32)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    result = measure_training(base, DepthRouteConfig(layers=[2]), batch=1, length=8, rounds=1, peaks=PEAKS)
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    assert result["lora_trained_parameters"] == 8 * 3 * (32 + 64)  # rank, the three matrices of one FFN
    with pytest.raises(ValueError, match="loss 'quick' is unknown"):
        measure_training(base, DepthRouteConfig(layers=[2]), loss="quick")


# Reading results


def test_a_result_equals_itself(suite_result, measured):
    for result in (suite_result, measured[2], read_result(RECIPE / "cpu.json")):
        comparison = compare_results(result, result)
        assert comparison.notes == []
        assert {change.verdict for change in comparison.changes} == {"same"}
        assert len(comparison_table(comparison).rows) == len(comparison.changes) >= 6


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
    prefill = [c for c in comparison.changes if c.figure == "budget 0.5 / dense" and c.label.startswith("prefill")]
    assert [change.verdict for change in prefill] == ["higher", "lower", "same", "noise unknown", "same", "same"]
    assert any("threads" in note for note in comparison.notes)
    assert f"only in the old result: {gone['label']}" in comparison.notes


def test_tables_hold_every_measurement(suite_result, measured):
    times, overheads, training, loading, memory = tables(suite_result)
    assert len(times.rows) == 6 * 2 + 3 and len(overheads.rows) == 7
    assert len(training.rows) == 2 and len(loading.rows) == 2 and len(memory.rows) == 5
    for table in (*tables(suite_result), *tables(measured[2])):
        assert all(len(row) == len(table.head) for row in table.rows)
        assert len({line.count("|") for line in table.markdown()}) == 1


def test_plots_show_what_there_is(tmp_path, suite_result, measured):
    assert {path.stem for path in plot_result(tmp_path / "a", suite_result)} == {
        "times", "eta", "roofline", "sweep", "training", "memory",
    }  # fmt: skip
    for path in plot_result(tmp_path / "b", measured[2]):
        assert path.stat().st_size > 5000
    assert plot_result(tmp_path / "c", {"measurements": []}) == []
    recipe = read_result(RECIPE / "cpu.json")
    assert {path.stem for path in plot_result(tmp_path / "d", recipe)} == {"times", "eta", "roofline", "memory"}


@pytest.mark.parametrize("path", sorted(RECIPE.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_suites_can_be_read(path):
    _, cases = read_suite(path)
    assert len({case.describe() for case in cases}) == len(cases)


# Command line


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_the_command_measures_a_suite_and_draws_it(capsys, suite_file, tmp_path):
    suite_file.write_text("shape: tiny\nlayers: last:1\nlength: 8\nbatch: 1\ncases: [{case: prefill}, {case: load}]\n")
    out, plots = tmp_path / "result.json", tmp_path / "plots"
    options = ("--repeats", 1, "--dtype", "float32", "--json", out, "--plot", plots)
    code, printed, _ = run(capsys, "bench", "--suite", suite_file, *options)
    assert code == 0 and "prefill 1 x 8" in printed and "inject ms" in printed
    assert len(measurements(read_result(out))) == 2 and (plots / "times.png").is_file()
    code, printed, _ = run(capsys, "bench", "--compare", out, out, "--json", tmp_path / "compared.json")
    assert code == 0 and "same" in printed
    assert json.loads((tmp_path / "compared.json").read_text())["notes"] == []


def test_several_sizes_of_a_shape_become_several_measurements(capsys, tiny, tmp_path):
    out = tmp_path / "result.json"
    sizes = ("--length", "4,8", "--batch", "1,2", "--decode-batch", 1, "--decode-steps", 1, "--repeats", 1)
    options = ("--layers", "last:1", "--dtype", "float32", "--json", out, "--cases", "prefill,decode,load")
    code, _, _ = run(capsys, "bench", "--shape", "tiny", *sizes, *options)
    assert code == 0
    assert [m["case"] for m in measurements(read_result(out))] == [*["prefill"] * 4, *["decode"] * 2, "load"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--suite", "none.yaml"], "none.yaml: No such file"),
        (["--compare", "a.json", "b.json"], "a.json: No such file"),
        (["--suite", "none.yaml", "--gate", "mlp"], "--gate go with --shape"),
        (["--suite", "none.yaml", "--shape", "x"], "give either"),
        (["--shape", "qwen2.5-0.5b", "--cases", "prefill,fly"], "'fly' is unknown"),
        (["--adapter", "x", "--cases", "train"], "'train' is unknown here"),
        (["--shape", "qwen2.5-0.5b", "--batch", "0"], "--batch 0: each must be at least 1"),
        (["--shape", "qwen2.5-0.5b", "--length", "a"], "write whole numbers"),
        (["--shape", "qwen2.5-0.5b", "--baselines", "fast"], "'fast' is unknown"),
        (["--shape", "qwen2.5-0.5b", "--depth", "99"], "depth=99"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, arguments, message):
    code, _, printed = run(capsys, "bench", *arguments)
    assert code == 2
    (line,) = printed.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_file_that_is_no_result_is_refused(capsys, tmp_path):
    for content, message in (("{", "not JSON"), ("{}", "not a result"), ('{"measurements": [{}]}', "not results")):
        (tmp_path / "x.json").write_text(content)
        code, _, printed = run(capsys, "bench", "--compare", tmp_path / "x.json", tmp_path / "x.json")
        assert code == 2 and message in printed


def test_the_table_on_a_terminal_is_brief_and_the_report_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    head = ("case", "variant", "share full", "ms", "dense ms", "speed-up", "FLOPs / dense", "eta", "eta roofline")
    row = (
        "decode 8 x 16 steps after 1024",
        "routed 0.25",
        "0.250",
        "1922.35",
        "1955.00",
        "0.826",
        "0.973",
        "-7.74",
        "1",
    )
    table = Table((*head, "eta free", "tokens/s", "modes"), [(*row, "-9.04", "16666", "eager / eager")])
    brief = table.brief()
    assert set(table.head) - set(brief.head) == {"eta roofline", "eta free", "modes"}
    print_table(brief.head, brief.rows, wide=True)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120
    apart = Table(table.head, [(*row, "-9.04", "16666", "static / compiled")]).brief()
    assert apart.head[-1] == "modes" and apart.rows[0][-1] == "static / compiled"

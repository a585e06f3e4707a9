"""The benchmark's bookkeeping: what runs, what is counted, what is written.

Times themselves are not tested.
"""

import json

import pytest
import torch
from models import build_base, build_routed, decoder_layers, tokens
from places import ROOT

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.bench import Case, bench, dense_view
from hf_depthroute.bench.inference import measure_inference
from hf_depthroute.bench.measurements import compare_results, label_of
from hf_depthroute.bench.modes import fill_cache, new_cache, rewind_cache
from hf_depthroute.bench.result_tables import brief, comparison_table, tables
from hf_depthroute.bench.suite import setting_of
from hf_depthroute.bench.timing import Estimate, Samples, interleave
from hf_depthroute.bench.variants import Variants, count_passes
from hf_depthroute.cli import main
from hf_depthroute.cli.output import print_table
from hf_depthroute.inference.calibration import active_routings
from hf_depthroute.routing.trace import record_routes

RECIPE = ROOT / "recipes" / "speed"


@pytest.fixture(scope="module")
def measured():
    base = build_base("llama")
    view = dense_view(base)
    model = get_depth_routed_model(base, DepthRouteConfig(layers="last:2", budget=0.7))
    routing = active_routings(model)[0]
    routing.tuned = {(True, 9): "gathered"}
    table = routing.active_quantiles().values.clone()
    sizes = {"batch": 2, "length": 16, "decode_steps": 2, "repeats": 4}
    result = bench(
        model,
        base=view,
        budgets=[0.5, 0.25],
        baselines=("eager", "static"),
        **sizes,
    )
    return model, table, result


def every_variant(model, base=None, budgets=(0.5,)):
    return Variants(model, base, budgets, input_ids=tokens(4, 12))


# Models


def test_a_dense_view_shares_every_tensor_and_is_not_routed():
    base = build_base("gpt2")
    view = dense_view(base)
    get_depth_routed_model(base, DepthRouteConfig())
    ours, theirs = dict(base.named_parameters()), dict(view.named_parameters())
    assert all(theirs[name] is ours[name] for name in theirs)
    assert not any("routing" in name for name, _ in view.named_modules())


# Timing


def test_every_variant_runs_once_a_round():
    ran = []
    samples = interleave(
        {name: lambda name=name: ran.append(name) or 1.0 for name in "abc"}, rounds=5
    )
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
    assert variants.names == ["base", "disabled", "budget 1.0", "budget 0.5"]
    ids, logits, rows = tokens(3, 8), {}, {}
    for name in variants.names:
        with variants.using(name) as model, torch.no_grad():
            seen = []
            hooks = [
                layer.mlp.register_forward_hook(
                    lambda _, args, out, seen=seen: seen.append(args[0].numel() // 32)
                )
                for layer in (decoder_layers(model)[index] for index in (1, 2))
            ]
            logits[name] = model(ids).logits
            for hook in hooks:
                hook.remove()
            rows[name] = sum(seen)
    assert torch.equal(logits["disabled"], logits["base"]) and torch.equal(
        logits["budget 1.0"], logits["base"]
    )
    assert not torch.allclose(logits["budget 0.5"], logits["base"], atol=1e-3)
    assert rows["base"] == 2 * ids.numel()
    assert rows["budget 0.5"] < 0.8 * rows["base"]


def test_an_adapter_without_a_budget_is_timed_as_it_is():
    base = build_base("llama")
    view = dense_view(base)
    config = DepthRouteConfig(
        layers=[1, 2], gate="sinks", branch="none", budget=0.01, phases="prefill"
    )
    model = get_depth_routed_model(base, config)
    result = bench(
        model, base=view, budgets=[0.5, 0.25], batch=2, length=16, decode_steps=2, repeats=2
    )
    assert list(result["prefill"]["overheads"]) == ["disabled"]
    (row,) = result["prefill"]["budgets"].values()
    assert row["full_ratio"] == pytest.approx(1 / 16) and row["flops_routed_over_dense"] < 1
    (row,) = result["decode"]["budgets"].values()
    assert row["full_ratio"] == 1.0
    names = {row["variant"] for rows in tables(result) for row in rows if "variant" in row}
    assert names == {"routed"}


def test_budget_and_thresholds_are_restored_and_executors_left_as_they_are(measured):
    model, table, _ = measured
    routing = active_routings(model)[0]
    assert routing.active_config().budget == 0.7
    assert torch.equal(routing.active_quantiles().values, table)
    assert routing.tuned == {(True, 9): "gathered"}


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
    assert not any(routing.state.settings.recorders for routing in active_routings(model))


# One model


def test_results_are_json_with_all_parts(measured):
    _, _, result = measured
    assert json.loads(json.dumps(result)) == result
    for part in ("prefill", "decode"):
        assert set(result[part]["budgets"]) == {"0.5", "0.25"}
        assert set(result[part]["dense_modes"]) == {"eager", "static"}
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


def test_eta_follows_from_the_reported_ratio_and_ideal(measured):
    _, _, result = measured
    for row in result["prefill"]["budgets"].values():
        ideal = row["flops_routed_over_dense"]  # the report is rounded
        assert row["eta"] == pytest.approx((1 - row["ratio"]) / (1 - ideal), rel=5e-3, abs=0.01)
        assert row["speedup"] == pytest.approx(1 / row["ratio"], abs=0.001)


def test_no_eta_where_nothing_can_be_saved():
    variants = every_variant(build_routed("llama"), budgets=[0.999])
    case = Case(case="prefill", batch=2, length=8, rounds=1)
    row = measure_inference(variants, case, tokens(2, 8))["budgets"]["0.999"]
    assert row["flops_routed_over_dense"] > 0.995
    assert row["eta"] is None


# Reading results


def test_a_result_equals_itself(measured):
    comparison = compare_results(measured[2], measured[2])
    assert comparison.notes == []
    assert {change.verdict for change in comparison.changes} == {"same"}
    assert len(comparison_table(comparison)) == len(comparison.changes) >= 6


def test_tables_hold_every_measurement(measured):
    times, overheads = tables(measured[2])
    assert len(times) == 2 * 2 and len(overheads) == 2
    for rows in (times, overheads):
        assert all(list(row) == list(rows[0]) for row in rows)


# Command line


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--compare", "a.json", "b.json"], "a.json: No such file"),
        (["x", "--compare", "a.json", "b.json"], "give either ADAPTER"),
        ([], "give either ADAPTER"),
        (["x", "--cases", "prefill,fly"], "'fly' is unknown"),
        (["x", "--cases", "memory"], "'memory' is unknown here"),
        (
            ["x", "--masked"],
            (
                "No such option: --masked (Possible options: --cases, --phases); suites of "
                "recipes/speed"
            ),
        ),
        (["x", "--batch", "0"], "--batch 0: each must be at least 1"),
        (["x", "--length", "a"], "write whole numbers"),
        (["x", "--baselines", "fast"], "'fast' is unknown"),
        (["x", "--budgets", "2"], "--budgets 2"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, arguments, message):
    code, _, printed = run(capsys, "bench", *arguments)
    assert code == 2
    (line,) = printed.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_file_that_is_no_result_is_refused(capsys, tmp_path):
    for content, message in (
        ("{", "not JSON"),
        ("{}", "not a result"),
        ('{"measurements": [{}]}', "not results"),
    ):
        (tmp_path / "x.json").write_text(content)
        code, _, printed = run(
            capsys, "bench", "--compare", tmp_path / "x.json", tmp_path / "x.json"
        )
        assert code == 2 and message in printed


def test_the_table_on_a_terminal_is_brief_and_the_report_has_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {
        "case": "decode 8 x 16 steps after 1024",
        "variant": "routed 0.25",
        "share full": "0.250",
        "ms": "1922.35",
        "dense ms": "1955.00",
        "speed-up": "0.826",
        "FLOPs / dense": "0.973",
        "eta": "-7.74",
        "tokens/s": "16666",
        "modes": "eager / eager",
    }
    (short,) = brief([row])
    assert set(row) - set(short) == {"modes"}
    print_table(list(short), [list(short.values())], wide=True)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120
    apart = row | {"modes": "static / compiled"}
    assert brief([apart]) == [apart]


def test_a_measurement_names_every_target_that_layers_have() -> None:
    model = build_routed("llama", "attention", layers=[1, 2, 3], target_pattern={2: "ffn"})
    assert setting_of(model)["target"] == "attention+ffn"


def test_a_label_counts_layers() -> None:
    for layers, counted in (([1], "ffn of 1 layer"), ([1, 2], "ffn of 2 layers")):
        setting = setting_of(build_routed("llama", layers=layers))
        assert label_of("decode", setting) == f"decode: llama float32, {counted}"

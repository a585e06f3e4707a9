"""Model cards: every figure from a file, nothing from a stranger but text,
and what a person wrote stays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from benchmark_scores import scores
from card_rules import card_fault
from huggingface_hub import ModelCard, ModelCardData
from models import build_base, build_routed, tokens
from text_models import save_base
from training import make_trainer, rows

import hf_depthroute
from hf_depthroute import (
    DepthRouteCallback,
    DepthRouteConfig,
    calibrate,
    get_depth_routed_model,
    record_routes,
    set_budget,
)
from hf_depthroute.adapter.doctor import examine
from hf_depthroute.card import ResultError, add_results, make_card, write_card
from hf_depthroute.card.escaping import cell, clean, code, escape, hub_id, shown_path
from hf_depthroute.cli import main
from hf_depthroute.config.fields import CHOICES
from hf_depthroute.evaluation import evaluate_budgets

Save = Callable[[peft.PeftModel], Path]
END = "<!-- hf_depthroute: end of the generated part -->"
HOSTILE = f"x`|<script>alert(1)</script>\n---\nlicense: mit\n# {END} {{{{ 7*7 }}}}"
MACHINE = {"device": "A CPU", "threads": 2, "cores": 4, "torch": "2.0"}


def losses(**fields: Any) -> dict[str, Any]:
    """As `eval --json` writes it."""
    table = [
        {
            "budget": 1.0,
            "rule": "dense",
            "loss": 2.0,
            "perplexity": 7.39,
            "full_ratio": 1.0,
            "gap": None,
        },
        {
            "budget": 0.5,
            "rule": "topk",
            "loss": 2.25,
            "perplexity": 9.49,
            "full_ratio": 0.5,
            "gap": None,
        },
        {
            "budget": 0.5,
            "rule": "threshold",
            "loss": 2.5,
            "perplexity": 12.18,
            "full_ratio": 0.48,
            "gap": 0.25,
        },
    ]
    return {
        "dataset": "someone/text",
        "split": "test",
        "blocks": 8,
        "length": 16,
        "rows": table,
    } | fields


def tasks() -> dict[str, Any]:
    """As `eval --tasks --json` writes it."""

    def run(accuracy: float, ratio: float, budget: float | None) -> dict[str, Any]:
        found = {
            "results": {"piqa": {"alias": "piqa", "acc,none": accuracy, "acc_stderr,none": 0.01}},
            "configs": {"piqa": {"dataset_path": "baber/piqa"}},
            "n-samples": {"piqa": {"effective": 100}},
        }
        return {"budget": budget, "full_ratio": ratio, "seconds": 1.0, "lm_eval": found}

    return {"runs": {"dense": run(0.75, 1.0, None), "budget 0.5": run(0.5, 0.49, 0.5)}}


def speed() -> dict[str, Any]:
    """As `bench --json` writes it."""
    setting = {
        "model_type": "llama",
        "dtype": "float32",
        "routed_layers": [1],
        "batch": 4,
        "length": 8,
    }
    timed = {"routed_ms": 12.5, "speedup": 0.8, "eta": None, "full_ratio": 0.5, "tokens_per_s": 1.0}
    return {
        "setting": setting,
        "machine": MACHINE,
        "prefill": {"dense_ms": 10.0, "budgets": {"0.5": timed}},
    }


@pytest.fixture
def adapter(saved_adapter: Save) -> Path:
    return saved_adapter(build_routed("llama"))


def table_row(card: ModelCard, start: str) -> list[str]:
    (line,) = (line for line in card.text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


# What a card says


def test_a_card_without_results_claims_none(adapter: Path) -> None:
    card = ModelCard.load(adapter / "README.md")
    assert card.text.count("Not measured.") == 3
    assert "Not recorded." in card.text
    assert card.data.eval_results is None
    assert "Not faster" not in card.text
    assert card_fault(card.content) is None


def test_every_figure_is_of_a_result(adapter: Path) -> None:
    card = make_card(adapter, [losses(), tasks(), speed()])
    assert "Not measured." not in card.text
    assert table_row(card, "dense base")[2:4] == ["2.0000", ""]
    assert table_row(card, "causal threshold") == [
        "causal threshold",
        "0.5",
        "2.5000",
        "+0.5000",
        "12.182",
        "48.0%",
        "+0.2500",
    ]
    assert "| `piqa` | `acc` | `dense` | 0.7500 | 0.0100 |  | 100.0% | 100 |" in card.text
    assert "|  |  | `budget 0.5` | 0.5000 | 0.0100 | -0.2500 | 49.0% | 100 |" in card.text
    assert table_row(card, "prefill 4 x 8, float32")[1:] == [
        "0.5",
        "50.0%",
        "10.00",
        "12.50",
        "0.800",
        "-",
    ]
    assert "`A CPU`, threads `2`, cores `4`" in card.text
    assert "at budget 0.5: 0.80 of the dense speed." in card.text


def test_a_group_of_tasks_has_the_documents_of_its_tasks_and_every_filter_is_a_metric(
    adapter: Path,
) -> None:
    parts = ["mmlu_pro_law", "mmlu_pro_math"]
    group = {
        "group_subtasks": {"mmlu_pro": parts},
        "configs": {part: {"dataset_path": "TIGER-Lab/MMLU-Pro"} for part in parts},
        "n-samples": {part: {"original": 10, "effective": 10} for part in parts},
    }
    text = make_card(adapter, [scores("mmlu_pro", **group), scores("gsm8k")]).text
    assert text.count("| 20 |") == 2
    assert "| `exact_match,strict-match` | `dense` | 0.7500 |" in text
    assert "`exact_match,flexible-extract` | `dense` | 0.9000 |" in text


def test_the_hub_indexes_what_inference_gives(adapter: Path) -> None:
    data = make_card(adapter, [losses(), tasks()], datasets=["someone/text", "local.txt"]).data
    found = {(r.dataset_type, r.metric_type): r.metric_value for r in data.eval_results}
    assert found == {("someone/text", "loss"): 2.5, ("baber/piqa", "acc"): 0.5}
    assert data.datasets == ["someone/text"]


def test_thresholds_are_those_that_inference_compares_with(saved_adapter: Save) -> None:
    model = build_routed("llama", layers=[1, 3])
    calibrate(model, [{"input_ids": tokens(8, 16)}])
    set_budget(model, 0.25)
    card = ModelCard.load(saved_adapter(model) / "README.md")
    for layer, value in hf_depthroute.inference.calibration.thresholds(model).items():
        assert table_row(card, str(layer))[1] == f"{value:.4f}"
    assert "not calibrated" not in card.text
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert table_row(card, "trained parameters")[1] == f"{trained:,}"
    assert "| budget | 0.25 of the calls in " in card.text


def test_what_a_controller_learnt_is_what_is_told_and_measured(tmp_path: Path) -> None:
    config = DepthRouteConfig(layers=[1, 3], budget=0.5, selection="controller")
    model = get_depth_routed_model(build_base("llama"), config)
    trainer, _ = make_trainer(model, rows(32, length=32), tmp_path, controller_step=0.05)
    trainer.train()
    model.eval()
    batch = {"input_ids": tokens(4, 16)}
    with record_routes(model) as trace, torch.no_grad():
        own = model(**batch, labels=batch["input_ids"]).loss
    compared = {layer: float(record.threshold) for layer, record in trace.items()}
    assert hf_depthroute.inference.calibration.thresholds(model) == compared
    card = make_card(model)
    assert all(table_row(card, str(i))[1] == f"{value:.4f}" for i, value in compared.items())
    assert evaluate_budgets(model, [batch], None, [0.5])[-1].loss == pytest.approx(float(own))
    set_budget(model, 0.5)  # it is so already
    assert hf_depthroute.inference.calibration.thresholds(model) == compared


def test_thresholds_of_an_untrained_router_are_called_so(saved_adapter: Save) -> None:
    untrained = get_depth_routed_model(build_base("llama"), DepthRouteConfig())
    assert "**not calibrated**" in (saved_adapter(untrained) / "README.md").read_text()


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"target": "attention"}, "still writes its key and value"),
        ({"target": "block", "granularity": "sequence"}, "A sequence is decided on its prompt."),
        ({"gate": "none"}, "every token skips the routed layers"),
        ({"gate": "linear", "branch": "none"}, "score at or above 0"),
        ({"causal_rule": "predictor"}, "the causal predictor"),
    ],
)
def test_it_says_what_is_routed(fields: dict[str, Any], said: str, saved_adapter: Save) -> None:
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(**fields))
    text = (saved_adapter(model) / "README.md").read_text()
    assert said in text
    assert ("set_budget(model" in text) == model.peft_config["default"].takes_budget()


def test_an_adapter_that_decides_nothing_is_said_to(saved_adapter: Save) -> None:
    """As a fit for prompts makes one: its card spoke of a router that decides for each token."""
    fields: dict[str, Any] = {
        "gate": "sinks",
        "phases": "prefill",
        "prompt_tail": 64,
        "branch_pattern": {2: "none"},
    }
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers="all", **fields))
    card = (saved_adapter(model) / "README.md").read_text()
    who = "every token of a prompt but the last 64, attention sinks left out,"
    assert f"nothing decides: {who} skips the same part." in card
    assert "replaced by a low-rank branch, and in some layers otherwise (see the table)." in card
    assert "router decides" not in card and "rule in training" not in card
    assert "| budget | none |" in card


@pytest.mark.parametrize("branch", CHOICES["branch"])
def test_it_says_what_stands_in_for_what_is_skipped(branch: str, saved_adapter: Save) -> None:
    table = {"memory_slots": 8192, "memory_width": 4} if branch == "memory" else {}
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(branch=branch, **table))
    said = (saved_adapter(model) / "README.md").read_text()
    assert ("is replaced by nothing" in said) == (branch == "none")
    assert said.count("What is skipped is replaced by") == 1


def test_a_training_that_held_no_text_out_is_understood(
    adapter: Path, recwarn: pytest.WarningsRecorder
) -> None:
    card = make_card(adapter, training={"seconds": 2.0, "evaluation": []})
    assert "* Time: `2.0` seconds" in card.text and "### Loss\n\nNot measured." in card.text
    assert not recwarn.list


def test_a_record_in_another_form_is_left_out_as_a_whole(adapter: Path) -> None:
    with pytest.warns(UserWarning, match="left out of the model card: training.json"):
        card = make_card(adapter, [losses()], training={"seconds": 2.0, "versions": "1"})
    assert str(card) == str(make_card(adapter, [losses()], training={}))


@pytest.mark.parametrize("calibrated", [True, False])
def test_the_loading_code_runs(
    calibrated: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an adapter whose thresholds were never fitted it does not set a budget,
    which would be refused."""
    base = save_base(tmp_path / "base")
    model = get_depth_routed_model(
        transformers.AutoModelForCausalLM.from_pretrained(base), DepthRouteConfig()
    )
    if calibrated:
        calibrate(model, {"input_ids": tokens(2, 8)})
    model.save_pretrained(tmp_path / "adapter")
    card = make_card(tmp_path / "adapter", repo_id=None)
    source = re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1]
    assert str(tmp_path) not in card.content  # only the last part of a path is shown
    assert (
        ("\nhf_depthroute.set_budget" in source)
        == calibrated
        == ("**not calibrated**" not in card.text)
    )
    source = source.replace('"path/to/base"', repr(str(base))).replace(
        '"path/to/this/folder"', repr(str(tmp_path / "adapter"))
    )
    exec(source.replace("Once upon a time", "the cat"), {})
    assert "the cat" in capsys.readouterr().out


def shares(text: str) -> list[str]:
    """The last column of the table of thresholds, its head first."""
    head, _, *lines = (
        re.search(r"\| layer \| threshold \|.*?\n\n", text, re.DOTALL)[0].strip().splitlines()
    )
    return [line.split("|")[3].strip() for line in (head, *lines)]


def test_the_card_of_a_training_says_what_its_thresholds_let_run(tmp_path: Path) -> None:
    """Tracked in training, then calibrated; another budget has thresholds that nobody measured."""
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 3], budget=0.5))
    trainer, _ = make_trainer(
        model, rows(32, length=32), tmp_path, learning_rate=1e-6, logging_steps=3
    )
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    head, *found = shares((tmp_path / "adapter" / "README.md").read_text())
    assert head == "share full in training"
    assert all(40 <= float(share.rstrip("%")) <= 60 for share in found) and len(found) == 2
    assert shares(str(make_card(model))) == [head, *found]
    set_budget(model, 0.25)
    assert shares(str(make_card(model))) == [
        "share full in calibration",
        "not recorded",
        "not recorded",
    ]
    ratios = calibrate(model, [{"input_ids": tokens(4, 32)}])
    model.save_pretrained(tmp_path / "adapter")
    wanted = ["share full in calibration", *(f"{ratio:.1%}" for ratio in ratios.values())]
    assert shares((tmp_path / "adapter" / "README.md").read_text()) == wanted


def test_recorded_shares_are_of_the_thresholds_that_were_recorded(saved_adapter: Save) -> None:
    model = build_routed("llama", layers=[1, 3])
    calibrate(model, [{"input_ids": tokens(4, 16)}])
    values = hf_depthroute.inference.calibration.thresholds(model)
    record = {
        "thresholds": {str(layer): value for layer, value in values.items()},
        "calibrated_full_ratio": {"1": 0.5, "3": 0.5},
    }
    _, *found = shares(str(make_card(saved_adapter(model), training=record)))
    assert found == ["50.0%", "50.0%"]
    near = {layer: value * (1 + 1e-6) for layer, value in record["thresholds"].items()}
    _, *found = shares(str(make_card(saved_adapter(model), training=record | {"thresholds": near})))
    assert found == ["50.0%", "50.0%"]  # as another device made them
    set_budget(model, 0.25)
    _, *found = shares(str(make_card(saved_adapter(model), training=record)))
    assert found == ["not recorded", "not recorded"]


def test_the_same_adapter_gives_the_same_card(adapter: Path, tmp_path: Path) -> None:
    model = peft.PeftModel.from_pretrained(build_base("llama"), adapter)
    assert str(make_card(adapter, [losses()])) == str(make_card(model, [losses()]))


# Results that do not belong here


def test_results_of_other_weights_are_refused(adapter: Path) -> None:
    mine = json.loads((adapter / "adapter_config.json").read_text())["weights_hash"]
    make_card(adapter, [losses(weights_hash=mine)])
    with pytest.raises(ResultError, match="result 1: was measured with other weights"):
        make_card(adapter, [losses(weights_hash="sha256:0")])


@pytest.mark.parametrize(
    "content, message",
    [
        ([], "not a result"),
        ({"rows": []}, "no row of the dense base"),
        ({"rows": [{"rule": "dense"}]}, "'budget'"),
        (
            {"rows": [{"rule": "dense", "budget": 1, "loss": "low", "full_ratio": 1}]},
            "'low' is not a number",
        ),
        ({"runs": {"budget 0.5": {"lm_eval": {}}}}, "no run of the dense base"),
        ({"prefill": {}}, "is wrong"),
        ({"answer": 42}, "neither a result"),
    ],
)
def test_what_is_no_result_is_refused_in_one_line(
    content: Any, message: str, adapter: Path, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ResultError, match=message) as refused:
        make_card(adapter, [path])
    assert "result.json" in str(refused.value) and "\n" not in str(refused.value)


def test_results_on_another_base_are_refused(adapter: Path) -> None:
    for measured in (losses(), tasks(), speed()):
        make_card(adapter, [measured | {"base_mismatch": False}])
        with pytest.raises(ResultError, match="result 1: was measured on another base"):
            make_card(adapter, [measured | {"base_mismatch": True}])


@pytest.mark.parametrize("own, measured", [("all", "prefill"), ("prefill", "all"), ("all", "all")])
def test_results_name_their_phases(own: str, measured: str, saved_adapter: Save) -> None:
    folder = saved_adapter(build_routed("llama", phases=own))
    scored, timed = tasks(), speed()
    scored["runs"]["budget 0.5"]["phases"] = measured
    if measured != "all":
        timed["setting"]["phases"] = measured
    card = make_card(folder, [scored, timed])
    said = own != measured
    assert (f"`budget 0.5, phases {measured}`" in card.text) == said
    assert (f"| prefill 4 x 8, float32, phases {measured} |" in card.text) == said
    (result,) = card.data.eval_results
    assert result.metric_name == f"acc (budget 0.5{f', phases {measured}' if said else ''})"


def test_one_layer_and_one_block_are_said_in_the_singular(saved_adapter: Save) -> None:
    model = build_routed("llama", layers=[2])
    calibrate(model, [{"input_ids": tokens(4, 12)}])
    folder = saved_adapter(model)
    text = make_card(folder, [losses(blocks=1)]).text
    assert "of the calls in 1 layer with a gate, " in text and "`, 1 block of " in text
    told = [found.text for found in examine(folder)]
    assert "calibrated: thresholds fitted to the scores of 1 layer" in told
    assert any(each.startswith("1 layer with ") for each in told)


def test_results_with_thresholds_of_their_own_say_so(adapter: Path) -> None:
    said = "the thresholds of every budget were calibrated for this on split `dev`"
    assert said in make_card(adapter, [losses(calibrate_on="dev")]).text
    assert "calibrated for this" not in make_card(adapter, [losses(calibrate_on=None)]).text


@pytest.mark.parametrize("calibrated", [True, False])
def test_results_from_python_say_whether_thresholds_were_calibrated_for_them(
    saved_adapter: Save, calibrated: bool
) -> None:
    model = build_routed("llama")
    texts = [{"input_ids": tokens(4, 12, seed)} for seed in (1, 2)]
    rows = evaluate_budgets(model, texts[:1], texts[1:] if calibrated else None, [0.25, 0.5])
    assert [row.calibrated for row in rows] == [False] + [calibrated] * 4
    text = make_card(saved_adapter(model), [rows]).text
    assert ("; the thresholds of every budget were calibrated for this." in text) == calibrated


def test_results_that_became_stale_do_not_stop_a_save(saved_adapter: Save) -> None:
    model = build_routed("llama")
    add_results(model, losses(weights_hash="sha256:0"))
    with pytest.warns(UserWarning, match="left out of the model card"):
        folder = saved_adapter(model)
    assert "## Results\n\n### Loss\n\nNot measured." in (folder / "README.md").read_text()
    peft.PeftModel.from_pretrained(build_base("llama"), folder)


def test_what_was_measured_before_the_weights_changed_is_left_out(saved_adapter: Save) -> None:
    model = build_routed("llama")
    batch = {"input_ids": tokens(4, 12)}
    add_results(model, evaluate_budgets(model, [batch], None, [0.5]))
    assert "causal threshold" in make_card(model).text
    calibrate(model, [{"input_ids": tokens(4, 12, seed=1)}])
    with pytest.warns(UserWarning, match="result 1: was measured with other weights"):
        folder = saved_adapter(model)
    assert "causal threshold" not in (folder / "README.md").read_text()


@pytest.mark.parametrize("processes", [1, 2])
def test_results_of_weights_that_are_not_here_whole_are_shown(
    monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """As under FSDP and ZeRO-3, or offloaded: their hash is not known before a save."""
    model = build_routed("llama")
    rows = evaluate_budgets(model, [{"input_ids": tokens(4, 12)}], None, [0.5])
    monkeypatch.setattr("hf_depthroute.card.measured.world_size", lambda: processes)
    if processes == 1:
        monkeypatch.setattr(
            "hf_depthroute.card.measured.get_peft_model_state_dict",
            lambda *given, adapter_name: {"weight": torch.empty(2, device="meta")},
        )
    add_results(model, rows)
    assert "causal threshold" in make_card(model).text


# Strangers


def test_hostile_names_are_shown_and_do_nothing(saved_adapter: Save) -> None:
    model = build_routed("llama")
    model.peft_config["default"].base_model_name_or_path = HOSTILE
    folder = saved_adapter(model)
    machine = {"device": HOSTILE}
    named = tasks()
    for run in named["runs"].values():
        run["lm_eval"]["results"] = {HOSTILE: {f"{HOSTILE},none": 0.5}}
    record = {
        "command": ["hf-depthroute", HOSTILE],
        "dataset": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
    }
    card = make_card(
        *(folder, [losses(dataset=HOSTILE, split=HOSTILE), named, speed() | {"machine": machine}]),
        training=record, model_name=HOSTILE, license=HOSTILE, tags=[HOSTILE],
    )  # fmt: skip
    assert set(card.data.to_dict()) == {
        "library_name",
        "license",
        "model-index",
        "pipeline_tag",
        "tags",
    }
    assert card.data.license == clean(HOSTILE) != "mit"
    assert card.text.count(END) == 1
    fenced = re.sub(r"```\w*\n.*?```", "", card.text, flags=re.DOTALL)
    plain = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", fenced)
    assert "<script" not in plain.replace("\\<script", "")
    assert "{{ 7*7 }}" in card.text
    assert not [line for line in card.text.splitlines() if line.strip() in ("---", "license: mit")]
    compile(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], "card", "exec")
    write_card(folder)  # and is still one that can be updated


@pytest.mark.parametrize(
    "text", ["a", "`a`", "``a` b", "", "a\nb", "a|b", "</code><b>", "\u202ea\x00\u2028b"]
)
def test_a_code_span_holds_any_text(text: str) -> None:
    span = code(text)
    fence = re.match("`+", span)[0]
    assert span.endswith(fence) and fence not in re.findall("`+", span[len(fence) : -len(fence)])
    assert "\n" not in span and span.isprintable()


def test_escaped_text_has_no_markup_left() -> None:
    assert escape("<b>[x](y)</b> *z* https://w") == r"\<b\>\[x\](y)\</b\> \*z\* https\://w"
    assert (escape("a|b"), cell("c|d")) == (r"a\|b", r"`c\|d`")
    assert clean("hf_" + "a" * 34) == "hf_***"


@pytest.mark.parametrize(
    "name", ["/home/me/llama", "../llama", "~/llama", "a/b/c", "-a", "a--b", "a b", "", None, 3]
)
def test_a_path_is_no_hub_id(name: Any) -> None:
    assert hub_id(name) is None
    assert "/home" not in shown_path(str(name))


# What a person wrote


def test_text_around_the_generated_part_stays(adapter: Path) -> None:
    path = adapter / "README.md"
    card = ModelCard.load(path)
    card.data["license"], card.data["my-key"] = "mit", "mine"
    card.text = f"\nMy words before.\n{card.text}\nMy words after.\n"
    card.save(path)
    model = peft.PeftModel.from_pretrained(build_base("llama"), adapter)
    set_budget(model, 0.125)
    model.save_pretrained(adapter)
    again = ModelCard.load(path)
    assert (again.data.license, again.data["my-key"]) == ("mit", "mine")
    assert again.text.startswith("\nMy words before.\n") and again.text.rstrip().endswith(
        "My words after."
    )
    assert again.text.count("| budget |") == 1 and "| budget | 0.125 of the calls in " in again.text


def test_a_readme_of_somebody_else_gets_the_card_at_its_end(adapter: Path) -> None:
    (adapter / "README.md").write_text("# Mine\n\nRead this first.\n")
    text = write_card(adapter).read_text()
    assert text.index("Read this first.") < text.index("## What is routed")


@pytest.mark.parametrize("readme", ["---\n: [\n---\nMy text", "---\n- a\n---\nMy text", "My text"])
def test_unreadable_metadata_does_not_stop_a_save(readme: str, adapter: Path) -> None:
    (adapter / "README.md").write_text(readme)
    build_routed("llama").save_pretrained(adapter)
    card = ModelCard.load(adapter / "README.md")
    assert card.data.library_name == "peft" and "My text" in card.text


def test_the_empty_template_is_replaced(adapter: Path) -> None:
    card = ModelCard.from_template(ModelCardData())
    card.data["language"] = "en"
    card.save(adapter / "README.md")
    card = ModelCard.load(write_card(adapter))
    assert "More Information Needed" not in card.text
    assert card.data.language == "en"


def test_results_stay_while_the_adapter_does(adapter: Path) -> None:
    write_card(adapter, [losses()])
    model = peft.PeftModel.from_pretrained(build_base("llama"), adapter)
    model.save_pretrained(adapter)
    kept = ModelCard.load(adapter / "README.md")
    assert "causal threshold" in kept.text and kept.data.eval_results
    set_budget(model, 0.125)
    model.save_pretrained(adapter)
    changed = ModelCard.load(adapter / "README.md")
    assert "causal threshold" not in changed.text and not changed.data.eval_results


# Who writes it


def test_the_trainers_card_tells_its_training(tmp_path: Path) -> None:
    model = build_routed("llama")
    trainer, _ = make_trainer(model, rows(8), tmp_path / "run")
    trainer.train()
    batch = {"input_ids": tokens(4, 12)}
    add_results(model, evaluate_budgets(model, [batch], None, [0.5]))
    trainer.create_model_card(
        license="apache-2.0", tags="mine", dataset="someone/text", dataset_name="of TRL's"
    )
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert (card.data.license, card.data.datasets) == ("apache-2.0", ["someone/text"])
    assert "mine" in card.data.tags
    assert "* Last log entry, step 4: `loss`" in card.text
    assert "`learning_rate` `0.01`" in card.text and "`8` examples" in card.text
    assert "causal threshold" in card.text
    trainer.train()
    assert "causal threshold" not in make_card(model).text  # measured before the last training


def test_a_plain_trainers_checkpoint_has_a_card(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        save_steps=1,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(build_routed("llama"), arguments, train_dataset=rows(4))
    trainer.add_callback(DepthRouteCallback(trainer))
    trainer.train()
    for step in (1, 2):
        assert (
            f"* Last log entry, step {step}: "
            in (tmp_path / f"checkpoint-{step}" / "README.md").read_text()
        )


def test_another_methods_card_is_pefts_own(tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(build_base("llama"), lora).save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert "hf_depthroute" not in card.content and "### Framework versions" in card.text


def test_a_named_adapter_is_loaded_from_its_subfolder(tmp_path: Path) -> None:
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(), adapter_name="router")
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert 'adapter_name="router", subfolder="router"' in text


def test_the_command_writes_the_card(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return int(ended.value.code or 0), *capsys.readouterr()

    result, empty = tmp_path / "eval.json", tmp_path / "empty"
    empty.mkdir()
    result.write_text(json.dumps(losses()))
    code, out, err = run("card", adapter, "--results", result, "--license", "mit")
    assert (code, out, err) == (0, f"wrote {adapter / 'README.md'}\n", "")
    assert ModelCard.load(adapter / "README.md").data.license == "mit"
    code, out, _ = run("card", adapter, "--out", "-")
    assert code == 0 and "## What is routed" in out
    for arguments, expected, message in (
        ([adapter, "--private"], 2, "--private goes with --push-to"),
        ([tmp_path / "absent"], 2, "no such folder"),
        ([adapter, "--results", tmp_path / "absent.json"], 2, "cannot be read"),
        ([empty], 4, "no depth-routed adapter"),
        ([adapter, "--push-to", "me/router"], 3, "HF_HUB_OFFLINE is set"),
        ([adapter, "--push-to", "my router"], 3, "repository my router: no name of a repository"),
    ):
        code, _, err = run("card", *arguments)
        assert code == expected, err
        assert message in err and len(err.splitlines()) == 1


def test_the_weights_are_what_they_were(saved_adapter: Save) -> None:
    model = build_routed("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    add_results(model, losses())
    saved_adapter(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

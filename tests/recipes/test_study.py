"""A study: what its file may say, the same start and batches for every run,
and continuing after any interruption."""

from __future__ import annotations

import copy
import fcntl
import functools
import json
import multiprocessing
import random
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from models import VOCABULARY, build_base, tokens
from safetensors.torch import save_file
from study import run as one_run
from study import runner, step_ratio
from study.__main__ import main
from study.fingerprint import PACKAGE, hash_code
from study.fingerprint import STUDY as STUDY_CODE
from study.grid import read_study
from study.run import DepthRouteTrainer, StudyError
from study.runner import run_study
from torch.utils.flop_counter import FlopCounterMode

from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.data.text import DataError

TIMES = ("train_seconds", "train_cpu_seconds", "step_seconds_median", "refresh_over_forward")
JEPA = {"gate": "jepa", "context_dim": 16, "summary_dim": 8, "action_dim": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "g1": {"label": "G1", "about": "the MLP gate"},
    "g3": {"adapter": JEPA, "training": {"jepa_targets": "deranged"}},
    "bare": {"training": {"oracle": "none"}},
    "joint": {"training": {"oracle": "none"}, "joint": True},
    "memory": {
        "adapter": {"target": "memory", "memory_slots": 4096, "memory_width": 4},
        "training": {"oracle": "none", "cgs_weight": 0.5, "cgs_warmup": 1, "cgs_interval": 2},
        "joint": True,
    },
    "long": {"training": {"oracle": "none"}, "steps": 12},
    "bad": {
        "training": {"learning_rate": 1e30, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    },
    "timed": {
        "training": {"oracle": "none"},
        "iso_compute": {"same_time_as": "g1", "steps_of": "bare"},
    },
}
STUDY: dict[str, Any] = {
    "name": "miniature",
    "base": "base",
    "data": {"blocks": "blocks.safetensors"},
    "steps": 6,
    "batch_size": 2,
    "eval_every": 2,
    "seeds": [42, 7],
    "thresholds": [100, 1.5],
    "adapter": {"layers": "last:2", "gate_input": "residual"},
    "training": {
        "learning_rate": 0.01,
        "warmup_steps": 1,
        "oracle": "all_full",
        "oracle_warmup": 1,
    },
    "configs": ["configs/g1.yaml", "configs/g3.yaml"],
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, blocks of tokens, and config files."""
    folder = tmp_path_factory.mktemp("material")
    build_base("llama").save_pretrained(folder / "base")
    save_blocks(folder / "blocks.safetensors")
    (folder / "configs").mkdir()
    for name, content in CONFIGS.items():
        (folder / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.fixture
def folder(material: Path, tmp_path: Path) -> Path:
    """A copy of the material that a test may change."""
    return Path(shutil.copytree(material, tmp_path / "study"))


@pytest.fixture(autouse=True, scope="module")
def one_thread_per_run() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOKY_MAX_CPU_COUNT", "1")
        yield


def test_preset_of_a_config_stands_between_the_study_and_its_own_fields(folder: Path) -> None:
    (folder / "configs" / "tuned.yaml").write_text(
        "preset: router-tuning\ntraining: {capacity_weight: 4.0}\n"
    )
    study = read_study(
        study_file(
            folder, "tuned", adapter={"gate": "mlp", "layers": [1]}, training={"budget_weight": 2.0}
        )
    )
    (spec, *_) = study.specs()
    assert (spec.adapter["gate"], spec.adapter["layers"]) == ("linear", "before_last:half")
    assert (spec.training["capacity_weight"], spec.training["budget_weight"]) == (4.0, 0.0)
    study = read_study(study_file(folder, "g1", preset="router-tuning", adapter={"layers": [1]}))
    assert (study.adapter["gate"], study.adapter["layers"]) == ("linear", [1])


def save_blocks(path: Path, seed: int = 0) -> None:
    blocks = tokens(19, 16, seed).int()
    save_file({"train": blocks[:11].clone(), "validation": blocks[11:].clone()}, path)


def study_file(folder: Path, *configs: str, **fields: Any) -> Path:
    content = copy.deepcopy(STUDY) | fields
    if configs:
        content["configs"] = [f"configs/{name}.yaml" for name in configs]
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(folder: Path, out: str | Path, *configs: str, **options: Any) -> dict[str, Any]:
    fields = {name: options.pop(name) for name in list(options) if name in STUDY}
    return run_study(read_study(study_file(folder, *configs, **fields)), folder / out, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "cpu_seconds")}
        for row in rows
    ]


def tables(out: Path) -> dict[str, Any]:
    """Everything that a report is made from, by run, without what a clock said."""
    result = {}
    for summary in sorted(out.glob("runs/*/*/summary.json")):
        values = {
            key: value for key, value in json.loads(summary.read_text()).items() if key not in TIMES
        }
        run = summary.parent
        result[f"{run.parent.name}/{run.name}"] = (
            values,
            lines(run / "metrics.jsonl"),
            lines(run / "eval.jsonl"),
        )
    return result


def stamps(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in out.glob("runs/*/*/*")}


@pytest.fixture(scope="module")
def reference(
    one_thread_per_run: None, material: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The tables of an uninterrupted study of two configs and two seeds."""
    folder = Path(shutil.copytree(material, tmp_path_factory.mktemp("reference") / "study"))
    assert run(folder, "out") == {}
    return tables(folder / "out")


@pytest.fixture(scope="module")
def finished(
    one_thread_per_run: None, material: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The material with a finished study of one run, in `out`."""
    folder = Path(shutil.copytree(material, tmp_path_factory.mktemp("finished") / "study"))
    assert run(folder, "out", "g1", seeds=[42]) == {}
    return folder


@pytest.fixture
def ended(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "ended"))


# The study file


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"step": 3}, "unknown key 'step'; did you mean 'steps'?"),
    ({"steps": "many"}, "steps='many' must be an integer"),
    ({"steps": True}, "steps=True must be an integer"),
    ({"eval_every": 0}, "eval_every=0 must be an integer of at least 1"),
    ({"eval_every": 4}, "eval_every=4 must be at most half of steps"),
    ({"seeds": [1, 1]}, "seeds must not be empty, and not repeat anything"),
    ({"seeds": [-1]}, "seeds=[-1] must be a list of integers of at least 0"),
    ({"thresholds": ["low"]}, "thresholds=['low'] must be a list of numbers"),
    ({"data": {"blocks": "b", "length": 8}}, "data: unknown key 'length'"),
    ({"data": {"length": 8}}, "data needs a dataset, or blocks"),
    ({"adapter": {"gates": "mlp"}}, "adapter: 'gates' cannot be set here; did you mean 'gate'?"),
    ({"adapter": {"seed": 3}}, "adapter: 'seed' cannot be set here"),
    ({"adapter": {"gate": "tree"}}, "config g1: gate='tree' is not supported"),
    ({"adapter": {"budget": 1.5}}, "config g1: budget=1.5 must be"),
    ({"training": {"max_steps": 3}}, "training: 'max_steps' cannot be set here"),
    ({"training": {"learning_rate": "1e-3"}}, "YAML reads 1e-3 as text, write 1.0e-03"),
    ({"training": {"bf16": 1}}, "training: bf16=1 must be bool"),
    ({"training": {"jepa_weight": -1.0}}, "config g1: training: jepa_weight=-1.0 must be"),
    ({"training": {"lr_scheduler_type": "zigzag"}}, "config g1: training: "),
    ({"configs": ["configs/none.yaml"]}, "none.yaml: No such file or directory"),
    ({"configs": ["configs/timed.yaml"]}, "config timed: same_time_as='g1' is no config"),
]


@pytest.mark.parametrize(("fields", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_wrong_study_file_is_refused_in_one_line(folder, fields, message):
    with pytest.raises(ConfigError) as refused:
        read_study(study_file(folder, **fields))
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "key 'name' appears twice"),
        ("adapter: {gate: mlp, gate: jepa}\n", "key 'gate' appears twice"),
        ("name: &a x\nbase: *a\n", "aliases are not supported"),
        ("- a\n", "must be a mapping"),
        ("name: [\n", "not valid YAML"),
        ("name: x\n", "base is missing"),
    ],
)
def test_wrong_yaml_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        read_study(tmp_path / "study.yaml")
    assert "\n" not in str(refused.value)


def test_wrong_configs_are_refused(folder):
    for text, message in (
        ("steps: 3\n", "steps=3 must be at least twice the study's eval_every"),
        ("iso_compute: {same_time_as: g1}\n", "needs same_time_as and steps_of"),
        (
            "iso_compute: {same_time_as: g1, steps_of: x}\n",
            "config x: steps_of='x' is itself iso_compute",
        ),
        ("label: 3\n", "label=3 must be text"),
    ):
        (folder / "configs" / "x.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_study(study_file(folder, "g1", "x"))


def test_configs_are_merged_over_the_study_key_by_key(folder):
    study = read_study(study_file(folder, "g1", "g3", "long"))
    specs = {spec.name: spec for spec in study.specs()}
    assert list(specs) == ["g1/42", "g3/42", "long/42", "g1/7", "g3/7", "long/7"]
    assert specs["g3/7"].adapter == STUDY["adapter"] | JEPA
    assert specs["g3/7"].training == STUDY["training"] | {"jepa_targets": "deranged"}
    assert (
        specs["long/7"].training["oracle"] == "none"
        and specs["long/7"].training["warmup_steps"] == 1
    )
    assert (specs["g3/7"].steps, specs["long/7"].steps) == (6, 12)
    assert specs["g3/7"].adapter_config().seed == 7
    assert [spec.name for spec in study.specs(["g3"], [7])] == ["g3/7"]
    with pytest.raises(
        ConfigError, match="--only lang: the study has no such config; did you mean 'long'"
    ):
        study.specs(["lang"])
    with pytest.raises(ConfigError, match="--seeds 8: the study's seeds are 42, 7"):
        study.specs(None, [8])


def test_the_committed_studies_are_valid():
    folder = PACKAGE.parent / "recipes" / "aux_losses"
    files = ("study", "long", "main", "variants", "budget_25")
    pilots, long, *tuned = (read_study(folder / f"{name}.yaml") for name in files)
    assert len(pilots.specs()) == 3 * len(pilots.configs) == 90 and len(long.specs()) == 60
    listed = {
        name
        for file in files
        for name in yaml.safe_load((folder / f"{file}.yaml").read_text())["configs"]
    }
    assert listed == {
        path.relative_to(folder).as_posix() for path in (folder / "configs").rglob("*.yaml")
    }
    for study in tuned:
        assert replace(study, name="", seeds=[], configs=[]) == replace(
            tuned[0], name="", seeds=[], configs=[]
        )


# Runs


def test_a_run_writes_its_records_and_its_summary(reference):
    summary, steps, evaluations = reference["g3/42"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(
        {"loss", "loss_lm", "loss_jepa", "grad_norm", "q_cosine/layer_3"} <= row.keys()
        for row in steps
    )
    assert [row["step"] for row in steps if "loss_util" in row] == [2]
    losses = {row["step"]: row["lm_loss"] for row in evaluations}
    assert list(losses) == [0, 2, 4, 6]
    assert summary["avg_first_half"] == losses[2]
    assert summary["avg_whole"] == pytest.approx((losses[2] + losses[4] + losses[6]) / 3)
    assert summary["endpoint"] == losses[6] and summary["best"] == min(
        losses[step] for step in (2, 4, 6)
    )
    assert summary["hits"] == {"100.0": 0, "1.5": None}
    assert summary["grad_norm_mean"] == pytest.approx(sum(row["grad_norm"] for row in steps) / 6)
    assert summary["layers"].keys() == {"2", "3"}
    layer = summary["layers"]["3"]
    assert layer["q_distance"] == steps[-1]["q_distance/layer_3"] and layer["full_ratio"] == 0.5
    assert 0 <= layer["oracle_auc"] <= 1 and 0 <= layer["oracle_auc_all_full"] <= 1
    assert layer["fork_bias"].keys() == {
        "correlation",
        "sign_agreement",
        "mean_layer_wide",
        "mean_exact",
    }
    assert summary["threshold_full_ratio"] == pytest.approx(0.5, abs=0.05)
    assert summary["frequent_loss"] != summary["rare_loss"]
    assert reference["g1/42"][0]["layers"]["3"]["q_distance"] is None


def test_every_run_of_a_seed_sees_the_same_batches(folder, monkeypatch):
    seen: dict[str, list[torch.Tensor]] = {}

    class Watched(DepthRouteTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.setdefault(self.args.output_dir, []).append(inputs["input_ids"].clone())
            return super().compute_loss(model, inputs, *args, **kwargs)

    monkeypatch.setattr("study.run.DepthRouteTrainer", Watched)
    assert run(folder, "out", "g1", "g3", "long") == {}
    batches = {"/".join(Path(name).parts[-2:]): torch.cat(parts) for name, parts in seen.items()}
    assert torch.equal(batches["g1/42"], batches["g3/42"]) and torch.equal(
        batches["g1/7"], batches["g3/7"]
    )
    # Though its second epoch begins after 11 blocks.
    assert torch.equal(batches["long/42"][:12], batches["g1/42"])
    assert not torch.equal(batches["g1/42"], batches["g1/7"])
    first_epoch = batches["long/42"][:11]
    assert len(first_epoch.unique(dim=0)) == 11


def test_a_memory_trains_with_its_base_and_is_measured(folder: Path) -> None:
    assert run(folder, "out", "memory", seeds=[42]) == {}
    summary, steps, _ = tables(folder / "out")["memory/42"]
    assert any("loss_cgs" in row for row in steps) and not any(
        "loss_budget" in row for row in steps
    )
    assert [0 < layer["oracle_auc"] < 1 for layer in summary["layers"].values()] == [True, True]
    assert summary["threshold_full_ratio"] == 1.0
    assert summary["cost"]["inference_ffn_ratio"] == 2.0


def test_no_run_depends_on_the_runs_before_it(folder):
    assert run(folder, "after", "joint", "bare", seeds=[42]) == {}
    assert run(folder, "alone", "joint", "bare", seeds=[42], only=["bare"]) == {}
    after, alone = tables(folder / "after"), tables(folder / "alone")
    assert alone.keys() == {"bare/42"} and alone["bare/42"] == after["bare/42"]
    joint, bare = after["joint/42"], after["bare/42"]
    assert joint[2][0] == bare[2][0] and joint[2][-1] != bare[2][-1]
    assert joint[0]["trainable_parameters"] > bare[0]["trainable_parameters"]


@pytest.mark.nightly
def test_iso_compute_takes_its_steps_from_a_ratio_that_is_measured_once(
    folder, capsys, monkeypatch
):
    """By a clock that counts the FLOPs of matrix products: nothing beside the test changes it."""
    monkeypatch.setattr(step_ratio, "ROUNDS", 2)
    clock = FlopCounterMode(display=False)
    monkeypatch.setattr(step_ratio.Stopwatch, "_now", staticmethod(clock.get_total_flops))
    with clock:
        assert run(folder, "out", "timed", "bare", "g1", seeds=[7, 42], only=["timed"]) == {}
    assert "miniature: a step of g1 takes " in capsys.readouterr().out
    (name, measured), *others = json.loads((folder / "out/step_ratios.json").read_text()).items()
    assert name == "g1 / bare" and not others
    assert measured["quartiles"] == [measured["ratio"]] * 2 and measured["ratio"] > 1  # labels
    for seed in (7, 42):
        made = json.loads((folder / f"out/runs/timed/{seed}/summary.json").read_text())
        assert made["steps"] == round(6 * measured["ratio"])
    before = stamps(folder / "out")
    assert run(folder, "out", "timed", "bare", "g1", seeds=[7, 42], only=["timed"]) == {}
    assert stamps(folder / "out") == before and "takes" not in capsys.readouterr().out


def test_a_stopwatch_goes_on_with_the_work_of_its_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    watch = step_ratio.Stopwatch()
    watch.on_train_begin(None, None, None)
    began = time.process_time()
    while time.process_time() - began < 0.01:
        pass
    watch.on_train_end(None, None, None)
    assert 0.01 <= watch.seconds <= time.process_time()


def test_iso_compute_follows_the_configs_that_it_compares(folder, monkeypatch):
    """A config that is timed changes: its time is measured again,
    and what was trained for the old time is refused."""
    ratios = iter([2.0, 3.0])
    monkeypatch.setattr(step_ratio, "step_ratio", lambda *_: {"ratio": next(ratios)})
    steps = lambda: json.loads((folder / "out/runs/timed/42/summary.json").read_text())["steps"]  # noqa: E731
    only_timed = functools.partial(
        run, folder, "out", "timed", "bare", "g1", seeds=[42], only=["timed"]
    )
    assert only_timed() == {} and steps() == 12
    ratio_file = folder / "out/step_ratios.json"
    known = json.loads(ratio_file.read_text())
    assert [spec["steps"] for spec in known["g1 / bare"].pop("specs")] == [6, 6]
    ratio_file.write_text(json.dumps(known))  # as earlier versions wrote it
    assert only_timed() == {} and steps() == 12
    ratio_file.write_text(json.dumps({"g1 / bare": {"ratio": 2.0, "specs": [{}, {}]}}))
    with pytest.raises(
        StudyError, match=r"timed/42: made with another specification \(steps 12 -> 18\)"
    ):
        only_timed()
    shutil.rmtree(folder / "out/runs/timed/42")
    assert only_timed() == {} and steps() == 18


def test_a_failing_run_leaves_the_others_alone(folder, capsys):
    failures = run(folder, "out", "bad", "g1", seeds=[42])
    assert failures.keys() == {"bad/42"}
    assert failures["bad/42"].reason.startswith("NonFiniteLossError: step 2: not finite: ")
    assert tables(folder / "out").keys() == {"g1/42"}
    out = capsys.readouterr().out
    assert "[0/2] bad/42 failed: NonFiniteLossError" in out and "[1/2] g1/42 endpoint " in out


# Continuing


def test_complete_runs_are_not_repeated_and_the_study_may_grow(folder, reference, capsys):
    assert run(folder, "out", "g1", seeds=[42]) == {}
    before = stamps(folder / "out")
    # A label is no specification.
    (folder / "configs" / "g1.yaml").write_text('label: "G1 again"\n')
    assert run(folder, "out") == {}
    after = stamps(folder / "out")
    assert {path: after[path] for path in before} == before
    assert tables(folder / "out") == reference
    info = json.loads((folder / "out" / "study.json").read_text())
    assert info["seeds"] == [42, 7] and [config["label"] for config in info["configs"]] == [
        "G1 again",
        "g3",
    ]
    assert "miniature: 1 of 4 runs are complete" in capsys.readouterr().out


def test_a_run_without_summary_starts_again(folder, reference):
    assert run(folder, "out") == {}
    (folder / "out/runs/g3/42/summary.json").unlink()
    with (folder / "out/runs/g3/42/metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert run(folder, "out") == {}
    assert tables(folder / "out") == reference


def change_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_blocks(folder / "blocks.safetensors", seed=1)


def change_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_base("llama", seed=1).save_pretrained(folder / "base")


def change_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CODE", "0123456789abcdef")


def change_versions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "versions", lambda: {**versions, "torch": "99.0"})


versions = runner.versions()


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (change_data, {}, "with other data;"),
        (change_base, {}, "with other base model;"),
        (change_code, {}, "with other code of hf_depthroute;"),
        (change_versions, {}, f'with other versions (torch "{versions["torch"]}" -> "99.0");'),
        (
            None,
            {"batch_size": 1, "thresholds": [1.5]},
            "other settings (batch_size 2 -> 1, thresholds [100.0, 1.5] ->",
        ),
        (
            None,
            {"training": STUDY["training"] | {"rank_weight": 0.5}},
            "(training.rank_weight null -> 0.5)",
        ),
    ],
)
def test_results_of_different_studies_are_never_mixed(ended, monkeypatch, change, fields, message):
    before = stamps(ended / "out")
    if change is not None:
        change(ended, monkeypatch)
    with pytest.raises(StudyError) as refused:
        run(ended, "out", "g1", seeds=[42], **fields)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert "pass another --out" in str(refused.value)
    assert stamps(ended / "out") == before


def test_a_complete_run_of_another_specification_is_refused_and_kept(ended):
    before = stamps(ended / "out")
    (ended / "configs" / "g1.yaml").write_text("training: {util_weight: 0.5}\n")
    with pytest.raises(StudyError, match=r"training.util_weight null -> 0.5\); rename the config"):
        run(ended, "out", "g1", seeds=[42])
    assert stamps(ended / "out") == before


def test_the_code_that_results_depend_on_is_hashed(tmp_path):
    package = tmp_path / "package"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    study = shutil.copytree(
        STUDY_CODE, tmp_path / "study", ignore=shutil.ignore_patterns("__pycache__")
    )
    before = hash_code(package, study)
    for name in ("cli/train.py", "report/plots.py", "bench/suite.py", "files/hub.py"):
        (package / name).write_text("changed\n")
    (study / "table.py").write_text("changed\n")
    assert hash_code(package, study) == before
    for path in (
        package / "training/oracle.py",
        package / "evaluation/perplexity.py",
        study / "metrics.py",
    ):
        path.write_text("changed\n")
        assert hash_code(package, study) != before
        before = hash_code(package, study)


def test_two_starts_never_share_a_folder(folder, monkeypatch):
    monkeypatch.setattr(runner, "_PATIENCE", 0.0)
    (folder / "out").mkdir()
    for name, message in (
        (".lock", "another start of this study is running"),
        (".workers", "are still going"),
    ):
        with (folder / "out" / name).open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(StudyError, match=message):
                run(folder, "out")


def test_folders_and_data_that_cannot_be_used_are_refused(folder, monkeypatch):
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("do not touch")
    with pytest.raises(StudyError, match="holds files but no study"):
        run(folder, "full")
    with pytest.raises(ConfigError, match=r"config g1: layers='last:9': the model has only 4"):
        run(folder, "out", adapter={"layers": "last:9"})
    with pytest.raises(DataError, match="no such file"):
        run(folder, "out", data={"blocks": "none.safetensors"})
    save_file(
        {"train": torch.full((2, 8), VOCABULARY), "validation": torch.ones(2, 8).int()},
        folder / "x.safetensors",
    )
    with pytest.raises(DataError, match="the model's vocabulary"):
        run(folder, "out", data={"blocks": "x.safetensors"})
    save_file({"train": torch.ones(2, 8)}, folder / "x.safetensors")
    with pytest.raises(DataError, match="train must be an integer tensor"):
        run(folder, "out", data={"blocks": "x.safetensors"})
    with pytest.raises(StudyError, match="--engine threads: use one of: processes, ray"):
        run(folder, "out", engine="threads")
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        StudyError, match=r"joblib is not installed: pip install joblib scikit-learn adjustText"
    ):
        run(folder, "out")


def test_text_is_packed_once(folder, monkeypatch):
    from text_models import word_tokenizer, write_text

    word_tokenizer().save_pretrained(folder / "base")
    write_text(folder / "text.txt")
    data = {"dataset": "text.txt", "split": "train[:80%]", "validation_split": "train[80%:]", "length": 16,
            "validation_blocks": 4}  # fmt: skip
    assert run(folder, "out", "g1", data=data, seeds=[7]) == {}
    info = json.loads((folder / "out" / "study.json").read_text())
    assert (
        info["length"] == 16
        and info["data"]["validation_tokens"] == 64
        and info["data"]["tokens"] > 64
    )
    monkeypatch.setattr(runner, "prepare_blocks", None)
    assert run(folder, "out", "g1", "bare", data=data, seeds=[7]) == {}


# The command


def test_the_command_says_how_far_each_run_is_and_takes_other_steps(folder, capfd, monkeypatch):
    monkeypatch.setattr(one_run, "INTERVAL", 0.0)
    study = study_file(folder, "bare", "long", seeds=[42])
    with pytest.raises(SystemExit) as ended:
        main(["run", str(study), "--out", str(folder / "out"), "--steps", "4"])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err
    assert "miniature: reading the data" in err
    assert "[run 1 of 2] bare, seed 42: starts, 4 steps\n" in err
    for step in (1, 2, 3, 4):
        assert re.search(
            rf"^\[run 1 of 2\] bare, seed 42: step {step}/4 \| loss [\d.]+ \| \d+:\d\d left$",
            err,
            re.M,
        )
    assert "[run 2 of 2] long, seed 42: step 8/8 |" in err  # 12 of the file's 6, twice as many
    assert "step" not in out.split("complete;")[1]
    assert read_study(study, 4).eval_every == 2 and read_study(study, 3).eval_every == 1


def test_the_command_prints_one_line_per_run_and_ends_with_what_failed(folder, capfd):
    def study(*arguments: object) -> tuple[int, list[str], list[str]]:
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "run",
                    str(study_file(folder, "g1", "bad")),
                    "--out",
                    str(folder / "out"),
                    *map(str, arguments),
                ]
            )
        out, err = capfd.readouterr()
        told = [
            line
            for line in err.splitlines()
            if not line.startswith(("miniature: reading", "[run "))
        ]
        return int(ended.value.code or 0), out.splitlines(), told

    code, out, err = study("--only", "g1", "--seeds", 42)
    assert (code, err) == (0, []) and len(out) == 2 and out[1].startswith("[1/1] g1/42 endpoint ")
    code, out, err = study("--seeds", "42")
    assert code == 1 and out[0].startswith("miniature: 1 of 2 runs are complete") and len(out) == 2
    assert err[0].startswith("bad/42 failed: NonFiniteLossError: step 2: ")
    assert err[1].startswith("error: 1 run failed; ")
    for arguments, message in (
        (("--only", "g2"), "error: --only g2: the study has no such config"),
        (("--seeds", "x"), "error: --seeds 'x': write integers, such as 42,123"),
        (("--engine", "threads"), "error: --engine threads: use one of: processes, ray"),
        (("--jobs", "0"), "error: Invalid value '0' for '--jobs'"),
    ):
        code, out, err = study(*arguments)
        assert code == 2 and out == [] and len(err) == 1 and err[0].startswith(message)


# Killed


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes that start with everything imported, forked from a server that has
    computed nothing yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["study.runner", "hf_depthroute.inference.calibration", "sklearn.metrics"]
    )
    return context


def test_ray_makes_the_same_tables(folder: Path, reference: dict[str, Any]) -> None:
    pytest.importorskip("ray", reason="ray is an optional extra")
    assert run(folder, "out", jobs=2, engine="ray") == {}
    assert tables(folder / "out") == reference


@pytest.mark.nightly
def test_a_kill_at_any_moment_changes_no_table(folder, reference, processes):
    study, out = read_study(study_file(folder)), folder / "out"
    moments, longest, kills = random.Random(0), 1.5, 0
    while kills < 8:
        process = processes.Process(target=run_study, args=(study, out))
        process.start()
        process.join(moments.uniform(0.1, longest))
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
        else:  # it was complete before it could be killed: once more, and sooner
            assert process.exitcode == 0
            shutil.rmtree(out)
            longest *= 0.7
    assert run_study(study, out) == {}
    assert tables(out) == reference


@pytest.mark.nightly
def test_runs_of_a_killed_start_end_with_it(folder, reference, processes):
    study, out = read_study(study_file(folder)), folder / "out"
    process = processes.Process(target=run_study, args=(study, out), kwargs={"jobs": 2})
    process.start()
    deadline = time.monotonic() + 60
    while len(list(out.glob("runs/*/*/metrics.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()  # its two workers are in the middle of a run each
    process.join()
    assert run_study(study, out) == {}
    assert tables(out) == reference

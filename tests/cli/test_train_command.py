"""`hf-depthroute train`: every field is an option, a run goes on,
and it says what the adapter is worth."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers
import typer
from peft import PeftConfig
from safetensors.torch import load_file
from text_models import save_base, write_text

from hf_depthroute import DepthRouteConfig, RoutingArguments
from hf_depthroute.cli import app, errors, main
from hf_depthroute.cli.training import hold_out
from hf_depthroute.training.checkpoints import MARKER, mark_complete
from hf_depthroute.training.losses import LOSSES
from hf_depthroute.training.presets import PRESETS

Run = Callable[..., tuple[int, str, str]]
# Written by the library, or fixed: trainable_token_indices must stay None.
FILLED = {
    "base_architecture",
    "format_version",
    "library_version",
    "weights_hash",
    "gate_package",
    "gate_module",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def train(
    base: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """`train("--steps", 3) -> (code, stdout, stderr)`, into `tmp_path / "out"`."""
    level = transformers.logging.get_verbosity()
    start = [
        "train",
        "--dataset",
        text,
        "--out",
        tmp_path / "out",
        "--batch-size",
        2,
        "--length",
        16,
        "--steps",
        2,
    ]

    def call(*words: object, model: Path | None = base) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    str(word)
                    for word in (*start, *(() if model is None else ("--model", model)), *words)
                ]
            )
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    yield call
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return content


def config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return content


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


# Options


def test_every_training_argument_and_every_adapter_field_is_an_option() -> None:
    command = typer.main.get_command(app).commands["train"]
    defaults = {parameter.name: parameter.default for parameter in command.params}
    for field in dataclasses.fields(RoutingArguments):
        assert (field.name, defaults.get(field.name, "absent")) == (field.name, field.default)
    inherited = {field.name for field in dataclasses.fields(PeftConfig)}
    written = inherited | FILLED | {"trainable_token_indices", "share_shifts"}
    own = {
        field.name: field.default
        for field in dataclasses.fields(DepthRouteConfig)
        if field.name not in written
    }
    assert own == {name: defaults[name] for name in own}


def test_the_default_weight_of_a_loss_stands_in_its_field() -> None:
    assert {name: term.weight for name, term in LOSSES.items()} == RoutingArguments().weights()


def test_what_an_option_sets_arrives_also_from_yaml(train: Run, tmp_path: Path) -> None:
    """The exit gate trains by its exit loss, which had no option."""
    (tmp_path / "train.yaml").write_text("exit-weight: 0.75\nfused-loss: false\ncontext-dim: 8\n")
    words = (
        "--gate",
        "exit",
        "--target",
        "block",
        "--lm-weight",
        0.25,
        "--threshold",
        0.5,
        "--alive-min",
        0.01,
    )
    code, out, err = train(*words, "--config", tmp_path / "train.yaml", "--logging-steps", 1)
    assert code == 0, err
    assert "exit " in out
    assert any("loss_exit" in entry for entry in record(tmp_path / "out")["log_history"])
    saved = config(tmp_path / "out")
    assert (saved["gate"], saved["threshold"], saved["context_dim"]) == ("exit", 0.5, 8)


def test_a_layer_gets_a_target_and_a_branch_of_its_own(train: Run, tmp_path: Path) -> None:
    patterns = (
        "--target-pattern",
        "1=block",
        "--branch-pattern",
        "1=lowrank",
        "--rank-pattern",
        "1=6",
    )
    code, _, err = train("--layers", "0,1", "--branch", "neurons", "--branch-rank", 8, *patterns)
    assert code == 0, err
    saved = config(tmp_path / "out")
    assert (saved["target_pattern"], saved["branch_pattern"], saved["rank_pattern"]) == (
        {"1": "block"},
        {"1": "lowrank"},
        {"1": 6},
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (("--threshold", "half"), "threshold='half'"),
        (("--target-pattern", "28:block"), "write layer=value, such as 28=block"),
        (("--target-pattern", "1=experts"), "target_pattern={1: 'experts'}"),
        (("--rank-pattern", "1=few"), "use an integer from 1 to 262144"),
        (("--dropped-experts", "0;1"), "--dropped-experts '0;1': write whole numbers"),
        (("--dropped-experts", "0,1/2"), "dropped_experts goes with target='experts'"),
        (("--oracle-gamma", "2"), "oracle_gamma=2.0"),
        (("--loss-weights", "{"), "is not JSON"),
        (("--preset", "router-tunning"), "did you mean"),
        (("--hold-out", "1"), "Invalid value '1' for '--hold-out'"),
    ],
)
def test_a_wrong_value_of_a_field_is_named(
    words: tuple[str, ...], message: str, train: Run
) -> None:
    code, _, err = train(*words)
    assert code == errors.USAGE
    assert message in err


def test_a_preset_is_the_method_and_options_override_it(train: Run, tmp_path: Path) -> None:
    row = PRESETS["conditional-depth-routing-jepa"]
    code, _, err = train(
        "--preset", "conditional-depth-routing-jepa", "--budget", 0.25, "--alive-weight", 0.1
    )
    assert code == 0, err
    saved = config(tmp_path / "out")
    assert {name: saved[name] for name in row.adapter} == {**row.adapter, "budget": 0.25}
    used = record(tmp_path / "out")["arguments"]
    assert (used["oracle"], used["util_weight"], used["alive_weight"], used["lr"]) == (
        "all_full",
        1.0,
        0.1,
        2e-4,
    )
    assert "--preset conditional-depth-routing-jepa" in " ".join(
        record(tmp_path / "out")["command"]
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (("--hold-out", 0.1, "--validation-split", "train"), "--hold-out has no effect with"),
        (("--hold-out", 0, "--validation-blocks", 2), "--validation-blocks has no effect with"),
        (("--budget-start", 0.9), "without --budget-schedule-steps above 0"),
        (("--temperature-start", 3), "without --temperature-schedule-steps above 0"),
        (("--oracle-window", 4), "without --oracle all_full or on_policy"),
        (("--util-weight", 2), "without --oracle all_full or on_policy"),
        (("--cgs-warmup", 4), "without --cgs-weight above 0"),
        (("--alive-weight", 0, "--alive-min", 0.1), "without --alive-weight above 0"),
        (("--controller-step", 0.1), "without --selection controller"),
        (("--jepa-weight", 2), "without --gate jepa"),
        (("--gate", "jepa", "--jepa-weight", 0, "--jepa-targets", "deranged"), "--jepa-weight"),
        (("--predictor-weight", 2), "without --causal-rule predictor"),
        (("--preset", "loss-free-balancing", "--budget-start", 0.9), "without --budget-schedule"),
    ],
)
def test_an_option_for_another_one_that_is_missing_is_refused(
    words: tuple[object, ...], message: str, train: Run
) -> None:
    code, _, err = train(*words)
    assert code == errors.USAGE
    assert "no effect" in err and message in err


@pytest.mark.parametrize(
    "words",
    [
        ("--preset", "loss-free-balancing", "--controller-step", 0.02),
        ("--oracle", "on_policy", "--oracle-warmup", 0, "--util-weight", 0.5),
        ("--util-weight", 0, "--jepa-weight", 0),  # what is, said
        ("--hold-out", 0, "--validation-split", "train", "--validation-blocks", 1),
    ],
)
def test_an_option_that_has_its_other_one_is_taken(words: tuple[object, ...], train: Run) -> None:
    code, _, err = train(*words)
    assert code == 0, err


# Going on


OTHER_OPTIONS = [
    ("--lr", 2e-4, 1e-3),
    ("--warmup-steps", None, 3),
    ("--batch-size", 2, 3),
    ("--accumulate", 1, 2),
    ("--length", 16, 8),
    ("--alive-weight", 0.5, 0.25),
    ("--hold-out", 0.05, 0.1),
    ("--calibration-blocks", 64, 8),
]


def test_resume_of_a_longer_run_says_so(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--save-steps", 2)
    with monkeypatch.context() as patch:
        patch.setattr("hf_depthroute.inference.calibration.calibrate", lambda *args: 1 / 0)
        assert train(*words, "--steps", 3)[0] == errors.OTHER
    code, out, err = train(*words, "--steps", 5, "--resume")
    assert code == 0, err
    assert "note: --steps is 5 from here on" in out and "was trained with 3" in out
    assert record(tmp_path / "out")["arguments"]["steps"] == 5


def test_resume_of_a_checkpoint_without_options_compares_what_its_trainer_had(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--save-steps", 2, "--steps", 4)
    with monkeypatch.context() as patch:
        patch.setattr("hf_depthroute.inference.calibration.calibrate", lambda *args: 1 / 0)
        assert train(*words)[0] == errors.OTHER
    checkpoint = tmp_path / "out" / "checkpoint-4"
    noted = json.loads((checkpoint / "training.json").read_text())
    del noted["arguments"]
    (checkpoint / "training.json").write_text(json.dumps(noted))
    mark_complete(checkpoint)
    code, _, err = train(*words, "--resume", "--lr", 1e-3)
    assert code == errors.USAGE and "was trained with --lr 0.0002, not 0.001" in err
    assert train(*words, "--resume")[0] == 0


def test_resume_ends_where_an_uninterrupted_run_ends(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--steps", 5, "--save-steps", 2, "--gate", "jepa")
    assert train(*words)[0] == 0
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    whole = weights(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")

    step = transformers.Trainer.training_step
    with monkeypatch.context() as patch:

        def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 4:
                raise KeyboardInterrupt
            return step(self, *args, **kwargs)

        patch.setattr(transformers.Trainer, "training_step", fail)
        assert train(*words)[0] == errors.INTERRUPTED
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint-2", "checkpoint-4"}
    code, _, err = train(*words)
    assert code == errors.USAGE and "pass --resume" in err
    code, _, err = train(*words, "--resume", "--budget", 0.75)
    assert code == errors.USAGE and "checkpoint-4 was trained with budget=0.5, not 0.75" in err
    code, _, err = train(*words, "--resume", "--phases", "prefill")
    assert code == errors.USAGE and "checkpoint-4 was trained with phases=all, not prefill" in err
    code, _, err = train(*words, "--resume", "--seed", 1)
    assert code == errors.USAGE and "checkpoint-4 was trained with seed=0, not 1" in err
    for option, before, now in OTHER_OPTIONS:
        code, _, err = train(*words, "--resume", option, now)
        assert (
            code == errors.USAGE
            and f"checkpoint-4 was trained with {option} {before}, not {now}" in err
        )
    (tmp_path / "out" / "checkpoint-4" / MARKER).unlink()
    code, out, err = train(*words, "--resume", "--logging-steps", 1)
    assert code == 0, err
    assert record(tmp_path / "out")["arguments"]["lr"] == 2e-4
    assert "passed over checkpoint-4" in out and "going on from" in out and "checkpoint-2" in out
    assert weights(tmp_path / "out") == whole
    assert "--resume" not in record(tmp_path / "out")["command"]
    assert "seconds, resumed at step `2`\n" in (tmp_path / "out" / "README.md").read_text()
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_resume_without_a_checkpoint_begins_and_says_so(train: Run) -> None:
    code, out, err = train("--resume")
    assert code == 0, err
    assert "training begins at the first step" in out


def test_a_run_that_died_after_its_last_step_is_only_finished(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--steps", 4, "--save-steps", 2)
    assert train(*words)[0] == 0
    whole, history = weights(tmp_path / "out"), record(tmp_path / "out")["log_history"]
    shutil.rmtree(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("hf_depthroute.inference.calibration.calibrate", lambda *args: 1 / 0)
        assert train(*words)[0] == errors.OTHER
    code, _, err = train(*words, "--resume")
    assert code == 0, err
    assert weights(tmp_path / "out") == whole
    assert [entry["step"] for entry in record(tmp_path / "out")["log_history"]] == [
        e["step"] for e in history[:-1]
    ]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == []


def test_resume_names_what_is_wrong_with_every_checkpoint(train: Run, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    code, _, err = train("--resume")
    assert code == errors.USAGE
    assert "no checkpoint is whole (checkpoint-7: it was not saved to the end" in err


@pytest.mark.parametrize("spelling", [[], ["--adapter"]], ids=["position", "option"])
def test_an_adapter_is_trained_on(
    spelling: list[str], train: Run, base: Path, tmp_path: Path
) -> None:
    assert train("--layers", "1,3", "--budget", 0.25, "--lr", "1e-2")[0] == 0
    first = tmp_path / "first"
    (tmp_path / "out").rename(first)
    code, _, err = train(*spelling, first, "--steps", 1, "--lr", "1e-9", model=None)
    assert code == 0, err
    command = record(tmp_path / "out")["command"]
    assert (
        command.count(str(first)) == 1
        and [word for word in command if word.endswith("adapter")] == spelling
    )
    saved, arguments = config(tmp_path / "out"), record(tmp_path / "out")["arguments"]
    assert (saved["layers"], saved["budget"]) == ([1, 3], 0.25)
    assert (arguments["adapter"], arguments["model"]) == (str(first), str(base))
    one, two = (
        load_file(folder / "adapter_model.safetensors") for folder in (first, tmp_path / "out")
    )
    trained = [name for name in one if "branch" in name and name.endswith("weight")]
    assert trained and all((one[name] - two[name]).abs().max() < 1e-6 for name in trained)
    assert weights(first) != weights(tmp_path / "out")


@pytest.mark.parametrize(
    "words", [("--budget", "0.5"), ("--preset", "dlo"), ("--gate", "mlp", "--layers", "all")]
)
def test_an_adapter_that_is_trained_on_keeps_its_configuration(
    words: tuple[str, ...], train: Run
) -> None:
    code, _, err = train("--adapter", "adapter", *words, model=None)
    assert code == errors.USAGE
    assert words[0] in err and "with --adapter it is what adapter says" in err


# From a fit


FROM_FIT = (
    "--init",
    "fit",
    "--layers",
    "all",
    "--gate",
    "affine",
    "--batch-size",
    4,
    "--length",
    32,
)


@pytest.fixture
def longer(tmp_path: Path) -> tuple[str, Path]:
    """Enough text to fit to."""
    return "--dataset", write_text(tmp_path / "longer.txt", 200)


def test_training_starts_from_a_fit_and_keeps_its_record(
    train: Run, longer: tuple[str, Path], tmp_path: Path
) -> None:
    code, out, err = train(*longer, *FROM_FIT, "--steps", 1, "--lr", "1e-9")
    assert code == 0, err
    assert "fitted to " in out and "of the tokens run full" in out
    found, saved = record(tmp_path / "out"), config(tmp_path / "out")
    assert found["fit"]["keep"] == 0.5
    assert (saved["budget_scope"], saved["selection"]) == ("global", "threshold")
    assert "training started from a fit to" in (tmp_path / "out" / "README.md").read_text()
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    downs = [value for name, value in tensors.items() if "down" in name]
    # Those of a random start are zero.
    assert downs and all(down.abs().max() > 1e-3 for down in downs)


def test_a_budget_of_a_fit_is_that_of_the_layers_named(
    train: Run, longer: tuple[str, Path], tmp_path: Path
) -> None:
    code, _, err = train(*longer, *FROM_FIT, "--layers", "1,3", "--budget", 0.25)
    assert code == 0, err
    found = record(tmp_path / "out")["fit"]
    assert found["keep"] == (0.25 * 2 + 2) / 4 and set(found["layers"]) == {"1", "3"}


def test_resume_does_not_fit_again(
    train: Run, longer: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*longer, *FROM_FIT, "--steps", 4, "--save-steps", 2)
    assert train(*words)[0] == 0
    whole, fit = weights(tmp_path / "out"), record(tmp_path / "out")["fit"]
    shutil.rmtree(tmp_path / "out")
    step = transformers.Trainer.training_step
    with monkeypatch.context() as patch:

        def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3:
                raise KeyboardInterrupt
            return step(self, *args, **kwargs)

        patch.setattr(transformers.Trainer, "training_step", fail)
        assert train(*words)[0] == errors.INTERRUPTED

    monkeypatch.setattr("hf_depthroute.cli.training.fit_router", lambda *args, **kwargs: 1 / 0)
    for other in (("--budget", 0.75), ("--layers", "0,1,2")):
        code, _, err = train(*words, "--resume", *other)
        assert (
            code == errors.USAGE and "not trained from a fit of this --budget and --layers" in err
        )
    code, _, err = train(*words, "--resume", "--branch-rank", 3)
    assert code == errors.USAGE and "was trained with branch_rank=4, not 3" in err
    code, out, err = train(*words, "--resume")
    assert code == 0, err
    assert "going on from" in out and "fitted to" not in out
    assert weights(tmp_path / "out") == whole
    assert record(tmp_path / "out")["fit"] == fit


@pytest.mark.parametrize(
    "words, message",
    [
        (("--init", "zeros"), "--init zeros: use random or fit"),
        (("--init", "fit", "--selection", "gumbel"), "leave --selection and --budget-scope out"),
        (("--init", "fit", "--budget-scope", "layer"), "leave --selection and --budget-scope out"),
        (("--init", "fit", "--gate", "jepa"), "gate='jepa' is not fitted"),
        (("--init", "fit", "--budget", "1"), "between 0 and 1"),
        (("--init", "fit", "--calibration-blocks", "2"), "512 is the least"),
    ],
)
def test_what_a_fit_cannot_start_is_refused(
    words: tuple[str, ...], message: str, train: Run
) -> None:
    code, _, err = train(*words)
    assert code == errors.USAGE
    assert message in err


def test_an_adapter_that_is_trained_on_is_not_fitted(train: Run) -> None:
    code, _, err = train("--adapter", "adapter", "--init", "fit", model=None)
    assert code == errors.USAGE
    assert "--init: defines a new adapter" in err


# Before training and after it


def test_too_little_space_is_found_before_training(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trains(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr(transformers.Trainer, "train", trains)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9 - 4096, 4096)
    )
    code, _, err = train()
    assert code == errors.RESOURCES
    assert "bytes and only 4,096 are free there" in err
    assert not (tmp_path / "out").exists()


def test_without_validation_text_a_part_is_held_out_and_compared(
    train: Run, tmp_path: Path
) -> None:
    for words in ((), ("--streaming", "--overwrite")):
        code, out, err = train(*words, "--validation-blocks", 2)
        assert code == 0, err
        assert "held out" in out
        assert "validation loss: dense" in out and "of the tokens run full" in out
        held_out = record(tmp_path / "out")["held_out_blocks"]
        assert 1 <= held_out <= 2
        assert f"{held_out} blocks held out" in (tmp_path / "out" / "README.md").read_text()
    code, out, _ = train("--hold-out", 0, "--overwrite")
    assert code == 0
    assert (
        "pass --validation-split, --eval-dataset or --hold-out" in out
        and "validation loss" not in out
    )


def test_what_is_held_out_is_not_trained_on() -> None:
    rows = datasets.Dataset.from_dict({"row": list(range(100))})
    for packed in (rows, rows.to_iterable_dataset()):
        train, validation = hold_out(packed, 0.05, most=4)
        kept, held = ([row["row"] for row in part] for part in (train, validation))
        assert len(held) == 4 and sorted(kept + held) == list(range(100))
    assert hold_out(rows, 0.0, 4) == (rows, None)
    assert hold_out(rows.select([0]), 0.5, 4)[1] is None
    assert [len(part) for part in hold_out(rows.select([0, 1]), 0.01, 4)] == [1, 1]


def test_a_data_set_saved_to_disk_is_trained_on(train: Run, text: Path, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": text.read_text().splitlines()})
    rows.save_to_disk(tmp_path / "rows")
    code, _, err = train("--dataset", tmp_path / "rows", "--split", "train[:80%]")
    assert code == 0, err


def test_an_adapter_that_cannot_pay_for_itself_is_said(train: Run) -> None:
    code, out, err = train("--gate", "jepa", "--layers", "all")
    assert code == 0, err
    assert "cannot pay for itself" in out and "context_dim (now " in out
    assert (
        "cannot pay for itself"
        not in train("--gate", "linear", "--branch", "none", "--overwrite")[1]
    )


def test_overwriting_keeps_what_somebody_wrote_into_the_readme(train: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train()[0] == 0
    (out / "README.md").write_text(
        "My own words.\n" + (out / "README.md").read_text().partition("---\n\n")[2]
    )
    assert train("--overwrite")[0] == 0
    assert "My own words." in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("broken", "missing"),
    [
        ("transformers.PreTrainedTokenizerBase.save_pretrained", "tokenizer_config.json"),
        ("hf_depthroute.files.staged.write_json", "training.json"),
        ("hf_depthroute.card.peft_cards.write_card", "README.md"),
    ],
)
def test_what_goes_with_an_adapter_does_not_cost_the_training(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, missing: str
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr(broken, full)
    code, _, err = train()
    assert code == 0, err
    (note,) = [
        line for line in err.splitlines() if line.startswith("note: ") and "was not written" in line
    ]
    assert "No space left" in note
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert missing not in found and {"adapter_config.json", "adapter_model.safetensors"} <= found

"""What training prints is for people: one line per log entry;
the values per layer go to the logs."""

from __future__ import annotations

import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from models import build_routed
from training import Row, rows, training_arguments
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer
from transformers.integrations import integration_utils

from hf_depthroute import (
    DepthRouteCallback,
    DepthRouteConfig,
    DepthRouteTrainer,
    get_depth_routed_model,
)
from hf_depthroute.training.arguments import RoutingArguments
from hf_depthroute.training.log_lines import (
    duration,
    log_line,
    missed_budget,
    unfinished_schedules,
)

DEPTH = 24
LINE = re.compile(
    r"step \d+/2 \| loss [\d.e-]+ \| lm [\d.e-]+, budget [\d.e-]+, alive [\d.e-]+ \| full \d+\.\d% "
    r"\| gate p 0\.\d+ \| "
    r"grad [\d.e-]+ \| lr [\d.e-]+ \| \d+:\d\d left"
)


def deep_model() -> Any:
    """24 layers, all routed: 72 values per layer and log entry."""
    sizes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
    base = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=DEPTH, **sizes)
    )
    return get_depth_routed_model(
        base, DepthRouteConfig(layers="all", gate_hidden=4, branch_rank=2)
    )


def trained(folder: Path, trainer: type[Trainer] = DepthRouteTrainer, **fields: Any) -> Trainer:
    data: list[Row] = rows(4)
    arguments = training_arguments(folder, max_steps=2, logging_steps=1, **fields)
    made = trainer(model=deep_model(), args=arguments, train_dataset=data)
    made.train()
    return made


def per_layer(entry: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if "layer_" in name}


@pytest.mark.parametrize("trainer", [DepthRouteTrainer, Trainer])
@pytest.mark.parametrize("bar", [False, True], ids=["lines", "bar"])
def test_a_log_entry_is_one_short_line_and_the_layers_are_in_the_history(
    trainer: type[Trainer], bar: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trained(tmp_path, trainer, disable_tqdm=not bar)
    out = capsys.readouterr().out
    first, second, end = (line for line in out.splitlines() if line.startswith(("step", "trained")))
    for line in (first, second):
        assert LINE.fullmatch(line), line
        assert len(line) < 160
    assert second.endswith("0:00 left")
    assert re.fullmatch(r"trained 2 steps in \d+:\d\d \(.+ steps/s\), mean loss [\d.]+", end)
    assert "layer_" not in out and "{" not in out
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert [len(per_layer(entry)) for entry in logged] == [3 * DEPTH] * 2


def test_a_printer_of_the_callers_own_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Own(PrinterCallback):
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            print("my own line")

    arguments = training_arguments(tmp_path, max_steps=1)
    trainer = DepthRouteTrainer(
        model=deep_model(), args=arguments, train_dataset=rows(4), callbacks=[Own]
    )
    trainer.train()
    own, line, own_at_end, end = capsys.readouterr().out.splitlines()
    assert own == own_at_end == "my own line"
    assert line.startswith("step 1/1") and end.startswith("trained 1 step in ")


def test_a_plain_model_is_printed_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = training_arguments(tmp_path, max_steps=1, logging_steps=1)
    base = deep_model().unload().requires_grad_(True)
    Trainer(model=base, args=arguments, train_dataset=rows(4)).train()
    assert "{'loss'" in capsys.readouterr().out


class Settings(dict[str, Any]):
    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:  # type: ignore[override]
        super().update(values)


class Trackio(types.ModuleType):
    """What transformers' `TrackioCallback` calls, keeping what it is given."""

    __version__ = "0.43.0"
    __spec__ = ModuleSpec("trackio", None)

    def __init__(self) -> None:
        super().__init__("trackio")
        self.entries: list[dict[str, Any]] = []
        self.config = Settings()
        self.context_vars = types.SimpleNamespace(
            current_space_id=types.SimpleNamespace(get=lambda: None)
        )

    def init(self, **fields: Any) -> None:
        self.project = fields["project"]

    def log(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)

    def finish(self) -> None:
        self.finished = True


def test_trackio_gets_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers' own callback; trackio itself brings a web server, which no test needs."""
    trackio = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: True)
    trained(tmp_path, report_to=["trackio"], project="routed")
    assert trackio.project == "routed" and trackio.finished
    logged = [entry for entry in trackio.entries if "train/loss" in entry]
    assert [entry["train/global_step"] for entry in logged] == [1, 2]
    assert all(
        len(per_layer(entry)) == 3 * DEPTH and "train/loss_budget" in entry for entry in logged
    )


def test_lines_of_other_entries() -> None:
    evaluated = log_line({"eval_loss": 3.25, "eval_runtime": 1.5, "epoch": 0.1}, 20, 1000, 4000)
    assert evaluated == "step   20/1000 | eval_loss 3.25 | eval_runtime 1.5 | 1:06:40 left"
    tuned = log_line(
        {"loss": 1.0, "num_tokens": 4096, "full_ratio/layer_1": 0.25, "full_ratio/layer_3": 0.75},
        1,
        9,
    )
    assert tuned == "step 1/9 | loss 1 | full 50.0% | num_tokens 4096"
    assert duration(75.4) == "1:15"


def test_a_fixed_threshold_that_ends_far_from_its_budget_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Router-Tuning's gates do where its loss is too weak;
    a gate with a calibrated threshold is left alone."""
    for gate, budget in (("linear", 0.01), ("linear", 0.99), ("mlp", 0.01)):
        model = build_routed("llama", gate, budget=budget)
        arguments = training_arguments(tmp_path, max_steps=1, logging_steps=1, learning_rate=1e-9)
        DepthRouteTrainer(model=model, args=arguments, train_dataset=rows(4)).train()
        out = capsys.readouterr().out
        share = float(re.search(r"full ([\d.]+)%", out)[1]) / 100  # type: ignore[index]
        said = f"far from the budget of {budget:.1%}: the threshold of this gate is fixed at" in out
        assert said == (gate == "linear" and abs(share - budget) > 0.1), (gate, out)


@pytest.mark.parametrize("ours", [True, False])
def test_a_schedule_that_does_not_end_is_said_before_the_first_step(
    ours: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedules = {"budget_schedule_steps": 8, "temperature_schedule_steps": 2}
    model = build_routed("llama")
    fields = {"max_steps": 2, "logging_steps": 1}
    if ours:
        arguments = training_arguments(tmp_path, **schedules, **fields)
        trainer: Any = DepthRouteTrainer(model=model, args=arguments, train_dataset=rows(4))
    else:
        trainer = Trainer(
            model=model,
            args=training_arguments(tmp_path, **fields),
            train_dataset=rows(4),
            callbacks=[DepthRouteCallback(arguments=RoutingArguments(**schedules))],
        )
    trainer.train()
    first, *others = capsys.readouterr().out.splitlines()
    assert first == (
        "note: budget_schedule_steps=8 is longer than this training of 2 steps, which ends at a "
        "budget of 0.938, not at the adapter's 0.5: train for at least 8 steps, or make the "
        "schedule shorter"
    )
    assert not [line for line in others if "schedule" in line]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"budget_schedule_steps": 10}, []),
        ({"budget_schedule_steps": 11}, ["budget"]),
        ({"budget_schedule_steps": 11, "budget_start": 0.5}, []),
        ({"temperature_schedule_steps": 99, "temperature_start": 8.0}, ["temperature"]),
        ({"temperature_schedule_steps": 99}, []),  # from 2 to 2
    ],
)
def test_what_a_training_of_ten_steps_leaves_unfinished(
    fields: dict[str, Any], names: list[str]
) -> None:
    config = DepthRouteConfig()
    lines = unfinished_schedules(RoutingArguments(**fields), config, 10)
    assert [line.split("_")[0] for line in lines] == [f"note: {name}" for name in names]
    static = DepthRouteConfig(gate="none")
    assert unfinished_schedules(RoutingArguments(**fields), static, 10) == []
    assert unfinished_schedules(RoutingArguments(**fields), config, 0) == []


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"oracle": "all_full", "oracle_warmup": 9}, []),
        ({"oracle": "all_full", "oracle_warmup": 10}, ["oracle_warmup=10"]),
        ({"oracle_warmup": 10, "cgs_warmup": 10}, []),  # neither is used
        ({"cgs_weight": 0.5}, ["cgs_warmup=500"]),
    ],
)
def test_labels_that_a_training_of_ten_steps_never_makes(
    fields: dict[str, Any], names: list[str]
) -> None:
    lines = unfinished_schedules(RoutingArguments(**fields), DepthRouteConfig(), 10)
    said = [f"note: {name}: a training of 10 steps makes no labels" for name in names]
    assert [line.partition(", so")[0] for line in lines] == said


def test_a_resumed_training_says_which_steps_it_took() -> None:
    end = {"train_runtime": 2.0, "train_steps_per_second": 2.0, "train_loss": 5.5}
    assert log_line(end, 44, 44) == "trained 44 steps in 0:02 (2 steps/s), mean loss 5.5"
    resumed = "trained 4 steps, up to step 44, in 0:02 (2 steps/s), mean loss 5.5"
    assert log_line(end, 44, 44, first_step=40) == resumed


@pytest.mark.parametrize(("share", "said"), [(0.65, False), (0.9, True), (0.3, True)])
def test_the_last_entry_with_shares_counts(share: float, said: bool) -> None:
    config = DepthRouteConfig(gate="linear", budget=0.6)
    history = [
        {"full_ratio/layer_1": 0.6},
        {"full_ratio/layer_1": share, "full_ratio/layer_2": share},
        {"loss": 1.0},
    ]
    assert (missed_budget(config, history) is not None) == said
    assert missed_budget(config, []) is None
    assert missed_budget(DepthRouteConfig(gate="sinks", budget=0.6), history) is None

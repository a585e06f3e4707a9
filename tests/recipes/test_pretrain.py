"""The recipe that pretrains the base models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_base import pretrain
from places import ROOT

LINES = [f"value_{n} = combine(first={n % 7}, second={n % 11})  # line {n}" for n in range(600)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on a few lines and a tiny model; `stop` is called with every row of the log."""
    texts = {"train": LINES[:500], "validation": LINES[500:]}
    monkeypatch.setattr(pretrain, "load_text", lambda source, split: {"text": texts[split]})
    monkeypatch.setitem(
        pretrain.SHAPES, "wide_base", pretrain.Shape(32, 64, 2, 4, 2, 300, False, "muon", 1e-2)
    )
    monkeypatch.setattr(pretrain, "CARDS", tmp_path)
    shutil.copy(ROOT / "model_cards" / "wide_base.template.md", tmp_path)
    write, terminated = pretrain.Log.write, signal.getsignal(signal.SIGTERM)

    def command(folder: str, *options: str, stop: Any = None) -> Path:
        def write_and_stop(log: pretrain.Log, row: dict[str, float]) -> None:
            write(log, row)
            if stop:
                stop(row["step"])

        monkeypatch.setattr(pretrain.Log, "write", write_and_stop)
        given = [
            "--shape",
            "wide_base",
            "--out",
            str(tmp_path / folder / "model"),
            "--work",
            str(tmp_path / folder),
        ]
        sizes = [
            "--batch",
            "4",
            "--length",
            "16",
            "--warmup",
            "2",
            "--log-every",
            "1",
            "--validate-every",
            "3",
        ]
        monkeypatch.setattr(sys, "argv", ["pretrain.py", *given, *sizes, *options])
        pretrain.main()
        return tmp_path / folder

    yield command
    signal.signal(signal.SIGTERM, terminated)


def terminate_at(last: int) -> Any:
    return lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == last else None


def kill_at(last: int) -> Any:
    def stop(step: int) -> None:
        if step == last:
            raise RuntimeError("killed")

    return stop


def learned(folder: Path) -> tuple[bytes, list[dict[str, float]]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for row in rows:
        del row["tokens_per_second"]
    return (folder / "model" / "model.safetensors").read_bytes(), rows


def test_a_run_stopped_and_killed_ends_as_one_that_was_not(run: Any) -> None:
    whole = run("whole", "--steps", "10")
    run("parts", "--steps", "10", stop=terminate_at(4))
    with pytest.raises(RuntimeError, match="killed"):
        run("parts", "--steps", "10", "--save-seconds", "0", stop=kill_at(7))
    assert torch.load(run("parts", "--steps", "10") / "checkpoint.pt")["step"] == 10
    model, rows = learned(whole)
    assert (model, rows) == learned(whole.parent / "parts")
    assert [row["step"] for row in rows] == list(range(1, 11)) and rows[8][
        "validation_loss"
    ] < rows[2]["validation_loss"]


def test_finishing_lets_the_rate_fall_to_zero_and_leaves_the_run_as_it_was(run: Any) -> None:
    run("one", stop=terminate_at(12))
    work = run("two", stop=terminate_at(12))
    run("one", "--finish")
    run("two", "--finish", stop=terminate_at(13))
    run("two", "--finish")
    model, rows = learned(work)
    assert (model, rows) == learned(work.parent / "one")
    assert [row["lr"] for row in rows[10:]] == pytest.approx([0.01, 0.01, 0.02 / 3, 0.01 / 3, 0])
    training = json.loads((work / "model" / "training.json").read_text())
    assert training["steps"] == 15 and training["train_tokens_seen"] == 15 * 4 * 16
    assert str(training["validation_loss"]) in (work.parent / "wide_base.md").read_text()

    run("two", stop=terminate_at(14))  # goes on at the constant rate
    assert [row["lr"] for row in learned(work)[1]] == pytest.approx([0.005] + [0.01] * 13)
    assert torch.load(work / "checkpoint.pt")["step"] == 14


def test_a_compiled_run_learns_through_the_compiled_model(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []

    def compile_(model: Any) -> Any:
        return lambda **inputs: called.append(inputs) or model(**inputs)

    plain = run("plain", "--steps", "2")
    monkeypatch.setattr(torch, "compile", compile_)
    assert (
        learned(run("compiled", "--steps", "2", "--compile")) == learned(plain) and len(called) == 2
    )


def test_other_settings_are_not_resumed(run: Any) -> None:
    run("one", "--steps", "1")
    with pytest.raises(SystemExit, match="other settings"):
        run("one", "--steps", "1", "--lr", "0.5")


def test_text_of_packages_holds_no_file_twice_no_copy_of_held_out_text_and_not_this_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = [
        package
        for package in metadata.distributions()
        if package.name in ("pluggy", "iniconfig", "hf_depthroute")
    ]
    monkeypatch.setattr(pretrain.metadata, "distributions", lambda path: some)
    texts, licences = pretrain.package_texts([], ["nothing"])
    assert len(set(texts)) == len(texts) and {name.split()[0] for name in licences} == {
        "pluggy",
        "iniconfig",
    }
    longest, shortest = max(texts, key=len), min(texts, key=len)
    copy = longest.replace("import", "from elsewhere import")
    assert set(pretrain.package_texts([shortest], [copy])[0]) == set(texts) - {longest, shortest}

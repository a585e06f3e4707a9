"""Bytes that are no text, terminals that cannot show it, numbers that are none: one line,
and nothing is measured."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from models import build_routed, routed
from text_models import save_base
from training import make_trainer, rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_depthroute.training.checkpoints import (
    CheckpointError,
    fault_of,
    last_complete,
    mark_complete,
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    base = save_base(folder / "base")
    # Every token is written as a letter that ASCII does not have.
    path = base / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {
        token if token[0] == "<" or token == "the" else f"é{token}": index
        for token, index in content["model"]["vocab"].items()
    }
    path.write_text(json.dumps(content))
    assert "écat" in AutoTokenizer.from_pretrained(base).get_vocab()
    routed(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(folder / "adapter")
    return folder / "adapter"


def process(
    *arguments: str | bytes | Path, stdin: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "hf_depthroute", *arguments],
        input=stdin,
        capture_output=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment,
        timeout=120,
    )


NOT_UTF8 = os.fsdecode(b"caf\xe9")
WORDS: dict[str, list[object]] = {
    "prompt": ["generate", "adapter", "--prompt", NOT_UTF8],
    "title": ["report", "adapter", "--dataset", "x.txt", "--title", NOT_UTF8],
    "path": ["card", NOT_UTF8],
    "out": ["train", "--model", "m", "--dataset", "x.txt", "--out", NOT_UTF8],
    "config": ["train", "--config", NOT_UTF8],
    "command": [NOT_UTF8],
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_words_that_are_no_text_are_refused_at_once(words: list[object]) -> None:
    ended = run(*words)
    assert ended.code == 2
    assert "'caf\\udce9'" in ended.error and "not UTF-8" in ended.error


def test_stdin_that_is_no_text_is_refused(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the caf\xe9\n")))
    ended = run("generate", adapter)
    assert ended.code == 2
    assert ended.error.startswith("the prompt on stdin is not UTF-8: byte 0xe9 at position 7")


def test_stdin_is_utf8_in_every_locale(adapter: Path) -> None:
    ended = process(
        *("generate", adapter, "--max-new-tokens", "2"),
        stdin="the écat".encode(),
        PYTHONIOENCODING="ascii",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii() and b"\\xe9cat" in ended.stdout
    assert b"tokens/s" in ended.stderr


BIG = "9" * 5000


@pytest.mark.parametrize(
    "written",
    [
        f"steps: {BIG}",
        f"seed: 0x{'f' * 9000}",
        "steps: 99999999999999999999",
        "lr: [1, 0x" + "f" * 9000 + "]",
    ],
)
def test_a_huge_integer_in_a_config_is_a_usage_error(written: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(written)
    ended = run(
        "train", "--config", path, "--model", "m", "--dataset", "x.txt", "--out", tmp_path / "out"
    )
    assert ended.code == 2
    assert str(path) in ended.error and len(ended.error) < 500


@pytest.mark.parametrize("option", ["--steps", "--seed", "--batch-size", "--length"])
def test_a_huge_integer_on_the_command_line_is_one(option: str, tmp_path: Path) -> None:
    text = tmp_path / "x.txt"  # one that is missing is refused first
    text.write_text("words")
    ended = run("train", "--model", "m", "--dataset", text, "--out", tmp_path / "out", option, BIG)
    assert ended.code == 2
    assert option in ended.error and len(ended.error) < 500


DAMAGES = [
    "",
    "{",
    "[1]",
    "null",
    '{"temperature": "x"}',
    '{"temperature": [1]}',
    '{"temperature": NaN}',
    '{"temperature": 1e999}',
    '{"temperature": 0}',
    '{"temperature": -1}',
    '{"temperature": true}',
    '{"temperature": 1e31}',
    '{"temperature": 1' + "0" * 400 + "}",
    '{"temperature": 1' + "0" * 5000 + "}",
    '{"temperature": null}',
    '{"temperature": ' + "[" * 100_000,
    '{"Temperature": 1}',
    "\udce9",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_routing_state_is_no_whole_checkpoint(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "routing_state.json").write_bytes(damage.encode("utf-8", "surrogateescape"))
    mark_complete(folder)
    fault = fault_of(folder)
    assert fault is not None and "routing_state.json is corrupt" in fault and "\n" not in fault
    with pytest.raises(CheckpointError, match="routing_state"):
        last_complete(tmp_path)


def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer, _ = make_trainer(build_routed("llama"), rows(16), tmp_path, **fields)
    trainer.train()
    state = tmp_path / "checkpoint-2" / "routing_state.json"
    assert fault_of(state.parent) is None
    size = state.stat().st_size
    state.write_bytes(b"\xff" * size)
    found, skipped = last_complete(tmp_path)
    assert found == tmp_path / "checkpoint-1"
    assert len(skipped) == 1 and "routing_state.json is corrupt" in skipped[0]

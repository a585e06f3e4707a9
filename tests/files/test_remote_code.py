"""The code that a base brings with it runs only where the caller says so,
and nothing asks for it on a terminal."""

from __future__ import annotations

import ast
import builtins
import itertools
import json
import os
import pty
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run
from models import routed
from places import ROOT
from study.__main__ import main as study_main
from text_models import save_base, write_text
from transformers import AutoModelForCausalLM

from hf_depthroute.files.remote_code import code_repositories

OWN = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("code of the base ran")
class OwnConfig(LlamaConfig):
    pass
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
MODEL_CODE = {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
TOKENIZER_CODE = {
    "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
    "tokenizer_class": "OwnTokenizer",
}


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """What the base's code writes when it runs."""
    return tmp_path / "ran"


@pytest.fixture
def bases(tmp_path: Path, marker: Path) -> dict[str, Path]:
    """Bases that ask for code of their own: for an architecture that transformers does not have,
    or a tokenizer."""
    plain = save_base(tmp_path / "plain")
    (plain / "own.py").write_text(OWN.format(marker=str(marker)))
    known, unknown, tokenizer = (
        shutil.copytree(plain, tmp_path / n) for n in ("known", "unknown", "tokenizer")
    )
    edit(known / "config.json", **MODEL_CODE)
    edit(unknown / "config.json", model_type="own_llama", **MODEL_CODE)
    edit(tokenizer / "tokenizer_config.json", **TOKENIZER_CODE)
    return {"plain": plain, "known": known, "unknown": unknown, "tokenizer": tokenizer}


@pytest.fixture
def adapter(bases: dict[str, Path], tmp_path: Path) -> Path:
    model = routed(AutoModelForCausalLM.from_pretrained(bases["plain"], trust_remote_code=False))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def write_study(folder: Path, base: Path, text: Path) -> Path:
    data = {
        "dataset": str(text),
        "length": 16,
        "split": "train[:50%]",
        "validation_split": "train[50%:]",
    }
    (folder / "a.yaml").write_text("adapter: {layers: [1, 2]}")
    content = {
        "name": "s",
        "base": str(base),
        "data": data,
        "seeds": [1, 2, 3],
        "steps": 2,
        "eval_every": 1,
    }
    content |= {"batch_size": 2, "thresholds": [3.0], "configs": ["a.yaml"]}
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    return folder / "study.yaml"


def name_base(adapter: Path, base: Path) -> None:
    edit(adapter / "adapter_config.json", base_model_name_or_path=str(base))


def loading_calls() -> list[str]:
    """Calls of transformers' auto classes that do not say whether remote code is trusted."""
    silent = []
    for path in [*(ROOT / "hf_depthroute").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            what = ast.unparse(node.func)
            loads = what.endswith(".from_pretrained") and ("Auto" in what and "Peft" not in what)
            if loads and "trust_remote_code" not in [word.arg for word in node.keywords]:
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return silent


def test_every_load_says_whether_code_may_run() -> None:
    assert loading_calls() == []


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *itertools.product(
            ["generate", "eval", "train", "report", "study", "lm-eval"], ["unknown", "tokenizer"]
        ),
        ("bench", "unknown"),  # it reads no tokenizer
    ],
)
def test_no_command_asks_and_none_runs_the_code(
    kind: str,
    command: str,
    bases: dict[str, Path],
    adapter: Path,
    marker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda prompt="": asked.append(prompt) or "n")
    name_base(adapter, bases[kind])
    text = write_text(tmp_path / "text.txt")
    if command == "lm-eval":
        pytest.importorskip("lm_eval")
        from hf_depthroute.evaluation.harness import DepthRouteLM

        with pytest.raises(Exception) as caught:  # lm-eval and transformers have several
            DepthRouteLM(None, str(adapter), device="cpu")
        assert "trust_remote_code" in str(caught.value)
    else:
        study = write_study(tmp_path, bases[kind], text)
        arguments: dict[str, list[object]] = {
            "generate": [adapter, "--prompt", "the cat", "--max-new-tokens", 2],
            "eval": [adapter, "--dataset", text, "--length", 16],
            "train": [
                "--model",
                bases[kind],
                "--dataset",
                text,
                "--out",
                tmp_path / "out",
                "--length",
                16,
            ],
            "bench": [adapter, "--batch", 1, "--length", 4, "--decode-steps", 0, "--repeats", 1],
            "report": [adapter, "--dataset", text, "--length", 16],
            "study": [study, "--out", tmp_path / "results"],
        }
        if command == "study":
            ended = run("run", *arguments[command], program=study_main)
        else:
            ended = run(command, *arguments[command])
        assert ended.code == 2, ended.err
        said = ended.err.split("\n")[-2]
        assert said.startswith("error: ") and "code of its own" in said and str(bases[kind]) in said
        assert said.endswith("pass --trust-remote-code")
    assert asked == []
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["known", "tokenizer"])
def test_the_option_runs_the_code_and_names_where_it_is_from(
    kind: str, bases: dict[str, Path], adapter: Path, marker: Path
) -> None:
    name_base(adapter, bases[kind])
    words = ("generate", adapter, "--prompt", "the cat", "--max-new-tokens", 2)
    assert run(*words).code == (0 if kind == "known" else 2)  # transformers has a Llama of its own
    assert not marker.exists()
    ended = run(*words, "--trust-remote-code")
    assert ended.code == 0, ended.err
    assert marker.exists()
    assert f"--trust-remote-code: code of {bases[kind]} may run" in ended.err
    marker.unlink()
    assert run(*words).code == (0 if kind == "known" else 2)  # the word counts once
    assert not marker.exists()


def test_code_of_another_repository_is_named(bases: dict[str, Path]) -> None:
    edit(bases["known"] / "config.json", auto_map={"AutoConfig": "other/repo--own.OwnConfig"})
    edit(
        bases["known"] / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "third/repo--own.T"]},
    )
    assert code_repositories(str(bases["known"])) == [
        str(bases["known"]),
        "other/repo",
        "third/repo",
    ]


def in_terminal(*arguments: object, seconds: float = 100.0) -> tuple[int, str]:
    """Exit code and output of the command line with a terminal as stdin, stdout and stderr;
    nobody types."""
    child, terminal = pty.fork()
    if child == 0:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        os.execvpe(
            sys.executable,
            [sys.executable, "-m", "hf_depthroute", *map(str, arguments)],
            environment,
        )
    end, said = time.monotonic() + seconds, b""
    try:
        while time.monotonic() < end and b"[y/N]" not in said:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # the child has ended
                break
            said += part
    finally:
        os.close(terminal)  # a child that asks reads the end of its input
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.decode()


@pytest.mark.nightly(unless=lambda kind: kind == "unknown")
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
@pytest.mark.parametrize("kind", ["unknown", "tokenizer"])
def test_generate_never_asks_on_a_terminal(
    kind: str, bases: dict[str, Path], adapter: Path, marker: Path
) -> None:
    name_base(adapter, bases[kind])
    code, said = in_terminal("generate", adapter, "--prompt", "the cat", "--max-new-tokens", 2)
    assert "[y/N]" not in said
    (line,) = said.replace("\r\n", "\n").split("\n")[:-1]
    assert line.startswith("error: ") and "--trust-remote-code" in line
    assert code == 2
    assert not marker.exists()

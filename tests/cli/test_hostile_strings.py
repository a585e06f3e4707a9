"""What a stranger wrote into a file is shown, and does nothing to the terminal,
the table or the page that shows it."""

from __future__ import annotations

import ast
import json
import shutil
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from command_line import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import routed
from peft import PeftModel
from safetensors.torch import load_file, save_file
from text_models import save_base, write_text
from transformers import AutoModelForCausalLM

import hf_depthroute
from hf_depthroute.adapter.doctor import examine
from hf_depthroute.adapter.files import CONFIG_NAME, WEIGHTS_NAME, read_config, tensors_hash

FORGED = (
    "me/base\x1b[2K\r\n\x1b[32mok\x1b[0m     hash is "
    "fine\x9b2J\x1b]0;owned\x07\u202ekcab\u2066\x85\u2028"
)
CONTROLS = st.sampled_from(
    [*map(chr, [*range(32), *range(127, 160)]), *"\u202a\u202e\u2066\u2069\u200f\u061c\u2028"]
)
HOSTILE = st.text(
    st.one_of(CONTROLS, st.characters(exclude_categories=["Cs"])), min_size=1, max_size=60
)
STRINGS = (
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "library_version",
    "weights_hash",
    "target",
    "gate",
)
FOLDERS = ("doctor", "card", "generate", "eval", "report", "serve")


def controls(text: str) -> list[str]:
    """What a terminal would act on, apart from the ends of lines."""
    return [
        c
        for c in text
        if c != "\n" and (unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in BIDI)
    ]


BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "adapter"
    routed(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "adapter")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def change(folder: Path, **fields: Any) -> None:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rename_tensor(folder: Path, name: str) -> None:
    """Call one of the tensors `name`, and make the hash fit."""
    tensors = load_file(folder / WEIGHTS_NAME)
    tensors[name] = tensors.pop(sorted(tensors)[0])
    save_file(tensors, folder / WEIGHTS_NAME)
    change(folder, weights_hash=tensors_hash(tensors))


def test_doctor_shows_a_forged_name_in_its_own_line(adapter: Path) -> None:
    change(adapter, base_model_name_or_path=FORGED)
    ended = run("doctor", adapter)
    assert ended.code == 0
    assert controls(ended.out + ended.err) == []
    (line,) = [line for line in ended.out.split("\n") if "me/base" in line]
    assert line.startswith("ok     base: me/base\\x1b[2K\\r\\n\\x1b[32mok") and "\\u202e" in line


@pytest.mark.parametrize("command", FOLDERS)
@pytest.mark.parametrize("where", ["name", "architecture", "tensor", "field"])
def test_no_command_prints_control_characters(
    command: str,
    where: str,
    adapter: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if where == "name":
        change(adapter, base_model_name_or_path=FORGED)
    elif where == "architecture":
        described = read_config(adapter / CONFIG_NAME)["base_architecture"]
        change(adapter, base_architecture=described | {"model_type": FORGED})
    elif where == "tensor":
        rename_tensor(adapter, f"base_model.model.{FORGED}.weight")
    else:
        change(adapter, **{FORGED: FORGED})
    arguments: dict[str, list[object]] = {
        "doctor": [adapter],
        "card": [adapter, "--out", "-"],
        "generate": ["--adapter", adapter, "--prompt", "the cat", "--max-new-tokens", 2],
        "eval": ["--adapter", adapter, "--dataset", text, "--length", 16, "--blocks", 2],
        "report": [adapter, "--dataset", text, "--length", 16, "--blocks", 2],
        "serve": [adapter],
    }
    # A bar of transformers returns to the start of its line.
    transformers.logging.disable_progress_bar()
    monkeypatch.chdir(tmp_path)  # serve changes it
    ended = run(
        command,
        *arguments[command],
        *(["--debug"] if command in ("doctor", "card", "generate") else []),
    )
    assert controls(ended.out + ended.err) == []
    if ended.code:
        assert ended.err.split("\n")[-2].startswith("error: ")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    hostile=HOSTILE,
    field=st.sampled_from([*STRINGS, "sizes", "tensor", "unknown", "peft_type", "modules"]),
)
def test_any_string_of_an_adapter_is_shown(
    hostile: str, field: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "any"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    if field == "sizes":
        change(folder, base_architecture={hostile: hostile, "model_type": hostile})
    elif field == "tensor":
        rename_tensor(folder, hostile)
    elif field == "unknown":
        change(folder, **{hostile: 1})
    elif field == "modules":
        change(folder, modules_to_save=[hostile])
    else:
        change(folder, **{field: hostile})
    diagnosed = run("doctor", folder)
    assert controls(diagnosed.out + diagnosed.err) == []
    assert all(
        line[:7].strip() in ("ok", "note", "fault") for line in diagnosed.out.split("\n")[:-1]
    )
    carded = run("card", folder, "--out", "-")
    assert controls(carded.out + carded.err) == []


@pytest.mark.parametrize("where", ["tensor", "architecture", "field", "hash"])
def test_errors_of_the_library_are_one_printable_line(
    where: str, adapter: Path, base: Path
) -> None:
    if where == "tensor":
        rename_tensor(adapter, f"base_model.model.{FORGED}.weight")
    elif where == "architecture":
        described = read_config(adapter / CONFIG_NAME)["base_architecture"]
        change(adapter, base_architecture=described | {FORGED: FORGED})
    elif where == "field":
        change(adapter, **{FORGED: FORGED})
    else:
        described = read_config(adapter / CONFIG_NAME)["base_architecture"]
        names = sorted(described["sampled_weights"])
        change(
            adapter, base_architecture=described | {"sampled_weights": {FORGED: 1.0, names[0]: 1e9}}
        )
    with pytest.raises(ValueError) as caught:
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    said = str(caught.value)
    assert controls(said) == [] and "\n" not in said
    assert all(controls(found.text) == [] and "\n" not in found.text for found in examine(adapter))


def test_a_warning_shows_the_name_of_a_missing_file(tmp_path: Path) -> None:
    from hf_depthroute.training.checkpoints import MARKER, CheckpointError, last_complete

    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / MARKER).write_text(json.dumps({FORGED: 3}))
    with pytest.raises(CheckpointError) as caught, warnings.catch_warnings():
        last_complete(tmp_path)
    assert controls(str(caught.value)) == [] and "\n" not in str(caught.value)


def test_a_table_shows_names_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from hf_depthroute.cli.output import print_table

    print_table(("task",), [(FORGED,), ("[red]piqa[/red]",)])
    out = capsys.readouterr().out
    assert controls(out) == [] and "[red]piqa[/red]" in out


def test_the_markdown_of_a_run_keeps_a_sample_in_its_fence(tmp_path: Path) -> None:
    from demo.report import sample_lines

    lines = sample_lines({"label": FORGED, "text": f"one\n```\n# two {FORGED}\n````\n"})
    assert controls("\n".join(lines)) == []
    fence = lines[2]
    assert fence.startswith("`````") and lines[-2] == fence and fence not in lines[3:-2]


def prints() -> Iterator[str]:
    """Calls of `print` in the command line, and everywhere a rich console."""
    for path in sorted((Path(hf_depthroute.__file__).parent).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            ):
                yield path.relative_to(Path(hf_depthroute.__file__).parent).as_posix()


def test_everything_is_printed_through_one_place() -> None:
    assert set(prints()) == {"files/shown.py"}

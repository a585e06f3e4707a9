"""The program `hf-depthroute`: it answers at once what needs no model,
and its commands find the method registered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import transformers
from models import routed
from places import ROOT
from text_models import save_base

COMMANDS = (
    "train",
    "eval",
    "bench",
    "generate",
    "serve",
    "report",
    "card",
    "doctor",
    "convert",
    "families",
)
HEAVY = ("torch", "peft", "transformers", "datasets", "numpy", "huggingface_hub", "matplotlib")
# Each call in one process after the other: its exit code, and which of the modules there are by
# then.
SCRIPT = """
import contextlib, importlib, io, json, sys
module, function, calls, heavy = sys.argv[1:]
main = getattr(importlib.import_module(module), function)
answers = []
for call in json.loads(calls):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main(call)
        except SystemExit as ended:
            loaded = [name for name in json.loads(heavy) if name in sys.modules]
            answers.append([call, ended.code, out.getvalue(), loaded])
print(json.dumps(answers))
"""


def answers(calls: list[list[str]]) -> list[tuple[list[str], int, str, list[str]]]:
    """`(call, exit code, what it printed, heavy modules loaded by then)` for each call of the
    installed program."""
    (program,) = re.findall(
        r'^hf-depthroute = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *program, json.dumps(calls), json.dumps(HEAVY)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return [tuple(answer) for answer in json.loads(ended.stdout)]


def test_help_the_versions_and_wrong_words_load_no_heavy_package() -> None:
    right = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    text = [
        ["fit", "--model", "x", "--out", "y", "--dataset", "README.md"],
        ["eval", "x", "--dataset", "/none.txt"],
    ]
    wrong = [
        *text,
        ["trian"],
        ["train"],
        ["eval", "--nope"],
        ["bench"],
        ["generate", "--max-new-tokens", "x"],
        ["report"],
    ]
    for call, code, said, loaded in answers(right + wrong):
        assert (code, loaded) == (0 if call in right else 2, []), said


def test_its_commands_find_the_method_registered(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    routed(transformers.AutoModelForCausalLM.from_pretrained(base)).save_pretrained(
        tmp_path / "adapter"
    )
    adapter = str(tmp_path / "adapter")
    generate = [
        "generate",
        "--adapter",
        adapter,
        "--prompt",
        "the",
        "--max-new-tokens",
        "2",
        "--budget",
        "1",
    ]
    weights = str(tmp_path / "adapter" / "adapter_model.safetensors")
    wrong = [["doctor", str(tmp_path / "none")], ["doctor", weights], ["doctor", "a/b/c"]]
    (*refused, examined, generated) = answers([*wrong, ["doctor", adapter], generate])
    for (_, code, said, loaded), reason in zip(
        refused, ("no such folder", "is a file", "not a Hub id"), strict=True
    ):
        assert code == 2 and reason in said and loaded == [], said
    assert examined[1] == 0 and "calibrated" in examined[2]
    assert not {"peft", "datasets", "matplotlib"} & set(examined[3])
    assert generated[1] == 0 and "peft" in generated[3]

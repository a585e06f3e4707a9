"""The fenced code blocks of Markdown pages, and a page's blocks run as a reader would,
top to bottom.

A block that cannot run in a test (a GPU, several processes, the network) is marked in front of its
fence, with the reason: `<!-- not run: needs two processes -->`. It is still compiled, and its
`hf-depthroute` commands parsed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hf_depthroute.cli import app, main

LANGUAGES = ("python", "sh", "yaml", "diff", "text")
_FENCE = re.compile(r"^\s*(`{3,}|~{3,})", re.MULTILINE)
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.M | re.S,
)
_LENGTHY = re.compile(
    r"(\bmax_steps=|\bmax_new_tokens=|--steps |--repeats |--max-new-tokens |--blocks "
    r")\d+|(select\(range\()\d+"
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it starts, and why it is not run, if it is not."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None

    @property
    def place(self) -> str:
        return f"{self.page.name}, line {self.line}"


def read_blocks(page: Path) -> list[Block]:
    """All fenced blocks of `page`; an indented fence, which would be overlooked, is refused."""
    text = page.read_text()
    found = [
        Block(page, text.count("\n", 0, m.start("code")) + 1, m["language"], m["code"], m["why"])
        for m in _BLOCK.finditer(text)
    ]
    assert len(_FENCE.findall(text)) == 2 * len(found), (
        f"{page}: a fence that is indented, open, or not of backticks"
    )
    return found


def check(block: Block) -> None:
    """What can be said of a block without running it."""
    assert block.language in LANGUAGES, f"{block.place}: name the language, one of {LANGUAGES}"
    if block.language == "python":
        compile(block.code, block.place, "exec")
    elif block.language == "yaml":
        yaml.safe_load(block.code)
    elif block.language == "sh":
        shell = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)
        assert shell.returncode == 0, f"{block.place}: {shell.stderr}"
        for words in commands(block.code):
            if words[0] == "hf-depthroute":
                parse(words[1:], block.place)


def commands(code: str) -> list[list[str]]:
    """The words of every line of a shell block, comments left out."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def parse(words: list[str], place: str) -> None:
    """Parse an `hf-depthroute` command line without running it."""
    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    try:
        command.make_context(words[0], list(words[1:]))
    except Exception as error:  # of Click, or a CliError from a callback
        pytest.fail(f"{place}: hf-depthroute {shlex.join(words)}: {error}")


def shortened(code: str) -> str:
    """The same code, with training cut to 2 steps, text to 2 tokens, a benchmark to 2 rounds,
    data to 8 rows."""
    return _LENGTHY.sub(lambda m: f"{m[1]}2" if m[1] else f"{m[2]}8", code)


def run(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block, shortened, in `namespace`."""
    code = shortened(block.code)
    if block.language == "python":
        exec(compile("\n" * (block.line - 1) + code, str(block.page), "exec"), namespace)
    elif block.language == "sh":
        for words in commands(code):
            assert words[0] == "hf-depthroute", (
                f"{block.place}: {words[0]} is not run here; mark the block"
            )
            with pytest.raises(SystemExit) as ended:
                main(words[1:])
            assert not ended.value.code, f"{block.place}: hf-depthroute {shlex.join(words[1:])}"


def run_page(page: Path, namespace: dict[str, Any]) -> int:
    """Run the blocks of `page` in order; how many ran."""
    blocks = [block for block in read_blocks(page) if block.not_run is None]
    for block in blocks:
        run(block, namespace)
    return len(blocks)

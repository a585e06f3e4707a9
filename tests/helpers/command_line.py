"""The command line in this process, for tests of what it says."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import NamedTuple

import transformers

from hf_depthroute.cli import main


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The only line on stderr, without its `error: `."""
        (line,) = self.err.split("\n")[:-1]
        assert line.startswith("error: "), line
        return line.removeprefix("error: ")


def run(*arguments: object, program: Callable[[list[str]], None] = main) -> Ended:
    """`run("doctor", folder)`, with what it wrote; the verbosity of transformers is restored."""
    level = transformers.logging.get_verbosity()
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            program([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()
    return Ended(int(str(code or 0)), out.getvalue(), err.getvalue())

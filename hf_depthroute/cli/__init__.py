"""The command line, `hf-depthroute COMMAND`.

Every command ends with exit code 0, or with one line `error: ...` on stderr and a code that says
what went wrong: 2 command line, config or data; 3 the Hub; 4 a corrupt or mismatched adapter; 5
memory or disk; 130 Ctrl-C; 1 the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from ..files.hub import without_tokens
from ..files.shown import say, say_block
from ..version import __version__
from .bench import bench
from .card import card
from .convert import convert
from .doctor import doctor
from .errors import INTERRUPTED, CliError, describe
from .evaluate import evaluate
from .families import families
from .fit import fit
from .generate import generate
from .lm_eval import lm_eval
from .play import play
from .report import report
from .serve import serve
from .serve_vllm import vllm_config
from .train import train

app = typer.Typer(
    name="hf-depthroute",
    help="""Depth routing for pretrained language models: easy tokens skip work, as a PEFT adapter.

    In every command ADAPTER is the folder of an adapter or its Hub id, and --out is where the
    command writes what it makes: a folder (train, fit, convert, report) or a file (eval, bench,
    families: the result as JSON; card), - for stdout.
    --adapter ADAPTER and --json FILE are older spellings of the two.
    """,
    add_completion=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        others = ", ".join(
            f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "accelerate")
        )
        say(f"hf-depthroute {__version__} ({others})")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the versions and exit."
        ),
    ] = False,
) -> None:
    pass


app.command("train")(train)
app.command("fit")(fit)
app.command("eval")(evaluate)
app.command("bench")(bench)
app.command("generate")(generate)
app.command("play")(play)
_PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("serve", context_settings=_PASSES_ON)(serve)
app.command("lm-eval", context_settings=_PASSES_ON)(lm_eval)
app.command("vllm-config", context_settings=_PASSES_ON)(vllm_config)
app.command("report")(report)
app.command("card")(card)
app.command("doctor")(doctor)
app.command("convert")(convert)
app.command("families")(families)


@app.command("study", hidden=True, context_settings=_PASSES_ON)
def _study(context: typer.Context) -> None:
    raise CliError(
        "study: moved to the recipes; in a checkout run: python recipes/study run STUDY.yaml --out "
        "OUT"
    )


def _check_words(words: Sequence[str]) -> None:
    """Refuse a word that is no text; a path of such bytes can be given by a link to it."""
    for word in words:
        if word.isascii() or not any("\ud800" <= character <= "\udfff" for character in word):
            continue
        try:
            os.fsencode(word).decode("utf-8")
            problem = (
                f"cannot be read in this locale ({sys.getfilesystemencoding()}); set PYTHONUTF8=1"
            )
        except UnicodeError:
            problem = "not UTF-8; write it in UTF-8, or link to the file by another name"
        raise CliError(f"{word[:100]!r} on the command line: {problem}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line on `argv` (default: `sys.argv[1:]`), and exit with its code."""
    run(app, "hf-depthroute", argv)


def run(program: typer.Typer, name: str, argv: Sequence[str] | None = None) -> None:
    """Run the commands of a program, with error lines and exit codes as here, and exit."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    # What they cannot show is escaped: no command ends for the lack of é.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        _check_words(arguments)
        code = typer.main.get_command(program).main(
            arguments, prog_name=name, standalone_mode=False
        )
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        code, message = describe(error)
        if "--debug" in arguments:
            import traceback

            say_block(without_tokens(traceback.format_exc()), sys.stderr)
        say(f"error: {message}", sys.stderr)
    if code == INTERRUPTED:
        say("error: interrupted", sys.stderr)
    sys.exit(code or 0)

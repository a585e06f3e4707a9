"""`hf-depthroute study`: many short training runs over configs and seeds, from one YAML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..hub import without_tokens
from ..shown import say, say_block
from . import options as o
from .errors import OTHER, CliError


def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")],
    out: Annotated[Path, typer.Option(help="Folder of the results. Started again, it does what is missing.")],
    jobs: Annotated[int, typer.Option(min=1, help="Runs at one time.")] = 1,
    engine: Annotated[str, typer.Option(help="processes (of this machine) or ray.")] = "processes",
    only: Annotated[str | None, typer.Option(help="Configs to run, comma-separated. Default: all.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Some of the study's seeds, comma-separated.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=2, help="Steps of every run instead of the file's, such as 20 to try a study. Default: its."),
    ] = None,
    trust_remote_code: o.TrustRemoteCode = False,
    debug: o.Debug = False,
) -> None:
    """Train and measure every config with every seed.

    Runs say on stderr how far they are. Complete runs are never repeated, and results of other code, data, base or
    settings are never mixed: such a folder is refused. Configs and seeds can be added to a study later.

    \b
    Example:
      hf-depthroute study recipes/aux_losses/study.yaml --out results --jobs 2
      hf-depthroute study recipes/aux_losses/study.yaml --out results --only g1,g3 --seeds 42
      hf-depthroute study recipes/aux_losses/study.yaml --out trial --steps 20
    """
    out = out.expanduser()
    if out.is_file():
        raise CliError(f"--out {out}: is a file; name a folder")
    names = None if only is None else [name.strip() for name in only.split(",")]
    numbers = None if seeds is None else _numbers(seeds)
    from . import loading

    loading.quiet(debug)
    from ..study.grid import read_study
    from ..study.runner import run_study

    read = read_study(file, steps)
    loading.load_config(read.resolve(read.base))
    failures = run_study(read, out, jobs, engine, names, numbers, debug)
    for name, failure in failures.items():
        if debug:
            say_block(without_tokens(failure.traceback), sys.stderr)
        say(without_tokens(f"{name} failed: {failure.reason}"), sys.stderr)
    if failures:
        count = f"{len(failures)} run{'s' if len(failures) > 1 else ''}"
        raise CliError(f"{count} failed; the same command repeats them and keeps the others", OTHER)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise CliError(f"--seeds {text!r}: write integers, such as 42,123") from error

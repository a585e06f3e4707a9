"""`hf-depthroute study`: many short training runs over configs and seeds, from one YAML file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..files.hub import without_tokens
from ..files.shown import say, say_block
from . import options as o
from .errors import OTHER, CliError


@dataclass(kw_only=True)
class StudyOptions:
    file: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")]
    out: Annotated[Path, typer.Option(help="Folder of the results. Started again, it does what is missing.")]
    jobs: Annotated[int, typer.Option(min=1, help="Runs at one time.")] = 1
    engine: Annotated[str, "processes (of this machine) or ray."] = "processes"
    only: Annotated[str | None, "Configs to run, comma-separated. Default: all."] = None
    seeds: Annotated[str | None, "Some of the study's seeds, comma-separated."] = None
    steps: Annotated[
        int | None,
        typer.Option(min=2, help="Steps of every run instead of the file's, such as 20 to try a study. Default: its."),
    ] = None
    trust_remote_code: o.TrustRemoteCode = False
    debug: o.Debug = False


@o.command
def study(options: StudyOptions) -> None:
    """Train and measure every config with every seed.

    Runs say on stderr how far they are. Complete runs are never repeated, and results of other code, data, base or
    settings are never mixed: such a folder is refused. Configs and seeds can be added to a study later.

    \b
    Example:
      hf-depthroute study recipes/aux_losses/study.yaml --out results --jobs 2
      hf-depthroute study recipes/aux_losses/study.yaml --out results --only g1,g3 --seeds 42
      hf-depthroute study recipes/aux_losses/study.yaml --out trial --steps 20
    """
    out = options.out.expanduser()
    if out.is_file():
        raise CliError(f"--out {options.out}: is a file; name a folder")
    names = None if options.only is None else [name.strip() for name in options.only.split(",")]
    wanted, text = "integers, such as 42,123", options.seeds
    seeds = None if text is None else o.parse_numbers("--seeds", text, low=None, wanted=wanted)
    from . import loading

    loading.quiet(options.debug)
    from ..study.grid import read_study
    from ..study.runner import run_study

    read = read_study(options.file, options.steps)
    loading.load_config(read.resolve(read.base))
    failures = run_study(read, out, options.jobs, options.engine, names, seeds, options.debug)
    for name, failure in failures.items():
        if options.debug:
            say_block(without_tokens(failure.traceback), sys.stderr)
        say(without_tokens(f"{name} failed: {failure.reason}"), sys.stderr)
    if failures:
        count = f"{len(failures)} run{'s' if len(failures) > 1 else ''}"
        raise CliError(f"{count} failed; the same command repeats them and keeps the others", OTHER)

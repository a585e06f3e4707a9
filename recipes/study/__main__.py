"""Studies: many short training runs over configs and seeds, from one YAML file,
and the table of what came out.

python recipes/study run recipes/aux_losses/long.yaml --out OUT --jobs 2
python recipes/study report OUT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hf_depthroute import cli
from hf_depthroute.cli import options as o
from hf_depthroute.cli.errors import OTHER, CliError
from hf_depthroute.cli.loading import load_config, quiet
from hf_depthroute.cli.output import print_table
from hf_depthroute.files.hub import without_tokens
from hf_depthroute.files.shown import say, say_block

if not __package__:  # `python recipes/study`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from study.grid import read_study
from study.results import ResultsError
from study.runner import run_study
from study.table import count_missing, loss_table, summarize, write_study_report

app = typer.Typer(help=__doc__, add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@dataclass(kw_only=True)
class RunOptions:
    file: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")]
    out: Annotated[
        Path, typer.Option(help="Folder of the results. Started again, it does what is missing.")
    ]
    jobs: Annotated[int, typer.Option(min=1, help="Runs at one time.")] = 1
    engine: Annotated[str, "processes (of this machine) or ray."] = "processes"
    only: Annotated[str | None, "Configs to run, comma-separated. Default: all."] = None
    seeds: Annotated[str | None, "Some of the study's seeds, comma-separated."] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=(
                "Steps of every run instead of the file's, such as 20 to try a study. Default: its."
            ),
        ),
    ] = None
    trust_remote_code: o.TrustRemoteCode = False
    debug: o.Debug = False


@app.command("run")
@o.command
def run(options: RunOptions) -> None:
    """Train and measure every config with every seed.

    Runs say on stderr how far they are. Complete runs are never repeated, and results of other
    code, data, base or settings are never mixed: such a folder is refused. Configs and seeds can be
    added to a study later.

    \b
    Example:
      python recipes/study run recipes/aux_losses/study.yaml --out results --jobs 2
      python recipes/study run recipes/aux_losses/study.yaml --out results --only g1,g3 --seeds 42
      python recipes/study run recipes/aux_losses/study.yaml --out trial --steps 20
    """
    out = options.out.expanduser()
    if out.is_file():
        raise CliError(f"--out {options.out}: is a file; name a folder")
    names = None if options.only is None else [name.strip() for name in options.only.split(",")]
    wanted, text = "integers, such as 42,123", options.seeds
    seeds = None if text is None else o.parse_numbers("--seeds", text, low=None, wanted=wanted)
    quiet(options.debug)
    read = read_study(options.file, options.steps)
    load_config(read.resolve(read.base))
    failures = run_study(read, out, options.jobs, options.engine, names, seeds, options.debug)
    for name, failure in failures.items():
        if options.debug:
            say_block(without_tokens(failure.traceback), sys.stderr)
        say(without_tokens(f"{name} failed: {failure.reason}"), sys.stderr)
    if failures:
        count = f"{len(failures)} run{'s' if len(failures) > 1 else ''}"
        raise CliError(f"{count} failed; the same command repeats them and keeps the others", OTHER)


@dataclass(kw_only=True)
class ReportOptions:
    study: Annotated[Path, typer.Argument(metavar="OUT", help="Result folder of a study.")]
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write. Default: OUT/report.")
    ] = None
    debug: o.Debug = False


@app.command("report")
@o.command
def report(options: ReportOptions) -> None:
    """Write the plain table of a study: steps, tokens,
    and losses over the seeds with their standard error.

    report.md has the table, results.csv every measured number, and results.json every run; a folder
    with only results.json is enough to write them again.
    """
    folder = options.out or options.study / "report"
    if folder.exists() and not folder.is_dir():
        raise CliError(f"--out {folder}: is a file, not a folder")
    quiet(options.debug)
    try:
        found = write_study_report(options.study, folder)
    except ResultsError as error:
        raise CliError(str(error)) from error
    losses = loss_table(found, summarize(found))
    losses = losses.drop(columns=["steps", "tokens"], errors="ignore")  # a terminal's width
    print_table(tuple(losses), losses.to_numpy().tolist())
    if found.missing():
        say(count_missing(found))
    say(folder / "report.md")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program on `argv` (default: `sys.argv[1:]`), and exit with its code."""
    cli.run(app, "python recipes/study", argv)


if __name__ == "__main__":
    main()

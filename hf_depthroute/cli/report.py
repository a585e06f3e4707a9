"""`hf-depthroute report`: tables, figures and verdicts of a study."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .errors import CliError


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Result folder of a study, or of a report.")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write. Default: DIR/report.")] = None,
    debug: o.Debug = False,
) -> None:
    """Write report.html, report.md, the figures and results.json of a study.

    Verdicts on the papers' claims come from paired seeds; a study without the papers' configs gets tables and figures.
    A folder with only results.json, as a report leaves it, is enough to write the report again.

    \b
    Example:
      hf-depthroute report results
      hf-depthroute report results --out page
    """
    if importlib.util.find_spec("adjustText") is None:
        raise CliError("adjustText is not installed: pip install 'hf-depthroute[study]'")
    from . import loading

    loading.quiet(debug)
    from ..report.study.page import count_runs, write_report
    from ..report.study.results import ResultsError

    folder = directory / "report" if out is None else out
    if folder.exists() and not folder.is_dir():
        raise CliError(f"--out {folder}: is a file, not a folder")
    try:
        study, verdicts = write_report(directory, folder)
    except ResultsError as error:
        raise CliError(str(error)) from error
    loading.print_table(("verdict", "claim"), [(verdict.word, verdict.statement) for verdict in verdicts])
    missing = sum(len(seeds) for seeds in study.missing().values())
    if missing:
        print(f"{count_runs(missing)} missing")
    print(folder / "report.html")

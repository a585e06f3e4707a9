"""`hf-depthroute report`: one HTML page about a routed model, or about a study."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from ..shown import say
from . import options as o
from .errors import CliError
from .report_run import RunOptions, report_run


def report(
    source: Annotated[
        str | None,
        typer.Argument(metavar="ADAPTER|STUDY", help="Hub id or folder of an adapter, or result folder of a study."),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Older spelling of ADAPTER.")] = None,
    model: o.BaseModel = None,
    config: o.ConfigFile = None,
    dataset: Annotated[str | None, typer.Option(help="Text to measure and to show: as for train.")] = None,
    dataset_name: o.DatasetName = None,
    split: Annotated[str, typer.Option(help="Split of the text.")] = "train",
    column: o.Column = "text",
    streaming: o.Streaming = False,
    budgets: Annotated[
        str | None,
        typer.Option(help="Fractions of tokens that run full, comma-separated. Default: 0.25,0.5,0.75."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="At most this many blocks.")] = 64,
    batch_size: o.BatchSize = 8,
    length: o.Length = 256,
    samples: Annotated[int, typer.Option(min=1, help="Blocks of the text in the token view.")] = 3,
    prompt: Annotated[str | None, typer.Option(help="Show how this text is continued, too.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="With --prompt: tokens to add.")] = 64,
    eval_file: Annotated[
        Path | None, typer.Option("--eval", metavar="FILE", help="Losses from eval --out, instead of taking them.")
    ] = None,
    bench_file: Annotated[
        Path | None, typer.Option("--bench", metavar="FILE", help="Times from bench --out, instead of taking them.")
    ] = None,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Measure the speed.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of the speed; medians are reported.")] = 15,
    title: Annotated[str | None, typer.Option(help="Of the page. Default: the adapter's name.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to write; of an adapter's page also a .html. Default: DIR/report."),
    ] = None,
    allow_base_mismatch: o.AllowBaseMismatch = False,
    trust_remote_code: o.TrustRemoteCode = False,
    debug: o.Debug = False,
) -> None:
    """Write one HTML page that loads nothing: about a routed model, or about a study.

    An adapter's page has loss, speed and arithmetic by budget, what every layer ran, scores with thresholds, and a text
    coloured token by token. A study's has losses, tables and figures, verdicts on the papers' claims whose configs it
    has, and report.md and results.json besides; a folder with only results.json is enough to write it again.

    \b
    Example:
      hf-depthroute report routed --dataset my_text.jsonl --budgets 0.25,0.5,0.75
      hf-depthroute report routed --dataset my_text.jsonl --prompt "Once upon a time" --out page.html
      hf-depthroute report results                                     # of hf-depthroute study
    """
    given = {"--adapter": adapter, "--dataset": dataset, "--prompt": prompt, "--eval": eval_file}
    given |= {"--bench": bench_file, "--budgets": budgets, "--model": model}
    for_adapter = [name for name, value in given.items() if value is not None]
    if source is not None and (_is_adapter(source) or (for_adapter and not Path(source).exists())):
        if adapter is not None:
            raise CliError(f"report: {source} and --adapter {adapter} are two adapters; give one")
        adapter = source
    elif source is not None:
        if for_adapter:
            raise CliError(f"report: {for_adapter[0]} is for an adapter, and {source} is no adapter's folder")
        _report_study(Path(source), out, debug)
        return
    if adapter is None:
        raise CliError("report: name an adapter and give --dataset, or name the folder of a study")
    if dataset is None:
        raise CliError(f"report: give --dataset, the text to measure adapter {adapter} on")
    run = RunOptions(
        adapter=adapter, model=model, dataset=dataset, dataset_name=dataset_name, split=split, column=column,
        streaming=streaming, budgets=budgets, blocks=blocks, batch_size=batch_size, length=length, samples=samples,
        prompt=prompt, max_new_tokens=max_new_tokens, eval_file=eval_file, bench_file=bench_file, speed=speed,
        repeats=repeats, title=title, dtype=dtype, out=out, allow_base_mismatch=allow_base_mismatch,
    )  # fmt: skip
    say(report_run(run, debug))


def _is_adapter(source: str) -> bool:
    return (Path(source) / "adapter_config.json").is_file()


def _report_study(directory: Path, out: Path | None, debug: bool) -> None:
    if importlib.util.find_spec("adjustText") is None:
        raise CliError("adjustText is not installed: pip install 'hf-depthroute[study]'")
    from . import loading

    loading.quiet(debug)
    from ..report.study.page import count_runs, write_report
    from ..report.study.results import ResultsError
    from ..report.study.tables import loss_table

    folder = directory / "report" if out is None else out
    if folder.exists() and not folder.is_dir():
        raise CliError(f"--out {folder}: is a file, not a folder")
    try:
        study, verdicts = write_report(directory, folder)
    except ResultsError as error:
        raise CliError(str(error)) from error
    losses = loss_table(study)
    loading.print_table(tuple(losses.columns), [tuple(row) for row in losses.rows])
    if verdicts:
        loading.print_table(("verdict", "claim"), [(verdict.word, verdict.statement) for verdict in verdicts])
    missing = sum(len(seeds) for seeds in study.missing().values())
    if missing:
        say(f"{count_runs(missing)} missing")
    say(folder / "report.html")

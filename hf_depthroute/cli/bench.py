"""`hf-depthroute bench`: measured speed and memory of a routed model against its dense base."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..shown import say, shown
from . import options as o
from .adapter import AnyAdapter, OldAdapter
from .errors import CliError
from .output import ResultFile, write_result

_OF_SHAPE = ("layers", "target", "gate", "depth", "vocabulary")  # an adapter has its own
_SINGLE = ("prefill", "decode", "memory")


def bench(
    adapter: AnyAdapter = None,
    model: o.BaseModel = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights of this shape instead: qwen2.5-0.5b, llama-3.2-1b, llama-3-8b or olmoe-1b-7b."
        ),
    ] = None,
    suite: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure the cases of this YAML file instead.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD NEW", help="Compare two result files instead of measuring."),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="With --shape: routed layers. Default: last:12.")] = None,
    target: Annotated[
        str | None, typer.Option(help="With --shape: ffn, attention, block or experts. Default: ffn.")
    ] = None,
    gate: Annotated[str | None, typer.Option(help="With --shape: mlp or jepa. Default: mlp.")] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="With --shape or --suite: keep so many decoder layers.")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(min=2, help="With --shape or --suite: size of it.")] = None,
    config: o.ConfigFile = None,
    cases: Annotated[
        str, typer.Option(help="Some of prefill,decode,memory, and with --shape train,load.")
    ] = "prefill,decode",
    budgets: o.Budgets = "0.5,0.25",
    masked: Annotated[
        bool, typer.Option("--masked", help="Time a plain mask-after-compute router too, at the same budgets.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time the executors that are measured to be fastest per layer too.")
    ] = False,
    baselines: Annotated[
        str | None,
        typer.Option(
            help="How models run, some of eager,static,compiled; the fastest counts, dense and routed. "
            "Default: eager on a CPU, all on a GPU."
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences in prefill and training; one or more, comma-separated.")] = "4",
    length: Annotated[str, typer.Option(help="Tokens of the prompt; one or more, comma-separated.")] = "256",
    decode_batch: Annotated[str, typer.Option(help="Sequences in decode; one or more, comma-separated.")] = "1",
    decode_steps: Annotated[int, typer.Option(min=0, help="Timed decoding steps; 0 leaves decode out.")] = 16,
    loss: Annotated[str, typer.Option(help="Of a training step: naive, fused, or both, comma-separated.")] = "naive",
    dtype: Annotated[str, typer.Option(help="auto (as stored; bfloat16 with --shape), float32, ...")] = "auto",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds; medians are reported. Default: 15, or the suite's.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    json_file: ResultFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw the result into this folder.")] = None,
    allow_base_mismatch: o.AllowBaseMismatch = False,
    adapter_option: OldAdapter = None,
    trust_remote_code: o.TrustRemoteCode = False,
    debug: o.Debug = False,
) -> None:
    """Measure a routed model against its dense base, in one process.

    Prompts are random tokens, on which every budget is calibrated first, so that the share asked for really runs
    full. eta is the part of the skipped arithmetic that shows on the clock.

    \b
    Example:
      hf-depthroute bench --shape qwen2.5-0.5b --budgets 0.5,0.25 --threads 2
      hf-depthroute bench routed --out bench.json
      hf-depthroute bench --suite recipes/speed/cpu.yaml --out new.json --plot plots
      hf-depthroute bench --compare old.json new.json
    """
    given = {"ADAPTER": adapter, "--shape": shape, "--suite": suite, "--compare": compare}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise CliError("bench: give either ADAPTER (with or without --model), --shape, --suite or --compare")
    if model is not None and adapter is None:
        why = "a shape has random weights" if shape is not None else "it names what is measured"
        raise CliError(f"bench: --model does not go with {chosen[0]}; {why}")
    of_shape = {"layers": layers, "target": target, "gate": gate, "depth": depth, "vocabulary": vocabulary}
    misplaced = [name for name in _OF_SHAPE if of_shape[name] is not None]
    misplaced = [name for name in misplaced if suite is None or name not in ("depth", "vocabulary")]
    if shape is None and misplaced:
        raise CliError(f"bench: --{' and --'.join(misplaced)} go with --shape; {chosen[0]} brings its own")
    if compare is not None:
        _compare(*compare, json_file)
        return
    from . import loading

    loading.quiet(debug)
    import torch

    loading.check_dtype(dtype, loading.DTYPES)
    if threads is not None:
        torch.set_num_threads(threads)
    sizes = {
        "batch": o.parse_numbers("--batch", batch),
        "length": o.parse_numbers("--length", length, low=2),
        "decode_batch": o.parse_numbers("--decode-batch", decode_batch),
    }
    modes = None if baselines is None else o.parse_names("--baselines", baselines, ("eager", "static", "compiled"))
    if suite is not None:
        overrides = {"depth": depth, "vocabulary": vocabulary, "rounds": repeats, "baselines": modes}
        result = _run_suite(suite, overrides | {"dtype": None if dtype == "auto" else dtype})
    else:
        allowed = _SINGLE if shape is None else (*_SINGLE, "train", "load")
        arguments: dict[str, Any] = {
            "cases": o.parse_names("--cases", cases, allowed),
            "budgets": tuple(o.parse_budgets(budgets)),
            "masked": masked,
            "tune": tune,
            "baselines": modes,
            "steps": decode_steps,
            "rounds": repeats or 15,
        }
        if adapter is not None:
            result = _measure_adapter(adapter, model, dtype, allow_base_mismatch, arguments, sizes)
        else:
            fields: dict[str, Any] = of_shape | {"shape": shape, "layers": o.parse_layers(layers), "dtype": dtype}
            fields |= {"loss": list(o.parse_names("--loss", loss, ("naive", "fused")))}
            result = _measure_shape(fields, arguments, sizes)
    from ..bench.results import tables

    if not write_result(json_file, result):
        for table in tables(result):
            _print(table)
    if plot is not None:
        from ..bench.plots import plot_result

        for path in plot_result(plot, result):
            say(f"wrote {path}", sys.stderr)


def _compare(old: Path, new: Path, out: Path | None) -> None:
    from . import loading

    loading.quiet(False)
    from ..bench.results import compare_results, comparison_table, read_result

    try:
        comparison = compare_results(read_result(old), read_result(new))
    except ValueError as error:
        raise CliError(f"--compare {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CliError(f"--compare {old} {new}: not results of hf-depthroute bench ({error!r} is wrong)") from error
    if write_result(out, comparison.to_dict()):
        return
    for note in comparison.notes:
        say(f"note: {note}")
    table = comparison_table(comparison)
    if table.rows:
        _print(table)
    else:
        say("the results have no measurement in common")


def _run_suite(path: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    from ..bench.suite import read_suite, run_cases

    try:
        name, listed = read_suite(path, **overrides)
    except ValueError as error:
        raise CliError(f"--suite {error}") from error
    return _refused(lambda: run_cases(listed, name=name, progress=_progress))


def _measure_shape(fields: dict[str, Any], arguments: dict[str, Any], sizes: dict[str, list[int]]) -> dict[str, Any]:
    import torch

    from ..bench.shapes import SHAPES
    from ..bench.single import bench_shape
    from ..bench.suite import expand, run_cases

    shape, cases = fields["shape"], arguments.pop("cases")
    if shape not in SHAPES:
        raise CliError(f"--shape {shape}: use one of: {', '.join(SHAPES)}")
    if fields["dtype"] == "auto":
        fields["dtype"] = "bfloat16"
    given = {name: value for name, value in fields.items() if value is not None}
    steps = arguments.pop("steps")
    if all(len(values) == 1 for values in sizes.values()) and set(cases) <= set(_SINGLE):
        given.pop("loss")
        given["dtype"] = getattr(torch, given["dtype"])
        chosen = _single(sizes, steps, arguments.pop("rounds"))
        return _refused(lambda: bench_shape(parts=cases, **given, **arguments, **chosen))
    listed = []
    try:
        for case in cases:
            if case == "decode" and steps == 0:
                continue
            batch = sizes["decode_batch" if case == "decode" else "batch"]
            entry = {"case": case, **given, **arguments, "batch": batch, "length": sizes["length"]}
            listed += expand(entry | ({"steps": steps} if case == "decode" else {}), {})
    except ValueError as error:
        raise CliError(f"bench: {error}") from error
    listed = list(dict.fromkeys(_plain(case) for case in listed))
    return _refused(lambda: run_cases(listed, progress=_progress))


def _plain(case: Any) -> Any:
    """Without what its kind of case does not look at, so that nothing is measured twice."""
    import dataclasses

    drop: dict[str, Any] = {} if case.case == "train" else {"loss": "naive"}
    if case.case == "load":
        drop |= {"batch": 1, "length": 1}
    return dataclasses.replace(case, **drop)


def _measure_adapter(
    adapter: str, model: str | None, dtype: str, mismatch: bool, arguments: dict[str, Any], sizes: dict[str, list[int]]
) -> dict[str, Any]:
    from ..bench.shapes import dense_view
    from ..bench.single import bench, bench_sizes
    from ..bench.variants import hold_adapter_in, wants_base_dtype
    from . import loading

    adapter_config = loading.load_adapter_config(adapter)
    model, base_config = loading.find_base(adapter, adapter_config, model)
    cases, steps, rounds = (arguments.pop(name) for name in ("cases", "steps", "rounds"))
    loading.check_length(max(sizes["length"]) + steps, base_config, "--length + --decode-steps")
    base = loading.load_model(model, dtype)
    untouched = dense_view(base)
    routed = loading.load_adapter(base, adapter, mismatch)
    first = next(base.parameters())
    if wants_base_dtype(first.device, arguments["baselines"]):
        hold_adapter_in(routed, first.dtype)
    if all(len(values) == 1 for values in sizes.values()):
        chosen = _single(sizes, steps, rounds)
        result = _refused(lambda: bench(routed, base=untouched, parts=cases, **arguments, **chosen))
    else:
        arguments |= {"decode_steps": steps, "repeats": rounds, "progress": _progress}
        result = _refused(lambda: bench_sizes(routed, base=untouched, parts=cases, **arguments, **sizes))
    return result | {"model": model, "adapter": adapter, "weights_hash": adapter_config.weights_hash}


def _single(sizes: dict[str, list[int]], steps: int, rounds: int) -> dict[str, Any]:
    values = {name: values[0] for name, values in sizes.items()}
    return values | {"decode_steps": steps, "repeats": rounds, "progress": _progress}


def _refused(measure: Any) -> dict[str, Any]:
    """What `measure` returns; what it cannot measure is the caller's choice, and said in one line."""
    try:
        result: dict[str, Any] = measure()
    except ValueError as error:
        raise CliError(f"bench: {error}") from error
    return result


def _print(table: Any) -> None:
    """On stdout; a table too wide for the terminal wraps, and none is cut in a pipe or a file."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    printed = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(table.head):
        text = number == 0 or not any(row[number][:1].isdigit() for row in table.rows)
        printed.add_column(name, justify="left" if text else "right")
    for row in table.rows:
        printed.add_row(*(Text(shown(cell)) for cell in row))
    console.print(printed)


def _progress(line: str) -> None:
    say(line, sys.stderr)

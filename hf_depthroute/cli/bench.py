"""`hf-depthroute bench`: measured speed and memory of a routed model against its dense base."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..files.shown import say
from . import options as o
from .errors import CliError
from .output import ResultFile, print_table, write_result

_OF_SHAPE = ("layers", "target", "gate", "depth", "vocabulary")  # an adapter has its own
_NOT_OF_SUITE = ("cases", "budgets", "masked", "tune", "batch", "length", "decode_batch", "decode_steps", "loss")
_OF_COMPARE = ("compare", "json_file", "config", "debug")
_SINGLE = ("prefill", "decode", "memory")


@dataclass(kw_only=True)
class BenchOptions:
    context: typer.Context
    adapter: o.AnyAdapter = None
    model: o.BaseModel = None
    gguf_file: o.GgufFile = None
    shape: Annotated[
        str | None,
        "Random weights of this shape instead: qwen2.5-0.5b, llama-3.2-1b, llama-3-8b, olmoe-1b-7b, embedded or "
        "embedded-wide.",
    ] = None
    suite: Annotated[Path | None, typer.Option(metavar="FILE", help="Measure the cases of this YAML file instead.")] = (
        None
    )
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="OLD NEW", help="Compare two result files instead of measuring.")
    ] = None
    layers: Annotated[str | None, "With --shape: routed layers. Default: last:12."] = None
    target: Annotated[str | None, "With --shape: ffn, attention, block or experts. Default: ffn."] = None
    gate: Annotated[str | None, "With --shape: mlp or jepa. Default: mlp."] = None
    depth: Annotated[int | None, typer.Option(min=1, help="With --shape or --suite: keep so many decoder layers.")] = (
        None
    )
    vocabulary: Annotated[int | None, typer.Option(min=2, help="With --shape or --suite: size of it.")] = None
    config: o.ConfigFile = None
    cases: Annotated[str, "Some of prefill,decode,memory, and with --shape train,load."] = "prefill,decode"
    budgets: o.Budgets = "0.5,0.25"
    phases: o.Phases = None
    masked: Annotated[bool, "Time a plain mask-after-compute router too, at the same budgets."] = False
    tune: Annotated[bool, "Time the executors that are measured to be fastest per layer too."] = False
    baselines: Annotated[
        str | None,
        "How models run, some of eager,static,compiled; the fastest counts, dense and routed. "
        "Default: eager on a CPU, all on a GPU.",
    ] = None
    batch: Annotated[str, "Sequences in prefill and training; one or more, comma-separated."] = "4"
    length: Annotated[str, "Tokens of the prompt; one or more, comma-separated."] = "256"
    decode_batch: Annotated[str, "Sequences in decode; one or more, comma-separated."] = "1"
    decode_steps: Annotated[int, typer.Option(min=0, help="Timed decoding steps; 0 leaves decode out.")] = 16
    loss: Annotated[str, "Of a training step: naive, fused, or both, comma-separated."] = "naive"
    dtype: Annotated[str, "auto (as stored; bfloat16 with --shape), float32, ..."] = "auto"
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds; figures are medians ± standard errors. Default: 15, or the suite's."),
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None
    json_file: ResultFile = None
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw the result into this folder.")] = None
    allow_base_mismatch: o.AllowBaseMismatch = False
    adapter_option: o.OldAdapter = None
    trust_remote_code: o.TrustRemoteCode = False
    debug: o.Debug = False


@o.command
def bench(options: BenchOptions) -> None:
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
    sources = {name: getattr(options, name) for name in ("adapter", "shape", "suite", "compare")}
    chosen = ["ADAPTER" if name == "adapter" else f"--{name}" for name, value in sources.items() if value is not None]
    if len(chosen) != 1:
        raise CliError("bench: give either ADAPTER (with or without --model), --shape, --suite or --compare")
    if options.model is not None and options.adapter is None:
        why = "a shape has random weights" if options.shape is not None else "it names what is measured"
        raise CliError(f"bench: --model does not go with {chosen[0]}; {why}")
    of_suite = ("depth", "vocabulary") if options.suite is not None else ()
    misplaced = [name for name in _OF_SHAPE if getattr(options, name) is not None and name not in of_suite]
    if options.shape is None and misplaced:
        raise CliError(f"bench: --{' and --'.join(misplaced)} go with --shape; {chosen[0]} brings its own")
    if options.suite is not None:
        o.refuse_unused(options.context, _NOT_OF_SUITE, "no effect with --suite, whose file says it for each case")
    if options.compare is not None:
        others = [name for name in o.given(options.context) if name not in _OF_COMPARE]
        o.refuse_unused(options.context, sorted(others), "no effect with --compare, which measures nothing")
    from . import loading

    if options.compare is not None:
        loading.quiet(False)
        _compare(*options.compare, options.json_file)
        return
    loading.quiet(options.debug)
    result = _measure(options)
    from ..bench.result_tables import Table, tables

    if not write_result(options.json_file, result):
        for table in map(Table.brief, tables(result)):
            print_table(table.head, table.rows, wide=True)
    if options.plot is not None:
        from ..bench.result_plots import plot_result

        for path in plot_result(options.plot, result):
            say(f"wrote {path}", sys.stderr)


def _compare(old: Path, new: Path, out: Path | None) -> None:
    from ..bench.measurements import compare_results, read_result
    from ..bench.result_tables import comparison_table

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
        print_table(table.head, table.rows, wide=True)
    else:
        say("the results have no measurement in common")


def _measure(options: BenchOptions) -> dict[str, Any]:
    import torch

    from ..bench.cases import read_suite
    from . import loading

    loading.check_dtype(options.dtype, loading.DTYPES)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    sizes = {
        "batch": o.parse_numbers("--batch", options.batch),
        "length": o.parse_numbers("--length", options.length, low=2),
        "decode_batch": o.parse_numbers("--decode-batch", options.decode_batch),
    }
    modes = None
    if options.baselines is not None:
        modes = o.parse_names("--baselines", options.baselines, ("eager", "static", "compiled"))
    fields: dict[str, Any] = {name: getattr(options, name) for name in ("phases", "depth", "vocabulary")}
    fields |= {"dtype": None if options.dtype == "auto" else options.dtype, "rounds": options.repeats}
    fields["baselines"] = modes
    if options.suite is not None:
        try:
            name, listed = read_suite(options.suite, **fields)
        except ValueError as error:
            raise CliError(f"--suite {error}") from error
        return _run(listed, name=name)
    kinds = o.parse_names("--cases", options.cases, _SINGLE if options.shape is None else (*_SINGLE, "train", "load"))
    if set(kinds) == {"decode"} and not options.decode_steps:
        raise CliError(f"bench: --decode-steps 0 leaves nothing of --cases {options.cases}")
    budgets = tuple(budget for budget in o.parse_budgets(options.budgets) if budget < 1)  # 1 always is
    fields |= {name: getattr(options, name) for name in ("shape", "target", "gate", "masked", "tune")}
    fields |= {"layers": o.parse_layers(options.layers), "budgets": budgets, "rounds": options.repeats or 15}
    origin: dict[str, Any] = {}
    given = None
    if options.adapter is not None:
        origin, given = _load(options, modes, max(sizes["length"]) + options.decode_steps)
        del fields["dtype"], fields["phases"]  # the model's
    known = {name: value for name, value in fields.items() if value is not None or name == "shape"}
    result = _run(_cases(options, kinds, known, sizes), given=given)
    if set(kinds) <= set(_SINGLE) and all(len(values) == 1 for values in sizes.values()):
        from ..bench.measurements import as_single

        only = {name: values[0] for name, values in sizes.items()}  # what has one size has a simpler form
        result = as_single(result, only | {"decode_steps": options.decode_steps, "repeats": fields["rounds"]})
    return result | origin


def _cases(
    options: BenchOptions, kinds: tuple[str, ...], fields: dict[str, Any], sizes: dict[str, list[int]]
) -> list[Any]:
    """Every kind of case at every size."""
    from ..bench.cases import expand
    from ..bench.shapes import SHAPES

    if options.shape not in (None, *SHAPES):
        raise CliError(f"--shape {options.shape}: use one of: {', '.join(SHAPES)}")
    listed, losses = [], o.parse_names("--loss", options.loss, ("naive", "fused"))
    for kind in kinds:
        entry = {**fields, "case": kind}
        if kind != "load":
            entry |= {"batch": sizes["decode_batch" if kind == "decode" else "batch"], "length": sizes["length"]}
        if kind in ("decode", "train"):
            entry |= {"steps": options.decode_steps} if kind == "decode" else {"loss": list(losses)}
        if kind != "decode" or options.decode_steps:
            with _refused():
                listed += expand(entry, {})
    return list(dict.fromkeys(listed))


def _load(options: BenchOptions, modes: tuple[str, ...] | None, positions: int) -> tuple[dict[str, Any], Any]:
    """Where the routed model and its untouched base are from, and both."""
    from ..bench.shapes import dense_view
    from ..bench.suite import Given
    from ..bench.variants import hold_adapter_in, wants_base_dtype
    from ..config.adapter import check_phases
    from ..inference.calibration import set_phases
    from . import loading

    source = loading.find_source(options)
    if options.phases is not None:
        check_phases(options.phases, source.config.granularity, source.config.target)
    loading.check_length(positions, source.base_config, "--length + --decode-steps")
    base = source.base_model()
    untouched = dense_view(base)
    routed = source.routed(base)
    if options.phases is not None:
        set_phases(routed, options.phases)
    first = next(base.parameters())
    if wants_base_dtype(first.device, modes):
        hold_adapter_in(routed, first.dtype)
    return source.origin(routed), Given(routed, untouched)


def _run(cases: list[Any], **how: Any) -> dict[str, Any]:
    from ..bench.suite import run_cases

    with _refused():
        return run_cases(cases, progress=lambda line: say(line, sys.stderr), **how)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Turn an impossible measurement into a one-line usage error."""
    try:
        yield
    except ValueError as error:
        raise CliError(f"bench: {error}") from error

"""`hf-depthroute bench`: measured speed of a routed model against its dense base."""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..files.shown import say
from . import options as o
from .errors import CliError, refused
from .output import ResultFile, print_rows, write_result

_OF_COMPARE = ("compare", "json_file", "config", "debug")


@dataclass(kw_only=True)
class BenchOptions(o.AdapterOptions):
    adapter: o.AnyAdapter = ""
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD NEW"),
        "Compare two result files instead of measuring.",
    ] = None
    cases: Annotated[str, "Some of prefill,decode."] = "prefill,decode"
    budgets: o.Budgets = "0.5,0.25"
    phases: o.Phases = None
    baselines: Annotated[
        str | None,
        "How models run, some of eager,static,compiled; the fastest counts, dense and routed. "
        "Default: eager on a CPU, all on a GPU.",
    ] = None
    batch: Annotated[str, "Sequences in prefill; one or more, comma-separated."] = "4"
    length: Annotated[str, "Tokens of the prompt; one or more, comma-separated."] = "256"
    decode_batch: Annotated[str, "Sequences in decode; one or more, comma-separated."] = "1"
    decode_steps: Annotated[o.WholeNumber, "Timed decoding steps; 0 leaves decode out."] = 16
    repeats: Annotated[o.Count, "Rounds; figures are medians ± standard errors."] = 15
    threads: Annotated[o.OptionalCount, "CPU threads. Default: all cores."] = None
    json_file: ResultFile = None


@o.command
def bench(options: BenchOptions) -> None:
    """Measure a routed model against its dense base, in one process.

    Prompts are random tokens, on which every budget is calibrated first, so that the share asked
    for really runs full. eta is the part of the skipped arithmetic that shows on the clock.

    \b
    Example:
      hf-depthroute bench routed --budgets 0.5,0.25 --threads 2
      hf-depthroute bench routed --length 256,1024 --decode-batch 1,8 --out bench.json
      hf-depthroute bench --compare old.json new.json
    """
    if (not options.adapter) == (options.compare is None):
        raise CliError("bench: give either ADAPTER (with or without --model) or --compare")
    if options.compare is not None:
        others = [name for name in o.given(options.context) if name not in _OF_COMPARE]
        options.refuse_unused(sorted(others), "with --compare, which measures nothing")
        _compare(*options.compare, options.json_file)
        return
    result = _measure(options)
    from ..bench.result_tables import brief, tables

    if not write_result(options.json_file, result):
        for rows in map(brief, tables(result)):
            print_rows(rows)


def _refuse_unused(options: BenchOptions, kinds: tuple[str, ...]) -> None:
    """`CliError` where an option is for a case that is not among `kinds`."""
    if "prefill" not in kinds:
        options.refuse_unused(("batch",), "without --cases prefill")
    if not options.decode_steps:
        options.refuse_unused(("decode_batch",), "with --decode-steps 0")
    elif "decode" not in kinds:
        options.refuse_unused(("decode_batch", "decode_steps"), "without --cases decode")


def _compare(old: Path, new: Path, out: Path | None) -> None:
    from . import loading

    loading.quiet(False)
    from ..bench.measurements import compare_results, read_result
    from ..bench.result_tables import comparison_table

    try:
        comparison = compare_results(read_result(old), read_result(new))
    except ValueError as error:
        raise CliError(f"--compare {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CliError(
            f"--compare {old} {new}: not results of hf-depthroute bench ({error!r} is wrong)"
        ) from error
    if write_result(out, asdict(comparison)):
        return
    for note in comparison.notes:
        say(f"note: {note}")
    rows = comparison_table(comparison)
    if rows:
        print_rows(rows)
    else:
        say("the results have no measurement in common")


def _measure(options: BenchOptions) -> dict[str, Any]:
    import torch

    from ..bench import Case, run_cases
    from ..bench.measurements import as_single

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
    kinds = o.parse_names("--cases", options.cases, Case.KINDS)
    if set(kinds) == {"decode"} and not options.decode_steps:
        raise CliError(f"bench: --decode-steps 0 leaves nothing of --cases {options.cases}")
    _refuse_unused(options, kinds)
    cases = []
    with refused("bench: "):
        every = Case(
            case="prefill",
            # 1 always is.
            budgets=tuple(budget for budget in o.parse_budgets(options.budgets) if budget < 1),
            baselines=modes,
            steps=max(1, options.decode_steps),
            rounds=options.repeats,
        )
        for kind in dict.fromkeys(kinds):
            if kind != "decode" or options.decode_steps:
                batches = sizes["decode_batch" if kind == "decode" else "batch"]
                pairs = itertools.product(batches, sizes["length"])
                cases += [
                    replace(every, case=kind, batch=batch, length=length) for batch, length in pairs
                ]
    origin, routed, untouched = _load(options, modes, max(sizes["length"]) + options.decode_steps)
    with refused("bench: "):
        result = run_cases(cases, routed, untouched, progress=lambda line: say(line, sys.stderr))
    if all(len(values) == 1 for values in sizes.values()):
        # What has one size has a simpler form.
        only = {name: values[0] for name, values in sizes.items()}
        result = as_single(
            result, only | {"decode_steps": options.decode_steps, "repeats": options.repeats}
        )
    return result | origin


def _load(
    options: BenchOptions, modes: tuple[str, ...] | None, positions: int
) -> tuple[dict[str, Any], Any, Any]:
    """Where the routed model and its untouched base are from, and both."""
    from ..bench.variants import dense_view, hold_in_base_dtype
    from . import loading

    source = loading.find_source(options)
    loading.check_length(positions, source.base_config, "--length + --decode-steps")
    base = source.base_model()
    untouched = dense_view(base)
    routed = source.routed(base)
    hold_in_base_dtype(routed, base, modes)
    return source.origin(routed), routed, untouched

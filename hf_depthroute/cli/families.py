"""`hf-depthroute families`: which model families can be routed,
and what is really skipped in each."""

from __future__ import annotations

from ..files.shown import say
from . import options as o
from .output import ResultFile, write_result


def families(json_file: ResultFile = None, debug: o.Debug = False) -> None:
    """List the supported model families: how their layers add up,
    and what a routed token really skips.

    A model belongs to the family that the "model_type" of its configuration names.

    \b
    Examples:
      hf-depthroute families
      hf-depthroute families --out families.json
    """
    from dataclasses import asdict

    from . import loading

    loading.quiet(debug)
    from ..base.capabilities import LEGEND, support_table

    table = support_table()
    if write_result(json_file, {"families": [asdict(row) for row in table], "legend": LEGEND}):
        return
    header = ("family", "layout", "ffn", "attention", "block", "experts", "sequence")
    lines = [header]
    for row in table:
        name = f"{row.family} ({row.variant})" if row.variant else row.family
        sequence = row.sequence
        if row.sliding not in (sequence, "-"):
            sequence += "*"
        lines.append((name, row.layout, row.ffn, row.attention, row.block, row.experts, sequence))
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]
    for line in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    say()
    for word, meaning in LEGEND.items():
        say(f"{word:8}  {meaning}")
    say(
        "sequence  attention and block with granularity='sequence'; *: masked in layers with a "
        "sliding window"
    )

"""`branches.md`: skipped tokens look n-grams up, or get a low-rank map that multiplies
as many weights.

python recipes/fit_router/branch_report.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

from pages import markdown_table
from study.intervals import interval, tell_mean

from hf_depthroute.files.staged import write_text

HERE = Path(__file__).parent
BASES = {"embedded": "embedded base", "stories260k": "stories260k"}
SIDES = {"static": "best layers left out", "mlp": "fitted, MLP gates"}
BRANCHES = {"rank": "rank + 64", "memory": "n-grams"}
COMPARED = (
    "The loss with n-grams minus that with the low-rank branch that multiplies as many weights "
    "(rank + 64), for the same seed; the intervals hold with 95 % for all rows together:"
)

Pair = tuple[dict[str, Any], dict[str, Any]]


def branch_pairs(found: dict[str, Any]) -> dict[tuple[int, str, int], list[Pair]]:
    """`{(steps, side, layers' worth of calls skipped): [(with n-grams, with rank + 64)]}` of
    one base, by seed."""
    pairs: dict[tuple[int, str, int], list[Pair]] = {}
    for key, memory in found.items():
        kind, *rest = key.split()
        side, _, branch = kind.partition("_")
        rank = found.get(" ".join([f"{side}_rank", *rest]))
        if side not in SIDES or branch != "memory" or rank is None:
            continue
        pairs.setdefault((0, side, int(rest[0])), []).append((memory, rank))
        after: Pair = memory.get("trained", {}), rank.get("trained", {})
        if after[0] and after[0]["steps"] == after[1].get("steps"):
            pairs.setdefault((after[0]["steps"], side, int(rest[0])), []).append(
                (memory | after[0], rank | after[1])
            )
    return pairs


def branch_table(results: dict[str, Any]) -> list[str]:
    """Both branches in the same place, fitted and trained."""
    pairs = {
        (base, *key): rows
        for base in BASES
        for key, rows in sorted(branch_pairs(results[base]).items())
    }
    lines = []
    for (base, steps, side, count), rows in pairs.items():
        shares, losses = (
            [tell_mean([row[name] for row in branch], digits) for branch in zip(*rows)]
            for name, digits in (("share", 3), ("more", 4))
        )
        difference = interval([memory["more"] - rank["more"] for memory, rank in rows], len(pairs))
        where = [BASES[base], f"{steps:,}", SIDES[side], str(count)]
        lines.append([*where, " / ".join(dict.fromkeys(shares)), *losses, difference.tell()])
    heads = [
        "base",
        "steps",
        "what",
        "layers' worth",
        "share run",
        BRANCHES["memory"],
        BRANCHES["rank"],
        "difference",
    ]
    return markdown_table(heads, lines)


def in_brief(results: dict[str, Any]) -> str:
    """What n-grams change with trained routers, two layers' worth of calls skipped,
    of both bases."""
    said = []
    for base, title in BASES.items():
        pairs = branch_pairs(results[base])
        steps = max(steps for steps, side, count in pairs if (side, count) == ("mlp", 2))
        rows = pairs[steps, "mlp", 2]
        difference = tell_mean([memory["more"] - rank["more"] for memory, rank in rows], sign="+")
        said.append(f"{difference} nats on {title} ({steps} steps, {len(rows)} seeds)")
    return f"routers that look n-grams up in place of as many low-rank weights: {', '.join(said)}"


def branch_times(found: dict[str, Any]) -> list[str]:
    """The time of a prompt and of decoding with each branch, over that of the default rank."""
    lines = []
    for base, row in found["bases"].items():
        for kind, title in BRANCHES.items():
            times = [row[phase][f"static_{kind}"] for phase in ("prompt", "decode")]
            cells = [f"{time['ratio']:.3f} ± {time['error']:.3f}" for time in times]
            lines.append([BASES[base], title, f"{row['weights'][f'static_{kind}']:,.0f}", *cells])
    return markdown_table(["base", "branch", "weights multiplied", "prompt", "decoding"], lines)


def section(results: dict[str, Any], times: dict[str, Any]) -> list[str]:
    """Both tables, of `results.json` and `branch_time.json`, with what they say."""
    machine = times["machine"]
    timed = (
        f"Time with two FFNs left out, over that with the default rank ({machine['device']}, "
        f"{machine['threads']} threads, float32, medians of {times['rounds']} rounds ± standard "
        "errors); a prompt is 4 rows of 256 tokens, decoding 32 steps of one sequence:"
    )
    return [COMPARED, "", *branch_table(results), "", timed, "", *branch_times(times)]


def page() -> str:
    """`branches.md`."""
    results, times = (
        json.loads((HERE / name).read_text()) for name in ("results.json", "branch_time.json")
    )
    return "\n".join([*section(results, times), ""])


if __name__ == "__main__":
    write_text(HERE / "branches.md", page())

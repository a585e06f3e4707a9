"""Claims of papers as rows of one table: what is claimed, what came out here,
and one of four states.

* agrees, disagrees: the whole interval lies on the claimed side, or on the other one
* open: neither; the reason says why
* not run: the reason says what it would take
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pages import markdown_table

from .intervals import MIN_SEEDS, OPEN, STATES, answer, interval

OURS = "not claimed"  # in place of a paper's number
HEAD = ["claim", "paper", "here", "state", "why, or what it would take"]


@dataclass(frozen=True)
class Judged:
    """A claim and what became of it.

    Attributes:
        claim: One sentence.
        paper: What its paper reports; empty or `OURS` for a statement that is not a paper's.
        here: The numbers of this repository.
        state: One of `STATES`.
        reason: Why it is open, or what running it would take.
    """

    claim: str
    paper: str
    here: str
    state: str
    reason: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(
                f"state {self.state!r} of the claim {self.claim!r} must be one of "
                f"{', '.join(STATES)}"
            )

    @property
    def ours(self) -> bool:
        """Whether it is a statement of this repository, not of a paper."""
        return self.paper in ("", OURS)


def judge(
    claim: str,
    paper: str,
    numbers: Sequence[float],
    expected: str,
    statements: int,
    margin: float = 0.0,
    show: Callable[[float], str] = "{:+.4f}".format,
) -> Judged:
    """A claim about one number per seed; `expected` and `margin` are those of `answer`."""
    found = interval(numbers, statements)
    state, alone = (answer(one, expected, margin) for one in (found, found.by_itself()))
    return Judged(
        claim, paper, found.tell(show), state, why_open(state, alone, found.seeds, statements)
    )


def why_open(state: str, alone: str, seeds: int, statements: int) -> str:
    """The reason of an open state, from the answers of both intervals;
    empty for every other state."""
    if state != OPEN:
        return ""
    if seeds < MIN_SEEDS:
        return cannot_decide(seeds)
    if alone != OPEN:
        return f"{alone} alone; cannot decide with {seeds} seeds and {statements} statements"
    return "neither interval decides"


def cannot_decide(seeds: int) -> str:
    return "no common seed" if not seeds else f"cannot decide with {seeds} seed{'s' * (seeds > 1)}"


def set_against(state: str, reason: str, elsewhere: str) -> tuple[str, str]:
    """State and reason of a statement about a paper's models,
    where the runs are of another regime (`elsewhere`).

    One rule for both directions: neither what agrees nor what disagrees in another regime says how
    the claim fares.
    """
    if not elsewhere or state == OPEN:
        return state, reason
    return OPEN, f"{state} here, in another regime: {elsewhere}"


def claims_table(rows: Iterable[Judged]) -> list[str]:
    """The rows as a Markdown table."""
    return markdown_table(
        HEAD, [[row.claim, row.paper, row.here, row.state, row.reason] for row in rows]
    )


def count_states(states: Iterable[str]) -> dict[str, int]:
    """How many rows have each state, in the order of `STATES`."""
    found = Counter(states)
    return {state: found[state] for state in STATES}


def tell_states(states: Iterable[str]) -> str:
    """`3 agree, 1 disagrees, 2 open, 4 not run`, without those that no row has."""
    verbs = {"agrees": ("agrees", "agree"), "disagrees": ("disagrees", "disagree")}
    counts = {state: count for state, count in count_states(states).items() if count}
    return ", ".join(
        f"{count} {verbs.get(state, (state, state))[count > 1]}" for state, count in counts.items()
    )

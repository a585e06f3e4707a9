"""Suggestions for a misspelled name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`; None if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: `"; did you mean 'budget'?"`, or nothing."""
    close = closest(name, known)
    if close is None:
        return ""
    return f"; did you mean {close!r}?"

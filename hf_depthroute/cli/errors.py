"""From an exception to an exit code and one line."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator
from typing import Any

from ..files.hub import without_tokens
from ..files.shown import OneLine, reason, shown

OTHER = 1  # not foreseen; `--debug` shows where
USAGE = 2  # command line, config or data
HUB = 3  # offline, not found, no access
ADAPTER = 4  # corrupt, or made for another model
RESOURCES = 5  # memory, disk space
INTERRUPTED = 130


_SUITES = "suites of recipes/speed/bench.py have it"
MOVED = {  # options of earlier versions, and where to look for them
    **dict.fromkeys(
        ("--masked", "--tune", "--suite", "--shape", "--plot", "--vocabulary"), _SUITES
    ),
    **dict.fromkeys(
        ("--target", "--gate", "--loss", "--layers", "--depth"),
        f"bench measures an adapter; {_SUITES}",
    ),
}


class CliError(OneLine):
    """Stops a command with `message` (one line: field, value, remedy) and `code`."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def refused(
    what: str, kinds: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Turn an exception of `kinds` into a `CliError` that says `what`, then why."""
    try:
        yield
    except kinds as error:
        raise CliError(f"{what}{reason(error)}") from error


def describe(error: BaseException) -> tuple[int, str]:
    """`(exit code, message)` of whatever ended a command. The message is one line."""
    code, message = _describe(error)
    return code, shown(without_tokens(" ".join(message.split())))


def _describe(error: BaseException) -> tuple[int, str]:
    if isinstance(error, CliError):
        return error.code, str(error)
    if hasattr(error, "format_message"):  # typer's own, for a bad command line
        context = getattr(error, "ctx", None)
        hint = ""
        if context is not None:
            hint = f" (see {context.command_path} --help)"
        option = getattr(error, "option_name", None)
        if context is not None and context.info_name == "bench" and option in MOVED:
            hint = f"; {MOVED[option]}"
        return USAGE, usage_message(error) + hint
    # Everything below needs the heavy libraries, which have been imported if their exceptions can
    # occur.
    from ..adapter.files import AdapterMismatchError
    from ..base.families import UnsupportedModelError
    from ..config.adapter import ConfigError
    from ..data.text import DataError
    from ..files.hub import HubError, causes, explain
    from ..files.out_of_resources import disk_full, out_of_memory

    if isinstance(error, HubError) or any(isinstance(cause, HubError) for cause in causes(error)):
        return HUB, str(error)
    if isinstance(error, AdapterMismatchError):
        return ADAPTER, str(error)
    if isinstance(error, ConfigError | DataError | UnsupportedModelError):
        return USAGE, str(error)
    # Their modules take seconds to import.
    if type(error).__name__ in ("NonFiniteLossError", "NonFiniteError"):
        return OTHER, str(error)
    said = str(error).strip() or "no message"
    if out_of_memory(error):
        remedy = (
            "lower --batch-size (or --batch) or --length, or use a smaller model or --dtype "
            "bfloat16"
        )
        if not said.startswith("out of memory"):
            said = f"out of memory: {said}"
        return RESOURCES, f"{said}; {remedy}"
    if disk_full(error):
        path = getattr(error, "filename", None)
        why = getattr(error, "strerror", None) or ""
        if why.startswith("disk full"):  # ours, with what is needed and what is left
            return RESOURCES, f"{path}: {why}"
        where = f" while writing {path}" if path else ""
        return RESOURCES, f"disk full{where}; free some space and run again"
    if hub := explain(error):
        return HUB, str(hub)
    if isinstance(error, OSError) and error.strerror:
        return USAGE, f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return OTHER, f"{type(error).__name__}: {said} (run again with --debug for the traceback)"


def usage_message(error: Any) -> str:
    """Typer's message about a bad command line, with the value that was given."""
    message = error.format_message().rstrip(".")
    problems = getattr(error.__cause__, "errors", None)  # pydantic's, for a value of the wrong type
    if callable(problems):
        message = message.replace(
            "Invalid value for", f"Invalid value {reprlib.repr(problems()[0]['input'])} for", 1
        )
    return message

"""From an exception to an exit code and one line."""

from __future__ import annotations

import errno
import re
from typing import Any

OTHER = 1  # not foreseen; `--debug` shows where
USAGE = 2  # command line, config or data
HUB = 3  # offline, not found, no access
ADAPTER = 4  # corrupt, or made for another model
RESOURCES = 5  # memory, disk space
INTERRUPTED = 130

_TOKEN = re.compile(r"hf_[A-Za-z0-9]{16,}")  # of the Hub
_DISK_FULL = "No space left on device"


class CliError(Exception):
    """Stops a command with `message` (one line: field, value, remedy) and `code`."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


def describe(error: BaseException) -> tuple[int, str]:
    """`(exit code, message)` of whatever ended a command. The message is one line."""
    code, message = _describe(error)
    return code, without_tokens(" ".join(message.split()))


def without_tokens(text: str) -> str:
    """`text` with Hub tokens blotted out: a server may repeat what it was sent."""
    return _TOKEN.sub("hf_***", text)


def _describe(error: BaseException) -> tuple[int, str]:
    if isinstance(error, CliError):
        return error.code, str(error)
    if hasattr(error, "format_message"):  # typer's own, for a bad command line
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return USAGE, usage_message(error) + hint
    # Everything below needs the heavy libraries, which have been imported if their exceptions can occur.
    from ..config import ConfigError
    from ..data import DataError
    from ..families import UnsupportedModelError
    from ..hub import HubError, causes, explain
    from ..tuner import AdapterMismatchError

    if isinstance(error, HubError) or any(isinstance(cause, HubError) for cause in causes(error)):
        return HUB, str(error)
    if isinstance(error, AdapterMismatchError):
        return ADAPTER, str(error)
    if isinstance(error, ConfigError | DataError | UnsupportedModelError):
        return USAGE, str(error)
    if out_of_memory(error):
        remedy = "lower --batch-size (or --batch) or --length, or use a smaller model or --dtype bfloat16"
        return RESOURCES, f"out of memory: {_first_line(error)}; {remedy}"
    if disk_full(error):
        path = getattr(error, "filename", None)
        return RESOURCES, f"disk full{f' while writing {path}' if path else ''}; free some space and run again"
    hub = explain(error, "download")
    if hub is not None:
        return HUB, str(hub)
    if isinstance(error, OSError) and error.strerror:
        return USAGE, f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return OTHER, f"{type(error).__name__}: {_first_line(error)} (run again with --debug for the traceback)"


def out_of_memory(error: BaseException) -> bool:
    """Whether the machine or the GPU ran out of memory."""
    import torch

    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def disk_full(error: BaseException) -> bool:
    """Whether a write failed for lack of space or quota; safetensors reports it in the message only."""
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or _DISK_FULL in str(error)


def usage_message(error: Any) -> str:
    """What typer says about a bad command line, with the value that was given."""
    message = error.format_message().rstrip(".")
    problems = getattr(error.__cause__, "errors", None)  # pydantic's, behind a value of the wrong type
    if callable(problems):
        message = message.replace("Invalid value for", f"Invalid value {problems()[0]['input']!r} for", 1)
    return message


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]

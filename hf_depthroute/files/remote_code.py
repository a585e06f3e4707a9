"""Whether a base model's own Python files may run: no, unless the caller says so.

A repository can bring classes of its own (`auto_map` in its configuration or its tokenizer's).
transformers asks on a terminal whether to run them when it is told neither yes nor no, so it is
always told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from .hub import causes

_trusted: ContextVar[bool] = ContextVar("trust_remote_code", default=False)


@contextmanager
def trust_remote_code() -> Iterator[None]:
    """Inside the block, `trusts_remote_code()` is True."""
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def trusts_remote_code() -> bool:
    """The `trust_remote_code` of everything that this library loads; False by default."""
    return _trusted.get()


def code_repositories(model: str) -> list[str]:
    """The repositories whose code `model` asks for, itself first:
    it reads configurations and runs nothing.

    Raises:
        OSError: There is no such model.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    found = {model: None}
    for settings in (PretrainedConfig.get_config_dict(model)[0], get_tokenizer_config(model)):
        for reference in _references(settings.get("auto_map")):
            if "--" in reference:  # REPOSITORY--FILE.CLASS
                found[reference.split("--")[0]] = None
    return list(found)


def refused_code(error: BaseException, model: str) -> str | None:
    """The message if transformers refused the remote code of `model`; None otherwise."""
    refusals = [cause for cause in causes(error) if isinstance(cause, ValueError)]
    if not any("trust_remote_code=True" in str(refusal) for refusal in refusals):
        return None
    names = ", ".join(code_repositories(model))
    return (
        f"asks for code of its own, from {names}, which is not run unasked; read it, then pass "
        "--trust-remote-code"
    )


def _references(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [reference for part in value for reference in _references(part)]

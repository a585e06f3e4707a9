"""ADAPTER, the argument that names the adapter in every command, and `--adapter`, its older spelling."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import CliError

_OLD = "hf_depthroute.cli --adapter"
_OPTION = "hf_depthroute.cli option in the place of ADAPTER"
_HELP = "Hub id or folder of the adapter."


def passed_on(context: typer.Context) -> list[str]:
    """The words that a command did not know, for the program it starts. With `--adapter`, ADAPTER took the first."""
    first = context.meta.get(_OPTION)
    return [*([] if first is None else [first]), *context.args]


def _remember(context: typer.Context, value: str | None) -> str | None:
    context.meta[_OLD] = value
    return value


def _either(context: typer.Context, value: str | None) -> str | None:
    """Callback of ADAPTER, which is read after `--adapter`: the one of both that was given."""
    old = context.meta.get(_OLD)
    if old is None:
        return value
    source = context.get_parameter_source("adapter")
    if value and source is not None and source.name == "COMMANDLINE":
        if not value.startswith("-"):
            raise CliError(f"{context.info_name}: {value} and --adapter {old} name an adapter twice; leave one out")
        context.meta[_OPTION] = value
    return str(old)


def _one(context: typer.Context, value: str) -> str:
    adapter = _either(context, value) or ""
    if (not adapter or adapter.startswith("-")) and not context.resilient_parsing:
        before = f" before {adapter}" if adapter else ""
        raise CliError(
            f"no adapter; name its folder or Hub id{before}: {context.command_path} ADAPTER {adapter}".strip()
        )
    return adapter


Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", show_default=False, callback=_one, help=_HELP)]
AnyAdapter = Annotated[str | None, typer.Argument(metavar="ADAPTER", callback=_either, help=_HELP)]
AdapterToTrain = Annotated[
    str | None,
    typer.Argument(metavar="ADAPTER", callback=_either, help="An adapter to go on training, instead of a new one."),
]
OldAdapter = Annotated[
    str | None, typer.Option("--adapter", is_eager=True, callback=_remember, help="Older spelling of ADAPTER.")
]

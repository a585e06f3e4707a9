"""Options that several commands share, and `--config FILE.yaml`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ..remote_code import trust_remote_code
from ..yaml_files import YamlError, read_mapping
from .errors import CliError, usage_message

_NOT_IN_YAML = ("config", "help", "debug")


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of `--config`: the file's values become the defaults of the command's other options.

    Raises:
        CliError: The file cannot be read, is not a flat mapping, repeats a key, has a key that is no option of this
            command, or a value that is no scalar.
    """
    if path is None or context.resilient_parsing:
        return path
    options = {p.name: p for p in context.command.params if p.name and p.name not in _NOT_IN_YAML}
    spelled = {word.lstrip("-").replace("-", "_"): p for p in options.values() for word in p.opts}
    defaults = dict(context.default_map or {})
    try:
        # `max-steps` and `max_steps` are the same option.
        content = read_mapping(path, key_name=lambda key: key.replace("-", "_"))
    except YamlError as error:
        raise CliError(f"--config {error}") from error
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in options and name in spelled:  # `out: FILE` and `json: FILE` are the same option
            name = str(spelled[name].name)
        if name not in options:
            close = difflib.get_close_matches(name, [*options, *spelled], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"see {context.command_path} --help for the options"
            raise CliError(f"{path}: unknown key {key!r}; {hint}")
        if value is None:
            continue
        defaults[name] = _as_option(path, key, value, flag=bool(getattr(options[name], "is_flag", False)))
        try:  # checked here too: a value that the command line overrides must not be wrong either
            options[name].process_value(context, defaults[name])
        except typer.BadParameter as error:
            raise CliError(f"{path}: {usage_message(error)}") from error
    context.default_map = defaults
    return path


def _as_option(path: Path, key: str, value: Any, flag: bool) -> Any:
    """What would have been typed on the command line, so that YAML and command line are checked alike."""
    if flag != isinstance(value, bool):
        hint = "true or false" if flag else "a value, not true or false (quote it if you mean the word)"
        raise CliError(f"{path}: {key}={value!r} must be {hint}")
    if flag:
        return value
    if isinstance(value, list) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in value):
        return ",".join(str(x) for x in value)
    if not isinstance(value, str | int | float):
        raise CliError(f"{path}: {key} must be a single value or a list of numbers, not {type(value).__name__}")
    return str(value)


def options_of(*classes: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every field of some dataclasses, which it takes as `**fields`.

    Name, type and default are the field's, and its metadata holds the help. `"flag": True` there makes a boolean that
    is False by default an option without its negation. Training arguments hold the help alone: transformers'
    argument parser hands the rest of a field's metadata to argparse.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind != p.VAR_KEYWORD]
        added = []
        for owner in classes:
            types = get_type_hints(owner)
            for field in fields(owner):
                assert field.default is not MISSING
                words = [f"--{field.name.replace('_', '-')}"] if field.metadata.get("flag") else []
                kind: Any = types[field.name]
                if str in get_args(kind):  # a field that takes several types takes each of them as text
                    kind = str | None
                option = Annotated[kind, typer.Option(*words, help=field.metadata["help"])]
                added.append(
                    inspect.Parameter(field.name, own[0].KEYWORD_ONLY, default=field.default, annotation=option)
                )
        parameters = [*(p.replace(kind=p.KEYWORD_ONLY) for p in own), *added]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def given(context: typer.Context) -> set[str]:
    """Names of the options that the command line or the YAML file sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def command_words(context: typer.Context, leave_out: Sequence[str] = ()) -> list[str]:
    """The command line that repeats this call without its YAML file: every option that is not at its default."""
    words, set_here = ["hf-depthroute", str(context.info_name)], given(context)
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        if name in (*_NOT_IN_YAML, *leave_out) or name not in set_here or value is None:
            continue
        if getattr(parameter, "is_flag", False):
            words.append((parameter.opts if value else parameter.secondary_opts or parameter.opts)[0])
        elif parameter.param_type_name == "argument":
            words.append(str(value))
        else:
            words += [parameter.opts[0], str(value)]
    return words


def parse_budgets(text: str) -> list[float]:
    """`"0.25,0.5"` -> `[0.25, 0.5]`.

    Raises:
        CliError: Not a comma-separated list of numbers in (0, 1].
    """
    from ..config import ConfigError, check_budget

    try:
        return [check_budget(float(part)) for part in text.split(",")]
    except ConfigError as error:
        raise CliError(f"--budgets {text}: {error}") from error
    except ValueError as error:
        raise CliError(f"--budgets {text!r}: write numbers in (0, 1], such as 0.25,0.5") from error


def parse_layers(text: str | None) -> str | list[int] | None:
    """`"2,3"` -> `[2, 3]`; `"last:2"` and the like stay as they are."""
    if text is None or not all(part.strip().lstrip("-").isdecimal() for part in text.split(",")):
        return text
    return [int(part) for part in text.split(",")]


def parse_numbers(option: str, text: str, low: int = 1) -> list[int]:
    """`"1,8"` -> `[1, 8]`.

    Raises:
        CliError: Not a comma-separated list of whole numbers, each at least `low`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise CliError(f"{option} {text!r}: write whole numbers, such as 1,8") from error
    if min(numbers) < low:
        raise CliError(f"{option} {text}: each must be at least {low}")
    return numbers


def parse_names(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """`"eager,static"` -> `("eager", "static")`.

    Raises:
        CliError: One of them is not in `allowed`.
    """
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise CliError(f"{option} {text}: {unknown[0]!r} is unknown here; use some of: {', '.join(allowed)}")
    return names


def _trust_remote_code(context: typer.Context, given: bool) -> bool:
    if given and not context.resilient_parsing:
        context.with_resource(trust_remote_code())  # until the command ends
    return given


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        help="YAML file of these options; the command line overrides it.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show warnings, and the traceback of an error.")]
Model = Annotated[str, typer.Option(help="Hub id or folder of the base model.")]
BaseModel = Annotated[str | None, typer.Option(help="Hub id or folder of the base model. Default: the adapter's.")]
AllowBaseMismatch = Annotated[
    bool,
    typer.Option("--allow-base-mismatch", help="Load the adapter onto a base of its shape with other weights."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=_trust_remote_code,
        help="Run Python code that the base's repository brings with it. Read it first.",
    ),
]
Dataset = Annotated[
    str,
    typer.Option(
        help="python-stdlib, a .txt/.jsonl/.json/.csv/.parquet file, a folder (also of save_to_disk), or a Hub id."
    ),
]
DatasetName = Annotated[str | None, typer.Option(help="Configuration of the Hub dataset, such as sample-10BT.")]
Column = Annotated[str, typer.Option(help="Column that holds the text.")]
Streaming = Annotated[bool, typer.Option("--streaming/--no-streaming", help="Read the dataset without downloading it.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Blocks in a batch.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens in a block.")]
Budgets = Annotated[str, typer.Option(help="Fractions of tokens that run full, comma-separated.")]

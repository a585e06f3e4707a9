"""Options that several commands share, and `--config FILE.yaml`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import CliError, usage_message

_MAX_BYTES = 1 << 20
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
    defaults = dict(context.default_map or {})
    for key, value in _read_yaml(path).items():
        name = str(key).replace("-", "_")
        if name not in options:
            close = difflib.get_close_matches(name, options, n=1)
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


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys, of which YAML parsers silently keep the last, and aliases, which can explode."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise CliError(f"{path}: YAML aliases are not supported; write the value out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                # `max-steps` and `max_steps` are the same option.
                key = str(key_node.value).replace("-", "_")
                if key in seen:
                    raise CliError(f"{path}: key {key_node.value!r} appears twice; keep one")
                seen.add(key)
            return super().construct_mapping(node, deep)

    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CliError(f"{path}: larger than 1 MiB; this is no config file")
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except OSError as error:
        raise CliError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CliError(f"{path}: not valid YAML: {str(error) or type(error).__name__}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise CliError(f"{path}: must be a mapping of option names to values, not a {type(loaded).__name__}")
    return loaded


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
Adapter = Annotated[str, typer.Option(help="Hub id or folder of the adapter.")]
Dataset = Annotated[
    str, typer.Option(help="python-stdlib, a .txt/.jsonl/.json/.csv/.parquet file, a folder, or a Hub id.")
]
DatasetName = Annotated[str | None, typer.Option(help="Configuration of the Hub dataset, such as sample-10BT.")]
Column = Annotated[str, typer.Option(help="Column that holds the text.")]
Streaming = Annotated[bool, typer.Option("--streaming/--no-streaming", help="Read the dataset without downloading it.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Blocks in a batch.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens in a block.")]
Budgets = Annotated[str, typer.Option(help="Fractions of tokens that run full, comma-separated.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result here.")]

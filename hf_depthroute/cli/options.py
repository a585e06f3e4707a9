"""Options that several commands share: ADAPTER with `--adapter`, its older spelling,
and `--config FILE.yaml`."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ..config.fields import MAX_SEED
from ..files.remote_code import trust_remote_code
from ..files.strict_yaml import YamlError, read_mapping
from ..files.suggestions import did_you_mean
from .errors import CliError, refused, usage_message

# Fields whose option has another name.
_OTHER_NAMES = {"gate_temperature": "temperature", "learning_rate": "lr"}
_TAKEN = "hf_depthroute.cli option in the place of ADAPTER"
_NOT_IN_YAML = ("config", "help", "debug")


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of `--config`: the file's values become defaults of the command's other options."""
    if path is None or context.resilient_parsing:
        return path
    parameters = [p for p in context.command.params if p.name and p.name not in _NOT_IN_YAML]
    # `out` and `json` are one.
    options = {word.lstrip("-").replace("-", "_"): p for p in parameters for word in p.opts}
    options |= {str(p.name): p for p in parameters}
    defaults = dict(context.default_map or {})
    with refused("--config ", YamlError):  # `max-steps` and `max_steps` are the same option
        content = read_mapping(path, lambda key: key.replace("-", "_"), as_written=True)
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in options:
            see = f"; see {context.command_path} --help for the options"
            raise CliError(f"{path}: unknown key {key!r}{did_you_mean(name, options) or see}")
        if value is None:
            continue
        option = options[name]
        typed = defaults[str(option.name)] = _as_typed(path, key, value, option)
        try:  # checked here too: a value that the command line overrides must not be wrong either
            option.process_value(context, typed)
        except typer.BadParameter as error:
            raise CliError(f"{path}: {usage_message(error)}") from error
    context.default_map = defaults
    return path


def _as_typed(path: Path, key: str, value: object, option: object) -> Any:
    """A YAML file's values as command-line arguments, so that both are checked alike."""
    flag = bool(getattr(option, "is_flag", False))
    if flag != isinstance(value, bool):
        hint = "a value, not true or false (quote it if you mean the word)"
        if flag:
            hint = "true or false"
        raise CliError(f"{path}: {key}={value!r} must be {hint}")
    if flag:
        return value
    if getattr(option, "multiple", False):  # given once for each value
        values = value if isinstance(value, list) else [value]
        return [_as_typed(path, key, each, None) for each in values]
    if isinstance(value, list) and all(map(_is_number, value)):
        return ",".join(map(str, value))
    if not isinstance(value, str | int):
        raise CliError(
            f"{path}: {key} must be a single value or a list of numbers, not {type(value).__name__}"
        )
    return str(value)


def _is_number(value: object) -> bool:
    """Whether it is a whole number, or the text of a number."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            float(value)
            return True
    return type(value) is int


def command(function: Callable[[Any], None]) -> Callable[..., None]:
    """A command for typer from a function of one dataclass: each of its fields is an option.

    A class's own fields come before those of its bases. Name, type and default are the field's; its
    help is the text in `Annotated[TYPE, "text"]` or in its metadata. There, a string that begins
    with -- is the option's name, and `typer.Option(...)`, as of `Count`, says more. What is neither
    text nor a number, a path, true or false is given as text. A flag that is off by default has no
    negation.
    """
    (owner,) = (kind for name, kind in get_type_hints(function).items() if name != "return")
    kinds = get_type_hints(owner, include_extras=True)
    order = [name for part in owner.__mro__ for name in inspect.get_annotations(part)]
    parameters = []
    for field in sorted(fields(owner), key=lambda field: order.index(field.name)):
        default = field.default
        if default is MISSING:
            default = inspect.Parameter.empty
        annotation = _annotation(field, kinds[field.name])
        how = {"default": default, "annotation": annotation}
        parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, **how))

    def call(**values: object) -> None:
        for name, value in values.items():  # a range lets NaN pass
            if isinstance(value, float) and not math.isfinite(value):
                raise CliError(f"--{option_name(name)} {value}: must be a finite number")
        function(owner(**values))

    call.__doc__ = function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _annotation(field: Field[object], kind: Any) -> Any:
    text = field.metadata.get("help")
    if kind is typer.Context:
        return kind
    words = []
    option = None
    if get_origin(kind) is Annotated:
        kind, *parts = get_args(kind)
        for part in parts:
            if not isinstance(part, str):
                option = copy.copy(part)
            elif part.startswith("--"):
                words.append(part)
            else:
                text = part
    if option is not None:
        option.help = text or option.help
        option.param_decls = words or option.param_decls
        return Annotated[kind, option]
    types = set(get_args(kind) or (kind,)) - {type(None)}
    if len(types) > 1 or not types <= {str, int, float, bool, Path}:
        kind = str | None
    if not words and (kind is not bool or field.default is False):
        words = [f"--{option_name(field.name)}"]
    return Annotated[kind, typer.Option(*words, help=text)]


def key_of(field: str) -> str:
    """`"learning_rate"` -> `"lr"`, which YAML files and records call it."""
    return _OTHER_NAMES.get(field, field)


def values_of(options: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def option_name(field: str) -> str:
    """`"gate_hidden"` -> `"gate-hidden"`."""
    return key_of(field).replace("_", "-")


def given(context: typer.Context) -> set[str]:
    """Names of the options that the command line or the YAML file sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name for name, source in sources.items() if source is not None and source.name != "DEFAULT"
    }


def _word(context: typer.Context, option: Any) -> str:
    """The word of an option; of a flag, the one for the value it has: `"--no-speed"`."""
    off = context.params.get(option.name) is False
    return str(((off and option.secondary_opts) or option.opts)[0])


def command_words(context: typer.Context, leave_out: Sequence[str] = ()) -> list[str]:
    """The command line that repeats this call without its YAML file."""
    words = ["hf-depthroute", str(context.info_name)]
    set_here = given(context)
    for parameter in context.command.params:
        name = parameter.name or ""
        value = context.params.get(name)
        if name in (*_NOT_IN_YAML, *leave_out) or name not in set_here or value is None:
            continue
        if getattr(parameter, "is_flag", False):
            words.append(_word(context, parameter))
        elif parameter.param_type_name == "argument":
            words.append(str(value))
        else:
            words += [_word(context, parameter), str(value)]
    return words


def parse_budgets(text: str) -> list[float]:
    """`"0.25,0.5"` -> `[0.25, 0.5]`; `CliError` where that is no list of numbers in (0, 1]."""
    from ..config.adapter import ConfigError, check_budget

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


def parse_pattern(text: str) -> dict[str, str | int]:
    """`"28=block,29=block"` -> `{"28": "block", "29": "block"}`; numbers become integers."""
    parts = [part.strip().partition("=") for part in text.split(",")]
    if not all(key.strip().isdigit() and value.strip() for key, _, value in parts):
        raise CliError(f"{text!r}: write layer=value, such as 28=block,29=block")
    return {
        key.strip(): int(value) if value.strip().isdigit() else value.strip()
        for key, _, value in parts
    }


def parse_numbers(
    option: str, text: str, low: int | None = 1, wanted: str = "whole numbers, such as 1,8"
) -> list[int]:
    """`"1,8"` -> `[1, 8]`; `CliError` unless it is a list of whole numbers from `low`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise CliError(f"{option} {text!r}: write {wanted}") from error
    if low is not None and min(numbers) < low:
        raise CliError(f"{option} {text}: each must be at least {low}")
    return numbers


def parse_names(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """`"eager,static"` -> `("eager", "static")`; `CliError` for one not in `allowed`."""
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise CliError(
            f"{option} {text}: {unknown[0]!r} is unknown here; use some of: {', '.join(allowed)}"
        )
    return names


def passed_on(context: typer.Context) -> list[str]:
    """Words that a command did not know; with `--adapter`, ADAPTER took the first of them."""
    return [*context.meta.get(_TAKEN, ()), *context.args]


def either(context: typer.Context, value: str | None) -> str | None:
    """Callback of ADAPTER, which is read after `--adapter`: the one of both that was given."""
    old = context.params.get("adapter_option")
    if old is None:
        return value
    source = context.get_parameter_source("adapter")
    if value and source is not None and source.name == "COMMANDLINE":
        if not value.startswith("-"):
            raise CliError(
                f"{context.info_name}: {value} and --adapter {old} name an adapter twice; leave "
                "one out"
            )
        context.meta[_TAKEN] = [value]
    return str(old)


def _one(context: typer.Context, value: str) -> str:
    adapter = either(context, value) or ""
    if (not adapter or adapter.startswith("-")) and not context.resilient_parsing:
        before = f" before {adapter}" if adapter else ""
        words = f"{context.command_path} ADAPTER {adapter}".strip()
        raise CliError(f"no adapter; name its folder or Hub id{before}: {words}")
    return adapter


def check_dataset(context: typer.Context, given: str | None) -> str | None:
    """Refuse a text that cannot be read before anything heavy is imported."""
    from ..data.text import DataError, check_source

    if given and not context.resilient_parsing:
        with refused("", (DataError, ValueError, OSError)):
            check_source(given)
    return given


def _trust_remote_code(context: typer.Context, given: bool) -> bool:
    if given and not context.resilient_parsing:
        context.with_resource(trust_remote_code())  # until the command ends
    return given


File = Annotated[Path | None, typer.Option(metavar="FILE")]
Folder = Annotated[Path | None, typer.Option(metavar="FOLDER")]
Count = Annotated[int, typer.Option(min=1)]
OptionalCount = Annotated[int | None, typer.Option(min=1)]
WholeNumber = Annotated[int, typer.Option(min=0)]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED)]
_ADAPTER = "Hub id or folder of the adapter."
Adapter = Annotated[
    str, typer.Argument(metavar="ADAPTER", show_default=False, callback=_one, help=_ADAPTER)
]
AnyAdapter = Annotated[
    str, typer.Argument(metavar="ADAPTER", show_default=False, callback=either, help=_ADAPTER)
]
OldAdapter = Annotated[
    str | None, typer.Option("--adapter", is_eager=True, help="Older spelling of ADAPTER.")
]
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
Debug = Annotated[
    bool, typer.Option("--debug", help="Show warnings, and the traceback of an error.")
]
BaseModel = Annotated[str | None, "Hub id or folder of the base model. Default: the adapter's."]
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
    typer.Option(callback=check_dataset),
    "python-stdlib, a .txt/.jsonl/.json/.csv/.parquet file, a folder (also of save_to_disk), or a "
    "Hub id.",
]
Budgets = Annotated[
    str, "Shares of tokens that run full in the layers with a gate, comma-separated."
]
Budget = Annotated[
    float | None,
    "Share of tokens that runs in full in the layers with a gate, in (0, 1]. Default: the "
    "adapter's.",
]
Phases = Annotated[
    str | None, "What is routed: all, or prefill (prompts only). Default: the adapter's."
]
ChatTemplate = Annotated[
    bool,
    "--chat-template/--no-chat-template",
    "Put the prompt into the tokenizer's chat template, if any.",
]


@dataclass(kw_only=True)
class CommandOptions:
    """Options of all commands, and the context that says which of them were given."""

    context: typer.Context
    debug: Debug = False

    def refuse_unused(self, names: Iterable[str], why: str) -> None:
        """`CliError` where one of these options is given, which the command would not look at."""
        params = {parameter.name: parameter for parameter in self.context.command.params}
        set_here = given(self.context)
        unused = [_word(self.context, params[name]) for name in names if name in set_here]
        if unused:
            has = "has" if len(unused) == 1 else "have"
            raise CliError(
                f"{self.context.info_name}: {' and '.join(unused)} {has} no effect {why}"
            )


@dataclass(kw_only=True)
class BaseOptions(CommandOptions):
    """Options of the commands that load a base model."""

    gguf_file: Annotated[
        str | None,
        typer.Option(metavar="NAME"),
        "The base is this GGUF file in --model. Default: the adapter's.",
    ] = None
    dtype: Annotated[str, "auto (as stored), float32, bfloat16 or float16."] = "auto"
    config: ConfigFile = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(kw_only=True)
class AdapterOptions(BaseOptions):
    """Options of the commands that load an adapter onto its base."""

    adapter: Adapter = ""
    adapter_option: OldAdapter = None
    model: BaseModel = None
    allow_base_mismatch: Annotated[
        bool, "Load the adapter onto a base of its shape with other weights."
    ] = False


@dataclass(kw_only=True)
class TextOptions:
    """Options of the commands that read blocks of a text."""

    dataset_name: Annotated[
        str | None, "Configuration of the Hub dataset, such as sample-10BT."
    ] = None
    column: Annotated[str, "Column that holds the text."] = "text"
    streaming: Annotated[
        bool, "--streaming/--no-streaming", "Read the dataset without downloading it."
    ] = False
    batch_size: Annotated[Count, "Blocks in a batch."] = 8
    length: Annotated[int, typer.Option(min=2), "Tokens in a block."] = 256

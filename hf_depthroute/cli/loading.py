"""Models, adapters, tokenizers and text for the commands. Local folders and Hub ids take the same path.

Commands import this module when they run: it registers the method with PEFT, which takes seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import tuner as tuner
from ..remote_code import code_repositories, refused_code, trusts_remote_code
from ..shown import reason, say, shown
from .errors import ADAPTER, USAGE, CliError
from .output import restore_hidden

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

    from ..config import DepthRouteConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_config(model: str) -> Any:
    """The base model's configuration; small, and enough to refuse an unsupported model before its weights load."""
    import transformers

    from ..families import UnsupportedModelError, row_of

    if (Path(model) / "adapter_config.json").is_file():
        raise CliError(f"model {model}: is an adapter, not a model; pass it as --adapter")
    with explained(f"model {model}", model):
        if trusts_remote_code():
            names = ", ".join(code_repositories(model))
            say(f"--trust-remote-code: code of {names} may run", sys.stderr)
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trusts_remote_code())
    try:
        row_of(config)
    except UnsupportedModelError as error:
        raise CliError(f"model {model}: {error}") from None
    return config


def load_tokenizer(model: str, config: Any) -> Any:
    import transformers

    with explained(f"tokenizer of {model}", model):
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=trusts_remote_code())
    if len(tokenizer) == 0:
        raise CliError(f"tokenizer of {model}: it is empty; are tokenizer.json and tokenizer_config.json there?")
    highest = max(tokenizer.get_vocab().values())
    if highest >= config.vocab_size:
        raise CliError(
            f"tokenizer of {model}: token id {highest} does not fit the model's vocabulary of {config.vocab_size}"
        )
    return tokenizer


def load_model(model: str, dtype: str) -> Any:
    """The base model, in eval mode, on the GPU if there is one."""
    import torch
    import transformers

    check_dtype(dtype, DTYPES)
    with explained(f"model {model}", model):
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=trusts_remote_code(),
        )
    return base.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def load_adapter_config(adapter: str) -> DepthRouteConfig:
    """The adapter's configuration.

    Raises:
        CliError: There is none (code 2 if the folder is missing, else 4), it is broken, or of another PEFT method.
    """
    import peft

    from ..config import DepthRouteConfig

    folder = Path(adapter)
    restore_hidden(folder)
    if folder.is_dir():
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            if not (folder / name).is_file():
                raise CliError(
                    f"adapter {adapter}: there is no {name} in it; is this the --out of a training?", ADAPTER
                )
    with explained(f"adapter {adapter}", adapter, code=ADAPTER):
        try:
            config = peft.PeftConfig.from_pretrained(adapter)
        except json.JSONDecodeError as error:  # so broken that PEFT could not tell whose it is
            raise CliError(
                f"adapter {adapter}: adapter_config.json is corrupt ({error}); train or copy again", ADAPTER
            ) from error
        except KeyError as error:
            raise CliError(
                f"adapter {adapter}: peft_type {error} is unknown; upgrade hf_depthroute", ADAPTER
            ) from error
    if not isinstance(config, DepthRouteConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise CliError(f"adapter {adapter}: a {kind} adapter, not a depth-routed one", ADAPTER)
    return config


def load_adapter(base: Any, adapter: str, allow_base_mismatch: bool = False, is_trainable: bool = False) -> PeftModel:
    """`base` with the adapter on it, in eval mode."""
    import peft

    from ..base_fingerprint import allow_base_mismatch as allowed

    with explained(f"adapter {adapter}", adapter, code=ADAPTER), allowed() if allow_base_mismatch else nullcontext():
        return peft.PeftModel.from_pretrained(base, adapter, is_trainable=is_trainable).eval()


def find_base(adapter: str, config: DepthRouteConfig, model: str | None) -> tuple[str, Any]:
    """Where the base model is, `--model` or what the adapter was trained on, and the base's configuration."""
    from ..hub import HubError

    base = model or config.base_model_name_or_path
    if not base:
        raise CliError(f"adapter {adapter}: it does not name its base model; pass --model")
    try:
        return base, load_config(base)
    except (CliError, HubError) as error:
        if model is not None or refused_code(error, base) is not None:
            raise
        hint = f"{error}; adapter {adapter} names this base: where it is elsewhere by now, pass --model"
        raise (CliError(hint, error.code) if isinstance(error, CliError) else HubError(hint)) from error


def check_dtype(dtype: str, allowed: tuple[str, ...]) -> None:
    if dtype not in allowed:
        raise CliError(f"--dtype {dtype}: use one of: {', '.join(allowed)}")


def check_length(length: int, config: Any, option: str = "--length") -> None:
    """Refuse more positions than the model has: some families crash there, others only get worse."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise CliError(f"{option} {length}: the model has {positions} positions; use at most {positions}")


def to_batches(packed: Any, batch_size: int, blocks: int | None) -> list[dict[str, torch.Tensor]]:
    """Up to `blocks` blocks of a packed dataset as batches: spread evenly, or the first ones of a stream."""
    import torch

    if hasattr(packed, "__len__"):
        count = len(packed) if blocks is None else min(blocks, len(packed))
        rows = packed.select([i * len(packed) // count for i in range(count)])
    else:
        rows = itertools.islice(packed, blocks)
    batches = []
    ids = [row["input_ids"] for row in rows]
    for start in range(0, len(ids), batch_size):
        input_ids = torch.tensor(ids[start : start + batch_size])
        batches.append({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})
    return batches


def print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table on stdout; numbers to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe or a file has no width to cut numbers for
    table = Table(*header)
    for column in table.columns:
        column.justify = "right"
        column.no_wrap = True
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    console.print(table)


def quiet(debug: bool) -> None:
    """Keep warnings, log lines and loading bars of the libraries off the terminal, unless `debug`."""
    if debug:
        return
    import warnings

    import huggingface_hub
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()


@contextlib.contextmanager
def explained(what: str, source: str, code: int = USAGE) -> Iterator[None]:
    """Turn whatever the libraries raise while loading `source` into a `CliError` or a `HubError` about `what`."""
    import safetensors
    from huggingface_hub.errors import HFValidationError

    from ..adapter_file import AdapterMismatchError
    from ..config import ConfigError
    from ..families import UnsupportedModelError
    from ..hub import causes, explain
    from ..resources import disk_full, out_of_memory

    try:
        yield
    except (CliError, UnsupportedModelError):
        raise
    except AdapterMismatchError as error:
        raise CliError(f"{what}: {error}", ADAPTER) from error
    except ConfigError as error:
        raise CliError(f"{what}: {error}", code) from error
    except Exception as error:
        if out_of_memory(error) or disk_full(error):
            raise
        code_refused = refused_code(error, source)
        if code_refused is not None:
            raise CliError(f"{what}: {code_refused}") from error
        if not Path(source).exists():
            hub = explain(error, what)
            if hub is not None:
                raise hub from error
            if any(isinstance(cause, HFValidationError) for cause in causes(error)):
                raise CliError(f"{what}: no such folder, and not a Hub id (user/name)") from error
        if isinstance(error, safetensors.SafetensorError):
            raise CliError(f"{what}: the weights are corrupt ({error}); download or copy them again", code) from error
        if isinstance(error, OSError | ValueError | KeyError | TypeError):
            raise CliError(f"{what}: cannot be loaded: {reason(error)}", code) from error
        raise

"""Models, adapters, tokenizers and text for the commands.
Local folders and Hub ids take the same path.

Commands import this module when they run: it registers the method with PEFT, which takes seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import safetensors
import torch
import transformers
from huggingface_hub.errors import HFValidationError
from peft import PeftConfig, PeftModel
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .. import registration as registration
from ..adapter.base_check import BaseDiffersWarning, allow_base_mismatch, check_base
from ..adapter.files import AdapterMismatchError
from ..base.families import UnsupportedModelError, row_of, text_config
from ..base.gguf import load_dequantised
from ..config.adapter import ConfigError, DepthRouteConfig, check_budget, check_phases
from ..data.prompts import PromptError, encode_prompt
from ..data.text import load_text, pack
from ..files.hub import HubError, causes, explain
from ..files.out_of_resources import disk_full, out_of_memory
from ..files.remote_code import code_repositories, refused_code, trusts_remote_code
from ..files.shown import DepthRouteWarning, counted, reason, say
from ..inference.calibration import is_calibrated
from ..inference.phases import set_phases
from .errors import ADAPTER, USAGE, CliError, refused
from .gguf import find_gguf_file
from .options import AdapterOptions
from .output import noted, say_as_notes

ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]
DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_config(model: str, gguf_file: str | None = None) -> PreTrainedConfig:
    """The base's configuration, enough to refuse an unsupported model before its weights load."""
    if (Path(model) / "adapter_config.json").is_file():
        raise CliError(f"model {model}: is an adapter, not a model; pass it as --adapter")
    with explained(f"model {model}", model):
        if trusts_remote_code():
            names = ", ".join(code_repositories(model))
            say(f"--trust-remote-code: code of {names} may run", sys.stderr)
        config = transformers.AutoConfig.from_pretrained(
            model, trust_remote_code=trusts_remote_code(), **_gguf_keyword(gguf_file)
        )
    with refused(f"model {model}: ", UnsupportedModelError):
        row_of(config)
    if text_config(config) is not config:
        raise CliError(
            f"model {model}: {config.model_type!r} reads images too; route it in Python, the "
            "commands do text"
        )
    return config


def _gguf_keyword(gguf_file: str | None) -> dict[str, Any]:
    """The keyword of `from_pretrained` for a GGUF file, if there is one."""
    if gguf_file is None:
        return {}
    return {"gguf_file": gguf_file}


def load_adapter_config(adapter: str) -> DepthRouteConfig:
    """The adapter's configuration; `CliError` if it is missing, broken, or another method's."""
    folder = Path(adapter)
    for name in ADAPTER_FILES if folder.is_dir() else ():
        if not (folder / name).is_file():
            raise CliError(
                f"adapter {adapter}: there is no {name} in it; is this the --out of a training?",
                ADAPTER,
            )
    config = read_peft_config(adapter)
    if not isinstance(config, DepthRouteConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise CliError(f"adapter {adapter}: a {kind} adapter, not a depth-routed one", ADAPTER)
    return config


def read_peft_config(adapter: str) -> PeftConfig:
    """The configuration of an adapter of any PEFT method; `CliError` where there is none."""
    with explained(f"adapter {adapter}", adapter, code=ADAPTER):
        try:
            config: PeftConfig = peft.PeftConfig.from_pretrained(adapter)
        except (json.JSONDecodeError, KeyError) as error:  # PEFT could not tell whose it is
            what = f"adapter_config.json is corrupt ({error}); train or copy again"
            if isinstance(error, KeyError):
                what = f"peft_type {error} is unknown; upgrade hf_depthroute"
            raise CliError(f"adapter {adapter}: {what}", ADAPTER) from error
    return config


def find_base(
    adapter: str, config: DepthRouteConfig, model: str | None, gguf_file: str | None = None
) -> tuple[str, object, str | None]:
    """The base (`--model` or the adapter's own), its configuration, and its GGUF file, if any."""
    base = model or config.base_model_name_or_path
    if not base:
        raise CliError(f"adapter {adapter}: it does not name its base model; pass --model")
    file = find_gguf_file(model, gguf_file, config)
    try:
        return base, load_config(base, file), file
    except (CliError, HubError) as error:
        if model is not None or refused_code(error, base) is not None:
            raise
        where = "where it is elsewhere by now, pass --model"
        hint = f"{error}; adapter {adapter} names this base: {where}"
        if isinstance(error, CliError):
            raise CliError(hint, error.code) from error
        raise HubError(hint) from error


def changed_fields(
    config: DepthRouteConfig,
    budget: float | None,
    phases: str | None = None,
    option: str = "--budget",
) -> dict[str, Any]:
    """The fields that `--budget` and `--phases` change; `ConfigError` if they cannot."""
    changed: dict[str, object] = {}
    if budget is not None:
        if not config.takes_budget():
            raise CliError(
                f"{option} {budget}: this adapter's threshold is fixed, whatever the budget; leave "
                "it out"
            )
        changed["budget"] = check_budget(budget)
    if phases is not None:
        changed["phases"] = check_phases(phases, config.granularity, config.target)
    return changed


def folder_of(what: str, source: str, patterns: list[str], code: int = USAGE) -> Path:
    """The folder of `what` at `source`; from the Hub, files of these patterns are downloaded."""
    if Path(source).is_dir():
        return Path(source)

    with explained(f"{what} {source}", source, code):
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=patterns))


def check_dtype(dtype: str, allowed: tuple[str, ...]) -> None:
    if dtype not in allowed:
        raise CliError(f"--dtype {dtype}: use one of: {', '.join(allowed)}")


def check_length(length: int, config: PreTrainedConfig, option: str = "--length") -> None:
    """Refuse more positions than the model has: some families crash there, others get worse."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise CliError(
            f"{option} {length}: the model has {positions} positions; use at most {positions}"
        )


@dataclass(frozen=True)
class Source:
    """The adapter (its configuration) and the base that a command's options name;
    the weights are loaded by methods.

    `gguf_file` is the base's file if it is one, `phases` what is to be routed in the place of the
    adapter's own.
    """

    options: Any
    config: DepthRouteConfig
    base: str
    base_config: Any
    gguf_file: str | None = None
    phases: str | None = None

    def origin(self, routed: Any) -> dict[str, Any]:
        """A result's description of adapter and base, and whether they belong together."""
        mismatch = False
        try:
            check_base(routed.get_base_model(), self.config.base_architecture or {})
        except AdapterMismatchError:  # which --allow-base-mismatch let in
            mismatch = True
        return {
            "model": self.base,
            "adapter": self.options.adapter,
            "weights_hash": self.config.weights_hash,
            "base_mismatch": mismatch,
        }

    def tokenizer(self) -> Any:
        """The base's tokenizer."""
        what = f"tokenizer of {self.base}"
        size = self.base_config.vocab_size
        with explained(what, self.base):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                self.base, trust_remote_code=trusts_remote_code(), **_gguf_keyword(self.gguf_file)
            )
        if len(tokenizer) == 0:
            raise CliError(
                f"{what}: it is empty; are tokenizer.json and tokenizer_config.json there?"
            )
        highest = max(tokenizer.get_vocab().values())
        if highest >= size:
            raise CliError(
                f"{what}: token id {highest} does not fit the model's vocabulary of {size}"
            )
        return tokenizer

    def prompt_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The prompt's token ids; `CliError` where they and the new tokens are too many."""
        options = self.options
        try:
            ids = encode_prompt(tokenizer, options.prompt, options.chat_template)
        except PromptError as error:
            raise CliError(f"{error}; add --no-chat-template") from error
        if not ids:
            raise CliError("the prompt has no tokens in this model's tokenizer")
        what = f"prompt of {counted(len(ids), 'token')} + --max-new-tokens ="
        check_length(len(ids) + options.max_new_tokens, self.base_config, what)
        return ids

    def batches(
        self, tokenizer: PreTrainedTokenizerBase, split: str, blocks: int
    ) -> list[dict[str, torch.Tensor]]:
        """Up to `blocks` blocks of a split of the text."""
        packed = read_blocks(self.options, tokenizer, split)
        return to_batches(packed, self.options.batch_size, blocks)

    def base_model(self) -> PreTrainedModel:
        """The base model, in eval mode, on the GPU if there is one."""
        dtype = self.options.dtype
        if dtype != "auto":
            dtype = getattr(torch, dtype)
        how = {"dtype": dtype, "trust_remote_code": trusts_remote_code()}
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        with explained(f"model {self.base}", self.base):
            if self.gguf_file is None:
                base, found = load(self.base, output_loading_info=True, **how)
                _say_missing(self.base, sorted(found["missing_keys"]))
            else:
                base = load_dequantised(load, self.base, self.gguf_file, **how)
        return base.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def routed(self, base: torch.nn.Module, is_trainable: bool = False) -> PeftModel:
        """`base` with the adapter on it, in eval mode."""
        adapter = self.options.adapter
        mismatch: AbstractContextManager[None] = nullcontext()
        if getattr(self.options, "allow_base_mismatch", False):
            mismatch = allow_base_mismatch()
        reads = explained(f"adapter {adapter}", adapter, code=ADAPTER)
        with reads, mismatch, noted(BaseDiffersWarning):
            routed = peft.PeftModel.from_pretrained(base, adapter, is_trainable=is_trainable).eval()
        if self.phases is not None:
            set_phases(routed, self.phases)
        return routed

    def check_fitted(self, routed: PeftModel, budgets: Sequence[float]) -> None:
        """Refuse budgets below 1 where the thresholds were never fitted to keep one."""
        below = min(budgets, default=1.0) < 1
        if below and self.config.takes_budget() and not is_calibrated(routed):
            raise CliError(
                f"adapter {self.options.adapter}: its thresholds were never fitted, so it keeps no "
                "budget; train it, or calibrate it and save it again"
            )


def _say_missing(base: str, weights: list[str]) -> None:
    """Say which weights the base's files lack: transformers draws them at random."""
    if weights:
        listed = ", ".join(weights[:3]) + (", ..." if len(weights) > 3 else "")
        say(
            f"note: model {base}: weights that its files lack are random, {len(weights)} in all: "
            f"{listed}",
            sys.stderr,
        )


def find_source(options: AdapterOptions) -> Source:
    """The adapter and the base that a command is about to load, with its options checked."""
    quiet(options.debug)
    check_dtype(options.dtype, DTYPES)
    config = load_adapter_config(options.adapter)
    phases = getattr(options, "phases", None)
    changed_fields(config, getattr(options, "budget", None), phases)
    return source_of(options, config, phases)


def source_of(options: Any, config: DepthRouteConfig, phases: str | None = None) -> Source:
    """A configuration, and the base that it or a command's options name."""
    adapter = getattr(options, "adapter", None) or ""
    found = find_base(adapter, config, options.model, options.gguf_file)
    return Source(options, config, *found, phases)


def read_blocks(options: Any, tokenizer: Any, split: str, other: str | None = None) -> Any:
    """Packed blocks of a split of the dataset that a command's options name, or of `other`."""
    text = load_text(
        other or options.dataset,
        split=split,
        name=None if other else options.dataset_name,
        column=options.column,
        streaming=options.streaming,
        verbose=options.debug,
    )
    return pack(text, tokenizer, options.length, verbose=options.debug)


def to_batches(packed: Any, batch_size: int, blocks: int | None) -> list[dict[str, torch.Tensor]]:
    """Up to `blocks` packed blocks as batches: spread evenly, or the first ones of a stream."""
    if hasattr(packed, "__len__"):
        count = len(packed) if blocks is None else min(blocks, len(packed))
        rows = packed.select([i * len(packed) // count for i in range(count)])
    else:
        rows = itertools.islice(packed, blocks)
    ids = [row["input_ids"] for row in rows]
    starts = range(0, len(ids), batch_size)
    batches = [torch.tensor(ids[start : start + batch_size]) for start in starts]
    return [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in batches]


def quiet(debug: bool) -> None:
    """Keep the libraries' warnings, log lines and bars off the terminal, unless `debug`.

    Those of this library are said as notes.
    """
    if debug:
        return

    warnings.simplefilter("ignore")
    say_as_notes(DepthRouteWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()


@contextlib.contextmanager
def explained(what: str, source: str, code: int = USAGE) -> Iterator[None]:
    """Turn errors in loading `source` into a `CliError` or a `HubError` about `what`."""
    try:
        yield
    except (CliError, UnsupportedModelError):
        raise
    except (AdapterMismatchError, ConfigError) as error:
        mismatch = isinstance(error, AdapterMismatchError)
        raise CliError(f"{what}: {error}", ADAPTER if mismatch else code) from error
    except Exception as error:
        if out_of_memory(error) or disk_full(error):
            raise
        if code_refused := refused_code(error, source):
            raise CliError(f"{what}: {code_refused}") from error
        if not Path(source).exists():
            if hub := explain(error, what):
                raise hub from error
            if any(isinstance(cause, HFValidationError) for cause in causes(error)):
                raise CliError(f"{what}: no such folder, and not a Hub id (user/name)") from error
        if isinstance(error, safetensors.SafetensorError):
            raise CliError(
                f"{what}: the weights are corrupt ({error}); download or copy them again", code
            ) from error
        if isinstance(error, OSError | ValueError | KeyError | TypeError):
            raise CliError(f"{what}: cannot be loaded: {reason(error)}", code) from error
        raise

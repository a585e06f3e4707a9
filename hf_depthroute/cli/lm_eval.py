"""`hf-depthroute lm-eval`: the program of lm-eval, in a process where PEFT knows
routed adapters."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from . import options as o
from .errors import CliError

# In KEY=VALUE words, and in JSON.
_PEFT, _ADAPTER = (
    re.compile(rf"""\b{name}["']?\s*[=:]\s*["']?([^,\s"'}}]+)""") for name in ("peft", "adapter")
)


def lm_eval(context: typer.Context, debug: o.Debug = False) -> None:
    """Run lm-eval itself: every argument goes to its program (see lm-eval run --help).

    --model hf takes an adapter as peft=ADAPTER. --model depthroute is the same with the adapter's
    own base, and takes budget=0.25 or phases=prefill too. Needs pip install "lm-eval[hf]".

    \b
    Example:
      hf-depthroute lm-eval --model hf --model_args pretrained=BASE,peft=ADAPTER --tasks piqa --batch_size 8
      hf-depthroute lm-eval --model depthroute --model_args adapter=ADAPTER,budget=0.25 --tasks piqa
    """  # noqa: E501
    try:
        from lm_eval.__main__ import cli_evaluate

        from ..evaluation import harness as harness  # registers depthroute
    except ImportError as error:
        raise CliError(
            f'lm-eval needs its package ({error}); install it with: pip install "lm-eval[hf]"'
        ) from error
    from .. import registration as registration

    words = o.passed_on(context)
    _refuse_padding(words)
    before = sys.argv
    sys.argv = ["lm-eval", *words]
    try:
        cli_evaluate()
    except SystemExit as ended:
        if ended.code:  # it has said why
            raise CliError(
                "lm-eval stopped, see above; lm-eval run --help lists its arguments"
            ) from ended
    finally:
        sys.argv = before


def _refuse_padding(words: Sequence[str]) -> None:
    """Refuse an adapter that is not there, or that `--model hf` would read otherwise than it is
    served.

    Its batches pad without a mask, which a decision about a sequence would read; and a prompt and
    its continuation come in one pass, so that prompts alone cannot be told.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)  # reads as lm-eval's does
    parser.add_argument("--config", "-C")
    parser.add_argument("--model", "-M")
    parser.add_argument("--batch_size", "-b")
    # Longer names that begin alike are not these options cut short.
    parser.add_argument("--model_args", "-a")
    parser.add_argument("--max_batch_size")
    try:
        given, _ = parser.parse_known_args(words)
    except argparse.ArgumentError:  # lm-eval says what is missing
        return
    file = _file_settings(given.config)
    model = given.model or file.get("model") or "hf"
    batch_size = given.batch_size or file.get("batch_size") or 1
    own = model == "depthroute"
    said = " ".join(words) if given.model_args else str(file.get("model_args"))
    found = (_ADAPTER if own else _PEFT).search(said)
    if found is None:
        return
    from ..config.adapter import DepthRouteConfig
    from .loading import load_adapter_config, read_peft_config

    config = load_adapter_config(found[1]) if own else read_peft_config(found[1])
    if own or not isinstance(config, DepthRouteConfig):
        return
    instead = f"use --model depthroute --model_args adapter={found[1]}"
    if config.phases == "prefill":
        raise CliError(
            f"--model {model}: it reads a prompt and its continuation in one pass, and "
            f"phases='prefill' of {found[1]} would route both; {instead}"
        )
    if config.granularity == "sequence" and str(batch_size) != "1":
        raise CliError(
            f"--model {model}: its batches pad without a mask, which granularity='sequence' "
            f"of {found[1]} would read; {instead}, or --batch_size 1"
        )


def _file_settings(path: str | None) -> dict[str, Any]:
    """The settings in lm-eval's YAML file; `{}` if there is none, or none about an adapter."""
    from ..files.strict_yaml import YamlError, read_mapping

    if path is None or not Path(path).is_file():  # lm-eval says what is missing
        return {}
    try:
        return read_mapping(Path(path))
    except YamlError as error:
        if not _PEFT.search(Path(path).read_bytes().decode(errors="replace")):
            return {}
        raise CliError(f"--config: {error}") from error

"""`hf-depthroute lm-eval`: the program of lm-eval, in a process where PEFT knows
routed adapters."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import typer

from . import options as o
from .errors import CliError

_PEFT = re.compile(r"""\bpeft["']?\s*[=:]\s*["']?([^,\s"'}]+)""")  # in KEY=VALUE words, and in JSON


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
    """Refuse an adapter of `--model hf` whose decisions would read the padding that its batches
    have no mask for."""
    found = _PEFT.search(" ".join(words))
    model = _value(words, "--model", "hf")
    if found is None or model == "depthroute" or _value(words, "--batch_size", "1") == "1":
        return
    from .loading import load_adapter_config

    config = load_adapter_config(found[1])
    if config.granularity == "sequence" or config.phases == "prefill":
        if config.granularity == "sequence":
            field = "granularity='sequence'"
        else:
            field = "phases='prefill'"
        raise CliError(
            f"--model {model}: its batches pad without a mask, which {field} of {found[1]} would "
            f"read; use --model depthroute --model_args adapter={found[1]}, or --batch_size 1"
        )


def _value(words: Sequence[str], option: str, default: str) -> str:
    """The value of `--option VALUE` or `--option=VALUE`."""
    for word, after in zip(words, (*words[1:], default)):
        if word == option:
            return after
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return default

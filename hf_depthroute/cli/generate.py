"""`hf-depthroute generate`: text from a routed model."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from . import options as o
from .errors import CliError


def generate(
    adapter: o.Adapter,
    model: o.BaseModel = None,
    config: o.ConfigFile = None,
    prompt: Annotated[str | None, typer.Option(help="Start of the text. Default: read from stdin.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 64,
    budget: Annotated[float | None, typer.Option(help="Budget in (0, 1]. Default: the adapter's.")] = None,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Draw tokens, or take the likeliest.")] = False,
    temperature: Annotated[float, typer.Option(help="With --sample.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="With --sample: keep the likeliest tokens of this total.")] = 1.0,
    seed: Annotated[int, typer.Option(help="With --sample.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Disable the adapter: the dense base.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    debug: o.Debug = False,
) -> None:
    """Continue a prompt. The text goes to stdout; tokens per second and the full ratio to stderr.

    \b
    Example:
      hf-depthroute generate --adapter routed --prompt "def main():" --budget 0.5
      echo "def main():" | hf-depthroute generate --adapter routed --full
    """
    if not 0 < temperature < float("inf"):
        raise CliError(f"--temperature {temperature}: must be a finite number above 0")
    if not 0 < top_p <= 1:
        raise CliError(f"--top-p {top_p}: must be in (0, 1]")
    if full and budget is not None:
        raise CliError("--budget has no effect with --full; leave one out")
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise CliError('no prompt; pass --prompt "..." or pipe text in')
        prompt = sys.stdin.read().rstrip("\n")
    if not prompt:
        raise CliError('the prompt is empty; pass --prompt "..." or pipe text in')
    from . import loading

    loading.quiet(debug)
    import torch
    import transformers

    from ..calibration import set_budget
    from ..config import check_budget
    from ..trace import count_routes

    if budget is not None:
        check_budget(budget)
    loading.check_dtype(dtype, loading.DTYPES)
    adapter_config = loading.load_adapter_config(adapter)
    if budget is not None and not adapter_config.takes_budget():
        raise CliError(f"--budget {budget}: adapter {adapter} decides by a fixed rule, so budgets have no effect on it")
    model = loading.base_of(adapter, adapter_config, model)
    base_config = loading.load_config(model)
    tokenizer = loading.load_tokenizer(model, base_config)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise CliError("the prompt has no tokens in this model's tokenizer")
    loading.check_length(length + max_new_tokens, base_config, f"prompt of {length} tokens + --max-new-tokens =")
    routed = loading.load_adapter(loading.load_model(model, dtype), adapter)
    if budget is not None:
        set_budget(routed, budget)

    transformers.set_seed(seed)
    choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sample:
        choice = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with routed.disable_adapter() if full else nullcontext(), torch.no_grad(), count_routes(routed) as counter:
        start = time.perf_counter()
        ids = routed.generate(**inputs.to(routed.device), max_new_tokens=max_new_tokens, pad_token_id=pad, **choice)
        seconds = time.perf_counter() - start
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    shares = list(counter.full_ratio().values()) or [1.0]
    new = ids.shape[1] - length
    print(f"{new} tokens, {new / seconds:.1f} tokens/s, full ratio {sum(shares) / len(shares):.3f}", file=sys.stderr)

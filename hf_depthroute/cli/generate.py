"""`hf-depthroute generate`: text from a routed model."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..shown import say, say_content
from . import options as o
from .adapter import Adapter, OldAdapter
from .errors import CliError
from .words import read_stdin

if TYPE_CHECKING:
    import torch


def generate(
    adapter: Adapter = "",
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
    lossless: Annotated[
        bool, typer.Option("--lossless", help="The dense base's text, faster: the routed model drafts it.")
    ] = False,
    draft_budget: Annotated[
        float | None, typer.Option(help="With --lossless: the draft's budget. Default: the adapter's.")
    ] = None,
    draft_drop: Annotated[
        str | None, typer.Option(help="With --lossless: decoder layers that the draft leaves out, such as 3,4.")
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --lossless: tokens drafted before the base looks. Default: 5.")
    ] = None,
    draft_search: Annotated[
        bool, typer.Option("--draft-search", help="With --lossless: time several drafts on the prompt, use the best.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    allow_base_mismatch: o.AllowBaseMismatch = False,
    adapter_option: OldAdapter = None,
    trust_remote_code: o.TrustRemoteCode = False,
    debug: o.Debug = False,
) -> None:
    """Continue a prompt. The text goes to stdout; tokens per second and the full ratio to stderr.

    With --lossless, stderr tells how much of the draft was accepted, and the speed against plain generation, which runs
    too.

    \b
    Example:
      hf-depthroute generate routed --prompt "def main():" --budget 0.5
      echo "def main():" | hf-depthroute generate routed --full
      hf-depthroute generate routed --prompt "def main():" --lossless --draft-search
    """
    if not 0 < temperature < float("inf"):
        raise CliError(f"--temperature {temperature}: must be a finite number above 0")
    if not 0 < top_p <= 1:
        raise CliError(f"--top-p {top_p}: must be in (0, 1]")
    if full and budget is not None:
        raise CliError("--budget has no effect with --full; leave one out")
    draft = {"--draft-budget": draft_budget, "--draft-drop": draft_drop, "--draft-tokens": draft_tokens}
    _check_draft_options(lossless, full, budget, draft_search, [name for name in draft if draft[name] is not None])
    dropped = _layer_list(draft_drop)
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise CliError('no prompt; pass --prompt "..." or pipe text in')
        prompt = read_stdin().rstrip("\n")
    if not prompt:
        raise CliError('the prompt is empty; pass --prompt "..." or pipe text in')
    from . import loading

    loading.quiet(debug)
    import torch
    import transformers

    from ..calibration import set_budget
    from ..config import check_budget
    from ..finite import finite_logits
    from ..trace import count_routes

    for given in (budget, draft_budget):
        if given is not None:
            check_budget(given)
    loading.check_dtype(dtype, loading.DTYPES)
    adapter_config = loading.load_adapter_config(adapter)
    for option, given in (("--budget", budget), ("--draft-budget", draft_budget)):
        if given is not None and not adapter_config.takes_budget():
            raise CliError(
                f"{option} {given}: adapter {adapter} decides by a fixed rule, so budgets have no effect on it"
            )
    model, base_config = loading.find_base(adapter, adapter_config, model)
    depth = base_config.num_hidden_layers
    if dropped and (dropped[-1] >= depth or len(dropped) == depth):
        raise CliError(f"--draft-drop {draft_drop}: the model has layers 0 to {depth - 1}; name some of them, not all")
    tokenizer = loading.load_tokenizer(model, base_config)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise CliError("the prompt has no tokens in this model's tokenizer")
    loading.check_length(length + max_new_tokens, base_config, f"prompt of {length} tokens + --max-new-tokens =")
    routed = loading.load_adapter(loading.load_model(model, dtype), adapter, allow_base_mismatch)
    if budget is not None:
        set_budget(routed, budget)

    transformers.set_seed(seed)
    choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sample:
        choice = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    choice["max_new_tokens"] = max_new_tokens
    pad = tokenizer.pad_token_id
    choice["pad_token_id"] = tokenizer.eos_token_id if pad is None else pad
    if lossless:
        arguments = {"budget": draft_budget, "drop": dropped, "num_tokens": draft_tokens or 5}
        ids, report = _lossless(routed, inputs.to(routed.device), None if draft_search else arguments, choice)
        say_content(tokenizer.decode(ids[0], skip_special_tokens=True))
        say(report, sys.stderr)
        return
    dense = routed.disable_adapter() if full else nullcontext()
    with dense, torch.no_grad(), finite_logits(routed), count_routes(routed) as counter:
        start = time.perf_counter()
        ids = routed.generate(**inputs.to(routed.device), **choice)
        seconds = time.perf_counter() - start
    say_content(tokenizer.decode(ids[0], skip_special_tokens=True))
    shares = list(counter.full_ratio().values()) or [1.0]
    new = ids.shape[1] - length
    say(f"{new} tokens, {new / seconds:.1f} tokens/s, full ratio {sum(shares) / len(shares):.3f}", sys.stderr)


def _check_draft_options(lossless: bool, full: bool, budget: float | None, search: bool, named: list[str]) -> None:
    if not lossless and (search or named):
        raise CliError(f"{named[0] if named else '--draft-search'} needs --lossless")
    if lossless and full:
        raise CliError("--lossless writes what --full writes; leave one out")
    if lossless and budget is not None:
        raise CliError("--budget has no effect with --lossless, which writes the full model's text; use --draft-budget")
    if search and named:
        raise CliError(f"--draft-search chooses the draft itself; leave out {' and '.join(named)}")


def _layer_list(text: str | None) -> list[int]:
    """`"4,3"` -> `[3, 4]`."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise CliError(f"--draft-drop {text!r}: write layer numbers, each once, such as 3,4")
    return sorted(map(int, parts))


def _lossless(
    routed: Any, inputs: Any, arguments: dict[str, Any] | None, settings: dict[str, Any]
) -> tuple[torch.Tensor, str]:
    """The full model's token ids `[1, T]`, and what to say about the draft. It is searched if `arguments` is None."""
    import torch

    from ..draft_search import search_draft
    from ..drafting import DraftCounter, draft_view, full_depth, lossless_generate

    if arguments is None:
        arguments = search_draft(routed, [inputs["input_ids"]], pad_token_id=settings["pad_token_id"]).best.arguments()
    draft, counter = draft_view(routed, **arguments), DraftCounter()
    with torch.no_grad():
        for new_tokens in (2, settings["max_new_tokens"]):  # the first call of anything is slower
            length = {"max_new_tokens": min(new_tokens, settings["max_new_tokens"])}
            state = torch.random.get_rng_state()
            start = time.perf_counter()
            with full_depth(routed):
                plain = routed.generate(**inputs, **settings | length)
            plain_seconds = time.perf_counter() - start
            torch.random.set_rng_state(state)
            counter = DraftCounter()
            start = time.perf_counter()
            ids = lossless_generate(routed, **inputs, draft=draft, counter=counter, **settings | length)
            seconds = time.perf_counter() - start
    prompt = inputs["input_ids"].shape[1]
    speed, plain_speed = counter.new_tokens / seconds, (plain.shape[1] - prompt) / plain_seconds
    budget = "the adapter's" if arguments["budget"] is None else arguments["budget"]
    left_out = ", ".join(map(str, arguments["drop"])) or "none"
    same = settings["do_sample"] or torch.equal(ids, plain)
    remark = "" if same else "; rounding made it differ from plain generation: --dtype float32 is exact"
    return ids, (
        f"{counter.new_tokens} tokens, {speed:.1f} tokens/s, {speed / plain_speed:.2f}x plain generation "
        f"({plain_speed:.1f} tokens/s), {counter.acceptance_rate:.3f} of the draft accepted, "
        f"{counter.tokens_per_pass:.2f} tokens per pass of the full model; draft: budget {budget}, layers left out "
        f"{left_out}, {arguments['num_tokens']} tokens ahead{remark}"
    )

"""`hf-depthroute generate`: text from a routed model."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ..files.shown import say, say_content
from . import options as o
from .errors import CliError

if TYPE_CHECKING:
    import torch

    from .loading import Source

_OF_SAMPLING = ("temperature", "top_p")


@dataclass(kw_only=True)
class GenerateOptions(o.AdapterOptions):
    prompt: Annotated[str | None, "Start of the text. Default: read from stdin."] = None
    chat_template: o.ChatTemplate = True
    max_new_tokens: Annotated[o.Count, "Tokens to add at most."] = 64
    budget: o.Budget = None
    phases: o.Phases = None
    sample: Annotated[bool, "--sample/--greedy", "Draw tokens, or take the likeliest."] = False
    temperature: Annotated[float, "With --sample."] = 1.0
    top_p: Annotated[float, "With --sample: keep the likeliest tokens of this total."] = 1.0
    seed: Annotated[o.Seed, "With --sample."] = 0
    full: Annotated[bool, "Disable the adapter: the dense base."] = False
    lossless: Annotated[
        bool, "The dense base's text: the routed model drafts it, the base checks the draft."
    ] = False
    draft_budget: Annotated[
        float | None, "With --lossless: the draft's budget. Default: the adapter's."
    ] = None
    draft_drop: Annotated[
        str | None, "With --lossless: decoder layers that the draft leaves out, such as 3,4."
    ] = None
    draft_tokens: Annotated[
        o.OptionalCount, "With --lossless: tokens drafted before the base looks. Default: 5."
    ] = None


@o.command
def generate(options: GenerateOptions) -> None:
    """Continue a prompt, or answer it. The text goes to stdout;
    tokens per second and the full ratio to stderr.

    Where the tokenizer has a chat template, the prompt is a user's message and the answer is
    printed; with --no-chat-template, and without a template, the prompt is printed with what
    continues it.

    With --lossless, stderr tells how much of the draft was accepted; the speed to compare with is
    that of --full.

    \b
    Example:
      hf-depthroute generate routed --prompt "def main():" --budget 0.5
      echo "def main():" | hf-depthroute generate routed --full
      hf-depthroute generate routed --prompt "def main():" --lossless --draft-budget 0.25 --draft-tokens 4
    """  # noqa: E501
    _check_options(options)
    dropped = _layer_list(options.draft_drop)
    options.prompt = _prompt(options.prompt)
    from . import loading

    source = loading.find_source(options)
    import torch
    import transformers

    from ..data.prompts import has_chat_template
    from ..inference.calibration import set_budget

    loading.changed_fields(source.config, options.draft_budget, option="--draft-budget")
    if options.lossless and (options.phases or source.config.phases) == "prefill":
        raise CliError(
            "--lossless drafts by the routed model, which phases='prefill' runs in full; add "
            "--phases all"
        )
    depth = source.base_config.num_hidden_layers
    if dropped and (dropped[-1] >= depth or len(dropped) == depth):
        layers = f"the model has layers 0 to {depth - 1}; name some of them, not all"
        raise CliError(f"--draft-drop {options.draft_drop}: {layers}")
    tokenizer = source.tokenizer()
    answers = options.chat_template and has_chat_template(tokenizer)
    prompt_ids = source.prompt_ids(tokenizer)
    routed = source.routed(source.base_model())
    ids = torch.tensor([prompt_ids], device=routed.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    source.check_fitted(
        routed, [b for b in (options.budget, options.draft_budget) if b is not None]
    )
    if options.budget is not None:
        set_budget(routed, options.budget)

    transformers.set_seed(options.seed)
    settings = _settings(options, tokenizer)
    if options.lossless:
        ahead = options.draft_tokens or 5
        draft = {"budget": options.draft_budget, "drop": dropped, "num_tokens": ahead}
        ids, report = _lossless(routed, inputs, draft, settings)
    else:
        ids, report = _plain(routed, inputs, settings, None if options.full else source)
    say_content(
        tokenizer.decode(ids[0, len(prompt_ids) if answers else 0 :], skip_special_tokens=True)
    )
    say(report, sys.stderr)


def _settings(options: GenerateOptions, tokenizer: Any) -> dict[str, Any]:
    """Arguments of `generate`."""
    from ..data.prompts import pad_id_of

    settings: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
    if options.sample:
        settings = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    return settings | {
        "do_sample": options.sample,
        "max_new_tokens": options.max_new_tokens,
        "pad_token_id": pad_id_of(tokenizer),
    }


def _plain(
    routed: Any, inputs: Any, settings: dict[str, Any], source: Source | None
) -> tuple[torch.Tensor, str]:
    """Token ids `[1, T]`, of the dense base without `source`, and what to say about them."""
    import torch

    from ..inference.non_finite import finite_logits

    length = inputs["input_ids"].shape[1]
    dense = routed.disable_adapter() if source is None else nullcontext()
    with dense, torch.no_grad(), finite_logits(routed):
        start = time.perf_counter()
        ids = routed.generate(**inputs, **settings)
        seconds = time.perf_counter() - start
    new = ids.shape[1] - length
    report = f"{new} tokens, {new / seconds:.1f} tokens/s, full ratio "
    if source is None:
        return ids, f"{report}1.000"
    share = _full_ratio(routed, ids, length)
    depth = source.base_config.num_hidden_layers
    layers = len(source.config.routed_layers(depth))
    of_all = (share * layers + depth - layers) / depth
    return ids, f"{report}{share:.3f} of the routed layers, {of_all:.3f} of all {depth}"


def _full_ratio(routed: torch.nn.Module, ids: torch.Tensor, prompt: int) -> float:
    """The share that ran full, seen in passes of its own: counting would slow decoding."""
    from ..evaluation.served import read_generated
    from ..routing.trace import count_routes

    with count_routes(routed) as counter:
        # The last token was not read.
        for _ in read_generated(routed, ids[:, :-1], prompt, logits_to_keep=1):
            pass
    shares = counter.full_ratio().values()
    return sum(shares) / len(shares)


def _check_options(options: GenerateOptions) -> None:
    if not 0 < options.temperature < float("inf"):
        raise CliError(f"--temperature {options.temperature}: must be a finite number above 0")
    if not 0 < options.top_p <= 1:
        raise CliError(f"--top-p {options.top_p}: must be in (0, 1]")
    if not options.sample:
        options.refuse_unused(_OF_SAMPLING, "without --sample")
    for name in ("budget", "phases"):
        if options.full and getattr(options, name) is not None:
            raise CliError(f"--{name} has no effect with --full; leave one out")
    for name in ("draft_budget", "draft_drop", "draft_tokens"):
        if not options.lossless and getattr(options, name) is not None:
            raise CliError(f"--{o.option_name(name)} needs --lossless")
    if options.lossless and options.full:
        raise CliError("--lossless writes what --full writes; leave one out")
    if options.lossless and options.budget is not None:
        raise CliError(
            "--budget has no effect with --lossless, which writes the full model's text; use "
            "--draft-budget"
        )


def _prompt(given: str | None) -> str:
    """The prompt, from stdin where it is not given: in UTF-8, whatever the locale says."""
    if given is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise CliError('no prompt; pass --prompt "..." or pipe text in')
        raw = getattr(sys.stdin, "buffer", None)  # None: a stream of text
        try:
            given = sys.stdin.read() if raw is None else raw.read().decode("utf-8")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise CliError(
                f"the prompt on stdin is not UTF-8: byte {byte:#x} at position {error.start}"
            ) from error
        given = given.rstrip("\n")
    if not given:
        raise CliError('the prompt is empty; pass --prompt "..." or pipe text in')
    return given


def _layer_list(text: str | None) -> list[int]:
    """`"4,3"` -> `[3, 4]`."""
    parts = []
    if text is not None:
        parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise CliError(f"--draft-drop {text!r}: write layer numbers, each once, such as 3,4")
    return sorted(map(int, parts))


def _lossless(
    routed: Any, inputs: Any, arguments: dict[str, Any], settings: dict[str, Any]
) -> tuple[torch.Tensor, str]:
    """The full model's token ids `[1, T]`, and what to say about the draft."""
    import torch

    from ..inference.drafting import DraftCounter, draft_view, lossless_generate

    draft = draft_view(routed, **arguments)
    counter = DraftCounter()
    start = time.perf_counter()
    with torch.no_grad():
        ids = lossless_generate(routed, **inputs, draft=draft, counter=counter, **settings)
    speed = counter.new_tokens / (time.perf_counter() - start)
    budget = arguments["budget"]
    if budget is None:
        budget = "the adapter's"
    left_out = ", ".join(map(str, arguments["drop"])) or "none"
    return ids, (
        f"{counter.new_tokens} tokens, {speed:.1f} tokens/s, {counter.acceptance_rate:.3f} of the "
        f"draft accepted, {counter.tokens_per_pass:.2f} tokens per pass of the full model; draft: "
        f"budget {budget}, layers left out {left_out}, {arguments['num_tokens']} tokens ahead"
    )

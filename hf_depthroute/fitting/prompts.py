"""Cheaper prompts: static layers, chosen and fitted by their cost to the text behind a prompt.

A token of a prompt matters to the text behind it through its keys and values alone. So a layer of a
prompt is priced on that text: for every layer, each way to leave out a part of it is fitted by
least squares, and its cost in nats is read from gradients (`sensitivity`). The cheapest set that
saves enough is then a knapsack.

Shapes: B batch, T positions, N tokens, d model width.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import nn

from ..adapter.loading import restoring
from ..adapter.tuner import get_depth_routed_model
from ..base.contexts import evaluating
from ..base.distributed import rows_of_all, sharing
from ..base.lm_head import check_head, logits_at
from ..base.stack import stack_of
from ..config.adapter import ConfigError, DepthRouteConfig
from ..config.fields import PATTERNS, RoutingFields
from ..data.batches import model_inputs, prompts_of
from ..inference.calibration import active_routings
from ..inference.non_finite import check_losses
from ..routing.trace import full_depth, run_in_full
from .bar import FitBar
from .layer_walk import LayerWalk
from .narrowing import parts_of_mean, remember_fit, tokens_and_losses
from .option_times import in_time
from .options import (
    Option,
    Search,
    StaticFit,
    choose,
    config_of,
    fit_on,
    prompt_length,
    real_rows,
    rows_of,
)
from .sensitivity import PRICED
from .text import Batches, first_tokens, own_part, positions, split, tokens_to_fit, warn_if_few

_OPTIONS = 3  # a layer's options take as long as so many passes through it
_FOUND = ("target", "gate", "branch", "branch_rank", "static_layers", *PATTERNS)
KEEP_OF = {"flops": "FLOPs of a prompt", "time": "time of a prompt"}
_TAIL = 64  # tokens at the end of a prompt that run in full; of short prompts a quarter


@restoring
def fit_prompts(
    model: nn.Module,
    batches: Iterable[Mapping[str, object]] | Mapping[str, object],
    keep: float = 0.8,
    config: DepthRouteConfig | None = None,
    *,
    keep_of: str = "flops",
    length: int | None = None,
    progress: bool | None = None,
) -> PeftModel:
    """Make a model read prompts with the share `keep` of the FLOPs, or of the time,
    without training.

        model = fit_prompts(AutoModelForCausalLM.from_pretrained(name), batches, keep=0.8)

    The adapter has `phases="prefill"`. Every layer may do without its FFN, its attention's queries,
    or both; keys and values are always written. In their place is a low-rank branch or some of the
    FFN's own neurons, fitted by least squares. All tokens of a prompt take it but attention sinks
    and the last (`prompt_tail`), which the text behind reads most; what is generated runs in
    full. Which layers do so, and how, is found on the text: two thirds of each row are a prompt,
    and the rest is the text whose loss counts. The last layer of a prompt is free, since nothing
    reads it but its last token.

    Every fifth row is held out, and costs are measured on it; so is the loss that the record tells.
    With the regressions it takes as long as some ten forward passes of the text.

    Args:
        model: A transformers model of a supported family, not routed. It is changed in place, as by
            `get_depth_routed_model`, and left in eval mode.
        batches: As of `fit_router`; rows of some hundred tokens, and many of them rather than long
            ones.
        keep: In (0, 1): the share of a prompt that is left, the router's own included.
        config: Which `layers` may be routed, by default all; its `prompt_tail`, `seed`,
            `modules_to_save` and `task_type` are kept. Target, gate and branch are found, and left
            out of it. Without a `prompt_tail` it is 64, or a quarter of a row's prompt where that
            is less.
        keep_of: What `keep` is a share of: `"flops"`, or `"time"`, as transformers takes it here
            and now: run it on the machine that serves, with nothing else on it. The choice of
            layers is the best for that.
        length: Tokens of the prompt that `keep` is a share of; by default those of the longest one
            of `batches`. Of a longer prompt less is left, since its last tokens are a smaller part
            of it.
        progress: Show a bar; by default where a terminal is.

    Returns:
        The routed model: `target_pattern`, `branch_pattern` and `rank_pattern` say what was found.

    Raises:
        ConfigError: `keep` is out of range, or so low that no choice of layers reaches it; or no
            prompt is longer than the `prompt_tail` that runs in full. The model is untouched.
        ValueError: Fewer than 512 tokens are left to fit on; or the model has no LM head.
        NonFiniteError: The base, or the routed model, computes NaN or infinity.
    """
    started = time.monotonic()
    _check_wanted(keep, keep_of, length)
    check_head(model, "fit_prompts")
    given = config or DepthRouteConfig(layers="all", phases="prefill")
    _check_not_found(given)
    text, held_out = split(list(model_inputs(model, batches)))
    tail = given.prompt_tail or max(1, min(_TAIL, prompt_length(text) // 4))
    given = replace(given, prompt_tail=tail)
    tokens = tokens_to_fit(text, "fit_prompts")
    if length is None:
        length = prompt_length(text)
    else:
        _check_length(length, tail)
    rated = first_tokens(held_out, PRICED)
    _check_tail(text, "to fit on", tail)
    _check_tail(rated, "to hold out", tail)
    warn_if_few(tokens, stacklevel=5)  # past `fit_router`
    first = DepthRouteConfig(
        layers=given.layers,
        gate="none",
        branch="none",
        phases="prefill",
        prompt_tail=tail,
        seed=given.seed,
    )
    routed = get_depth_routed_model(model, first)
    with (
        torch.no_grad(),
        evaluating(routed),
        sharing(),
        _bar(routed, text, held_out, progress) as bar,
    ):
        search = Search(routed, own_part(text), own_part(rated), length, tail, given.seed, bar)
        found = search.found
        base = routed.unload()
        if keep_of == "time":
            bar.phase("times")
            found = in_time(base, found, 1 - keep, _prompt_of(text, length), tail)
        chosen = _chosen(found, keep)
        branches = {index: search.branches[index][option] for index, option in chosen.items()}
        routed = get_depth_routed_model(base, config_of(chosen, given))
        for routing in active_routings(routed):
            held = routing.depth_route_branch[routing.active_name()]
            held.load_state_dict(branches[routing.layer_index].state_dict())
        metrics = search.metrics
        del search, branches
        bar.phase("the chosen ones")
        r2 = _refit(routed, own_part(text), tail, metrics)
        bar.phase("losses")
        dense_R, loss_R, kl_R = _behind(routed, own_part(held_out), tail)
        check_losses(routed, loss_R.tolist(), own_part(held_out))
    fit_record = {
        "phases": "prefill",
        "keep": keep,
        "keep_of": keep_of,
        **tokens_and_losses(tokens, held_out, dense_R, loss_R),
        "divergence": float(kl_R.mean()),
        "layers": {
            str(index): asdict(option) | asdict(found[index][option]) | {"branch_r2": r2[index]}
            for index, option in chosen.items()
        },
    }
    return remember_fit(routed, fit_record, started, bar.seconds)


def _check_wanted(keep: float, keep_of: str, length: int | None) -> None:
    if not 0 < keep < 1:
        raise ConfigError(
            f"keep={keep!r} must be between 0 and 1, the share of a prompt that is left"
        )
    if keep_of not in KEEP_OF:
        raise ConfigError(f"keep_of={keep_of!r} must be one of: {', '.join(KEEP_OF)}")
    if length is not None and length < 1:
        raise ConfigError(f"length={length} must be at least 1, the tokens of a prompt")


def _check_not_found(config: DepthRouteConfig) -> None:
    """`ConfigError` where a field is given that the fit finds."""
    for name in _FOUND:
        value = getattr(config, name)
        if value != getattr(RoutingFields, name):
            raise ConfigError(
                f"{name}={value!r}: of prompts it is found for every layer; leave it out"
            )


def _prompt_of(text: Batches, length: int) -> torch.Tensor:
    """A prompt `[1, length]` of the text's tokens, again from the start where they end."""
    ids = torch.cat([batch["input_ids"].flatten() for batch in text])
    return ids.repeat(1 + length // len(ids))[None, :length]


def _chosen(found: Mapping[int, Mapping[Option, StaticFit]], keep: float) -> dict[int, Option]:
    """`choose` what leaves `keep`; `ConfigError` where nothing does."""
    chosen = choose(found, 1 - keep)
    if not chosen:
        most = sum(max(0.0, *(fit.saved for fit in fits.values())) for fits in found.values())
        raise ConfigError(
            f"keep={keep:g} is not reached: leaving out all that can be saves {most:.2f} of a "
            "prompt"
        )
    return chosen


def _check_length(length: int, tail: int) -> None:
    """Raise `ConfigError` where a prompt of `length` tokens has none before its `tail`."""
    if length <= tail:
        raise ConfigError(
            f"length={length}: of a prompt of so many tokens the last {tail} run in full "
            "(prompt_tail), which are all; give a longer length or a smaller prompt_tail"
        )


def _check_tail(batches: Batches, use: str, tail: int) -> None:
    """Raise `ConfigError` if no prompt has a token before its `tail`, or text behind it."""
    masks = [prompts_of(batch, tail) for batch in batches]
    routed = any(bool(cheap.any()) for cheap, _ in masks)
    if not routed or not any(bool(behind.any()) for _, behind in masks):
        raise ConfigError(
            f"prompt_tail={tail}: no prompt in the rows {use} has more tokens and text behind it, "
            "so that nothing is routed or nothing measured; the prompt is the first two thirds of "
            "a row: give longer rows or a smaller prompt_tail"
        )


def _bar(model: PeftModel, text: Batches, held_out: Batches, shown: bool | None) -> FitBar:
    fitted = positions(own_part(text))
    held = positions(own_part(held_out))
    searched = _OPTIONS * (fitted + held)
    return FitBar(stack_of(model).layers, searched + 2 * fitted + 2 * held, searched, shown)


def _refit(
    model: PeftModel, text: Batches, tail: int, metrics: list[torch.Tensor | None]
) -> dict[int, float]:
    """Fit the branches again, to what leads from the routed stream back to the dense one.

    So a branch makes up for its own layer, and for as much of what those before it have lost as can
    be told.
    """
    walk = LayerWalk(model, text)
    cheap = [prompts_of(batch, tail)[0] for batch in text]
    states = walk.first()
    dense = walk.first()
    r2: dict[int, float] = {}
    for index in range(len(walk.layers)):
        routing = walk.routing(index)
        plan = walk.plan(index)
        if routing is None or plan is None:
            states = walk.run(index, states)
            dense = walk.run(index, dense) if r2 else states
            continue
        calls = walk.calls(index, states, plan)
        wanted = walk.calls(index, dense, plan)
        wanted_fulls = [call.full() for call in wanted]
        branch = routing.depth_route_branch[routing.active_name()]
        gate: Any = routing.depth_route_gate[routing.active_name()]
        gate.set_bound(real_rows([call.stream for call in calls], walk))
        skipped = [mask & (gate(call.stream)["scores"] < 0) for call, mask in zip(calls, cheap)]
        pairs = list(zip(calls, wanted_fulls))
        r2[index] = fit_on(branch, rows_of(branch, pairs, walk.real), metrics[index])
        states = []
        for call, mask in zip(calls, skipped):
            states.append(call.finish(torch.where(mask[..., None], call.cheap(), call.full())))
        dense = [call.finish(full) for call, full in zip(wanted, wanted_fulls)]
    return r2


def _behind(
    model: PeftModel, text: Batches, tail: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses of the dense and the routed model, and `KL(dense || routed)`, behind the prompts.

    Nats per token, `[R]` each, as `parts_of_mean` has them.
    """
    found = [torch.empty(4, 0, dtype=torch.float64)]  # of a process without rows
    for batch in text:
        cheap, _ = prompts_of(batch, tail)
        _, behind = prompts_of(batch)
        with full_depth(model):
            dense = logits_at(model, batch, behind).float().log_softmax(-1)
        with run_in_full(model, ~cheap):
            routed = logits_at(model, batch, behind).float().log_softmax(-1)
        labels = batch["input_ids"].roll(-1, 1)[behind][:, None]
        parts = -dense.gather(-1, labels), -routed.gather(-1, labels)
        kl = F.kl_div(routed, dense, reduction="none", log_target=True).sum(-1, keepdim=True)
        sums = [
            part.new_zeros(behind.shape).masked_scatter(behind, part).sum(1)
            for part in (*parts, kl)
        ]
        found.append(torch.stack([*sums, behind.sum(1).to(sums[0])]).double().cpu())
    *sums_R, count_R = rows_of_all(torch.cat(found, dim=1).T).T
    dense_R, loss_R, kl_R = (torch.stack([sum_R, count_R], dim=1) for sum_R in sums_R)
    return parts_of_mean(dense_R), parts_of_mean(loss_R), parts_of_mean(kl_R)

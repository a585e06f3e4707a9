"""Texts read as a model serves them: a generated one once more,
and continuations behind their prompt.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..adapter.modules_to_save import without_copies
from ..data.batches import prompts_of
from ..files.shown import DepthRouteWarning
from ..inference.calibration import active_routings
from ..routing.trace import RouteTrace, full_depth, record_routes, run_in_full

# As lm-eval's `_loglikelihood_tokens` gets them: a name, and the ids of prompt and continuation.
Request = tuple[object, list[int], list[int]]


@torch.no_grad()
def read_generated(
    model: torch.nn.Module, ids: torch.Tensor, prompt: int, **inputs: object
) -> Iterator[Any]:
    """Read `ids` `[1, T]`, whose first `prompt` tokens are the prompt, in passes;
    yields the output of each.

    So what was decided about a generated text is seen without a part in the time it took. Decisions
    are those of generating: the prompt is read first and alone. What follows it is read in one
    pass, since decisions are causal; with `phases="prefill"` token by token, since the last token
    of every pass runs in full. `generate` itself has not read the last token.

    The model is a `PeftModel` in eval mode with one active depth-routed adapter; `inputs` are what
    every pass is given besides, such as `logits_to_keep`.
    """
    alone = active_routings(model)[0].active_config().phases == "prefill"
    rest = ids.shape[1] - prompt
    cache = None
    behind = [1] * rest if alone else [rest] * (rest > 0)
    for part in ids.split([prompt, *behind], dim=1):
        out = model(input_ids=part, past_key_values=cache, use_cache=True, **inputs)
        cache = out.past_key_values
        yield out


@contextmanager
def as_base(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block `model` is what its router was put on: no layer is routed, and the router's
    copies of base modules (`modules_to_save`) are off; adapters of other methods stay on."""
    name = active_routings(model)[0].active_name()
    with full_depth(model), without_copies(model, name):
        yield


@torch.no_grad()
def read_behind_prompts(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[RouteTrace, torch.Tensor]:
    """Read texts whose first two thirds are a prompt (`prompts_of`), `[B, T]`, as
    `phases="prefill"` serves them.

    Returns:
        The decisions, which are for full behind a prompt and at its end, and the logits
        `[B, T, V]`.
    """
    cheap_BT, _ = prompts_of(batch, active_routings(model)[0].active_config().last_in_full)
    with run_in_full(model, ~cheap_BT), record_routes(model) as trace:
        return trace, model(**batch, use_cache=False).logits


@torch.no_grad()
def served_scores(
    model: Any,
    requests: Sequence[Request],
    max_length: int,
    counting: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[int, float, bool]]:
    """The log-likelihood of every continuation, and whether it is the greedy one,
    with the number of its request.

    With `phases="prefill"` that is the prompt first, then the rest in full. A prompt that several
    continuations follow is read once, in a context of `counting`. Of text that is longer than
    `max_length`, the beginning is left out, with a warning.
    """
    numbers: dict[tuple[int, ...], list[int]] = {}
    shortened = 0
    for number, (_, prompt, continuation) in enumerate(requests):
        left = max(1, max_length + 1 - len(continuation))
        shortened += len(prompt) > left
        numbers.setdefault(tuple(prompt[-left:]), []).append(number)
    if shortened:
        warnings.warn(
            f"{shortened} of {len(requests)} requests are longer than the {max_length} tokens that "
            "the model reads: their prompts lose their beginning",
            DepthRouteWarning,
            stacklevel=2,
        )
    for prompt_ids, of_prompt in numbers.items():
        ids_1T = torch.tensor([prompt_ids], device=model.device)
        with counting():
            read = model(input_ids=ids_1T, use_cache=True, logits_to_keep=1)
        for number in of_prompt:
            yield (number, *_score(model, read, requests[number][2]))


def _score(model: Any, read: Any, continuation: list[int]) -> tuple[float, bool]:
    ids_1T = torch.tensor([continuation], device=model.device)
    logits_TV = read.logits[0, -1:]
    if len(continuation) > 1:
        cache = copy.deepcopy(read.past_key_values)  # other continuations follow the same prompt
        with full_depth(model):
            rest = model(input_ids=ids_1T[:, :-1], past_key_values=cache, use_cache=True).logits[0]
        logits_TV = torch.cat([logits_TV, rest])
    log_probs_TV = logits_TV.float().log_softmax(-1)
    score = log_probs_TV.gather(1, ids_1T.T).sum()
    return float(score), bool((log_probs_TV.argmax(-1) == ids_1T[0]).all())

"""A text that was generated, read again: what was decided about it is seen without a part in the time it took.

Shapes: T positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..inference.calibration import active_routings


@torch.no_grad()
def read_generated(model: Any, ids: torch.Tensor, prompt: int, **inputs: Any) -> Iterator[Any]:
    """Read `ids` `[1, T]`, whose first `prompt` tokens are the prompt, in passes; yields the output of each.

    Decisions are those of generating: the prompt is read first and alone. What follows it is read in one pass, since
    decisions are causal; with `phases="prefill"` token by token, since the last token of every pass runs in full.

    Args:
        model: A `PeftModel` in eval mode with one active depth-routed adapter.
        ids: What `generate` returned for one prompt. It has not read the last token itself.
        prompt: Tokens of the prompt, at least one.
        **inputs: What every pass is given besides, such as `logits_to_keep`.
    """
    alone = active_routings(model)[0].active_config().phases == "prefill"
    rest = ids.shape[1] - prompt
    cache = None
    for part in ids.split([prompt, *([1] * rest if alone else [rest] * (rest > 0))], dim=1):
        out = model(input_ids=part, past_key_values=cache, use_cache=True, **inputs)
        cache = out.past_key_values
        yield out

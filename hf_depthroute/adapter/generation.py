"""`generate` of a routed model refuses what would change a decision, by whatever path it is called.

The base that an adapter was put on generates by itself too, as does one that transformers loaded
the adapter into; so the check stands at transformers' own `generate`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..config.adapter import ConfigError
from ..files.shown import DepthRouteWarning
from ..parts.gates import GATES
from ..routing.stack import configs_now, routed_layers

_DRAFTING = ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_model")
_BY_PARTS = ("prefill_chunk_size", *_DRAFTING)


def checked_generate(generate: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`GenerationMixin.generate`, after `check_generation`.

    What a draft decides changes no text: it is not checked.
    """
    if not getattr(kwargs.get("generation_config"), "is_assistant", None):
        check_generation(self, args, kwargs)
    return generate(self, *args, **kwargs)


def check_generation(
    model: nn.Module, arguments: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Refuse what makes `generate` decide otherwise than it does plainly, and warn where nothing is
    routed; an unrouted model passes.

    `arguments` are those of `generate` by place, the inputs and a generation config; `options` the
    others.

    Raises:
        ConfigError: Whole sequences are routed, and their decision would be made on a part of the
            prompt, on drafted tokens, or without a KV cache again at every step; or prompts alone
            are, and drafted tokens, or without a cache all that was generated, are read as one.
    """
    configs = configs_now(routed_layers(model))
    if not configs:
        return
    settings = [
        *arguments[1:2],
        options.get("generation_config"),
        getattr(model, "generation_config", None),
    ]

    def asked(name: str) -> Any:  # what one of them leaves open, the next one says
        values = [options.get(name), *(getattr(each, name, None) for each in settings)]
        return next((value for value in values if value is not None), None)

    given = {name: asked(name) for name in (*_BY_PARTS, "use_cache")}
    if any(config.granularity == "sequence" for config in configs):
        for name in _BY_PARTS:
            if given[name] is not None:
                raise ConfigError(
                    f"{name}: granularity='sequence' decides once, about the prompt whole and alone"
                )
    tails = [config.last_in_full for config in configs if config.phases == "prefill"]
    prompts_alone = bool(tails)
    if prompts_alone and 0 < (given["prefill_chunk_size"] or 0) <= max(tails):
        warnings.warn(
            f"prefill_chunk_size={given['prefill_chunk_size']}: the last {max(tails)} tokens of "
            "every chunk of a prompt run in full (prompt_tail), so nothing is routed; take longer "
            "chunks",
            DepthRouteWarning,
            stacklevel=3,  # past `checked_generate`
        )
    for name in _DRAFTING if prompts_alone else ():
        if given[name] is not None:
            raise ConfigError(
                f"{name}: several drafted tokens are verified in one pass, the first ones with the "
                "prompt, and phases='prefill' would route them as a prompt; leave it out"
            )
    if given["use_cache"] is not False:
        return
    if any(c.granularity == "sequence" and not GATES[c.gate].static for c in configs):
        raise ConfigError(
            "use_cache=False: granularity='sequence' decides once, and the KV cache keeps the "
            "decision; leave use_cache on"
        )
    if prompts_alone:
        raise ConfigError(
            "use_cache=False: phases='prefill' tells a prompt from generated tokens by the KV cache"
        )

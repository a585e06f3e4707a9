"""Checks of the generation settings in a request to `hf-depthroute serve`.

`transformers serve` hands any field of `GenerationConfig` on: some values end in an error of the server, others cost
without a bound, such as a stop string that is matched against every token of the vocabulary.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STOPS = 16  # strings of a request
STOP_LENGTH = 256  # characters of each
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 100),
}  # fmt: skip
_OPENAI: dict[str, tuple[float, float]] = {  # of the body itself; transformers adds 1 to the penalty and divides by it
    "temperature": (0, 100), "top_p": (0, 1), "frequency_penalty": (-0.99, 2), "seed": (-(2**63), 2**63 - 1),
}  # fmt: skip
# `transformers serve` takes these and does nothing with them; only what changes nothing passes, here as JSON.
_IGNORED: dict[str, tuple[str, ...]] = {
    "n": ("1",),
    "best_of": ("1",),
    "echo": ("false",),
    "logprobs": ("false",),
    "top_logprobs": ("0",),
    "presence_penalty": ("0", "0.0"),
    "response_format": ('{"type": "text"}',),
}
_BIASES = "/v1/chat/completions"  # the one path that does something with logit_bias
_WHOLE = {"top_k": (0, 1 << 20), "num_beams": (1, 1), "num_return_sequences": (1, 1)}
_COUNTS = ("max_new_tokens", "min_new_tokens")
_FIELDS = ("transformers_version", "do_sample", *_RANGES, *_WHOLE, *_COUNTS, "stop_strings")


@dataclass(frozen=True)
class Limits:
    """Limits of one server.

    Attributes:
        prompt_tokens: In one request.
        output_tokens: In one answer.
        requests: At one time, running and waiting; one more is answered with 429.
        positions: How many the model has, for prompt and answer together.
    """

    prompt_tokens: int
    output_tokens: int
    requests: int
    positions: int | None = None

    @property
    def body_bytes(self) -> int:
        """No prompt within the limit needs more: tokens are words, and chats have roles and tools."""
        return (1 << 20) + 32 * self.prompt_tokens


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is none; NaN and Infinity are none, and a number that is too large for a float is infinite.
    """

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise ValueError(f"{number[:20]} is no number of JSON, or too large")
        return value

    return json.loads(text, parse_constant=finite, parse_float=finite)


def wrong_settings(content: Mapping[str, Any], output_tokens: int, path: str = _BIASES) -> str | None:
    """Why what a request's body says about its generation is refused; None if it is not.

    Args:
        content: The body.
        output_tokens: The most that an answer may have.
        path: Where it was sent.
    """
    for name, (low, high) in _OPENAI.items():
        kinds = int if name == "seed" else int | float
        if content.get(name) is not None and not _within(content[name], low, high, kinds):
            return f"{name} must be a {'whole ' if kinds is int else ''}number from {low} to {high}"
    for name, harmless in _IGNORED.items():
        if content.get(name) is not None and json.dumps(content[name]) not in harmless:
            return f"{name} is not served; leave it out"
    if content.get("logit_bias") and path != _BIASES:
        return f"logit_bias is not served at {path}; use {_BIASES}"
    return _wrong_template(content.get("chat_template_kwargs")) or _wrong_generation(content, output_tokens)


def _within(value: Any, low: float, high: float, kinds: Any = int | float) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def _wrong_template(given: Any) -> str | None:
    """Why what a chat template is to be given is refused: a template of the client's own is a program."""
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > 16:
        return "chat_template_kwargs must be an object of at most 16 fields"
    from transformers import PreTrainedTokenizerBase

    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name, value in given.items():
        if name in taken:
            return f"chat_template_kwargs: {name!r} is the server's; use what the model's own template knows"
        if not (isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 256)):
            return f"chat_template_kwargs: {name[:50]!r} must be true, false, a number or a short string"
    return None


def _wrong_generation(content: Mapping[str, Any], output_tokens: int) -> str | None:
    """Why the stop strings or the `generation_config` of a body are refused."""
    stops = {"stop": content.get("stop")}
    given = content.get("generation_config")
    if given is not None:
        try:
            config = parse_json(given)
        except (ValueError, TypeError, RecursionError):
            config = None
        if not isinstance(config, dict):
            return "generation_config must be the text of a JSON object"
        for name, value in config.items():
            if name not in _FIELDS:
                return f"generation_config: {name[:50]!r} is not served; use some of: {', '.join(_FIELDS)}"
            if value is not None and (wrong := _wrong_field(name, value, output_tokens)):
                return f"generation_config: {wrong}"
        stops["stop_strings"] = config.get("stop_strings")
    for name, value in stops.items():
        strings = [value] if isinstance(value, str) else value
        if strings is None:
            continue
        if not isinstance(strings, list) or not 1 <= len(strings) <= STOPS:
            return f"{name} must be a string, or a list of 1 to {STOPS}"
        if not all(isinstance(string, str) and 1 <= len(string) <= STOP_LENGTH for string in strings):
            return f"{name}: each must be a string of 1 to {STOP_LENGTH} characters"
    return None


def _wrong_field(name: str, value: Any, output_tokens: int) -> str | None:
    if name == "transformers_version":  # `transformers chat` says it
        return None if isinstance(value, str) and len(value) <= 50 else "transformers_version must be a short string"
    if name == "do_sample":
        return None if isinstance(value, bool) else "do_sample must be true or false"
    if name in _RANGES:
        low, high = _RANGES[name]
        return None if _within(value, low, high) else f"{name} must be a number from {low} to {high}"
    if name in _WHOLE or name in _COUNTS:
        least, most = _WHOLE.get(name, (1, output_tokens))
        return None if _within(value, least, most, int) else f"{name} must be a whole number from {least} to {most}"
    return None

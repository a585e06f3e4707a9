"""Checks of the generation settings in a request to `hf-depthroute serve`.

`transformers serve` hands any field of `GenerationConfig` on: some values end in an error of the server, others cost
without a bound, such as a stop string that is matched against every token of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STOPS = 16  # strings of a request
STOP_LENGTH = 256  # characters of each
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 100),
}  # fmt: skip
_WHOLE = {"top_k": (0, 1 << 20), "num_beams": (1, 1), "num_return_sequences": (1, 1)}
_COUNTS = ("max_new_tokens", "min_new_tokens")
_FIELDS = ("transformers_version", "do_sample", *_RANGES, *_WHOLE, *_COUNTS, "stop_strings")


def wrong_settings(content: Mapping[str, Any], output_tokens: int) -> str | None:
    """Why the stop strings or the `generation_config` of a request's body are refused; None if they are not.

    Args:
        content: The body.
        output_tokens: The most that an answer may have.
    """
    stops = {"stop": content.get("stop")}
    given = content.get("generation_config")
    if given is not None:
        try:
            config = json.loads(given)
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
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        return None if fits else f"{name} must be a number from {low} to {high}"
    if name in _WHOLE or name in _COUNTS:
        least, most = _WHOLE.get(name, (1, output_tokens))
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return None if fits else f"{name} must be a whole number from {least} to {most}"
    return None

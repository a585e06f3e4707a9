"""The length of a request's prompt, counted outside of the server's event loop before its
handler takes the text.

The handlers of `transformers serve` tokenise in the event loop, so that everybody waits for the
longest prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS = ("prompt", "instructions", "input", "messages", "tools")
_CHARACTERS_OF_A_TOKEN = 16  # on average; text has 4 to 5, indented code up to 8
_SHORT = 4096  # characters that take no time
_PIECE = 8192  # characters


def fault_of_prompt(
    content: Mapping[str, object], most: int, tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """Why the prompt of a request is refused; None if it may be within the limit,
    which the handler checks exactly.

    Args:
        content: The body.
        most: How many tokens a prompt may have.
        tokenizer: The model's, or its processor.
    """
    texts = [text for name in _TEXTS for text in _strings(content.get(name))]
    length = sum(map(len, texts))
    if length > _CHARACTERS_OF_A_TOKEN * most + _SHORT:
        return f"the prompt has {length:,} characters; this server takes {most} tokens"
    if length <= _SHORT:
        return None
    encode = getattr(tokenizer, "tokenizer", tokenizer)
    count = 0
    for text in texts:
        for start in range(0, len(text), _PIECE):
            count += len(
                encode(text[start : start + _PIECE], add_special_tokens=False)["input_ids"]
            )
            count -= start > 0  # a word that is cut in two may have a token more
            if count > most:
                return f"the prompt has more than {most} tokens, which this server takes"
    return None


def _strings(value: object) -> Iterator[str]:
    """The texts of a prompt, a chat or its tools; names of fields are not the model's to read."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
    elif isinstance(value, dict):
        yield from _strings(
            value.get("content", value.get("text", json.dumps(value, ensure_ascii=False)))
        )

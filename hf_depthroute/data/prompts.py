"""A prompt as a model reads it: in the tokenizer's chat template, where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..files.shown import reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptError(ValueError):
    """A prompt cannot be encoded. The message is one line."""


def encode_prompt(tokenizer: Any, prompt: str, chat_template: bool = True) -> list[int]:
    """The token ids of a prompt, `[T]`.

    With `chat_template` it is put into the tokenizer's, if there is one, as the message of a user
    that the model is to answer. Models that were tuned to answer expect it; without it they often
    end the text at once.

    Raises:
        PromptError: The template cannot be rendered with one message of a user.
    """
    if not (chat_template and has_chat_template(tokenizer)):
        return list(tokenizer(prompt, return_token_type_ids=False)["input_ids"])
    import jinja2

    messages = [{"role": "user", "content": prompt}]
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise PromptError(
            f"the tokenizer's chat template does not take one message: {reason(error)}"
        ) from error
    return list(encoded["input_ids"])


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `encode_prompt` has a template to put a prompt into."""
    return bool(getattr(tokenizer, "chat_template", None))


def pad_id_of(tokenizer: Any) -> int | None:
    """The token that `generate` pads with: the tokenizer's, or else the one that ends a text."""
    pad: int | None = tokenizer.pad_token_id
    if pad is None:
        pad = tokenizer.eos_token_id
    return pad

"""The settings in a request to `hf-depthroute serve`, within bounds.

`transformers serve` hands any field of `GenerationConfig` on: some values end in an error of the
server, others cost without a bound, such as a stop string that is matched against every token of
the vocabulary.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    StringConstraints,
    ValidationError,
    ValidationInfo,
)

STOPS = 16  # strings of a request
STOP_LENGTH = 256  # characters of each
_BIASES = "/v1/chat/completions"  # the one path that does something with logit_bias


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
        """No prompt within the limit needs more: tokens are words, of which JSON may write a letter
        in 6 bytes, and chats have roles and tools.

        A longer one would be tokenised before it is refused, and all wait meanwhile.
        """
        return (1 << 16) + 64 * self.prompt_tokens


def _within_limit(value: int, info: ValidationInfo) -> int:
    most = int(info.context or 0)
    if not 1 <= value <= most:
        raise ValueError(f"must be a whole number from 1 to {most}")
    return value


def _for_template(given: dict[str, Any]) -> dict[str, object]:
    """Values for the chat template; a template of the client's own would be a program."""
    from transformers import PreTrainedTokenizerBase

    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name, value in given.items():
        if name in taken:
            raise ValueError(f"{name!r} is the server's; use what the model's own template knows")
        short = not isinstance(value, str) or len(value) <= 256
        if not isinstance(value, bool | int | float | str) or not short:
            raise ValueError(f"{name[:50]!r} must be true, false, a number or a short string")
    return given


Tokens = Annotated[int, AfterValidator(_within_limit)]  # at most the context of the validation
Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Stops = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=STOP_LENGTH)]],
    Field(min_length=1, max_length=STOPS),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]


class GenerationSettings(BaseModel):
    """The fields of `generation_config` that a request may set;
    `transformers chat` says its version too."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    transformers_version: Annotated[str, StringConstraints(max_length=50)] | None = None
    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    max_new_tokens: Tokens | None = None
    min_new_tokens: Tokens | None = None
    num_beams: Literal[1] | None = None
    num_return_sequences: Literal[1] | None = None
    stop_strings: Stops | None = None


class RequestSettings(BaseModel):
    """The fields of a body that set its generation; the rest is its handler's to look at."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    temperature: Temperature | None = None
    top_p: Share | None = None
    # Its handler divides by 1 more.
    frequency_penalty: Annotated[float, Field(ge=-0.99, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    stop: Stops | None = None
    generation_config: Json[GenerationSettings] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=16), AfterValidator(_for_template)] | None
    ) = None
    # `transformers serve` takes these and does nothing with them: only what changes nothing passes.
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None


def is_sampled(content: Mapping[str, Any]) -> bool:
    """Whether a request's body, of settings that are right, asks for drawn tokens, as OpenAI's API
    reads it: a temperature above 0, or a `top_p` below 1.

    What its `generation_config` says of `do_sample` goes before.
    """
    given = json.loads(content.get("generation_config") or "{}")
    if given.get("do_sample") is not None:
        return False
    temperature = content.get("temperature")
    if temperature is None:
        return (content.get("top_p") or 1) < 1
    return temperature > 0


def wrong_settings(
    content: Mapping[str, object], output_tokens: int, path: str = _BIASES
) -> str | None:
    """Why what a request's body says about its generation is refused; None if it is not."""
    if content.get("logit_bias") and path != _BIASES:
        return f"logit_bias is not served at {path}; use {_BIASES}"
    try:
        RequestSettings.model_validate(content, context=output_tokens)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        field = ".".join(map(str, wrong["loc"]))
        why = wrong["msg"].removeprefix("Value error, ")
        return f"{field[:100]}={str(wrong['input'])[:50]!r}: {why}"
    return None

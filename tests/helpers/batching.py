"""Continuous batching, and what `generate` gives for the same prompts."""

from __future__ import annotations

from typing import Any

import torch
from models import tokens
from transformers import GenerationConfig

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 3)]
GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=63, pad_token_id=0)


def generate_batch(model: Any, attention: str = "sdpa") -> list[Any]:
    from transformers import ContinuousBatchingConfig

    # Transformers 5.17.
    size = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    config = ContinuousBatchingConfig(**{size: 16}, num_blocks=32, max_batch_tokens=64)
    model.get_base_model().set_attn_implementation(attention)
    return list(
        model.generate_batch(
            inputs=PROMPTS, generation_config=GREEDY, continuous_batching_config=config
        ).values()
    )


def generate(model: Any) -> list[list[int]]:
    return [
        model.generate(torch.tensor([prompt]), generation_config=GREEDY)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]

"""Runs of the SFTTrainer of TRL on token ids."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from models import build_base, tokens
from text_models import word_tokenizer
from training import training_arguments

from hf_depthroute import DepthRouteConfig

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

ROUTES = DepthRouteConfig(layers=[1, 2, 3], gate="jepa")
LENGTHS = (12, 9, 7, 12, 10, 5, 8, 11)
CHAT = (
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'assistant' %}{% generation %}{{ "
    "m['content'] }} <eos>{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)


def token_data() -> Any:
    """Examples of different lengths, token ids already."""
    ids = tokens(len(LENGTHS), max(LENGTHS))
    return datasets.Dataset.from_dict(
        {"input_ids": [row[:n].tolist() for row, n in zip(ids, LENGTHS)]}
    )


def sft_arguments(folder: Path, **fields: Any) -> Any:
    shared = training_arguments(folder)
    names = (
        "output_dir use_cpu report_to save_strategy disable_tqdm logging_steps num_train_epochs "
        "max_grad_norm per_device_train_batch_size learning_rate train_sampling_strategy "
        "weight_decay lr_scheduler_type lr_scheduler_kwargs"
    )
    defaults = {name: getattr(shared, name) for name in names.split()}
    return trl.SFTConfig(**defaults | {"bf16": False, "gradient_checkpointing": False} | fields)


def sft(
    folder: Path,
    data: Any,
    cls: Any = None,
    callbacks: Any = (),
    config: Any = None,
    model: Any = None,
    **fields: Any,
) -> Any:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHAT
    return (cls or trl.SFTTrainer)(
        model or build_base("llama"),
        args=sft_arguments(folder, **fields),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=config or copy.deepcopy(ROUTES),
        callbacks=list(callbacks),
    )

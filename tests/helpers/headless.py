"""Models of tasks other than language modelling."""

from __future__ import annotations

from typing import Any

import peft
import torch
from models import CONFIGS, build_base, randomised
from peft import PeftModel
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

AUTO: dict[str, tuple[Any, type[PeftModel]]] = {
    "SEQ_CLS": (AutoModelForSequenceClassification, peft.PeftModelForSequenceClassification),
    "TOKEN_CLS": (AutoModelForTokenClassification, peft.PeftModelForTokenClassification),
    "FEATURE_EXTRACTION": (AutoModel, peft.PeftModelForFeatureExtraction),
}


def headless(task: str, family: str = "llama", seed: int = 0) -> Any:
    """A random model of the task; of one family and seed, all tasks have the same decoder."""
    base = build_base(family)
    auto = AUTO[task][0]
    config = CONFIGS[family][1]()
    config.num_labels = 3
    model = randomised(auto.from_config(config), "sdpa", torch.float32, seed)
    getattr(model, "base_model", model).load_state_dict(base.base_model.state_dict())
    return model

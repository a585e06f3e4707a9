"""A routed model of every row of the family table, and a pass of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from models import EXTENDED, build_routed, tokens
from peft import PeftModel

from hf_depthroute import record_routes
from hf_depthroute.routing.trace import RouteTrace

TARGETS = ("ffn", "attention", "block")
every_family = pytest.mark.parametrize("family", EXTENDED)
# One family per layout and per change of the logits.
LAYOUTS = ("gemma2", "granite", "olmo2", "phi", "cohere2", "falcon")
IDS = tokens(3, 12)


@functools.cache
def shared(family: str, target: str) -> PeftModel:
    """A routed model that every test leaves as it found it."""
    return build_routed(family, "mlp" if target == "ffn" else target, layers=[1, 2])


@torch.no_grad()
def run(model: Any, **inputs: Any) -> tuple[torch.Tensor, RouteTrace]:
    with record_routes(model) as trace:
        return model(**({"input_ids": IDS, "use_cache": False} | inputs)).logits, trace

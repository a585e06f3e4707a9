"""Bases that were loaded from a GGUF file: its name, and weights that train like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from .families import field_of


def gguf_file_of(config: object) -> str | None:
    """The name of the GGUF file that a model was loaded from; None for other models."""
    quantised = field_of(config, "quantization_config")
    if getattr(quantised, "quant_method", None) != "gguf":
        return None
    if quantised.gguf_file:
        return Path(quantised.gguf_file).name
    return None


def load_dequantised(load: Any, folder: str, gguf_file: str, **how: Any) -> Any:
    """`load(folder, gguf_file=gguf_file, **how)` with weights that are plain numbers,
    whatever kernels there are.

    Blocks of a GGUF file take no gradient, and Trainers refuse a model that calls itself quantised.
    `load` is a function such as `AutoModelForCausalLM.from_pretrained`.
    """
    kind = getattr(transformers, "GgufConfig", None)  # versions without it always dequantise
    if kind is None:
        return load(folder, gguf_file=gguf_file, **how)
    settings = kind(gguf_file=gguf_file, dequantize=True)
    model = load(folder, gguf_file=gguf_file, quantization_config=settings, **how)
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.quantization_config = settings  # for `gguf_file_of`
    return model

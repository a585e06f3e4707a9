"""Bases that were loaded from a GGUF file: the file's name,
and weights that train like any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from .families import field_of


def gguf_file_of(config: object) -> str | None:
    """The name of the GGUF file that a model of this configuration was loaded from;
    None for other models."""
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

    Args:
        load: Such as `AutoModelForCausalLM.from_pretrained`.
        folder: The folder or Hub id of the file.
        gguf_file: Its name there.
        **how: More arguments of `load`.
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

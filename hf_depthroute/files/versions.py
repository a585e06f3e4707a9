"""Versions that a result depends on."""

from __future__ import annotations

import platform

import peft
import torch
import transformers

from ..version import __version__


def versions() -> dict[str, str]:
    """Versions of this library, of those below it, and of Python."""
    return {
        "hf_depthroute": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "python": platform.python_version(),
    }

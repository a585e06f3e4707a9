"""Text in, packed blocks of tokens out."""

from .text import load_text, pack

__all__ = ["load_text", "pack"]

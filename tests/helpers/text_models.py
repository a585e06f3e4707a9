"""A word tokenizer and a small model folder that goes with it, for tests that start from text."""

from __future__ import annotations

from pathlib import Path

from models import VOCABULARY, build_base
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "and",
    "dog",
    "ran",
    "to",
    "a",
    "big",
    "red",
    "hat",
    "saw",
    "it",
    "was",
    "said",
]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, no token added; ids below the tiny models' vocabulary."""
    vocabulary = {
        word: index for index, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *_WORDS])
    }
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def save_base(folder: Path, family: str = "llama") -> Path:
    """A tiny base model and its tokenizer in `folder`."""
    build_base(family).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def write_text(path: Path, lines: int = 60) -> Path:
    """A text file of `lines` sentences over the tokenizer's words."""
    sentences = (
        " ".join(_WORDS[(7 * line + 3 * word) % len(_WORDS)] for word in range(12 + line % 5))
        for line in range(lines)
    )
    path.write_text("\n".join(sentences))
    return path

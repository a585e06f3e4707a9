"""Token ids as the pieces of text that a reader sees: one piece a token, or several tokens that make one character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"  # what a tokenizer decodes half a character to
_LONGEST = 8  # tokens that can make one character; what is still unreadable then is no text


def text_pieces(tokenizer: Any, ids: Sequence[int], boundary: int | None = None) -> tuple[list[str], list[int]]:
    """The text of `ids`, cut where tokens meet.

    A token that is no text alone, such as one byte of a character, is joined with its neighbours. Pieces joined give
    the decoded text.

    Args:
        tokenizer: The model's tokenizer.
        ids: `[T]`.
        boundary: A position that no piece reaches across, such as the end of a prompt.

    Returns:
        The pieces, and how many tokens each holds; the sum is `T`.
    """
    pieces: list[str] = []
    counts: list[int] = []
    start = 0  # of the tokens that are not yet a piece
    how: dict[str, bool] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    while start < len(ids):
        # Decoded with the piece in front, since some tokenizers drop the space of a first token; never with a part of
        # a character, which would make the rest unreadable.
        context = ids[start - counts[-1] : start] if counts and not pieces[-1].endswith(_REPLACEMENT) else []
        before = tokenizer.decode(list(context), **how) if context else ""
        last = min(len(ids), start + _LONGEST)
        if boundary is not None and start < boundary:
            last = min(last, boundary)
        for stop in range(start + 1, last + 1):
            whole = tokenizer.decode([*context, *ids[start:stop]], **how)
            # Half a character can make even the beginning unreadable.
            if whole.startswith(before) and not whole[len(before) :].endswith(_REPLACEMENT):
                text = whole[len(before) :]
                break
        else:  # never readable: one unreadable token
            stop = start + 1
            text = tokenizer.decode(list(ids[start:stop]), **how)
        pieces.append(text)
        counts.append(stop - start)
        start = stop
    return pieces, counts

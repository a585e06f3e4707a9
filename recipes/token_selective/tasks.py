"""The three tasks: characters of Tiny-Shakespeare, and copying and sorting of symbols.

Shapes: N sequences, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

SYMBOLS, SOURCE = 32, 10  # of copy and sort: distinct symbols, and symbols to copy or sort
BOS, SEP, EOS = SYMBOLS, SYMBOLS + 1, SYMBOLS + 2
# Of characters.
KINDS = ("inside a word", "first letter of a word", "space", "new line", "punctuation")


@dataclass(frozen=True)
class Task:
    """Token ids, int64; one token more than the model reads.

    Attributes:
        train: Text `[tokens]` to cut windows from, or sequences `[N, T + 1]`.
        validation: `[N, T + 1]`.
        vocab_size: Ids run from 0 to `vocab_size - 1`.
        first: Position of the first target that counts; the source of copy and sort does not.
        characters: By id, what it stands for; empty where ids are symbols.
    """

    train: torch.Tensor
    validation: torch.Tensor
    vocab_size: int
    first: int = 1
    characters: str = ""

    def draw(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """A random training batch `[batch, T + 1]`; the same from the same generator."""
        if self.train.ndim == 2:
            return self.train[
                torch.randint(len(self.train), (batch,), generator=generator).to(self.train.device)
            ]
        length = self.validation.shape[1]
        starts = torch.randint(len(self.train) - length + 1, (batch, 1), generator=generator)
        return self.train[(starts + torch.arange(length)).to(self.train.device)]


def shakespeare(path: Path, length: int) -> Task:
    """Characters, numbered in sorted order; 80 % train,
    then 10 % validation in blocks of `length + 1`, then test."""
    text = path.read_text(encoding="utf-8")
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    ids = torch.tensor([number[character] for character in text])
    train, validation = ids[: len(ids) * 8 // 10], ids[len(ids) * 8 // 10 : len(ids) * 9 // 10]
    blocks = validation[: len(validation) // (length + 1) * (length + 1)].view(-1, length + 1)
    return Task(train, blocks, len(characters), characters="".join(characters))


def kinds(ids: torch.Tensor, characters: str) -> torch.Tensor:
    """Which of `KINDS` each character `[N, T]` is, by its place in `KINDS`;
    the first of a row begins a word.

    An apostrophe behind a letter is inside the word.
    """
    place = [
        0 if one.isalnum() else 2 if one == " " else 3 if one == "\n" else 4 for one in characters
    ]
    found = torch.tensor(place, device=ids.device)[ids]
    before = torch.nn.functional.pad(found[:, :-1], (1, 0), value=2)
    apostrophe = torch.tensor([one == "'" for one in characters], device=ids.device)[ids]
    found = torch.where(apostrophe & (before == 0), 0, found)
    before = torch.nn.functional.pad(found[:, :-1], (1, 0), value=2)
    return torch.where((found == 0) & (before != 0), 1, found)


def symbols(name: str, seed: int = 0) -> Task:
    """`BOS source SEP target EOS`: 10,000 training and 1,000 held-out sequences;
    only the target counts."""
    source = torch.randint(SYMBOLS, (11_000, SOURCE), generator=torch.Generator().manual_seed(seed))
    target = source if name == "copy" else source.sort(dim=1).values
    columns = [torch.full((len(source), 1), token) for token in (BOS, SEP, EOS)]
    rows = torch.cat([columns[0], source, columns[1], target, columns[2]], dim=1)
    return Task(rows[:10_000], rows[10_000:], SYMBOLS + 3, first=SOURCE + 2)


def load_task(name: str, text: Path, length: int, device: torch.device) -> Task:
    task = shakespeare(text, length) if name == "shakespeare" else symbols(name)
    return replace(task, train=task.train.to(device), validation=task.validation.to(device))

"""The token blocks of a study: prepared once, kept in its folder,
and handed to every run in the same order.

Shapes: N training blocks, M validation blocks, T tokens in a block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from hf_depthroute.data.text import DataError, load_text, pack
from hf_depthroute.files.hub import HubError, explain
from hf_depthroute.files.remote_code import refused_code, trusts_remote_code
from hf_depthroute.files.shown import reason


@dataclass(frozen=True)
class Blocks:
    """Token ids, int32."""

    train: torch.Tensor  # [N, T]
    validation: torch.Tensor  # [M, T]

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            digest.update(repr(tuple(part.shape)).encode())
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def to_bytes(self) -> bytes:
        """The content of a `blocks.safetensors`."""
        return save({"train": self.train.contiguous(), "validation": self.validation.contiguous()})

    def check(self, config: Any) -> None:
        """Raise `DataError` unless a model of `config` can read the blocks."""
        length, positions = self.train.shape[1], getattr(config, "max_position_embeddings", None)
        if positions is not None and length > positions:
            raise DataError(
                f"blocks of {length} tokens: the model has {positions} positions; use a shorter "
                "length"
            )
        for part in (self.train, self.validation):
            if part.min() < 0 or part.max() >= config.vocab_size:
                raise DataError(
                    f"token ids must be from 0 to {config.vocab_size - 1}, the model's vocabulary"
                )


def prepare_blocks(data: dict[str, Any], source: str, base: str, verbose: bool = False) -> Blocks:
    """The blocks that a study's `data` asks for.

    Args:
        data: The study file's `data`.
        source: Its `blocks` or `dataset`, as found from here.
        base: Folder or Hub id of the model, whose tokenizer is used.
        verbose: Show the progress of `datasets`.

    Raises:
        DataError: The text, the tokenizer or the file cannot be used.
    """
    if "blocks" in data:
        return read_blocks(Path(source))
    length, wanted = data.get("length", 256), data.get("validation_blocks", 128)
    tokenizer = _load_tokenizer(base)
    splits = []
    for split in (data.get("split", "train"), data.get("validation_split", "validation")):
        text = load_text(
            source,
            split=split,
            name=data.get("name"),
            column=data.get("column", "text"),
            verbose=verbose,
        )
        packed: Any = pack(text, tokenizer, length, verbose=verbose)
        splits.append(torch.tensor(packed["input_ids"], dtype=torch.int32))
    return Blocks(splits[0], spread(splits[1], wanted))


def read_blocks(path: Path) -> Blocks:
    """The blocks of a safetensors file with the integer tensors `train` `[N, T]` and
    `validation` `[M, T]`.

    Raises:
        DataError: The file cannot be read, or holds something else.
    """
    if not path.is_file():
        raise DataError(f"blocks {path}: no such file")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise DataError(
            f"blocks {path}: corrupt, or not in safetensors format ({error})"
        ) from error
    for name in ("train", "validation"):
        value = tensors.get(name)
        if (
            value is None
            or value.ndim != 2
            or value.is_floating_point()
            or value.shape[0] < 1
            or value.shape[1] < 2
        ):
            raise DataError(
                f"blocks {path}: {name} must be an integer tensor of blocks by tokens, at least 1 "
                "by 2"
            )
    if tensors["train"].shape[1] != tensors["validation"].shape[1]:
        raise DataError(f"blocks {path}: train and validation blocks have different lengths")
    return Blocks(tensors["train"].int(), tensors["validation"].int())


def spread(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """Up to `count` blocks, spread evenly."""
    count = min(count, len(blocks))
    return blocks[[i * len(blocks) // count for i in range(count)]]


def to_batches(
    blocks: torch.Tensor, batch_size: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": part.long().to(device)} for part in blocks.split(batch_size)]


def draw_order(blocks: int, wanted: int, seed: int) -> torch.Tensor:
    """Which of `blocks` training blocks come when, `[wanted]`: epoch after epoch,
    each in a random order.

    It depends on the seed alone, and a longer run begins like a shorter one.
    """
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(blocks, generator=generator) for _ in range(-(-wanted // blocks))]
    return torch.cat(epochs)[:wanted]


class OrderedBlocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Training blocks in the order they are trained on; for a Trainer that does not shuffle."""

    def __init__(self, blocks: torch.Tensor, order: torch.Tensor) -> None:
        self.blocks = blocks
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.blocks[self.order[index]].long()
        return {"input_ids": ids, "labels": ids}


def _load_tokenizer(base: str) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            base, trust_remote_code=trusts_remote_code()
        )
    except Exception as error:
        code_refused = refused_code(error, base)
        if code_refused is not None:
            raise DataError(f"tokenizer of {base}: {code_refused}") from error
        hub: HubError | None = (
            None if Path(base).exists() else explain(error, f"tokenizer of {base}")
        )
        raise hub or DataError(
            f"tokenizer of {base}: {reason(error)}; use data: {{blocks: FILE}}"
        ) from error

"""Text to measure a model on, as people have it: a loader's batches, a tokenizer's output,
or rows of a dataset.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

# What a forward pass without labels takes of a batch.
INPUTS = ("input_ids", "attention_mask", "position_ids")
PROMPT_SHARE = 2 / 3  # of a row that stands for a prompt and the text behind it
# How names of what is no text begin.
_NOT_TEXT = ("pixel_values", "image_", "video_", "input_features", "audio_")


def model_inputs(model: nn.Module, batches: Iterable[object]) -> Iterator[dict[str, torch.Tensor]]:
    """The model inputs of each batch (`INPUTS`, without labels), on the model's device.

    Args:
        model: The model.
        batches: Dicts with `input_ids` and optionally `attention_mask` and `position_ids`: tensors
            or lists `[B, T]`, lists of rows of different lengths, or one row `[T]`. Or a single one
            of them, such as a tokenizer returns. In rows of several documents (packed)
            `position_ids` begin anew with each, and there is no mask.

    Raises:
        ValueError: A batch has no `input_ids`, or they are neither tensors nor lists of ids; it has
            images or sound, which would not be read; or it has ids or, of a model with a learned
            table of positions, more positions than the model's tables.
    """
    device = device_of(model)
    tables = _tables_of(model)
    for number, batch in enumerate([batches] if isinstance(batches, Mapping) else batches):
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            held = type(batch).__name__
            if isinstance(batch, Mapping):
                held = ", ".join(map(str, batch))
            raise ValueError(
                f"batch {number} holds no input_ids, but {held}; batches are dicts of what a "
                "tokenizer returns"
            )
        other = [
            name for name in batch if str(name).startswith(_NOT_TEXT) and batch[name] is not None
        ]
        if other:
            raise ValueError(
                f"batch {number} holds {', '.join(other)}, which are not read here: their places "
                "would count as text; give text alone"
            )
        inputs = {name: batch[name] for name in INPUTS if batch.get(name) is not None}
        if "attention_mask" not in inputs and _is_ragged(batch["input_ids"]):
            inputs["attention_mask"] = [[1] * len(row) for row in batch["input_ids"]]
            if any(breaks_of(torch.as_tensor(row)).any() for row in inputs.get("position_ids", ())):
                raise ValueError(
                    f"batch {number} has packed rows of different lengths: transformers tells "
                    "documents apart only in rows without padding; cut them to one length"
                )
        rows = {name: _rows(name, value) for name, value in inputs.items()}
        _check_tables(tables, number, rows)
        found = {name: value.to(device) for name, value in rows.items()}
        if "position_ids" in found:  # one row of them may stand for all
            found["position_ids"] = found["position_ids"].expand_as(found["input_ids"])
        yield found


def _tables_of(model: Any) -> tuple[int | None, int | None]:
    """Sizes of the tables of tokens and of learned positions, next to it; None without one."""
    if not hasattr(model, "get_input_embeddings"):
        return None, None
    table = model.get_input_embeddings()
    expected = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    beside = [
        part
        for module in model.modules()
        if any(child is table for child in module.children())
        for part in module.children()
        if part is not table and isinstance(part, nn.Embedding)
    ]
    positions = next((p.num_embeddings for p in beside if p.num_embeddings == expected), None)
    return getattr(table, "num_embeddings", None), positions


def _check_tables(
    tables: tuple[int | None, int | None], number: int, inputs: Mapping[str, torch.Tensor]
) -> None:
    """Refuse ids and positions without a row: PyTorch names neither, and on CUDA all ends."""
    tokens, positions = tables
    ids_BT = inputs["input_ids"]
    if tokens is None or ids_BT.numel() == 0:
        return
    worst = int(ids_BT.min())
    if worst >= 0:
        worst = int(ids_BT.max())
    if not 0 <= worst < tokens:
        raise ValueError(
            f"batch {number} holds the token id {worst}, and the model has {tokens} embeddings; "
            "use the model's own tokenizer"
        )
    if positions is None:
        return
    longest = ids_BT.shape[1]
    if "position_ids" in inputs:
        longest = int(inputs["position_ids"].max()) + 1
    if longest > positions:
        raise ValueError(
            f"batch {number} has rows of {longest} tokens, and the model has {positions} "
            f"positions; cut the rows to {positions} tokens or fewer"
        )


def device_of(*modules: nn.Module) -> torch.device:
    """The device of the first weight of `modules`; if offloaded, that to which it is fetched."""
    for part in (part for module in modules for part in module.modules()):
        for weight in part.parameters(recurse=False):
            execution = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
            if weight.device.type != "meta" or execution is None:
                return weight.device
            return torch.device(execution)
    return torch.device("cpu")


def token_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Bool `[B, T]`, true at real tokens: where `attention_mask` is set; without one everywhere."""
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones_like(batch["input_ids"], dtype=torch.bool)
    return mask.bool()


def prompts_of(
    batch: Mapping[str, torch.Tensor], tail: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two thirds of every row's, or document's, real tokens, and the text behind them.

    Args:
        batch: `input_ids` and optionally `attention_mask` and `position_ids`, each `[B, T]`.
        tail: Tokens at the end of each prompt that are left out of it.

    Returns:
        Bool `[B, T]` each: the prompts without their last `tail` tokens, and the positions whose
        next token is behind the prompt.
    """
    real = token_mask(batch)
    starts = document_starts(batch)
    place = real.cumsum(1)
    count = real.sum(1, keepdim=True)
    if starts is not None:  # packed: all tokens are real
        document = starts.cumsum(1)
        count = torch.zeros_like(place).scatter_add(1, document, real.long()).gather(1, document)
        place = place - torch.where(starts, place - 1, 0).cummax(1).values
    last = (count * PROMPT_SHARE).long()  # the prompt's last token is the `last`-th real one
    return real & (place <= last - tail), real & (place >= last) & (place < count)


def breaks_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Bool `[B, T]`, true where positions do not go on by one: another (packed) document starts."""
    return pad(position_ids.diff() != 1, (1, 0))


def document_starts(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Bool `[B, T]`, true where `position_ids` say that another document starts (`breaks_of`).

    None without them, and with an `attention_mask` `[B, T]`, with which transformers takes a row
    for one document.
    """
    positions = batch.get("position_ids")
    mask = batch.get("attention_mask")
    if positions is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return None
    return breaks_of(positions).expand_as(batch["input_ids"])


def labels_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The labels of a batch, `[B, T]`, as in transformers: its `labels`, or else its ids.

    No position predicts the first of the ids of another document.
    """
    if (labels := batch.get("labels")) is not None:
        return labels
    ids = batch["input_ids"]
    starts = document_starts(batch)
    if starts is None:
        return ids
    return ids.masked_fill(starts, -100)


def _rows(name: str, value: Any) -> torch.Tensor:
    """`[B, T]`; rows of different lengths end with zeros."""
    parts = value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(part, torch.Tensor) and part.ndim for part in parts):
        raise ValueError(
            f"{name} is a list of {len(value)} tensors: what a DataLoader makes of lists stands "
            "position by position. Load the dataset with dataset.with_format('torch'), or with a "
            "collate_fn that pads"
        )
    if _is_ragged(value):
        return pad_sequence([torch.as_tensor(row) for row in value], batch_first=True)
    found = torch.as_tensor(value)
    return found[None] if found.ndim == 1 else found


def _is_ragged(value: Any) -> bool:
    rows = isinstance(value, (list, tuple)) and all(isinstance(row, (list, tuple)) for row in value)
    return rows and len({len(row) for row in value}) > 1

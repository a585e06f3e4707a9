"""The token view: what every layer decided about every token of a text, as data of a page and as a notebook's output.

Shapes: B batch, T positions, V vocabulary, K decisions per token and layer (1, or the experts of a token).
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..base.lm_head import token_losses
from ..files.staged import write_text
from .pieces import text_pieces
from .rendering import render

if TYPE_CHECKING:
    from ..routing.trace import RouteRecord, RouteTrace


class TokenView:
    """A page with the token view alone. In a notebook the last expression of a cell is displayed.

    Args:
        data: From `view_data`.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __repr__(self) -> str:
        texts = self.data["texts"]
        tokens = sum(len(text["runs"][0]["loss"]) for text in texts)
        return f"TokenView(texts={len(texts)}, tokens={tokens}, layers={self.data['layers']}); .save('page.html')"

    @property
    def html(self) -> str:
        """The whole page; it loads nothing from elsewhere."""
        return render("view.html", title="Token view", data=self.data, alone=True)

    def save(self, path: str | Path) -> Path:
        """Write the page to `path`."""
        path = Path(path)
        write_text(path, self.html)
        return path

    def _repr_html_(self) -> str:
        # A frame of its own: the page's styles and script do not reach the notebook, nor the notebook's the page.
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self.html)}" title="Token view" width="100%" '
            'height="560" style="border:0;width:100%;height:560px;resize:vertical"></iframe>'
        )


def view_of(
    trace: RouteTrace,
    tokenizer: Any = None,
    input_ids: torch.Tensor | None = None,
    *,
    logits: torch.Tensor | None = None,
    prompt_length: int | None = None,
) -> TokenView:
    """Build the view that `RouteTrace.show` returns, with one text for every sequence of the batch.

    Raises:
        ValueError: The trace is empty, or `input_ids` or `logits` do not have its shape.
    """
    if not len(trace):
        raise ValueError("the trace is empty: call the model inside the record_routes block, then show the trace")
    batch, length = trace[next(iter(trace))].mask.shape[:2]
    if input_ids is not None:
        input_ids = torch.as_tensor(input_ids)
        input_ids = input_ids[None] if input_ids.ndim == 1 else input_ids
    for name, tensor in (("input_ids", input_ids), ("logits", logits)):
        if tensor is not None and tuple(tensor.shape[:2]) != (batch, length):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but the trace is of {batch} x {length} tokens; a generation "
                "keeps its last step only, so call the model once more on the whole text"
            )
    losses = None if logits is None or input_ids is None else losses_by_position(logits, input_ids)
    texts = []
    for row in range(batch):
        ids = None if input_ids is None else input_ids[row].tolist()
        loss = None if losses is None else losses[row]
        run = run_data(trace, row, tokenizer, ids, loss=loss, prompt_length=prompt_length)
        texts.append({"label": f"Sequence {row + 1}", "runs": [run]})
    return TokenView(view_data(trace, texts))


def view_data(trace: RouteTrace, texts: list[dict[str, Any]]) -> dict[str, Any]:
    """The page's data: `layers`, and `texts` with a `label` and `runs`, each from `run_data`."""
    return {"layers": list(trace), "texts": texts}


def run_data(
    trace: RouteTrace,
    row: int,
    tokenizer: Any,
    ids: Sequence[int] | None,
    *,
    loss: Sequence[float] | None = None,
    dense_loss: Sequence[float] | None = None,
    prompt_length: int | None = None,
) -> dict[str, Any]:
    """One text under one budget. Padding is left out.

    Returns:
        JSON-ready: `budget`, None if there is none; `pieces` of text and the `counts` of their tokens; `prompt`, the
        tokens before the generated ones or None; `loss` and `dense_loss` per token, in nats, None if unknown;
        and `layers`, for each its `layer`, `threshold`, `decisions` per token (K), `mask` (a 0 or 1 per decision), and
        `scores`: float32, little-endian, in base64.
    """
    first = trace[next(iter(trace))]
    mask = first.token_mask
    real = torch.ones(first.mask.shape[1], dtype=torch.bool) if mask is None else mask[row].bool().cpu()
    kept = real.nonzero().flatten().tolist()
    if prompt_length is not None:
        prompt_length = sum(position < prompt_length for position in kept)
    if ids is None or tokenizer is None:
        shown = kept if ids is None else [ids[position] for position in kept]
        pieces, counts = [f"{number} " for number in shown], [1] * len(shown)
    else:
        pieces, counts = text_pieces(tokenizer, [ids[position] for position in kept], prompt_length)
    return {
        "budget": None if math.isnan(first.budget) else float(first.budget),
        "pieces": pieces,
        "counts": counts,
        "prompt": prompt_length,
        "loss": _picked(loss, kept),
        "dense_loss": _picked(dense_loss, kept),
        "layers": [_layer_data(index, record, row, real) for index, record in trace.items()],
    }


@torch.no_grad()
def losses_by_position(logits: torch.Tensor, input_ids: torch.Tensor) -> list[list[float]]:
    """Cross-entropy of each token given those before it, in nats, from `[B, T, V]`; NaN for the first. `[B, T]`"""
    loss_BT = token_losses(logits[:, :-1], input_ids[:, 1:])
    return F.pad(loss_BT, (1, 0), value=math.nan).tolist()


def _layer_data(index: int, record: RouteRecord, row: int, real: torch.Tensor) -> dict[str, Any]:
    mask_TK = record.mask[row].cpu()[real].reshape(int(real.sum()), -1)
    threshold: Any = None if record.threshold is None else float(record.threshold)
    if threshold is not None and math.isinf(threshold):  # that of a budget of 1; JSON has no infinity
        threshold = str(threshold).replace("inf", "Infinity")
    scores_TK = record.scores[row].detach().float().cpu()[real].reshape(mask_TK.shape)
    return {
        "layer": index,
        "threshold": threshold,
        "decisions": mask_TK.shape[1],
        "mask": "".join("01"[value] for value in mask_TK.flatten().tolist()),
        "scores": base64.b64encode(scores_TK.numpy().astype("<f4").tobytes()).decode(),
    }


def _picked(values: Sequence[float] | None, kept: list[int]) -> list[float | None]:
    if values is None:
        return [None] * len(kept)
    return [round(values[p], 4) if math.isfinite(values[p]) else None for p in kept]

"""The token view: what every layer decided about every token of a text,
as data of a page and as a notebook's output.

`render` makes pages of one file, and `text_pieces` cuts a text into what a reader sees of its
tokens.

Shapes: B batch, T positions, V vocabulary, K decisions per token and layer (1, or the experts of a
token).
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..base.lm_head import token_losses
from ..files.staged import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..routing.trace import RouteRecord, RouteTrace

_HERE = Path(__file__).parent
_REPLACEMENT = "\ufffd"  # what a tokenizer decodes half a character to
_LONGEST = 8  # tokens that can make one character; what is still unreadable then is no text


class TokenView:
    """A page with the token view alone. In a notebook the last expression of a cell is displayed.

    Args:
        data: `layers`, and `texts` with a `label` and `runs`, each from `run_data`.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __repr__(self) -> str:
        texts = self.data["texts"]
        tokens = sum(len(text["runs"][0]["loss"]) for text in texts)
        return (
            f"TokenView(texts={len(texts)}, tokens={tokens}, layers={self.data['layers']}); "
            ".save('page.html')"
        )

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
        # A frame of its own: the page's styles and script do not reach the notebook, nor the
        # notebook's the page.
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self.html)}" title="Token view" '
            'width="100%" height="560" '
            'style="border:0;width:100%;height:560px;resize:vertical"></iframe>'
        )


def view_of(
    trace: RouteTrace,
    tokenizer: PreTrainedTokenizerBase | None = None,
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
        raise ValueError(
            "the trace is empty: call the model inside the record_routes block, then show the trace"
        )
    batch, length = trace[next(iter(trace))].mask.shape[:2]
    if input_ids is not None:
        input_ids = torch.as_tensor(input_ids)
        if input_ids.ndim == 1:
            input_ids = input_ids[None]
    for name, tensor in (("input_ids", input_ids), ("logits", logits)):
        if tensor is not None and tuple(tensor.shape[:2]) != (batch, length):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but the trace is of {batch} x {length} "
                "tokens; a generation keeps its last step only, so call the model once more on "
                "the whole text"
            )
    texts = []
    for row in range(batch):
        ids = loss = None
        if input_ids is not None:
            ids = input_ids[row].tolist()
            if logits is not None:
                (loss,) = losses_by_position(logits[row, None], input_ids[row, None])
        run = run_data(trace, row, tokenizer, ids, loss=loss, prompt_length=prompt_length)
        texts.append({"label": f"Sequence {row + 1}", "runs": [run]})
    return TokenView({"layers": list(trace), "texts": texts})


def run_data(
    trace: RouteTrace,
    row: int,
    tokenizer: Any,
    ids: Sequence[int] | None,
    *,
    loss: Sequence[float] | None = None,
    dense_loss: Sequence[float] | None = None,
    prompt_length: int | None = None,
) -> dict[str, object]:
    """One text under one budget. Padding is left out.

    Returns:
        JSON-ready: `budget`, None if there is none; `pieces` of text and the `counts` of their
        tokens; `prompt`, the tokens before the generated ones or None; `loss` and `dense_loss` per
        token, in nats, None if unknown; and `layers`, for each its `layer`, `threshold`,
        `decisions` per token (K), `mask` (a 0 or 1 per decision), and
        `scores`: float32, little-endian, in base64.
    """
    first = trace[next(iter(trace))]
    real = torch.ones(first.mask.shape[1], dtype=torch.bool)
    if first.token_mask is not None:
        real = first.token_mask[row].bool().cpu()
    kept = real.nonzero().flatten().tolist()
    if prompt_length is not None:
        prompt_length = sum(position < prompt_length for position in kept)
    if ids is None or tokenizer is None:
        shown = kept
        if ids is not None:
            shown = [ids[position] for position in kept]
        pieces = [f"{number} " for number in shown]
        counts = [1] * len(shown)
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
    """Cross-entropy of each token in nats, `[B, T]` from logits `[B, T, V]`; NaN for the first."""
    loss_BT = token_losses(logits[:, :-1], input_ids[:, 1:])
    return F.pad(loss_BT, (1, 0), value=math.nan).tolist()


def _layer_data(index: int, record: RouteRecord, row: int, real: torch.Tensor) -> dict[str, Any]:
    mask_TK = record.mask[row].cpu()[real].reshape(int(real.sum()), -1)
    threshold: Any = None
    if record.threshold is not None:
        threshold = float(record.threshold)
        if math.isinf(threshold):  # that of a budget of 1; JSON has no infinity
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
    # What stands before the first token is padding, which predicts nothing.
    found = [round(values[p], 4) if math.isfinite(values[p]) else None for p in kept[1:]]
    return [None, *found][: len(kept)]


def text_pieces(
    tokenizer: Any, ids: Sequence[int], boundary: int | None = None
) -> tuple[list[str], list[int]]:
    """The text of `ids`, cut where tokens meet.

    A token that is no text alone, such as one byte of a character, is joined with its neighbours,
    but for those across `boundary`, the end of a prompt. Pieces joined give the decoded text.

    Returns:
        The pieces, and how many tokens each holds.
    """
    pieces: list[str] = []
    counts: list[int] = []
    start = 0  # of the tokens that are not yet a piece
    how: dict[str, bool] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    while start < len(ids):
        # Decoded with the piece in front, since some tokenizers drop the space of a first token;
        # never with a part of a character, which would make the rest unreadable.
        context: Sequence[int] = []
        if counts and not pieces[-1].endswith(_REPLACEMENT):
            context = ids[start - counts[-1] : start]
        before = ""
        if context:
            before = tokenizer.decode(list(context), **how)
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


def render(template: str, **values: object) -> str:
    """The page that `template`, a file in this folder, makes of `values`; text is escaped."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "fixed": "{:.{}f}".format,
        "percent": "{:.{}%}".format,
        "signed": "{:+.{}f}".format,
        "or_dash": lambda value, digits=2: "-" if value is None else f"{value:.{digits}f}",
    }
    # Sorted keys would move layers; and JSON has no NaN, which nothing here may hold.
    environment.policies["json.dumps_kwargs"] = {
        "sort_keys": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    # Nothing is loaded, and no other script or style runs, not even from text that was not escaped.
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return environment.get_template(template).render(
        style=Markup(style), script=Markup(script), policy=policy, **values
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

"""The page: a prompt, a budget, and two texts, coloured by the layers that ran."""

from __future__ import annotations

import atexit
import html
import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from ..base.stack import stack_of
from ..data.prompts import PromptError, encode_prompt, has_chat_template
from ..files.shown import counted
from ..inference.calibration import set_budget
from ..report.tokens import text_pieces
from ..routing.description import budget_words
from .writing import Text, write

if TYPE_CHECKING:
    import gradio

_MAX_PROMPT = 2048
_MAX_NEW_TOKENS = 256
_GRACE = 5.0  # seconds, at the end of the process, for a step that still runs
_WAITING = 16  # people in the line; the model writes for one at a time
_STYLE = """
.text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9;
  font-family: ui-monospace, Consolas, monospace; }
.text span { --share: 0; padding: .15em 0; border-bottom: 3px solid rgb(194 106 0 / var(--share));
  background: rgb(245 158 11 / calc(var(--share) * .45)); }
.text .written { font-weight: 600; }
"""
_LEGEND = (
    "The stronger the shade and the underline of a token, the more layers ran in full for it; "
    "point at it to see how many. What was written is bold, and the last token has not been read "
    "yet. Routed model and base take turns, so their speeds compare; one run of one text is no "
    "measurement."
)


def make_page(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, title: str, chat_template: bool = True
) -> gradio.Blocks:
    """The page of a routed model, ready for `launch`; it sets the model's budget.

    The model is in eval mode, with a router that can run: trained with thresholds, fitted or
    calibrated. A `chat_template`, if the tokenizer has one, is turned on and off on the page.

    Raises:
        ImportError: Gradio (the extra `play`) is not installed.
    """
    import gradio

    config: Any = model.peft_config[model.active_adapter]
    depth = len(stack_of(model).layers)
    own = round(config.budget, 2)
    with gradio.Blocks(title=title, analytics_enabled=False) as page:
        gradio.HTML(f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>")
        prompt = gradio.Textbox(label="Prompt", value="Once upon a time", lines=4, max_lines=12)
        with gradio.Row():
            # Nothing to move where a rule decides that knows no budget.
            budget = gradio.Slider(
                min(0.05, own),
                1,
                value=own,
                step=0.01,
                visible=config.takes_budget(),
                label="Budget: share of the tokens that run in full, in layers with a gate",
                info=f"The adapter's is {budget_words(config, depth)}.",
            )
            length = gradio.Slider(1, _MAX_NEW_TOKENS, value=64, step=1, label="New tokens")
        chat = gradio.Checkbox(
            chat_template,
            label="Chat template: the prompt is a message to answer",
            visible=has_chat_template(tokenizer),
        )
        with gradio.Row():
            start = gradio.Button("Write", variant="primary")
            stop = gradio.Button("Stop")
        with gradio.Row():
            columns = []
            for name in ("Routed", "Base"):
                with gradio.Column():
                    gradio.HTML(f"<h2>{name}</h2>")
                    columns += [
                        gradio.HTML(elem_id=f"{name.lower()}-facts"),
                        gradio.HTML(elem_id=name.lower()),
                    ]
        gradio.HTML(f"<p>{_LEGEND}</p>")
        given = [prompt, budget if config.takes_budget() else gradio.State(None), length, chat]
        writing = gradio.on(
            [start.click, prompt.submit, budget.release],
            _Writer(model, tokenizer).run,
            given,
            columns,
            concurrency_limit=1,
            trigger_mode="once",
            show_progress="hidden",
        )
        stop.click(None, cancels=[writing], queue=False)
    page.queue(max_size=_WAITING)
    return page


class _Writer:
    """The page's runs.

    A run that is stopped is left in the middle of a step, which still ends: one step at a time.
    """

    def __init__(self, model: PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
        config: Any = model.peft_config[model.active_adapter]
        self._model = model
        self._tokenizer = tokenizer
        self._budget = config.budget
        self._free = threading.Lock()
        # A thread of Gradio computes: Python aborts if it does so while Python ends.
        atexit.register(self._free.acquire, timeout=_GRACE)

    def run(
        self, prompt: str, budget: float | None, new_tokens: int, chat: bool
    ) -> Iterator[tuple[str, str, str, str]]:
        """Speed and text of the routed model and of its base, after each step."""
        import gradio

        try:
            ids = self._ids(prompt, new_tokens, chat)
            if budget is not None:
                own = self._budget  # has more digits than the page shows
                with self._free:
                    set_budget(self._model, own if budget == round(own, 2) else budget)
        except ValueError as error:
            raise gradio.Error(str(error), print_exception=False) from error
        tokenizer = self._tokenizer
        steps = write(self._model, ids, int(new_tokens))
        while True:
            with self._free:
                step = next(steps, None)
            if step is None:
                return
            routed, dense = step
            yield said(routed), coloured(routed, tokenizer), said(dense), coloured(dense, tokenizer)

    def _ids(self, prompt: str, new_tokens: int, chat: bool) -> list[int]:
        ids = encode_prompt(self._tokenizer, prompt, chat)
        if not ids:
            raise PromptError("The prompt has no tokens; type something.")
        positions = getattr(self._model.config, "max_position_embeddings", None) or math.inf
        longest = max(0, min(_MAX_PROMPT, positions - new_tokens))
        if len(ids) > longest:
            raise PromptError(
                f"The prompt has {len(ids)} tokens; at most {longest} can be read here."
            )
        return ids


def coloured(text: Text, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text as HTML: a span for each token, shaded by the share of layers that ran for it."""
    pieces, counts = text_pieces(tokenizer, text.ids, text.prompt)
    spans = []
    at = 0
    for piece, count in zip(pieces, counts):
        kind = ' class="written"' if at >= text.prompt else ""
        how = ""
        runs = text.layers[at : at + count]
        if runs:
            full = sum(runs) / len(runs)
            title = f"{full:g} of {text.depth} layers"
            how = f' style="--share: {full / text.depth:.3f}" title="{title}"'
        spans.append(f"<span{kind}{how}>{html.escape(piece)}</span>")
        at += count
    return f'<div class="text">{"".join(spans)}</div>'


def said(text: Text) -> str:
    """Speed and share in one line."""
    speed = text.tokens_per_second
    parts = [
        f"{text.written} new" if speed is None else f"{text.written} new, {speed:.1f} tokens/s",
        f"prompt of {counted(text.prompt, 'token')} in {1000 * text.prompt_seconds:.0f} ms",
        f"{text.share:.0%} of the layers in full",
    ]
    return f"<p>{'; '.join(parts)}</p>"

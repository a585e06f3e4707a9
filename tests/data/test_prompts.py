"""Prompts reach a model in its tokenizer's chat template,
and plain where there is none or it is turned off."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command_line import run
from models import routed
from text_models import save_base, word_tokenizer, write_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_depthroute.data.prompts import PromptError, encode_prompt

CHAT = (
    "{% for message in messages %}<bos>{{ 'the dog' if message.role == 'user' }} {{ "
    "message.content }}{% endfor %}{% if add_generation_prompt %} said{% endif %}"
)
BROKEN = "{{ raise_exception('a system message has to come first') }}"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A base whose tokenizer has a chat template, and an adapter that routes it."""
    base = save_base(tmp_path / "base")
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(base)
    routed(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "adapter")
    return base, tmp_path / "adapter"


def test_a_prompt_is_put_into_the_template_once() -> None:
    tokenizer = word_tokenizer()
    plain = tokenizer("cat sat")["input_ids"]
    assert encode_prompt(tokenizer, "cat sat") == plain
    tokenizer.chat_template = CHAT
    assert tokenizer.decode(encode_prompt(tokenizer, "cat sat")) == "<bos> the dog cat sat said"
    assert encode_prompt(tokenizer, "cat sat", chat_template=False) == plain
    tokenizer.chat_template = BROKEN
    with pytest.raises(
        PromptError, match="does not take one message: a system message has to come first"
    ):
        encode_prompt(tokenizer, "cat sat")


def test_generate_prints_the_answer_and_without_a_template_prompt_and_continuation(
    files: tuple[Path, Path],
) -> None:
    base, adapter = files
    tokenizer, model = (
        AutoTokenizer.from_pretrained(base),
        AutoModelForCausalLM.from_pretrained(base),
    )
    for words, prompt, first in (
        ([], "<bos> the dog cat sat said", 6),
        (["--no-chat-template"], "cat sat", 0),
    ):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        expected = model.generate(input_ids=ids, do_sample=False, max_new_tokens=5, pad_token_id=0)[
            0, first:
        ]
        ended = run(
            "generate",
            adapter,
            "--model",
            base,
            "--prompt",
            "cat sat",
            "--max-new-tokens",
            5,
            "--full",
            *words,
        )
        assert ended.code == 0, ended.err
        assert ended.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize(
    ("words", "prompt"),
    [([], "<bos> the dog cat sat said"), (["--no-chat-template"], "cat sat")],
)
def test_a_report_puts_its_prompt_into_the_template_too(
    files: tuple[Path, Path], tmp_path: Path, words: list[str], prompt: str
) -> None:
    base, adapter = files
    text = ["--dataset", write_text(tmp_path / "text.txt"), "--length", 16, "--blocks", 2]
    given = ["--prompt", "cat sat", *words, "--max-new-tokens", 5, "--budgets", "0.5", "--no-speed"]
    page = tmp_path / "page.html"
    ended = run("report", adapter, "--model", base, *text, *given, "--out", page)
    assert ended.code == 0, ended.err
    found = re.search(r'id="token-data"[^>]*>(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    shown = json.loads(found[1])["texts"][0]["runs"][0]
    assert shown["prompt"] == len(prompt.split()) == sum(shown["counts"]) - 5
    assert "".join(shown["pieces"]).startswith(prompt)


def test_a_template_that_takes_no_single_message_names_the_way_out(
    files: tuple[Path, Path],
) -> None:
    base, adapter = files
    (base / "chat_template.jinja").write_text(BROKEN)
    ended = run("generate", adapter, "--model", base, "--prompt", "cat sat")
    assert ended.code == 2
    assert ended.error.endswith("a system message has to come first; add --no-chat-template")

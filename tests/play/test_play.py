"""`hf-depthroute play` and the Space: what is written, what is counted,
and the page in headless Chromium."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from models import build_routed, routed, tokens
from peft import PeftModel
from places import HELPERS, ROOT
from ports import free_port
from text_models import save_base, word_tokenizer

from hf_depthroute import record_routes
from hf_depthroute.play.page import coloured, make_page, said
from hf_depthroute.play.writing import Text, layers_run, write

SPACE = ROOT / "recipes" / "space" / "app.py"


@pytest.mark.parametrize(
    "family, kind",
    [("llama", "mlp"), ("gpt2", "block"), ("llama", "attention"), ("olmoe", "experts")],
)
def test_both_texts_are_those_of_generate(family: str, kind: str) -> None:
    model = build_routed(family, kind)
    ids = tokens(1, 7)
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
    expected = model.generate(input_ids=ids, **greedy)[0].tolist()
    with model.disable_adapter():
        base = model.generate(input_ids=ids, **greedy)[0].tolist()
    steps = [
        (len(written.ids), written, dense) for written, dense in write(model, ids[0].tolist(), 9)
    ]
    assert [length for length, *_ in steps] == list(range(8, 17))
    _, written, dense = steps[-1]
    assert (written.ids, dense.ids) == (expected, base)


def test_layers_are_those_that_run_over_the_whole_text() -> None:
    model = build_routed("llama", "mlp")
    for written, dense in write(model, tokens(1, 7)[0].tolist(), 9):
        assert len(written.layers) == len(dense.layers) == len(written.ids) - 1
    with torch.no_grad(), record_routes(model) as trace:
        model(input_ids=torch.tensor([written.ids[:-1]]))
    assert written.layers == layers_run(trace, written.depth)
    assert len(set(written.layers)) > 1 and max(written.layers) <= written.depth
    assert set(dense.layers) == {float(dense.depth)} and dense.share == 1
    routed_layers = list(trace.values())
    full = (
        sum(float(record.mask.float().mean()) for record in routed_layers)
        + written.depth
        - len(routed_layers)
    )
    assert written.share == pytest.approx(full / written.depth)


def test_a_text_ends_where_generate_ends_it_and_the_other_goes_on() -> None:
    model = build_routed("llama", "mlp")
    ids = tokens(1, 7)
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    with model.disable_adapter():
        base = model.generate(input_ids=ids, **greedy)[0, 7:].tolist()
    own = model.generate(input_ids=ids, **greedy)[0, 7:].tolist()
    end = next(token for token in own if token not in base)
    model.generation_config.eos_token_id = [end]
    *_, (written, dense) = write(model, ids[0].tolist(), 12)
    assert written.ids[7:] == own[: own.index(end) + 1] and written.ended
    assert dense.ids[7:] == base and not dense.ended


def test_a_step_is_timed_and_the_prompt_apart() -> None:
    (first, _), *_, (last, dense) = list(
        write(build_routed("llama", "mlp"), tokens(1, 7)[0].tolist(), 6)
    )
    assert first is last and last.prompt_seconds > 0 and last.seconds > 0
    assert (
        last.tokens_per_second == 5 / last.seconds and dense.tokens_per_second == 5 / dense.seconds
    )


def test_what_is_drawn_is_the_text_and_never_markup() -> None:
    text = Text([4, 5, 6], prompt=2, depth=4, layers=[1.0, 4.0], prompt_seconds=0.002)
    page = coloured(text, word_tokenizer())
    assert re.findall(r'title="(.*?)"', page) == ["1 of 4 layers", "4 of 4 layers"]
    assert re.findall("--share: ([0-9.]+)", page) == ["0.250", "1.000"]
    assert page.count('class="written"') == 1
    assert said(text) == "<p>1 new; prompt of 2 tokens in 2 ms; 62% of the layers in full</p>"

    class Hostile:
        def decode(self, ids: list[int], **how: Any) -> str:
            return "".join(["<script>alert(1)</script>", "&amp;", '" onclick="x'][i] for i in ids)

    page = coloured(Text([0, 1, 2], prompt=1, depth=4, layers=[1.0, 2.0]), Hostile())
    assert "<script" not in page and "&amp;amp;" in page and '" onclick' not in page


def test_without_gradio_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = run("play", "adapter")
    assert (ended.code, ended.error) == (
        2,
        "play needs Gradio; install it with: pip install gradio",
    )


@pytest.fixture
def files(tmp_path: Path, saved_adapter: Callable[[PeftModel], Path]) -> tuple[Path, Path]:
    """A base with a tokenizer, and an adapter that routes it."""
    from transformers import AutoModelForCausalLM

    base = save_base(tmp_path / "base")
    return base, saved_adapter(routed(AutoModelForCausalLM.from_pretrained(base)))


def test_the_page_rounds_the_budget_and_says_of_which_layers_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is shown is rounded; the adapter's own budget stays as it is until the slider moves."""
    pytest.importorskip("gradio", reason="the page is made with Gradio (extra play)")
    model = build_routed("llama", "mlp", budget=0.7321428)
    asked: list[float] = []
    monkeypatch.setattr(
        "hf_depthroute.play.page.set_budget", lambda _, budget: asked.append(budget)
    )
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}the dog said {{ message.content }}{% endfor %}"
    )
    page = make_page(model, tokenizer, "tiny")
    (slider,) = (
        block
        for block in page.blocks.values()
        if str(getattr(block, "label", "")).startswith("Budget")
    )
    (box,) = (
        block
        for block in page.blocks.values()
        if str(getattr(block, "label", "")).startswith("Chat template")
    )
    assert slider.value == 0.73
    assert slider.info == (
        "The adapter's is 0.732 of the calls in 3 layers with a gate, which is 0.799 of all 4 "
        "layers."
    )
    assert box.visible and box.value
    run = next(fn.fn for fn in page.fns.values() if slider in fn.inputs)
    (_, chat, *_) = list(run("cat sat", 0.73, 1, True))[-1]
    (_, plain, *_) = list(run("cat sat", 0.5, 1, False))[-1]
    assert asked == [0.7321428, 0.5]
    assert "dog" in chat and "dog" not in plain.split('class="written"')[0]


WRITES_AT_THE_END = """
import sys, threading
from models import build_routed
from text_models import word_tokenizer
from hf_depthroute.play.page import make_page

page = make_page(build_routed("llama"), word_tokenizer(), "tiny")
run = next(fn.fn for fn in page.fns.values() if len(fn.inputs) == 4)
begun = threading.Event()

def write():
    for _ in run("cat sat", 0.5, 40, False):
        begun.set()

threading.Thread(target=write, daemon=True).start()
begun.wait()
sys.exit(130)
"""


def test_a_page_that_still_writes_ends_with_its_own_code() -> None:
    pytest.importorskip("gradio", reason="the page is made with Gradio (extra play)")
    places = os.pathsep.join([str(ROOT), str(HELPERS)])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITES_AT_THE_END],
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (130, "")


def test_the_space_in_a_browser(
    files: tuple[Path, Path], browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Type, write, stop, move the budget, forget the prompt; nothing is asked of another host."""
    pytest.importorskip("gradio", reason="the page is made with Gradio (extra play)")
    expect = pytest.importorskip("playwright.sync_api").expect
    base, adapter = files
    monkeypatch.setenv("ADAPTER", str(adapter))
    monkeypatch.setenv("MODEL", str(base))
    spec = importlib.util.spec_from_file_location("space_app", SPACE)
    assert spec is not None and spec.loader is not None
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    app.model.generation_config.eos_token_id = None  # whatever a random model says
    _, url, _ = app.demo.launch(
        prevent_thread_lock=True, quiet=True, server_port=None, ssr_mode=False
    )
    try:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        asked, errors = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        # What is typed before the page has drawn itself is lost.
        page.goto(url, wait_until="networkidle")
        facts = page.locator("#routed-facts")
        routed_text, dense_text = (page.locator(f"#{name} .text") for name in ("routed", "base"))

        def write_until(
            seen: Any, text: Any, prompt: str = "the cat sat on the mat", new_tokens: int = 12
        ) -> None:
            """Type and click until `seen` has the text: while a run lasts, clicks are not heard."""
            for _ in range(30):
                page.get_by_label("Prompt").fill(prompt)
                page.get_by_label("number input for New tokens").fill(str(new_tokens))
                page.get_by_role("button", name="Write").click()
                with contextlib.suppress(AssertionError):
                    expect(seen).to_contain_text(text, timeout=2000)
                    return
            expect(seen).to_contain_text(text)

        write_until(facts, "12 new,")
        assert (
            routed_text.locator(".written").count() == dense_text.locator(".written").count() == 12
        )
        assert routed_text.text_content().startswith("the cat sat on the mat")
        expect(page.locator("#base-facts")).to_contain_text("100% of the layers in full")
        shares = {span.get_attribute("title") for span in routed_text.locator("span[title]").all()}
        assert len(shares) > 1, "tokens differ in the layers that run for them"
        whole = routed_text.text_content()
        write_until(facts, re.compile("[1-4][0-9] new,"), new_tokens=50)
        page.get_by_role("button", name="Stop").click()
        write_until(facts, "12 new,")
        assert routed_text.text_content() == whole, "what was stopped is not in the way"
        slider = page.get_by_label("number input for Budget")
        slider.fill("1")
        slider.press("Enter")
        slider.blur()
        write_until(facts, re.compile("12 new.*100% of the layers in full"))
        write_until(page.locator("body"), "The prompt has no tokens", prompt="")
        assert errors == []
        assert {address.split("/")[2] for address in asked if not address.startswith("data:")} == {
            url.split("/")[2]
        }
    finally:
        app.demo.close(verbose=False)


def test_the_command_serves_the_page_until_ctrl_c(files: tuple[Path, Path]) -> None:
    pytest.importorskip("gradio", reason="the page is made with Gradio (extra play)")
    base, adapter = files
    port = free_port()
    words = ["play", str(adapter), "--model", str(base), "--port", str(port)]
    with subprocess.Popen(
        [sys.executable, "-m", "hf_depthroute", *words], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        # A test run in the background of a shell ignores Ctrl-C, and its children inherit that.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            assert f"open http://127.0.0.1:{port}" in server.stdout.readline()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=60) as answer:
                assert b'"title":"adapter"' in answer.read()
            ended = run(*words)
            assert ended.code == 2 and ended.error.endswith(
                f"--port {port}: cannot listen there; choose others"
            )
            server.send_signal(signal.SIGINT)
            _, said_last = server.communicate(timeout=60)
        finally:
            server.kill()
    assert (server.returncode, said_last) == (130, "error: interrupted\n")


def test_a_full_disk_is_not_taken_for_a_port_that_is_in_use(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gradio", reason="the page is made with Gradio (extra play)")

    class Page:
        def launch(self, **_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "/tmp/gradio")

    monkeypatch.setattr("hf_depthroute.play.page.make_page", lambda *_: Page())
    base, adapter = files
    ended = run("play", adapter, "--model", base)
    assert ended.code == 5 and "disk full while writing /tmp/gradio" in ended.error

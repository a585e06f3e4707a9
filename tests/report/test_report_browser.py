"""The page in headless Chromium: drawn, pointed at, switched and typed into,
without an error and without a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_pages import BUDGETS, HOSTILE, LAYERS, planted_report, planted_trace

from hf_depthroute.report.run_page import render_page
from hf_depthroute.report.tokens import text_pieces

MINUS = "\u2212"
REPORT, TRACES, TOKENIZER = planted_report()
RUNS = REPORT.tokens["texts"][0]["runs"]

SHADES = "[...document.querySelectorAll('#text .t')].map(t => t.style.getPropertyValue('--share'))"
CONTRASTS = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const over = (top, under) => under.map((v, i) => top[i] * (top[3] ?? 1) + v * (1 - (top[3] ?? 1)));
  const paper = (element) => parse(getComputedStyle(element).backgroundColor);
  const texts = ".t, .small, figcaption, .tile dt, summary, a, .from, th, label span, .sign";
  return [...document.querySelectorAll(texts)].map((e) => {
    if (e.classList.contains("t")) e.style.setProperty("--share", 1);
    const layers = [];
    for (let at = e; at !== document.body; at = at.parentElement) layers.unshift(paper(at));
    const behind = layers.reduce((under, top) => over(top, under), paper(document.body).slice(0, 3));
    const [low, high] = [light(parse(getComputedStyle(e).color)), light(behind)].sort((a, b) => a - b);
    return [e.className + e.tagName, (high + 0.05) / (low + 0.05)];
  });
}"""  # WCAG contrast of each text over what is behind it, tokens at their strongest shade


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(REPORT), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """`opened(path, **context) -> page`; after the test,
    nothing may have been said on the console or asked for."""
    pages, said, asked = [], [], []

    def call(path: Path, **context: Any) -> Any:
        # No smooth scrolling while something is measured.
        page = browser.new_page(reduced_motion="reduce", **context)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        pages.append((page, path))
        return page

    yield call
    assert said == []
    assert asked == [path.as_uri() for _, path in pages]
    for page, _ in pages:
        page.close()


def choose_budget(page: Any, number: int) -> None:
    page.locator(f"input[name=budget][value='{number}']").check()


def tops(page: Any, *ids: str) -> list[float]:
    """Where elements begin, all at one moment."""
    script = "ids => ids.map(id => document.getElementById(id).getBoundingClientRect().y)"
    found: list[float] = page.evaluate(script, ids)
    return found


def details(page: Any) -> list[list[str]]:
    """Layer, score, threshold and decision as the page says them about one token."""
    return [
        [cell.strip() for cell in row.locator("th, td").all_inner_texts()][:4]
        for row in page.locator("#detail-table tbody tr").all()
    ]


def expected_details(number: int, position: int) -> list[list[str]]:
    found = []
    for layer in LAYERS:
        record = TRACES[number][layer]
        score, threshold = f"{record.scores[0, position]:.3f}", f"{float(record.threshold):.3f}"
        decision = "■ full" if record.mask[0, position] else "□ skipped"
        found.append(
            [str(layer), score.replace("-", MINUS), threshold.replace("-", MINUS), decision]
        )
    return found


def single_token_pieces() -> list[tuple[int, int]]:
    """Numbers of the pieces that are one token, with its position."""
    starts = [sum(RUNS[0]["counts"][:number]) for number in range(len(RUNS[0]["counts"]))]
    return [
        (n, start) for n, (count, start) in enumerate(zip(RUNS[0]["counts"], starts)) if count == 1
    ]


def test_pointing_at_a_token_shows_its_scores(opened, file):
    page = opened(file)
    for number, position in single_token_pieces()[:3]:
        page.locator(f"#token-{number}").hover()
        assert details(page) == expected_details(1, position)
        assert f"token {position + 1}" in page.locator("#detail-facts").inner_text()
    page.locator("h1").hover()
    assert "No token chosen" in page.locator("#detail-title").inner_text()


@pytest.mark.parametrize("number", range(len(BUDGETS)))
def test_the_page_has_every_decision_of_the_trace(number, opened, file):
    page = opened(file)
    choose_budget(page, number)
    page.locator("#as-table summary").click()
    # Filled by the toggle event, which comes after the click.
    page.locator("#as-table tbody tr").first.wait_for()
    rows = page.evaluate(
        "[...document.querySelectorAll('#as-table tbody tr')].map(r => [...r.cells].map(c => "
        "c.textContent))"
    )
    pieces, counts = text_pieces(TOKENIZER, _ids())
    assert len(rows) == len(pieces)
    for row, position, count in zip(rows, _starts(counts), counts):
        assert row[0] == ", ".join(str(position + k + 1) for k in range(count))
        masks = [TRACES[number][layer].mask[0, position : position + count] for layer in LAYERS]
        if count == 1:
            assert row[4:] == ["full" if mask.item() else "skipped" for mask in masks]
        else:
            assert row[4:] == [f"{int(mask.sum())} of {count} full" for mask in masks]
        assert float(row[2]) == pytest.approx(
            sum(float(mask.float().mean()) for mask in masks), abs=0.006
        )


def _ids() -> list[int]:
    return list(TOKENIZER(HOSTILE)["input_ids"])


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:number]) for number in range(len(counts))]


def test_the_budget_switches_tiles_charts_and_text(opened, file):
    page = opened(file)
    shades = []
    for number, budget in enumerate(BUDGETS):
        choose_budget(page, number)
        tiles = page.locator(".tiles:visible")
        assert tiles.count() == 1 and f"{3.01 - budget:.3f}" in tiles.inner_text()
        assert page.locator("figure svg[aria-labelledby^='ratio-']:visible").count() == 1
        assert page.locator("[data-layer]:visible").count() == len(LAYERS)
        assert (
            page.locator("#summary")
            .inner_text()
            .startswith(f"Budget {budget:g}, all routed layers")
        )
        shades.append(page.evaluate(SHADES))
    assert shades[0] != shades[1] != shades[2]
    assert sum(map(float, shades[0])) < sum(map(float, shades[2]))


def test_the_layer_switches_text_and_histograms(opened, file):
    page = opened(file)
    page.locator("#choose-layer").select_option(label="layer 5")
    assert page.locator("[data-layer]:visible").count() == 1
    for number, position in single_token_pieces():
        token = page.locator(f"#token-{number}")
        full = bool(TRACES[1][5].mask[0, position])
        assert float(token.evaluate("t => t.style.getPropertyValue('--share')")) == float(full)
        assert f"layer 5 {'full' if full else 'skipped'}" in token.get_attribute("aria-label")
    assert "layer 5" in page.locator("#summary").inner_text()


def test_tokens_can_be_shaded_by_their_loss(opened, file):
    page = opened(file)
    page.locator("#choose-shade").select_option(label="next-token loss")
    shades = [float(share) for share in page.evaluate(SHADES)]
    losses = [loss or 0.0 for loss in RUNS[0]["loss"]]  # nothing predicts the first token
    counts = RUNS[0]["counts"]
    pieces = [sum(losses[start : start + count]) for start, count in zip(_starts(counts), counts)]
    assert shades == pytest.approx([loss / max(pieces) for loss in pieces], abs=1e-3)


def test_the_keyboard_reaches_every_token_and_control(opened, file):
    page = opened(file)
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.name || ''")
        )
        outline = "el => getComputedStyle(el).outlineStyle !== 'none' || el.name === 'budget'"
        assert page.evaluate(f"({outline})(document.activeElement)")
        if reached[-1] == "text":
            break
    assert [name for name in reached if name] == ["budget", "choose-layer", "choose-shade", "text"]
    box = page.locator("#text")
    assert box.get_attribute("aria-activedescendant") == "token-0"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert box.get_attribute("aria-activedescendant") == "token-2"
    assert page.locator("[aria-selected=true]").evaluate_all("all => all.map(t => t.id)") == [
        "token-2"
    ]
    page.keyboard.press("End")
    assert box.get_attribute("aria-activedescendant") == f"token-{len(RUNS[0]['pieces']) - 1}"
    page.keyboard.press("ArrowUp")
    above, last = tops(
        page, box.get_attribute("aria-activedescendant"), f"token-{len(RUNS[0]['pieces']) - 1}"
    )
    assert above < last
    page.keyboard.press("Home")
    assert details(page) == expected_details(1, 0)


def test_hostile_text_is_shown_and_does_nothing(opened, file):
    page = opened(file)
    page.locator("#as-table summary").click()
    page.locator("#as-table tbody tr").first.wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    text = page.locator("#text").inner_text()
    assert (
        "</script><img src=x onerror=window.hacked=1>" in text and "U+202E" in text and "␇" in text
    )
    first, second = tops(
        page, *(f"token-{RUNS[0]['pieces'].index(piece)}" for piece in ("<", "\u05e9"))
    )
    assert second - first > 60  # two line breaks


def test_a_character_of_several_tokens_is_one_piece(opened, file):
    page = opened(file)
    number = RUNS[0]["pieces"].index("\U0001f999")
    page.locator(f"#token-{number}").click()
    facts = page.locator("#detail-facts").inner_text()
    start = _starts(RUNS[0]["counts"])[number]
    assert f"token {start + 1}, {start + 2}, {start + 3}, {start + 4}" in facts
    assert len(details(page)[0][1].split(", ")) == 4


def test_generated_text_is_told_from_the_prompt(opened, file):
    page = opened(file)
    assert page.locator(".from").count() == 1
    generated = page.locator(".t.made")
    assert generated.count() >= 1 and "generated" in generated.first.get_attribute("aria-label")
    generated.first.click()
    assert page.locator("#detail-facts").inner_text().endswith("generated")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read(scheme, opened, file):
    page = opened(file, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    found = page.evaluate(CONTRASTS)
    assert len(found) > 50
    assert {name: ratio for name, ratio in found if ratio < 4.5} == {}


def test_a_frame_in_a_notebook_shows_the_text_and_leaves_the_notebook_alone(opened, tmp_path):
    shown = planted_trace(5, 0.5).show()._repr_html_()
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!DOCTYPE html><body><p>cell</p>{shown}</body>")
    page = opened(notebook)
    frame = page.frame_locator("iframe")
    assert frame.locator(".t[role=option]").count() == 5
    frame.locator("#token-1").hover()
    assert frame.locator("#detail-table tbody tr").count() == len(LAYERS)
    assert page.locator("p").evaluate("p => getComputedStyle(p).maxWidth") == "none"
    assert re.match("about:srcdoc", page.frames[1].url)
    assert page.frames[1].evaluate("window.origin") == "null"

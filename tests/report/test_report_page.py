"""The page of a routed model: well formed, loading nothing, hostile text as text;
and the command that writes it."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import transformers
from models import routed
from report_pages import ATTACK, BUDGETS, planted_report
from text_models import save_base, write_text

from hf_depthroute.cli import main
from hf_depthroute.report.run_page import render_page


class Page(HTMLParser):
    """Balanced tags, ids, links inside the page, headings,
    and attributes that would load or run something."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def html() -> str:
    return render_page(planted_report()[0])


def test_the_page_is_well_formed(html):
    page = Page(html)
    assert page.open == [] and page.tags.count("h1") == 1 and page.tags.count("main") == 1
    assert len(page.ids) == len(set(page.ids))
    links = {value for tag, name, value in page.attributes if (tag, name) == ("a", "href")}
    assert {link.removeprefix("#") for link in links} <= set(page.ids)
    named = {
        value
        for _, name, value in page.attributes
        if name in ("aria-labelledby", "aria-describedby")
    }
    assert {part for value in named for part in value.split()} <= set(page.ids)
    headings = [int(tag[1]) for tag in page.tags if tag in ("h1", "h2", "h3")]
    assert all(later - sooner <= 1 for sooner, later in itertools.pairwise(headings))


def test_the_page_loads_nothing_and_forbids_it(html):
    page = Page(html)
    assert {
        value for _, name, value in page.attributes if name in ("src", "data", "action", "srcset")
    } == set()
    assert [v for tag, name, v in page.attributes if tag == "link" and name == "href"] == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", html)
    assert not any(name == "style" or name.startswith("on") for _, name, _ in page.attributes)
    policy = next(
        v
        for tag, name, v in page.attributes
        if tag == "meta" and name == "content" and "src" in str(v)
    )
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy


def test_hostile_text_stays_text(html):
    assert html.count(ATTACK) == 0 and "onerror=window" in html
    assert "img" not in Page(html).tags
    data = re.search(
        r'<script type="application/json" id="token-data">(.*?)</script>', html, re.S
    ).group(1)
    assert ATTACK in json.loads(data)["texts"][0]["runs"][0]["pieces"]


def test_a_long_text_stays_a_small_file():
    layers = tuple(range(24))
    report, *_ = planted_report(
        "Lorem ipsum dolor, " * 100 + "x" * 100, layers, (0.1, 0.25, 0.5, 0.75, 0.9)
    )
    assert sum(report.tokens["texts"][0]["runs"][0]["counts"]) == 2000
    assert len(render_page(report).encode()) < 3_000_000


def test_every_budget_has_its_tiles_and_charts(html):
    for number in range(len(BUDGETS)):
        assert html.count(f'data-budget="{number}"') == 3
    assert "3.260" not in html and f"{3.01 - 0.5:.3f}" in html


# The command


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """An adapter's folder and a text file."""
    folder = tmp_path_factory.mktemp("report")
    base = save_base(folder / "base")
    routed(transformers.AutoModelForCausalLM.from_pretrained(base)).save_pretrained(
        folder / "adapter"
    )
    return folder / "adapter", write_text(folder / "text.txt")


def run(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    return int(ended.value.code or 0), *capsys.readouterr()


def test_the_command_measures_and_writes_one_page(folders, tmp_path, capsys):
    adapter, text = folders
    out = tmp_path / "a" / "page.html"
    measured = (
        "--dataset",
        text,
        "--length",
        16,
        "--blocks",
        4,
        "--samples",
        2,
        "--budgets",
        "0.5,0.25",
    )
    code, said, err = run(
        capsys,
        adapter,
        *measured,
        "--prompt",
        "the cat",
        "--max-new-tokens",
        3,
        "--repeats",
        1,
        "--out",
        out,
    )
    assert (code, said) == (0, f"{out}\n"), err
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    page = out.read_text()
    assert str(adapter.parent) not in page
    assert (
        "Depth routing: adapter" in page and "text.txt, split train, 4 blocks of 16 tokens" in page
    )
    assert "not measured" not in page and "prompt and what each budget wrote" in page


def test_a_memory_is_said_to_skip_nothing(folders, tmp_path, capsys):
    adapter, text = folders
    base = transformers.AutoModelForCausalLM.from_pretrained(adapter.parent / "base")
    routed(base, "memory").save_pretrained(tmp_path / "adapter")
    out, measured = (
        tmp_path / "page.html",
        ("--dataset", text, "--length", 16, "--blocks", 4, "--samples", 1),
    )
    code, _, err = run(capsys, tmp_path / "adapter", *measured, "--out", out)
    assert code == 0, err
    page = out.read_text()
    assert (
        "Gates in 3 layers (1-3) weigh what is added to every token." in page
        and "Nothing is skipped" in page
    )
    assert "trained at budget" not in page and "decide for every token" not in page


def test_the_page_says_what_is_decided_about_what(folders, tmp_path, capsys):
    adapter, text = folders
    base = transformers.AutoModelForCausalLM.from_pretrained(adapter.parent / "base")
    model = routed(base, target="attention", granularity="sequence")
    model.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "page.html"
    measured = "--dataset", text, "--length", 16, "--blocks", 4, "--samples", 1, "--no-speed"
    for folder, said in (
        (tmp_path / "adapter", "decide for every sequence whether its attention runs."),
        (adapter, "decide for every token whether it enters the FFN."),
    ):
        code, _, err = run(capsys, folder, *measured, "--out", out)
        assert code == 0, err
        assert said in out.read_text()


def test_earlier_results_are_used_as_they_are(folders, tmp_path, capsys):
    adapter, text = folders
    report, *_ = planted_report()
    (tmp_path / "eval.json").write_text(json.dumps({"rows": list(report.rows)}))
    (tmp_path / "bench.json").write_text(json.dumps(report.bench))
    files = ("--eval", tmp_path / "eval.json", "--bench", tmp_path / "bench.json")
    code, said, err = run(
        capsys,
        "--adapter",
        adapter,
        "--dataset",
        text,
        "--length",
        16,
        "--blocks",
        2,
        *files,
        "--out",
        tmp_path / "o",
    )
    assert (code, said) == (0, f"{tmp_path / 'o' / 'report.html'}\n"), err
    assert "losses" not in err and "speed" not in err
    page = (tmp_path / "o" / "report.html").read_text()
    assert (
        "2.510" in page
        and "1.11x" in page
        and '<input type="radio" name="budget" value="2">' in page
    )


def test_losses_from_a_file_are_of_the_text_that_it_names(folders, tmp_path, capsys):
    adapter, text = folders
    own = json.loads((adapter / "adapter_config.json").read_text())["weights_hash"]
    rows = list(planted_report()[0].rows)
    common = (
        adapter,
        "--dataset",
        text,
        "--length",
        16,
        "--blocks",
        2,
        "--no-speed",
        "--out",
        tmp_path / "page.html",
    )
    for recorded, said in (
        ({}, "not recorded"),
        (
            {
                "dataset": "/there/their text.txt",
                "split": "test",
                "blocks": 64,
                "length": 32,
                "weights_hash": own,
                "calibrate_on": "dev",
            },
            "their text.txt, split test, 64 blocks of 32 tokens",
        ),
    ):
        (tmp_path / "eval.json").write_text(json.dumps(recorded | {"rows": rows}))
        code, _, err = run(capsys, *common, "--eval", tmp_path / "eval.json")
        assert code == 0, err
        page = (tmp_path / "page.html").read_text()
        assert f"<dt>Text of the losses</dt><dd>{said}</dd>" in page
        calibrated = "<dt>Thresholds of the losses</dt><dd>calibrated for them on split dev</dd>"
        assert (calibrated in page) == ("calibrate_on" in recorded)
        assert (
            "With 50% of the routed layers' calls in full, the loss is 2.510" in page
        )  # of that text
        assert "<dt>Text</dt><dd>text.txt, split train, 2 blocks of 16 tokens</dd>" in page


def test_times_of_none_of_the_budgets_are_refused(folders, tmp_path, capsys):
    adapter, text = folders
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(planted_report()[0].bench))
    measured = next(iter(json.loads(bench.read_text())["prefill"]["budgets"]))
    common = (adapter, "--dataset", text, "--length", 16, "--blocks", 2, "--bench", bench)
    code, _, err = run(capsys, *common, "--budgets", "0.3,0.8,1", "--out", tmp_path / "none.html")
    said = "has times of none of the budgets 0.3,0.8; measure them with bench --budgets 0.3,0.8"
    assert code == 2 and said in err.splitlines()[-1]
    out = tmp_path / "some.html"
    assert run(capsys, *common, "--budgets", f"0.3,{measured}", "--out", out)[0] == 0
    code, _, err = run(capsys, *common, "--budgets", "1", "--out", tmp_path / "whole.html")
    assert code == 0, err


@pytest.mark.parametrize(
    "recorded, said",
    [({"weights_hash": "sha256:0"}, "other weights"), ({"base_mismatch": True}, "another base")],
)
def test_results_of_another_adapter_or_base_are_refused(recorded, said, folders, tmp_path, capsys):
    adapter, text = folders
    report, *_ = planted_report()
    (tmp_path / "eval.json").write_text(json.dumps({"rows": list(report.rows)} | recorded))
    (tmp_path / "bench.json").write_text(json.dumps(dict(report.bench) | recorded))
    for option in ("eval", "bench"):
        path = tmp_path / f"{option}.json"
        code, _, err = run(
            capsys, adapter, "--dataset", text, f"--{option}", path, "--out", tmp_path / "page.html"
        )
        (line,) = err.splitlines()
        assert (
            code == 2
            and line.startswith(f"error: --{option} {path}: was measured ")
            and said in line
        )


def test_the_speed_of_other_budgets_than_one_is_measured(folders, tmp_path, capsys):
    adapter, text = folders
    measured = ("--dataset", text, "--length", 16, "--blocks", 2, "--samples", 1, "--repeats", 1)
    for budgets, said in (("0.5,1", False), ("1", True)):
        out = tmp_path / "page.html"
        code, _, err = run(capsys, adapter, *measured, "--budgets", budgets, "--out", out)
        assert code == 0, err
        assert ("Speed was not measured: no budget is below 1." in out.read_text()) == said
        assert ('id="speed-table"' in out.read_text()) != said


def test_an_adapter_without_budgets_gets_a_page(folders, tmp_path, capsys):
    _, text = folders
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[0].parent / "base")
    model = routed(base, threshold=0.0, rank_pattern={1: 3})
    model.save_pretrained(tmp_path / "fixed")
    code, _, err = run(
        capsys, tmp_path / "fixed", "--dataset", text, "--length", 16, "--blocks", 2, "--no-speed"
    )
    assert code == 0, err
    page = (tmp_path / "fixed" / "report" / "report.html").read_text()
    assert "<span>fixed</span>" in page and "not measured" in page
    assert "branch lowrank, rank 3 in 1</dd>" in page  # what layers have of their own, no budget
    assert "budget 0.5" not in page and '"budget":0.5' not in page
    assert '<th scope="row">0.5</th>' not in page


def test_where_no_router_decides_the_page_says_who_skips(folders, tmp_path, capsys):
    _, text = folders
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[0].parent / "base")
    model = routed(base, phases="prefill", gate="sinks", prompt_tail=2)
    model.save_pretrained(tmp_path / "sinks")
    shown = ("--dataset", text, "--length", 18, "--blocks", 4, "--samples", 1, "--no-speed")
    code, _, err = run(capsys, tmp_path / "sinks", *shown, "--out", tmp_path / "page.html")
    assert code == 0, err
    page = (tmp_path / "page.html").read_text()
    who = "every token of a prompt but the last 2, attention sinks left out, skips the routed part."
    assert f"No router decides: {who}" in page and "Routers in" not in page


def test_of_prompts_alone_the_page_is_about_the_text_behind_them(folders, tmp_path, capsys):
    _, text = folders
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[0].parent / "base")
    model = routed(base, phases="prefill", prompt_tail=2)
    model.save_pretrained(tmp_path / "prompts")
    out, measured = (
        tmp_path / "page.html",
        ("--dataset", text, "--length", 18, "--blocks", 4, "--budgets", "0.5"),
    )
    shown = (*measured, "--samples", 1, "--no-speed", "--out", out)
    code, _, err = run(capsys, tmp_path / "prompts", *shown)
    assert code == 0, err
    page = out.read_text()
    assert (
        "the first two thirds of every block are read as a prompt, and the loss is that of the text behind it."
        in page
    )
    data = json.loads(re.search(r'id="token-data"[^>]*>(.*?)</script>', page, re.S)[1])
    (view,) = data["texts"][0]["runs"]
    assert view["prompt"] == 12
    assert all(layer["mask"][10:] == "1" * 8 for layer in view["layers"])
    with pytest.raises(SystemExit):
        main(
            [
                "eval",
                str(tmp_path / "prompts"),
                *map(str, measured),
                "--json",
                str(tmp_path / "behind.json"),
            ]
        )
    assert "the loss is that of the text behind it" in capsys.readouterr().err
    rows = json.loads((tmp_path / "behind.json").read_text())["rows"]
    assert all(row["behind_prompts"] for row in rows)
    code, _, err = run(capsys, tmp_path / "prompts", *shown, "--eval", tmp_path / "behind.json")
    assert code == 0 and f"{rows[0]['loss']:.4f}" in out.read_text(), err
    (tmp_path / "behind.json").write_text(json.dumps({"rows": rows}))  # of any adapter
    (tmp_path / "eval.json").write_text(json.dumps({"rows": list(planted_report()[0].rows)}))
    for adapter, file, said in (
        (tmp_path / "prompts", "eval.json", "not of the text behind prompts"),
        (folders[0], "behind.json", "not of whole texts"),
    ):
        code, _, err = run(capsys, adapter, *shown[:6], "--eval", tmp_path / file, "--out", out)
        (line,) = err.splitlines()
        assert code == 2 and said in line


MISTAKES = [
    ((), "no adapter; name its folder or Hub id"),
    (("ADAPTER",), "give --dataset"),
    (("ADAPTER", "--adapter", "other", "--dataset", "TEXT"), "name an adapter twice"),
    (("ADAPTER", "--dataset", "TEXT", "--eval", "absent.json"), "absent.json"),
    (
        ("ADAPTER", "--dataset", "TEXT", "--eval", "broken.json"),
        "not a result of hf-depthroute eval",
    ),
    (("ADAPTER", "--dataset", "TEXT", "--bench", "broken.json"), "broken.json"),
    (
        ("ADAPTER", "--dataset", "TEXT", "--bench", "short.json"),
        "not a result of hf-depthroute bench",
    ),
    (("ADAPTER", "--dataset", "TEXT", "--budgets", "2"), "--budgets 2"),
    (("ADAPTER", "--dataset", "TEXT", "--out", "broken.json"), "is a file"),
    (("ADAPTER", "--dataset", "TEXT", "--length", "4096"), "--length 4096"),
    (
        (
            "ADAPTER",
            "--dataset",
            "TEXT",
            "--length",
            "16",
            "--prompt",
            "the",
            "--max-new-tokens",
            "99",
        ),
        "64 positions",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_one_line(arguments, said, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("[1]")
    Path("short.json").write_text('{"prefill": {"budgets": {"0.5": {}}}}')
    places = {"ADAPTER": folders[0], "TEXT": folders[1]}
    code, _, err = run(capsys, *(places.get(argument, argument) for argument in arguments))
    (line,) = err.splitlines()
    assert code == 2 and line.startswith("error: ") and said in line
    assert not (folders[0] / "report").exists()

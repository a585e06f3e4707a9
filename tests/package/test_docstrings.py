"""How the package's own text is written: docstrings that say what a thing is,
and papers called by their names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

MODULES = sorted([*(ROOT / "hf_depthroute").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "recipes").rglob("README.md"),
        *ROOT.glob("model_cards/*.md"),
    ]
)
IDENTIFIER = re.compile(r"arXiv:\d{4}\.\d{5}")
# The package's own habits, where peft and transformers have a noun phrase or a verb.
UNUSUAL = re.compile(
    r"\A\s*Wh(?:at|o|oever)\b|\b[Nn]one "
    r"where\b|\b(?:[Ww]hoever|[Ss]omebody|[Nn]obody|[Bb]eside)\b|\b[Ii]n front of\b"
)
# What begins a docstring, or the description of an argument, without saying what the thing is.
OWNER_ONLY = re.compile(r"\A\s*Of |^\s+\**\w+(?: \([^)]*\))?: Of |\n\n\s*Of ", re.MULTILINE)
DEPTH_ROUTING = "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
ROUTER_TUNING = (
    "Router-Tuning: A Simple and Effective Approach for Enabling Dynamic-Depth in Transformers"
)
TOKEN_SELECTIVE = "Adaptive Computation Depth via Learned Token Routing in Transformers"
COUNTERFACTUAL = (
    "Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in Engram-Style "
    "Conditional Memory"
)
FLEXIDEPTH = "Adaptive Layer-skipping in Pre-trained LLMs"
IDENTIFIERS = {
    DEPTH_ROUTING: "arXiv:2604.17228",
    ROUTER_TUNING: "arXiv:2410.13184",
    TOKEN_SELECTIVE: "arXiv:2605.05222",
    FLEXIDEPTH: "arXiv:2503.23798",
    COUNTERFACTUAL: "gitlab.com/fars-a/counterfactual-gate-supervision",
}
# Where a method is defined, its paper is named.
SOURCES = {
    "parts/gates.py": [DEPTH_ROUTING, ROUTER_TUNING, TOKEN_SELECTIVE],
    "parts/branches.py": [DEPTH_ROUTING],
    "parts/flexidepth.py": [FLEXIDEPTH],
    "parts/memory.py": [COUNTERFACTUAL],
    "execution/targets/memory.py": [COUNTERFACTUAL],
    "training/losses.py": [
        DEPTH_ROUTING,
        COUNTERFACTUAL,
        ROUTER_TUNING,
        TOKEN_SELECTIVE,
        FLEXIDEPTH,
    ],
    "training/oracle.py": [DEPTH_ROUTING],
    "evaluation/cost.py": [DEPTH_ROUTING],
    "training/trainer.py": [DEPTH_ROUTING],
    "../recipes/aux_losses/paper/claims.py": [DEPTH_ROUTING, COUNTERFACTUAL],
}


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""


def words(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def test_docstrings_say_what_a_thing_is() -> None:
    unclear = re.compile(
        f"{OWNER_ONLY.pattern}|[Tt]hat are those|behind the (?:LM )?head", re.MULTILINE
    )
    found = {path: text for path in MODULES for text in docstrings(path) if unclear.search(text)}
    assert not found


def test_docstrings_have_the_words_of_peft_and_transformers() -> None:
    package = [path for path in MODULES if "recipes" not in path.parts]
    found = [
        (path.name, hit[0])
        for path in package
        for text in docstrings(path)
        if (hit := UNUSUAL.search(text))
    ]
    assert not found


def test_a_text_that_speaks_of_the_paper_says_which() -> None:
    texts = {path: path.read_text() for path in (*MODULES, *PAGES)}
    speaks = {
        path: text
        for path, text in texts.items()
        if re.search(r"\bthe paper\b", text, re.IGNORECASE)
    }
    assert len(speaks) > 5
    assert [path for path, text in speaks.items() if not IDENTIFIER.search(text)] == []


@pytest.mark.parametrize("name", SOURCES)
def test_a_method_names_its_paper_where_it_is_defined(name: str) -> None:
    text = words((ROOT / "hf_depthroute" / name).read_text())
    for title in SOURCES[name]:
        assert title in text and IDENTIFIERS[title] in text

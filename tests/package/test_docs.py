"""What the documentation says runs: every code block of the README and of `docs/`,
and the notebook."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import matplotlib
import pytest
import torch
import transformers
from doc_blocks import Block, check, read_blocks, run_page, shortened
from models import randomised
from places import ROOT
from scripts import load_script
from transformers import (
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.base.families import FAMILIES
from hf_depthroute.parts.gates import GATES
from hf_depthroute.training.losses import LOSSES

DOCS = ROOT / "docs"
HOW_TO = DOCS / "how-to"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RUN = [page for page in PAGES if any(block.not_run is None for block in read_blocks(page))]
NOTEBOOK = DOCS / "notebooks" / "quickstart.ipynb"
TOKENIZER = ROOT / "recipes" / "embedded_base" / "model"
MACHINE = re.compile(r"/(tmp|home|root|work|usr|opt|Users|mnt|var)/|\b[0-9a-f]{12,}\b|https?://")
SNAPSHOT = "0" * 40  # a commit of the stand-in repositories
_SMALL = {"vocab_size": 2064, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
_SMALL |= {
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
# The Hub ids that the pages name, and random models of their architectures and depths.
BASES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "Qwen/Qwen2.5-0.5B": (Qwen2ForCausalLM, Qwen2Config(num_hidden_layers=24, **_SMALL)),
    "me/my-finetuned-qwen": (Qwen2ForCausalLM, Qwen2Config(num_hidden_layers=24, **_SMALL)),
    "allenai/OLMoE-1B-7B-0924": (
        OlmoeForCausalLM,
        OlmoeConfig(num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, **_SMALL),
    ),
}


def repository(hub: Path, name: str) -> Path:
    """The folder of a Hub repository's files in a cache, as a download leaves it."""
    folder = hub / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(SNAPSHOT)
    files = folder / "snapshots" / SNAPSHOT
    files.mkdir(parents=True)
    return files


def test_links_lead_to_files_of_the_repository() -> None:
    """Where the pages are read without the site."""
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("recipes/**/*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)\s#:]+)[^):]*\)", page.read_text())
    ]
    assert len(links) > 100
    assert [(str(page), link) for page, link in links if not (page.parent / link).exists()] == []


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub cache with the models and the adapter that the pages name."""
    folder = tmp_path_factory.mktemp("hub")
    for seed, (name, (cls, config)) in enumerate(BASES.items()):
        files = repository(folder, name)
        base: Any = randomised(cls(config), "sdpa", torch.float32, seed)
        base.save_pretrained(files)
        for file in TOKENIZER.glob("tokenizer*"):
            shutil.copy(file, files)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "models--Qwen--Qwen2.5-0.5B/snapshots" / SNAPSHOT
    )
    base.name_or_path = "Qwen/Qwen2.5-0.5B"
    get_depth_routed_model(base, DepthRouteConfig(layers="last:8")).save_pretrained(
        repository(folder, "me/my-router")
    )
    return folder


@pytest.fixture
def reader(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reader's working directory, with a text; what the page registers is
    forgotten afterwards."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(tmp_path)
    lines = [
        line
        for page in ("README.md", "SECURITY.md")
        for line in (ROOT / page).read_text().splitlines()
        if line
    ]
    (tmp_path / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": line}) for line in lines[:110])
    )
    tables: list[dict[str, Any]] = [FAMILIES, GATES, LOSSES]  # type: ignore[list-item]
    before, level = [dict(table) for table in tables], transformers.logging.get_verbosity()
    yield tmp_path
    transformers.logging.set_verbosity(level)
    for table, rows in zip(tables, before):
        table.clear()
        table.update(rows)


@pytest.mark.parametrize(
    "block", [b for page in PAGES for b in read_blocks(page)], ids=lambda block: block.place
)
def test_a_block_is_well_formed(block: Block, reader: Path) -> None:
    check(block)


@pytest.mark.nightly(unless=lambda page: page.name != "fit-without-training.md")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_runs_from_top_to_bottom(page: Path, reader: Path) -> None:
    """A how-to page starts from the lines of their index, and says so."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if page.parent == HOW_TO or page == ROOT / "README.md":
        run_page(HOW_TO / "index.md", namespace)
    if page != HOW_TO / "index.md":
        assert run_page(page, namespace)


def test_the_readme_is_read_in_minutes() -> None:
    """At most 120 lines, cells of tables that are read at a glance,
    and each term explained where it first stands."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert max(len(cell.split()) for cell in cells) <= 30
    prose = re.sub(r"!\[.*?\]\(.*?\)|<!--.*?-->|```.*?```", "", text, flags=re.DOTALL)
    for term in ("budget", "branch", "prefill", "nats"):
        first = re.search(rf"(\*+)?\b{term}\b", prose)
        assert first and first[1], f"{term} is not set off where it first stands"


def code_cells() -> list[dict[str, Any]]:
    return [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: a kernel of its own would import everything again."""
    (tmp_path / "docs" / "notebooks").mkdir(parents=True)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path / "docs" / "notebooks")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    matplotlib.use("agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells()):
        exec(compile(shortened("".join(cell["source"])), f"cell {number}", "exec"), namespace)
    assert torch.equal(
        namespace["loaded"](**namespace["inputs"]).logits,
        namespace["model"](**namespace["inputs"]).logits,
    )


def test_the_notebook_is_executed_in_order_and_tells_nothing_of_a_machine() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and all(
        output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs
    )
    said = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    for text in ("".join(part) for part in (*said, *(cell["source"] for cell in cells))):
        assert not MACHINE.search(text), text
    assert NOTEBOOK.stat().st_size < 200_000


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/a.css">',
        '<link rel="preconnect" href="https://fonts.example">',
        '<img alt="" src="http://example/a.png">',
        "<style>@import 'https://fonts.example/a.css'</style>",
        '<div style="background: url(https://example/a.png)"></div>',
    ],
)
def test_a_page_that_loads_from_another_host_is_noticed(page: str, tmp_path: Path) -> None:
    requests_of = load_script(DOCS / "hooks" / "self_contained.py").requests_of
    (tmp_path / "bad.html").write_text(f"<html><body>{page}</body></html>")
    (tmp_path / "good.html").write_text(
        '<link rel="canonical" href="https://example/"><a href="https://example/">x</a><script '
        'src="a.js"></script>'
    )
    assert len(requests_of(tmp_path / "bad.html")) == 1
    assert requests_of(tmp_path / "good.html") == []

"""Fixtures shared by all tests. No test needs the network or a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# For processes that tests start too: threads of several processes on few cores wait for each other, 100 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # read when Triton is imported, which other packages may do
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from peft import PeftModel

# Tracing makes Python half as slow again. What these files run, other tests cover; a table's other families run the
# lines of the first.
UNTRACED_FILES = (
    "test_family_table", "test_fuzz", "test_invariants_causal", "test_invariants_execution", "test_invariants_state",
)  # fmt: skip
TRACED_FAMILIES = ("llama", None)  # None: not a table over families


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters: dict[str, object] = item.callspec.params if hasattr(item, "callspec") else {}
        traced = parameters.get("family") in TRACED_FAMILIES or parameters.get("kind") == "experts"
        if item.path.stem in UNTRACED_FILES or not traced:
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture(autouse=True)
def fixed_global_state() -> None:
    """One thread and a fixed global seed: results do not depend on the order of the tests."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)


@pytest.fixture
def saved_adapter(tmp_path: Path) -> Callable[[PeftModel], Path]:
    """Save a model's adapter: `saved_adapter(model) -> folder`."""

    def save(model: PeftModel) -> Path:
        folder = tmp_path / "adapter"
        model.save_pretrained(folder)
        return folder

    return save

"""Fixtures shared by all tests. No test needs the network or a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# For processes that tests start too: threads of several processes on few cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # read when Triton is imported, which other packages may do
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from peft import PeftModel

# Tracing for coverage makes Python half as slow again. What these files run, other tests cover; of another long table,
# every fourth case is traced.
UNTRACED_FILES = (
    "test_docs", "test_family_table", "test_fuzz", "test_invariants_causal", "test_invariants_execution",
    "test_invariants_state",
)  # fmt: skip
LONG_TABLE = 16


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        tables.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in tables.values():
        for number, item in enumerate(cases):
            if item.path.stem in UNTRACED_FILES or (len(cases) > LONG_TABLE and number % 4):
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

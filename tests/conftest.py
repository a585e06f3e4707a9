"""Fixtures shared by all tests. No test needs the network or a GPU."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# For processes that tests start too: threads of several processes on few cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # read when Triton is imported, which other packages may do
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from models import ADAPTERS, DEVICE
from peft import PeftModel
from places import TESTS
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from hf_depthroute.execution import costs

# Tracing makes Python half as slow again. What these files and folders run, other tests run too, or
# it runs in processes that are not traced; of another table, two cases of each quarter count.
LEFT_OUT_OF_COVERAGE = {
    "recipes", "test_docs", "test_family_table", "test_fuzz", "test_invariants_causal",
    "test_invariants_execution", "test_invariants_state", "test_kill",
}  # fmt: skip
LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help="run the tests marked `nightly` too (`make nightly`)"
    )


def counted(items: list[pytest.Item]) -> set[pytest.Item]:
    """The part of `items` that coverage is counted of (`make coverage`)."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not LEFT_OUT_OF_COVERAGE & {item.path.stem, item.path.parent.name}:
            tables.setdefault(item.nodeid.split("[")[0], []).append(item)
    return {
        case
        for cases in tables.values()
        for number, case in enumerate(cases)
        if number % -(-len(cases) // 4) < 2
    }


def waits_for_the_night(item: pytest.Item) -> bool:
    """Whether a test is marked `nightly`, and is none of the cases that the mark's `unless`
    keeps in every run."""
    mark = item.get_closest_marker("nightly")
    if mark is None or "unless" not in mark.kwargs:
        return mark is not None
    unless, parameters = mark.kwargs["unless"], item.callspec.params  # type: ignore[attr-defined]
    return not unless(**{name: parameters[name] for name in signature(unless).parameters})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--nightly` or a test's own name (`file::test`), leave out what waits for the night;
    with `--cov`, also what coverage is not counted of."""
    chosen = items
    if not config.getoption("nightly") and not any("::" in argument for argument in config.args):
        chosen = [item for item in items if not waits_for_the_night(item)]
    kept = counted(chosen) if config.getoption("cov_source", default=None) else set(chosen)
    left_out = [item for item in items if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = len(left_out)
    # In the order that they have: a fixture of a module is made once for each of its parameters.
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The processes of pytest-xdist leave out the same tests, and pytest hears of none of them."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        covered = config.getoption("cov_source", default=None)
        why = "they count for no coverage" if covered else "--nightly runs them too"
        terminalreporter.write_line(f"{left_out:,} tests left out: {why}")


@pytest.fixture(scope="module", autouse=True)
def start_of_a_file() -> None:
    """What was imported by now stays: without this, Trainers spend a third of their time
    collecting garbage in it. Adapters are not shared by files: their tests patch the package."""
    ADAPTERS.clear()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_global_state() -> Iterator[None]:
    """One thread and a fixed global seed: results do not depend on the order of the tests."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    if DEVICE == "cpu":
        yield
        return
    # Tiny models on a GPU would run their decoding steps in full.
    with TensorsOfTests(), patch.object(costs, "STEP_SECONDS", 0.0):
        yield


class TensorsOfTests(TorchFunctionMode):
    """What a test makes without naming a device is made on `DEVICE`;
    the package and its libraries are not helped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        if TESTS not in Path(frame.f_code.co_filename).parents:
            return func(*args, **kwargs)
        if kwargs.get("generator") is None:
            return func(*args, **{**kwargs, "device": DEVICE})
        wanted = kwargs.pop("requires_grad", False)
        # The generator is one of the CPU.
        return func(*args, **kwargs).to(DEVICE).requires_grad_(wanted)


@pytest.fixture
def saved_adapter(tmp_path: Path) -> Callable[[PeftModel], Path]:
    """Save a model's adapter: `saved_adapter(model) -> folder`."""

    def save(model: PeftModel) -> Path:
        folder = tmp_path / "adapter"
        model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 KiB, in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, by playwright."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="pages are looked at with playwright (dev extra)"
    )
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    arguments = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    ]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()

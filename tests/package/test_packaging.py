"""What an installation relies on: versions that agree, pins above the lower bounds,
the commands of the Makefile.

Whether the pins resolve from the public index is checked by `make resolve`, which needs the
network.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def resolve() -> Any:
    """The module `.ci/resolve.py`."""
    spec = importlib.util.spec_from_file_location("resolve", ROOT / ".ci" / "resolve.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pythons() -> list[str]:
    """The Pythons that `.ci/resolve.py` resolves for, oldest first."""
    return list(resolve().PYTHONS)


def test_every_supported_python_is_resolved_for_tested_and_declared() -> None:
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    workflow = yaml.safe_load(
        (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    )
    assert pythons() == declared == workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={declared[0]}"


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "Makefile"])
def test_no_page_promises_an_older_python(page: str) -> None:
    named = re.findall(r"Python (3\.\d+)", (ROOT / page).read_text(encoding="utf-8"))
    assert named
    assert set(named) <= set(pythons())


def test_pins_are_within_the_bounds_of_every_extra() -> None:
    pins: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            pins.setdefault(canonicalize_name(pin.name), []).append(
                str(pin.specifier).removeprefix("==")
            )
    extras = [PROJECT["optional-dependencies"][name] for name in resolve().pinned_extras()]
    # vLLM has an environment of its own.
    assert len(extras) == len(PROJECT["optional-dependencies"]) - 1
    wanted = itertools.chain(PROJECT["dependencies"], *extras)
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != "hf-depthroute":
            assert name in pins, f"{name} is not pinned; run `make lock`"
            assert all(requirement.specifier.contains(version) for version in pins[name]), name


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert len(citation["references"]) == 5


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "hf_depthroute" / "py.typed").is_file()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("target", "what"), [("demo", "-e ."), ("test", '-e ".[dev]"')])
def test_one_variable_asks_for_a_small_build_of_pytorch(
    target: str, what: str, tmp_path: Path
) -> None:
    def commands(*variables: str, path: str) -> str:
        words = [
            "make",
            "--dry-run",
            target,
            f"VENV={tmp_path}/none",
            f"PYTHON={sys.executable}",
            *variables,
        ]
        return subprocess.run(
            words, cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, check=True
        ).stdout

    tools = tmp_path / "tools"  # make, a shell and their like, without uv
    tools.mkdir()
    for tool in ("make", "sh", "bash"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    with_pip = (
        f"{tmp_path}/none/bin/python -m pip install -q --disable-pip-version-check -c "
        "constraints.txt"
    )
    assert f"{with_pip} {what}" in commands(path=str(tools))
    small = commands("TORCH=cpu", path=str(tools))
    assert f"{with_pip} uv" in small
    assert (
        f"{tmp_path}/none/bin/uv pip install" in small
        and f"--torch-backend cpu -c constraints.txt {what}" in small
    )

    (tools / "uv").write_text("#!/bin/sh\n", encoding="utf-8")
    (tools / "uv").chmod(0o755)
    with_uv = commands(path=str(tools))
    assert (
        f"{tools}/uv venv" in with_uv
        and f"{tools}/uv pip install" in with_uv
        and "-m pip" not in with_uv
    )
    assert "--torch-backend" not in with_uv

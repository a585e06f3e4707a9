"""The package is a handful of rooms, and a room imports only those in front of it:
`ORDER` of `.ci/structure.py`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, TESTS

PACKAGE = ROOT / "hf_depthroute"


@pytest.fixture(scope="module")
def structure() -> Any:
    spec = importlib.util.spec_from_file_location(
        "structure", PACKAGE.parent / ".ci" / "structure.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_room_has_its_place_in_the_order(structure: Any) -> None:
    rooms = {structure.room_of(module) for module in structure.read_modules(PACKAGE)}
    assert rooms == set(structure.ORDER.split())


def test_a_room_imports_only_rooms_in_front_of_it(structure: Any) -> None:
    """In functions too, and where only a type checker looks."""
    rising = {
        (arrow.source, arrow.target) for arrow in structure.upward(structure.read_arrows(PACKAGE))
    }
    assert rising == set()


def test_no_modules_import_each_other_in_a_circle(structure: Any) -> None:
    running = [arrow for arrow in structure.read_arrows(PACKAGE) if not arrow.typing]
    assert structure.circles_of(structure.edges_of(running)) == []


def test_what_it_reads_are_the_imports(structure: Any, tmp_path: Path) -> None:
    package = tmp_path / "p"
    (package / "low").mkdir(parents=True)
    (package / "high").mkdir()
    (package / "__init__.py").write_text("import os\nfrom .high import b\n")
    (package / "low" / "__init__.py").write_text("")
    (package / "low" / "a.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..high.b import f\n"
        "def g():\n    from .. import high\n    import_module('..high.b', 'p')\n"
    )
    (package / "high" / "__init__.py").write_text("")
    (package / "high" / "b.py").write_text("import p.low.a\nfrom . import c\n")
    (package / "high" / "c.py").write_text(
        "from .b import f\nasync def f(self, x, *, y, **z):\n    from . import b\n"
    )
    found = [tuple(arrow)[:2] + tuple(arrow)[3:] for arrow in structure.read_arrows(package)]
    assert found == [
        ("__init__", "high.b", False, False),
        ("high.b", "high.c", False, False),
        ("high.b", "low.a", False, False),
        ("high.c", "high.b", False, False),
        ("high.c", "high.b", False, True),
        ("low.a", "high", False, True),
        ("low.a", "high.b", True, False),
        ("low.a", "high.b", False, True),
    ]
    edges = structure.edges_of(
        [arrow for arrow in structure.read_arrows(package) if not arrow.typing]
    )
    assert structure.circles_of(edges) == [{"high.b", "high.c", "low.a"}]
    assert structure.levels_of(edges)["__init__"] == 2
    assert next(structure.functions_of(structure.read_modules(package))) == ("high.c.f", 2, 3)


def test_tests_stand_in_the_rooms_of_the_package_and_import_no_test() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {"recipes", "package"}
    files = list(TESTS.rglob("test_*.py"))
    assert len(files) > 100 and {file.parent.name for file in files} <= rooms
    assert {file.parent.parent for file in files} == {TESTS}
    imports = re.compile(r"^\s*(from|import) test_", re.MULTILINE)
    assert not [
        file for file in TESTS.rglob("*.py") if imports.search(file.read_text(encoding="utf-8"))
    ]

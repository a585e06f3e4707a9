"""The table of invariants names tests that exist."""

from __future__ import annotations

import re

import pytest
from invariants import INVARIANTS
from places import TESTS


@pytest.mark.parametrize("number", range(1, 25))
def test_every_invariant_has_its_tests(number: int) -> None:
    _, files = INVARIANTS[number]
    assert files
    for file, names in files.items():
        source = next(TESTS.rglob(f"{file}.py")).read_text()
        for name in names:
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}.{name}"

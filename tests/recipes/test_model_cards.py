"""The committed example cards are what their committed results give."""

from __future__ import annotations

import importlib.util
import re

from card_rules import card_fault
from places import ROOT

FOLDER = ROOT / "model_cards"
# A path of the machine that made it.
MACHINE = re.compile(r"(?<![\w:/.-])/(tmp|home|root|work|usr|opt|Users|mnt|var)/")


def test_the_example_cards_are_current() -> None:
    spec = importlib.util.spec_from_file_location("make_cards", FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cards = module.cards()
    assert len(cards) >= 2
    for path, text in cards.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"run python model_cards/make.py: {path.name} is old"
        )
        assert card_fault(text) is None
        assert not MACHINE.search(text)

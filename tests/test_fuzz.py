"""The fuzz target of the adapter loader, for a minute; longer by hand: `python tests/fuzz_adapter.py --seconds 600`."""

from __future__ import annotations

import os

from fuzz_adapter import fuzz


def test_a_minute_of_damaged_adapters_finds_nothing() -> None:
    seconds = float(os.environ.get("FUZZ_SECONDS", "60"))
    outcomes, findings = fuzz(seconds, seed=int(os.environ.get("FUZZ_SEED", "0")))
    print(dict(outcomes))
    assert not findings
    refused = sum(count for name, count in outcomes.items() if name.endswith("refused"))
    assert sum(outcomes.values()) > 2 * seconds
    assert refused > sum(outcomes.values()) / 2
    assert outcomes["field: loaded"] + outcomes["field: loaded another model"] > 0  # not everything is refused

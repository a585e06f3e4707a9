"""The fuzz target of the adapter loader, shortly; `make fuzz` runs it for a minute, and CI does."""

from __future__ import annotations

from fuzz_adapter import fuzz


def test_seconds_of_damaged_adapters_find_nothing() -> None:
    seconds = 5
    outcomes, findings = fuzz(seconds, seed=1)
    print(dict(outcomes))
    assert not findings
    refused = sum(count for name, count in outcomes.items() if name.endswith("refused"))
    assert sum(outcomes.values()) > 2 * seconds
    assert refused > sum(outcomes.values()) / 2
    # Not everything is refused.
    assert outcomes["field: loaded"] + outcomes["field: loaded another model"] > 0

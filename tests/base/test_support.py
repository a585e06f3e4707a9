"""`hf-depthroute families`: the table says what the models do, and the command prints all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import EXTENDED, FAMILY_NAMES, build_base, decoder_layers

from hf_depthroute.base.capabilities import LEGEND, Support, support_table
from hf_depthroute.base.families import FAMILIES, VARIANTS, find_family
from hf_depthroute.cli import main

CASES = {name: name for name in FAMILY_NAMES} | {
    name: model_type for name, (model_type, _) in EXTENDED.items()
}
TABLE = support_table()


def rows_of(model_type: str) -> list[Support]:
    return [row for row in TABLE if row.family == model_type]


def test_every_family_and_variant_has_a_line() -> None:
    found = [(row.family, row.variant) for row in TABLE]
    variants = [(name, variant) for name, several in VARIANTS.items() for variant, _, _ in several]
    assert sorted(found) == sorted([(name, "") for name in FAMILIES] + variants)
    assert len(FAMILIES) >= 20
    assert {row.layout for row in TABLE} == {
        "sequential",
        "scaled",
        "sandwich",
        "post-norm",
        "parallel",
    }


@pytest.mark.parametrize("case", CASES)
def test_a_line_describes_the_model(case: str) -> None:
    """Layout and experts, against a model that was built; what is skipped,
    test_family_table.py counts."""
    base = build_base(case)
    family = find_family(base)
    assert family.layout in {row.layout for row in rows_of(CASES[case])}
    experts = hasattr(getattr(decoder_layers(base)[-1], family.ffn), family.experts)
    for row in rows_of(CASES[case]):
        assert row.ffn == "skipped"
        assert row.experts == ("skipped" if experts else "-")
        assert row.attention == ("masked" if family.queries is None else "skipped")
        assert row.block == ("ffn only" if family.queries is None else "skipped")


def test_the_command_prints_the_table_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "families.json"
    with pytest.raises(SystemExit) as caught:
        main(["families", "--json", str(path)])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    written = json.loads(path.read_text())
    assert written["legend"] == LEGEND
    for row in written["families"]:
        name = f"{row['family']} ({row['variant']})" if row["variant"] else row["family"]
        cells = next(line for line in lines if line.startswith(f"{name}  ")).split("  ")
        assert [cell.strip() for cell in cells if cell.strip()][1] == row["layout"]

"""Make the cards in this folder again, from what the runs in `runs/` left.

    python model_cards/make.py

A run is an adapter's configuration, `training.json` of `hf-depthroute train`, `eval.json` of
`eval --json` and, where speed was measured, `bench.json` of `bench --json`; its weights are not
kept.
"""

from __future__ import annotations

from pathlib import Path

from hf_depthroute.card import make_card

HERE = Path(__file__).parent
RESULTS = ("eval.json", "tasks.json", "bench.json")


def cards() -> dict[Path, str]:
    """The text of every card, by its file."""
    return {
        HERE / f"{run.name}.md": str(
            make_card(run, [run / name for name in RESULTS if (run / name).is_file()])
        )
        for run in sorted((HERE / "runs").iterdir())
    }


if __name__ == "__main__":
    for path, text in cards().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.name}")

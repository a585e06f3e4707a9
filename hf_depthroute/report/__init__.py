"""Readable reports from result files. The page of a run: `run/`; of a study: `study/`. `markdown` and `plots` write the
demo's `report.md`."""

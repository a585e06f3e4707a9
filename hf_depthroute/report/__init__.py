"""Readable reports from result files. Of one run: `plots` draws, `markdown` writes; of a study: `study/`."""

"""Readable reports from result files: `plots` draws, `markdown` writes."""

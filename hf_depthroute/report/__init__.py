"""Readable pages about a routed model: `run_page`, and the token view, `tokens`.

`collect` measures, `tokens` makes the token view and fills templates in, `charts` draws.
"""

"""Readable pages about a routed model: `run_page`, and the token view, `tokens`.

`collect` measures, `tokens` and `pieces` make the token view, `charts` draws, `rendering` fills templates in.
"""

"""Readable pages from results. `run_page` is about a routed model, `study_table` about a study.

`collect` measures, `tokens` and `pieces` make the token view, `charts` draws, `rendering` fills templates in.
"""

"""The report of a study.

`results` reads, `layouts` and `tables` tabulate, `rules` and `claims` judge, `plots` draws, `page` writes.
"""

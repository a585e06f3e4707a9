"""The report of a study.

`results` reads, `layouts` and `tables` tabulate, `rules` and `claims` judge, `curves` and `plots` draw, `page` writes.
"""

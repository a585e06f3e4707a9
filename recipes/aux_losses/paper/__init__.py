"""The papers' claims about auxiliary losses, judged by a study.

`layouts` and `tables` tabulate, `rules` and `claims` judge, `curves` and `plots` draw, `page`
writes.
"""

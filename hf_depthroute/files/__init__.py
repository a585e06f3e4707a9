"""Files, text and the Hub: staged writes, escaped text, bounds.

Nothing here knows about routing.
"""

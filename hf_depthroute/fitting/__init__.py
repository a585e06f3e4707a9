"""Routers without training: branches by least squares, gates by regression,
prompts by what they cost."""

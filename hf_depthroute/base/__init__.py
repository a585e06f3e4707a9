"""Base models: where the parts of a decoder layer are, how they add up,
their caches and LM heads."""

"""Base models: the parts of a decoder layer and how they add up, caches and LM heads."""

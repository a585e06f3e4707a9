"""Losses as functions of a trace, the objective that sums them, and the trainers."""

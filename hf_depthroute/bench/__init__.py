"""Measured speed and memory of a routed model against its dense base.

`run_cases` measures a list of cases, such as a suite file describes (`read_suite`); `bench` a few of them on one
model. Results are JSON-ready; `measurements` and `plots` read them.
"""

from .cases import Case, read_suite
from .shapes import SHAPES, dense_view, random_model
from .suite import bench, run_cases
from .timing import describe_machine

__all__ = [
    "SHAPES",
    "Case",
    "bench",
    "dense_view",
    "describe_machine",
    "random_model",
    "read_suite",
    "run_cases",
]

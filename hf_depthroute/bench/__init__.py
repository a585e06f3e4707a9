"""Measured speed and memory of a routed model against its dense base.

`bench` and `bench_shape` time one model; `run_cases` measures a list of cases, such as a suite file describes
(`read_suite`). Results are JSON-ready; `results` and `plots` read them.
"""

from .shapes import SHAPES, dense_view, random_model
from .single import bench, bench_shape
from .suite import Case, read_suite, run_cases
from .timing import describe_machine

__all__ = [
    "SHAPES",
    "Case",
    "bench",
    "bench_shape",
    "dense_view",
    "describe_machine",
    "random_model",
    "read_suite",
    "run_cases",
]

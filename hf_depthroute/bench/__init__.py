"""Measured speed of a routed model against its dense base.

`run_cases` measures a list of cases, and `bench` one of each kind. Results are JSON-ready;
`measurements` reads them.
"""

from .cases import Case
from .suite import bench, run_cases
from .timing import describe_machine
from .variants import dense_view

__all__ = ["Case", "bench", "dense_view", "describe_machine", "run_cases"]

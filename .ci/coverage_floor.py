"""Fail where a coverage report is below the floors:
`python .ci/coverage_floor.py coverage.json`."""

import json
import sys
from pathlib import Path

LINES, BRANCHES = 90.0, 85.0

totals = json.loads(Path(sys.argv[1]).read_text())["totals"]
lines = 100 * totals["covered_lines"] / totals["num_statements"]
branches = 100 * totals["covered_branches"] / totals["num_branches"]
print(
    f"coverage: {lines:.1f} % of lines (at least {LINES:.0f}), {branches:.1f} % of branches (at "
    f"least {BRANCHES:.0f})"
)
sys.exit(lines < LINES or branches < BRANCHES)

"""Pricing a given plan loads no tracer, search or solver."""

from __future__ import annotations

import subprocess
import sys

DECIDING = ("pulp", *(f"meshwright.planner.{room}" for room in ("intra_op", "search", "tracing")))
WRITTEN = """
import sys
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.pricing.stage_costs import StageCoster
print(*sys.modules)
"""


def test_prices_are_made_without_what_decides() -> None:
    command = [sys.executable, "-c", WRITTEN]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "meshwright.planner.pricing.evaluate" in loaded
    assert not [name for name in loaded if name.startswith(DECIDING)]

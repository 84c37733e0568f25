"""Pricing a given plan loads no tracer, search or solver."""

from __future__ import annotations

import subprocess
import sys

import pytest

DECIDING = ("pulp", *(f"meshwright.planner.{room}" for room in ("intra_op", "search", "tracing")))
WRITTEN = """
import sys
from meshwright.planner.pricing.{module} import {name}
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("module", "name"), [("evaluate", "Evaluator"), ("stage_costs", "StageCoster")]
)
def test_prices_are_made_without_what_decides(module: str, name: str) -> None:
    code = WRITTEN.format(module=module, name=name)
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = made.stdout.split()
    assert f"meshwright.planner.pricing.{module}" in loaded
    assert not [name for name in loaded if name.startswith(DECIDING)]

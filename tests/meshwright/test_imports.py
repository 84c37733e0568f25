"""Modules that a process loads: no search for a plan file, no planner for the executor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from meshwright import Overrides
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import net, planned

SEARCH = (
    "meshwright.planner.search",
    "meshwright.planner.drafts",
    "meshwright.planner.alternatives",
    "meshwright.planner.inter_op",
    "meshwright.planner.intra_op",
    "pulp",
    "highspy",
)
PLANNER = (
    *SEARCH, "meshwright.planner.tracing", "meshwright.planner.report",
    "meshwright.planner.pricing",
)  # fmt: skip


def loaded_by(program: str, *arguments: str) -> set[str]:
    """Modules that a fresh process has loaded when the program is done."""
    told = f"{program}\nimport sys\nprint('\\n'.join(['loaded:', *sys.modules]))"
    command = [sys.executable, "-c", told, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.partition("loaded:\n")[2].splitlines())


def within(modules: set[str], rooms: tuple[str, ...]) -> list[str]:
    return sorted(m for m in modules for room in rooms if m == room or m.startswith(f"{room}."))


def test_a_rank_with_a_plan_file_loads_no_search_and_no_solver(tmp_path: Path) -> None:
    planned(net(), overrides=Overrides(num_microbatches=2)).plan.save(tmp_path / "plan.json")
    program = """
import sys
from tests.helpers.tiny import ROWS, batch, net, planned
result = planned(net(), plan=sys.argv[1])
assert float(result.train_step(batch(ROWS))) > 0
assert "nothing was searched" in str(result.report)
"""
    loaded = loaded_by(program, str(tmp_path / "plan.json"))
    assert "meshwright.executor.runtime.runtime" in loaded
    assert within(loaded, SEARCH) == []


@second_tier("a rank with a plan file stays, which runs what the executor has")
def test_the_executor_loads_plans_and_operators_of_the_planner_only() -> None:
    program = """
import pkgutil
from importlib import import_module
import meshwright.executor
for module in pkgutil.walk_packages(meshwright.executor.__path__, "meshwright.executor."):
    import_module(module.name)
"""
    loaded = loaded_by(program)
    assert "meshwright.executor.stages.build" in loaded
    assert within(loaded, PLANNER) == []


@second_tier("a rank with a plan file stays, in a process of its own")
def test_errors_are_imported_without_who_raises_them() -> None:
    names = "InfeasibleError, OverrideError, PlanError, TraceError"
    loaded = loaded_by(f"from meshwright import {names}")
    assert within(loaded, (*SEARCH, "meshwright.planner.tracing", "meshwright.executor")) == []


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    import meshwright

    for name in meshwright.__all__:
        assert getattr(meshwright, name).__name__ == name

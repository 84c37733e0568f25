"""Integer program of a pairwise problem: one state per node, at the least node and edge costs.

    minimise   Σ_n Σ_s c_n(s) x_n(s)  +  Σ_(n,m) Σ_(s,t) c_nm(s,t) e_nm(s,t)
    subject to Σ_s x_n(s) = 1                                 one state per node        (`_one_hot`)
               Σ_t e_nm(s,t) = x_n(s),  Σ_s e_nm(s,t) = x_m(t)  flow on every edge         (`_flow`)
               x ∈ {0,1},  e ≥ 0

An illegal pair has no variable (infinite costs are absent, not large). The linear relaxation is
solved first; the integer program only where it is fractional. HiGHS first, CBC where it is missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pulp

from meshwright.planner.errors import SolverError

HANDING = 0.5  # seconds of handing a program to HiGHS, over those of making it


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The solution of a pairwise problem: the state of each node (`choice`), the objective and the
    bound that was proved (seconds), and the time that it took."""

    choice: Mapping[str, int]
    objective: float
    bound: float
    solver: str
    integral_relaxation: bool
    time_s: float

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the proved bound."""
        return (self.objective - self.bound) / max(abs(self.objective), 1e-30)


def solve_pairwise(
    unary: Mapping[str, np.ndarray],
    pairs: Mapping[tuple[str, str], np.ndarray],
    *,
    time_limit_s: float | None = None,
) -> Certificate | None:
    """Minimise node plus edge costs; None where no finite assignment exists. Raises TimeoutError
    where none was found within the time limit, of which making the program is part."""
    started = time.perf_counter()
    ends_s = math.inf if time_limit_s is None else started + time_limit_s
    finite = [a[np.isfinite(a)] for a in (*unary.values(), *pairs.values())]
    scale = max((float(np.abs(a).max()) for a in finite if a.size), default=1.0) or 1.0
    problem, states = _build(unary, pairs, scale, ends_s)
    if problem is None:
        return None
    handing_s = HANDING * (time.perf_counter() - started)
    name = _run(problem, ends_s, handing_s)
    if problem.status != pulp.LpStatusOptimal:
        return None
    bound = pulp.value(problem.objective) or 0.0
    variables = [x for xs in states.values() for x in xs if x is not None]
    fractional = any(1e-6 < (x.value() or 0.0) < 1 - 1e-6 for x in variables)
    if fractional:
        for x in variables:
            x.cat = pulp.LpInteger
        _run(problem, ends_s, handing_s)
    choice = {node: _chosen(xs) for node, xs in states.items()}
    objective = objective_of(choice, unary, pairs)
    if not np.isfinite(objective):  # a feasible relaxation does not promise an integral solution
        return None
    return Certificate(
        choice=choice,
        objective=objective,
        bound=bound * scale,
        solver=name,
        integral_relaxation=not fractional,
        time_s=time.perf_counter() - started,
    )


def _chosen(variables: Sequence[pulp.LpVariable | None]) -> int:
    """The state whose variable is largest, the first of those."""
    present = {s: x for s, x in enumerate(variables) if x is not None}
    return max(present, key=lambda s: present[s].value() or 0.0)


def objective_of(
    choice: Mapping[str, int],
    unary: Mapping[str, np.ndarray],
    pairs: Mapping[tuple[str, str], np.ndarray],
) -> float:
    """The cost in seconds of an assignment, recomputed from the costs alone."""
    nodes = sum(float(costs[choice[n]]) for n, costs in unary.items())
    return nodes + sum(float(costs[choice[a], choice[b]]) for (a, b), costs in pairs.items())


def _run(problem: pulp.LpProblem, ends_s: float, handing_s: float) -> str:
    """Solve until a `time.perf_counter()`, where handing the program over takes so many seconds;
    the solver's name. Raises TimeoutError where it found nothing."""
    seconds = ends_s - time.perf_counter() - handing_s
    if seconds <= 0:
        raise TimeoutError("no time left to solve the program")
    solver, name = _solver(None if math.isinf(seconds) else seconds)
    problem.solve(solver)
    if problem.status != pulp.LpStatusOptimal and time.perf_counter() >= ends_s:
        raise TimeoutError("the program was not solved in time")
    return name


def _build(
    unary: Mapping[str, np.ndarray],
    pairs: Mapping[tuple[str, str], np.ndarray],
    scale: float,
    ends_s: float,
) -> tuple[pulp.LpProblem | None, dict[str, list[pulp.LpVariable | None]]]:
    problem = pulp.LpProblem("pairwise", pulp.LpMinimize)
    number = {node: i for i, node in enumerate(unary)}
    states: dict[str, list[pulp.LpVariable | None]] = {}
    objective = []
    for node, costs in unary.items():
        legal = {
            s: problem.add_variable(f"x_{number[node]}_{s}", 0, 1)
            for s in np.flatnonzero(np.isfinite(costs)).tolist()
        }
        states[node] = [legal.get(s) for s in range(len(costs))]
        if not legal:
            return None, states
        problem += pulp.lpSum(legal.values()) == 1
        objective += [(x, float(costs[s]) / scale) for s, x in legal.items()]
    for (a, b), costs in pairs.items():
        if time.perf_counter() >= ends_s:
            raise TimeoutError("no time left to make the program")
        name = f"e_{number[a]}_{number[b]}"
        objective += _flow(problem, states[a], states[b], costs, name, scale)
    problem.setObjective(pulp.LpAffineExpression(objective))
    return problem, states


def _flow(
    problem: pulp.LpProblem,
    left: Sequence[pulp.LpVariable | None],
    right: Sequence[pulp.LpVariable | None],
    costs: np.ndarray,
    name: str,
    scale: float,
) -> list[tuple[pulp.LpVariable, float]]:
    rows: list[list[pulp.LpVariable]] = [[] for _ in left]
    columns: list[list[pulp.LpVariable]] = [[] for _ in right]
    terms = []
    for s, x in enumerate(left):
        for t, y in enumerate(right):
            if x is None or y is None or not np.isfinite(costs[s, t]):
                continue
            e = problem.add_variable(f"{name}_{s}_{t}", 0)
            rows[s].append(e)
            columns[t].append(e)
            terms.append((e, float(costs[s, t]) / scale))
    for flows, ends in ((rows, left), (columns, right)):
        for flow, end in zip(flows, ends, strict=True):
            if end is not None:
                problem += pulp.lpSum(flow) == end
    return terms


def _make_silent(time_limit_s: float | None, problem: pulp.LpProblem) -> None:
    """Give a program a HiGHS that prints no banner when PuLP enables its callbacks."""
    import highspy

    base: Any = highspy.Highs

    class Silent(base):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    model = problem.solverModel = Silent()
    model.setOptionValue("output_flag", False)  # of versions that enable callbacks later
    if time_limit_s:
        model.setOptionValue("time_limit", float(time_limit_s))


def _solver(time_limit_s: float | None) -> tuple[pulp.LpSolver, str]:
    """HiGHS through highspy, else CBC, and its name; SolverError where neither is there."""
    for name in ("HiGHS", "PULP_CBC_CMD", "COIN_CMD"):
        solver = getattr(pulp, name, None)
        if solver is None:
            continue
        instance = solver(msg=False, timeLimit=time_limit_s) if time_limit_s else solver(msg=False)
        if instance.available():
            if name == "HiGHS":
                instance.createAndConfigureSolver = partial(_make_silent, time_limit_s)
            return instance, name
    raise SolverError(
        "no LP solver found", way_out="`pip install highspy` (HiGHS), or a CBC binary on the PATH"
    )

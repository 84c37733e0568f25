"""The solved program of a block: its cost over its boundary states, and what it decides there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwright.costmodel.sharding import Placement
from meshwright.planner.intra_op.pairwise import PairwiseProblem, Scope, restricted
from meshwright.planner.intra_op.solvers import Certificate, solve_pairwise
from meshwright.planner.intra_op.time_limit import CORE_S

if TYPE_CHECKING:
    from meshwright.planner.intra_op.program import BlockProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A hub's state: a value waits for its readers in `state`, and in `copy`, made from it once for
    all who read that. Legal only from `source` and for readers of `kinds`, where given."""

    state: Placement
    copy: Placement | None = None
    source: Placement | None = None
    kinds: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class BlockTable:
    """Cost of a block over the states of its boundary nodes `keep`, none less than `bound`, and the
    choice behind each; `changes` are the costs that differ from the program's."""

    program: BlockProgram
    changes: Mapping[Scope, np.ndarray]
    keep: tuple[str, ...]
    costs: np.ndarray
    bound: float
    choices: Mapping[tuple[int, ...], Mapping[str, int]]

    @property
    def proved(self) -> bool:
        """Whether the costs are the least ones: a block too large for that has legal ones."""
        return self.bound >= float(self.costs.min())

    @property
    def problem(self) -> PairwiseProblem:
        """The whole program, with its costs here."""
        return self.program.problem.changed(self.changes)

    def stored(self, index: tuple[int, ...], value: str) -> Placement:
        """State in which a parameter is stored."""
        node = f"parameter:{value}"
        state = self.program.problem.states[node][self.choices[index][node]]
        return state.state if isinstance(state, Wait) else state

    def certify(self, index: tuple[int, ...], time_limit_s: float = CORE_S) -> Certificate | None:
        """The whole program handed to the solver, without elimination: an independent proof; None
        where there is none within the time limit."""
        problem = self.problem
        unary = restricted(problem.unary, dict(zip(self.keep, index, strict=True)))
        try:
            return solve_pairwise(unary, problem.pairs, time_limit_s=time_limit_s)
        except TimeoutError:
            return None

"""Intra-operator planning: the best strategy for every operator of a block on the tensor axis.

The program is the one of `solvers.py`: a node per operator (its strategies), per parameter (how it
is stored) and per value with several readers or across the block's boundary (a hub: how it waits),
an edge wherever a tensor passes. Costs are seconds per micro-batch, forward and backward together;
once-per-step work is spread over the micro-batches.

Readers that want the same state share one re-shard, which no edge can say. So a hub's states are
pairs: the state a value waits in, and one more it is brought to once (`Wait`).

Eliminating all nodes but the boundary's (`elimination.py`) gives the table of the block's cost over
its boundary states. From one data axis or number of micro-batches m to another only few costs of
parameters change,

    c_p(s)                        of parameter p stored as s, on the data axis (`_priced`)
    a_po(s, t) + b_po(s, t) / m   of handing it to operator o as t (`_Stored`)

and those of operators (`_varying_ops`) that meet other ranks' batch on the data axis, or, from one
ep > 1 to another, that exchange copies of tokens or work through them; there, too, of handing them
their matrices. The rest is solved once per program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwright.costmodel.graph import Op
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.operators import Cost, Pricer
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import (
    RP,
    Assignment,
    BlockLayouts,
    Placement,
    R,
    Route,
    Strategy,
    default_state,
    routes,
)
from meshwright.planner.intra_op.elimination import Elimination
from meshwright.planner.intra_op.pairwise import PairwiseProblem, Scope, for_all_pairs, restricted
from meshwright.planner.intra_op.solvers import Certificate, solve_pairwise
from meshwright.planner.intra_op.time_limit import CORE_S, SolverTime


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

    def stored(self, index: tuple[int, ...], value: str) -> Placement:
        """State in which a parameter is stored."""
        node = f"parameter:{value}"
        state = self.program.problem.states[node][self.choices[index][node]]
        return state.state if isinstance(state, Wait) else state

    def certify(self, index: tuple[int, ...], time_limit_s: float = CORE_S) -> Certificate | None:
        """An independent proof: the whole program without elimination; None if the time is over."""
        problem = self.program.problem.changed(self.changes)
        unary = restricted(problem.unary, dict(zip(self.keep, index, strict=True)))
        try:
            return solve_pairwise(unary, problem.pairs, time_limit_s=time_limit_s)
        except TimeoutError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Costs of a parameter: the `states` it may be stored in, one for each of its node's, and
    seconds of moving it to its readers, (..., 2) per micro-batch and per step, as factor `scope`.
    Where several operators read it, `scope` is the node alone."""

    value: str
    states: Sequence[Placement]
    scope: Scope
    moves: np.ndarray

    def factor(self, microbatches: float) -> np.ndarray:
        """Seconds of moving it, per micro-batch."""
        return self.moves[..., 0] + self.moves[..., 1] / microbatches


class BlockProgram:
    """The program of one block on a tensor axis at given rows. The storage of parameters is priced
    by `solve`, for a data-parallel degree and number of micro-batches; so are batches that meet,
    and experts, for the number of ranks that they are shared over (by more than one, if `pricer`
    has so many).

    `inputs` and `outputs` give the states that values crossing the boundary may have.
    `allowed(name, state)` restricts operators (by name, strategies) and values (by name, states)
    beforehand.
    """

    def __init__(
        self,
        pricer: Pricer,
        layouts: BlockLayouts,
        *,
        inputs: Mapping[str, Sequence[Placement]],
        outputs: Mapping[str, Sequence[Placement]],
        allowed: Callable[[str, Strategy | Placement], bool] | None = None,
    ) -> None:
        self.pricer, self.layouts = pricer, layouts
        self.graph, self.block = layouts.graph, layouts.block
        self.inputs, self.outputs = inputs, outputs
        self.allowed = allowed or (lambda name, state: True)
        self.problem = PairwiseProblem()
        self._routes = routes(layouts)
        several, experts = pricer.setting.mesh.ep > 1, layouts.table.has_experts
        self._varying_ops = [
            op
            for op in self.block.ops
            if (several and traits_of(op).experts) or pricer.meets_batch(op)
        ]
        # parameters whose local size depends on how many ranks share the experts out
        self._varying = [v for v in self.block.parameters if several and experts(v)]
        self._assignments = Memo[tuple[int, ...], Assignment]()  # by the states of all nodes
        self._build()
        # states in which a parameter may be stored: replicated, or as some reader takes it
        self.storable = {
            value: sorted({R} | {t for t in self._wanted(value) if t.sharded})
            for value in self.block.parameters
        }
        self._stored = [self._store(value) for value in self.block.parameters]
        self._elimination = Elimination(self.problem, self.boundary_nodes(), self._changing())

    # --- building ---

    def _build(self) -> None:
        for op in self.block.ops:
            self.problem.node(op.name, self.layouts.options(op), self._computing(op, self.pricer))
        for route in self._routes.values():
            self._connect(route)

    def _computing(self, op: Op, pricer: Pricer) -> list[float]:
        """Seconds of an operator, by strategy."""
        return [
            self._seconds(pricer.op_cost(op, s))
            if self.allowed(op.name, s) and self._readable(op, s)
            else np.inf
            for s in self.layouts.options(op)
        ]

    def _seconds(self, cost: Cost | None, microbatches: float = 1) -> float:
        return np.inf if cost is None else cost.seconds(microbatches)

    def _readable(self, op: Op, strategy: Strategy) -> bool:
        """Derived values and buffers are replicated: readable in any state but partial."""
        operands = zip(op.operands, strategy.operands, strict=True)
        return not any(self.layouts.fixed(v) and target.kind == "P" for v, target in operands)

    def _connect(self, route: Route) -> None:
        """Nodes for the stops of a value, and edges on to its readers."""
        value, first = route.value, route.maker is not None and route.result == 0
        source, sources = self._source(route)
        if route.leaves:
            states, hub = self.outputs[value], f"hub:{value}"
            may = [self.allowed(value, s) and (first or s == R) for s in states]
            self.problem.node(hub, states, [0.0 if ok else np.inf for ok in may])
            self._edge(value, source, sources, hub, states)
            source, sources = hub, states
        named = first and not route.crosses
        forced = not all(self.allowed(value, s) for s in {*sources, R})
        if route.shared or (named and route.readers and forced):
            name = f"read:{value}" if route.leaves else f"hub:{value}"
            waits = self._waits(value, sources) if named else self._settled(value, sources)
            may = [not named or self.allowed(value, w.state) for w in waits]
            self.problem.node(name, waits, [0.0 if ok else np.inf for ok in may])
            into = {s: [self._entering(value, s, w) for w in waits] for s in set(sources)}
            self.problem.edge(source, name, np.array([into[s] for s in sources]))
            self._read(value, name, waits)
            return
        for op, i in route.readers:
            self._edge(value, source, sources, op.name, self._targets(op, i))

    def _source(self, route: Route) -> tuple[str, Sequence[Placement]]:
        """The node that a value comes from, and the value's state in each of the node's."""
        if route.maker is not None:
            options = self.layouts.options(route.maker)
            return route.maker.name, [s.results[route.result] for s in options]
        node, states = f"in:{route.value}", self.inputs[route.value]
        self.problem.node(node, states, [0.0] * len(states))
        return node, states

    def _targets(self, op: Op, i: int) -> list[Placement]:
        """States in which an operator takes its operand i, by strategy."""
        return [s.operands[i] for s in self.layouts.options(op)]

    def _wanted(self, value: str) -> Counter[Placement]:
        """States that readers may take a value in, and how many readers each."""
        return Counter(t for op, i in self.layouts.readers[value] for t in {*self._targets(op, i)})

    def _waits(self, value: str, sources: Sequence[Placement]) -> list[Wait]:
        """Any state; with three readers or more also a copy in another, for two that share it."""
        wanted = self._wanted(value)
        states = sorted({*sources, *wanted, R})
        alone = [Wait(state=s) for s in states]
        if len(self.layouts.readers[value]) < 3:
            return alone
        return alone + [w for s in states for w in self._copies(value, s, wanted)]

    def _settled(self, value: str, sources: Sequence[Placement]) -> list[Wait]:
        """The states that `default_state` gives, for values whose state a plan can't name."""
        wanted = self._wanted(value)
        waits: list[Wait] = []
        for s in sorted(set(sources)):
            waits += [Wait(state=s, source=s), *self._copies(value, s, wanted, source=s)]
            if s.sharded:
                waits.append(Wait(state=RP, source=s, kinds=("R", "Rp")))
                waits.append(Wait(state=R, source=s, kinds=("R", "P")))
            if s.kind == "P":
                waits.append(Wait(state=R, source=s))
        return waits

    def _copies(
        self,
        value: str,
        state: Placement,
        wanted: Mapping[Placement, int],
        source: Placement | None = None,
    ) -> list[Wait]:
        """In `state`, and in one more that costs something to make and that several may read."""
        return [
            Wait(state=state, source=source, copy=t)
            for t, readers in sorted(wanted.items())
            if readers > 1 and 0 < self._seconds(self.pricer.reshard(value, state, t)) < np.inf
        ]

    def _entering(self, value: str, source: Placement, wait: Wait) -> float:
        if wait.source not in (None, source):
            return np.inf
        cost = self._seconds(self.pricer.reshard(value, source, wait.state))
        if wait.copy is None:
            return cost
        return cost + self._seconds(self.pricer.reshard(value, wait.state, wait.copy))

    def _read(self, value: str, name: str, waits: Sequence[Wait]) -> None:
        """Edges from a hub to all readers of its value."""
        for op, i in self.layouts.readers[value]:
            targets = self._targets(op, i)
            cost = {t: [self._reading(value, w, t) for w in waits] for t in set(targets)}
            self.problem.edge(name, op.name, np.array([cost[t] for t in targets]).T)

    def _reading(self, value: str, wait: Wait, target: Placement) -> float:
        if wait.kinds and target.kind not in wait.kinds:
            return np.inf
        if target == wait.copy:
            return 0.0
        return self._seconds(self.pricer.reshard(value, wait.state, target))

    def _edge(
        self, value: str, a: str, left: Sequence[Placement], b: str, right: Sequence[Placement]
    ) -> None:
        def seconds(source: Placement, target: Placement) -> float:
            return self._seconds(self.pricer.reshard(value, source, target))

        self.problem.edge(a, b, for_all_pairs(seconds, left, right))

    # --- parameters ---

    def _store(self, value: str) -> _Stored:
        """Add the node of a parameter, over the states in which it is stored."""
        node, readers = f"parameter:{value}", self.layouts.readers[value]
        states = self.storable[value]
        scope: Scope = (node, readers[0][0].name)
        if len(readers) > 1:
            waits = self._shared(value, states)
            self.problem.node(node, waits, np.zeros(len(waits)))
            self._read(value, node, waits)
            states, scope = [wait.state for wait in waits], scope[:1]
            moves = np.array([self._copying(value, wait) for wait in waits])
        else:
            moves = self._handing(value, states, self.pricer)
            self.problem.node(node, states, np.zeros(len(states)))
            self.problem.edge(node, readers[0][0].name, moves[..., 0])
        return _Stored(value=value, states=states, scope=scope, moves=moves)

    def _shared(self, value: str, states: Sequence[Placement]) -> list[Wait]:
        """Storage of a parameter with several readers; where all of them leave its gradient
        partial, it is reduced once per step."""
        wanted = self._wanted(value)
        waits = [w for s in states for w in (Wait(state=s), *self._copies(value, s, wanted))]
        return [*waits, Wait(state=R, copy=RP, kinds=("Rp",))]

    def _handing(self, value: str, states: Sequence[Placement], pricer: Pricer) -> np.ndarray:
        """(states, strategies of the only reader, 2): seconds of `_moving`."""
        (reader,) = self.layouts.readers[value]
        moving = partial(self._moving, value, pricer=pricer)
        return for_all_pairs(moving, states, self._targets(*reader))

    def _moving(
        self, value: str, source: Placement, target: Placement, pricer: Pricer
    ) -> tuple[float, float]:
        """Seconds per micro-batch and per step; a partial gradient is reduced once per step."""
        cost = pricer.reshard(value, source, target, once=True)
        microbatch_s = self._seconds(cost, np.inf)
        return microbatch_s, 0.0 if cost is None else cost.seconds(1) - microbatch_s

    def _copying(self, value: str, wait: Wait) -> tuple[float, float]:
        if wait.copy is None:
            return 0.0, 0.0
        if wait.kinds:
            return self._moving(value, wait.state, wait.copy, self.pricer)
        return self._seconds(self.pricer.reshard(value, wait.state, wait.copy)), 0.0

    def _changing(self) -> set[Scope]:
        """Factors that depend on the data axis, micro-batches or ranks that share experts out."""
        nodes: set[Scope] = {(f"parameter:{stored.value}",) for stored in self._stored}
        nodes |= {(op.name,) for op in self._varying_ops}
        return nodes | {stored.scope for stored in self._stored if self._moves(stored)}

    def _moves(self, stored: _Stored) -> bool:
        """Whether moving a parameter takes other seconds on other axes."""
        return bool(stored.moves[..., 1].any()) or stored.value in self._varying

    def _priced(
        self, pricer: Pricer, allowed: Callable[[str, Placement], bool], m: float
    ) -> dict[Scope, np.ndarray]:
        """Costs of the factors of `_changing`, for m micro-batches."""
        factors: dict[Scope, np.ndarray] = {
            (op.name,): np.array(self._computing(op, pricer)) for op in self._varying_ops
        }
        for stored in self._stored:
            value = stored.value
            if value in self._varying and pricer.setting.mesh.ep != self.pricer.setting.mesh.ep:
                stored = replace(stored, moves=self._handing(value, stored.states, pricer))
            cost = {
                s: self._seconds(pricer.parameter_cost(value, s), m)
                if self.allowed(value, s) and allowed(value, s)
                else np.inf
                for s in dict.fromkeys(stored.states)
            }
            node: Scope = (f"parameter:{value}",)
            factors[node] = np.array([cost[s] for s in stored.states])
            if stored.scope == node:
                factors[node] += stored.factor(m)
            elif self._moves(stored):
                factors[stored.scope] = stored.factor(m)
        return factors

    # --- solving ---

    def solve(
        self,
        pricer: Pricer,
        allowed: Callable[[str, Placement], bool] = lambda value, state: True,
        *,
        microbatches: float | None = None,
        time: SolverTime | None = None,
    ) -> BlockTable | None:
        """The cheapest assignment for every pair of boundary states; None if there is none at all.

        `pricer`, on any data axis with the program's tensor axis and rows, prices parameters and
        experts; `allowed` restricts how they are stored. Once-per-step work is spread over
        `microbatches`, by default the pricer's. A block too large for `time` gets legal states.
        """
        m = microbatches or pricer.step.batch.microbatches
        factors = self._priced(pricer, allowed, m)
        least = self._elimination.solve(factors, time)
        if least is None:
            return None
        return BlockTable(
            program=self,
            changes=factors,
            keep=tuple(self.boundary_nodes()),
            costs=least.costs,
            bound=least.bound,
            choices=least,
        )

    def bound_s(self, pricer: Pricer, time: SolverTime | None = None) -> float:
        """Lower bound on the seconds per micro-batch, without what is paid once per step."""
        factors = self._priced(pricer, lambda value, state: True, np.inf)
        return self._elimination.bound(factors, time)

    def boundary_nodes(self) -> list[str]:
        """Nodes of the block's inputs and outputs with a choice of states, at most one of each."""
        names = [f"in:{v}" for v in self.block.inputs] + [f"hub:{v}" for v in self.block.outputs]
        return [n for n in names if len(self.problem.states[n]) > 1]

    def assignment(self, table: BlockTable, index: tuple[int, ...]) -> Assignment:
        """The solution for given boundary states as strategies and states."""
        choice = table.choices[index]
        key = tuple(choice.values())
        return self._assignments.of(key, lambda: self._assigned(choice))

    def _assigned(self, choice: Mapping[str, int]) -> Assignment:
        picked = {name: self.problem.states[name][s] for name, s in choice.items()}
        chosen = {op.name: picked[op.name] for op in self.block.ops}
        states: dict[str, Placement] = {}
        for route in self._routes.values():
            if route.maker is None:
                continue
            value, source = route.value, chosen[route.maker.name].results[route.result]
            hub = picked.get(f"hub:{value}")
            hub = hub.state if isinstance(hub, Wait) else hub
            targets = self.layouts.targets(value, chosen)
            if route.result > 0 or hub is None or (hub == RP and targets == [RP]):
                states[value] = default_state(source, targets, route.leaves)
            else:  # readers of a replicated value share one re-shard per kind anyway
                states[value] = R if hub == RP and source == R else hub
        for value in self.block.parameters:
            stored = picked[f"parameter:{value}"]
            states[value] = stored.state if isinstance(stored, Wait) else stored
        return Assignment(strategies=chosen, states=states)

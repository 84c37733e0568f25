"""Intra-operator planning: the best strategy for every operator of a block on the tensor axis.

The program is the one of `solvers.py`: a node per operator (its strategies), per parameter (how it is stored)
and per value with several readers or across the block's boundary (a hub: its state), an edge wherever a
tensor passes. Costs are seconds per micro-batch, forward and backward together; once-per-step work is
spread over the micro-batches.

Blocks are almost series-parallel, so nodes with one or two neighbours are eliminated first, exactly:
a node n between a and b becomes the edge min_n(c_an + c_n + c_nb). What is left is the table of the block's
cost over its boundary states; only a core with more neighbours goes to the solver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from costmodel.graph import Block
from costmodel.pricing import Cost, Pricer
from costmodel.strategies import RP, P, Placement, R, Strategy
from planner.layouts import Assignment, BlockLayouts, default_state
from planner.solvers import Certificate, objective_of, solve_pairwise

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """What a block costs on one rank under an assignment, recomputed from the assignment alone.

    `cost` in seconds (see `Cost`); `parameters` local element count of trained parameters, `frozen_bytes` of the rest;
    `saved_bytes` kept for the backward per micro-batch without its inputs; `input_bytes` its inputs.
    """

    cost: Cost
    parameters: float
    frozen_bytes: float
    saved_bytes: float
    input_bytes: float


@dataclass(slots=True)
class PairwiseProblem:
    """Nodes with states, node costs and edge costs (seconds); +inf is illegal."""

    states: dict[str, Sequence[Strategy | Placement]] = field(default_factory=dict)
    unary: dict[str, np.ndarray] = field(default_factory=dict)
    pairs: dict[Pair, np.ndarray] = field(default_factory=dict)

    def node(
        self, name: str, states: Sequence[Strategy | Placement], costs: Sequence[float]
    ) -> None:
        self.states[name] = states
        self.unary[name] = np.asarray(costs, dtype=float)

    def edge(self, a: str, b: str, costs: np.ndarray) -> None:
        if (b, a) in self.pairs:
            self.pairs[b, a] = self.pairs[b, a] + costs.T
        else:
            self.pairs[a, b] = self.pairs.get((a, b), 0.0) + costs


class BlockProgram:
    """The program of one block on a tensor axis at given rows. What is paid once per step (parameters) is
    added by `solve`, for a data-parallel degree and number of micro-batches.

    `inputs` and `outputs` give the states that values crossing the boundary may have. `allowed(name, state)`
    restricts operators (by name, strategies) and values (by name, states) beforehand.
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
        self._build()

    # --- building ---

    def _build(self) -> None:
        made: dict[str, tuple[str, int]] = {}
        for op in self.block.ops:
            options = self.layouts.options(op)
            costs = [
                self._seconds(self.pricer.op_cost(op, s)) + self._slicing(op.operands, s)
                if self.allowed(op.name, s)
                else np.inf
                for s in options
            ]
            self.problem.node(op.name, options, costs)
            made |= {value: (op.name, k) for k, value in enumerate(op.results)}
        for value in self.block.inputs:
            states = self.inputs[value]
            self.problem.node(f"in:{value}", states, [0.0] * len(states))
            self._attach(value, f"in:{value}", lambda s: s)
        for value, (op_name, k) in made.items():
            self._attach(value, op_name, lambda s, k=k: s.results[k])

    def _seconds(self, cost: Cost | None, microbatches: int = 1) -> float:
        return np.inf if cost is None else cost.seconds(microbatches)

    def _slicing(self, operands: Sequence[str], strategy: Strategy) -> float:
        """Derived values and buffers are replicated: readable in any state but partial."""
        for value, target in zip(operands, strategy.operands, strict=True):
            if self.layouts.fixed(value) and target.kind == "P":
                return np.inf
        return 0.0

    def _attach(self, value: str, source: str, state_of: Callable[[object], Placement]) -> None:
        """Connect a value's source node to its readers, through a hub where it has several or leaves."""
        readers = self.layouts.readers.get(value, [])
        leaves = value in self.block.outputs
        sources = [state_of(s) for s in self.problem.states[source]]
        if not leaves and len(readers) <= 1:
            for op, i in readers:
                self._edge(
                    value,
                    source,
                    sources,
                    op.name,
                    [s.operands[i] for s in self.layouts.options(op)],
                )
            return
        hub = f"hub:{value}"
        states = self.outputs[value] if leaves else self._hub_states(value, sources)
        allowed = [0.0 if self.allowed(value, s) else np.inf for s in states]
        self.problem.node(hub, states, allowed)
        self._edge(value, source, sources, hub, states)
        if leaves and len(readers) > 1:
            inner = f"read:{value}"
            inner_states = self._hub_states(value, list(states))
            self.problem.node(inner, inner_states, [0.0] * len(inner_states))
            self._edge(value, hub, states, inner, inner_states)
            hub, states = inner, inner_states
        for op, i in readers:
            self._edge(
                value, hub, states, op.name, [s.operands[i] for s in self.layouts.options(op)]
            )

    def _hub_states(self, value: str, sources: Sequence[Placement]) -> list[Placement]:
        wanted = [
            s.operands[i] for op, i in self.layouts.readers[value] for s in self.layouts.options(op)
        ]
        return sorted(set(sources) | set(wanted) | {R})

    def _edge(
        self, value: str, a: str, left: Sequence[Placement], b: str, right: Sequence[Placement]
    ) -> None:
        cache: dict[tuple[Placement, Placement], float] = {}
        for s, t in itertools.product(set(left), set(right)):
            cache[s, t] = self._seconds(self.pricer.reshard(value, s, t))
        self.problem.edge(a, b, np.array([[cache[s, t] for t in right] for s in left]))

    def _with_parameters(
        self, pricer: Pricer, allowed: Callable[[str, Placement], bool]
    ) -> PairwiseProblem:
        """The program with a node per parameter: how it is stored, what that costs once per step."""
        problem = PairwiseProblem(
            states=dict(self.problem.states),
            unary=dict(self.problem.unary),
            pairs=dict(self.problem.pairs),
        )
        m = pricer.setting.num_microbatches
        for value in self.block.parameters:
            readers = self.layouts.readers[value]
            states = self.stored_states(value)
            costs = [
                self._seconds(pricer.parameter_cost(value, s), m)
                if self.allowed(value, s) and allowed(value, s)
                else np.inf
                for s in states
            ]
            node = f"parameter:{value}"
            problem.node(node, states, costs)
            price = pricer.reshard_parameter if len(readers) == 1 else pricer.reshard
            for op, i in readers:
                right = [s.operands[i] for s in self.layouts.options(op)]
                cache = {
                    (s, t): self._seconds(price(value, s, t), m)
                    for s, t in itertools.product(states, set(right))
                }
                problem.edge(
                    node, op.name, np.array([[cache[s, t] for t in right] for s in states])
                )
        return problem

    def stored_states(self, value: str) -> list[Placement]:
        """States in which a parameter may be stored: replicated, or as some reader takes it."""
        readers = self.layouts.readers[value]
        wanted = {s.operands[i] for op, i in readers for s in self.layouts.options(op)}
        return sorted({R} | {t for t in wanted if t.sharded})

    # --- solving ---

    def solve(
        self, pricer: Pricer, allowed: Callable[[str, Placement], bool] = lambda value, state: True
    ) -> BlockTable | None:
        """The cheapest assignment for every pair of boundary states; None if there is none at all.

        `pricer` prices the parameters; `allowed` restricts how they are stored.
        """
        problem = self._with_parameters(pricer, allowed)
        keep = self.boundary_nodes()
        reduced = eliminate(problem, keep)
        shape = [len(problem.states[name]) for name in keep]
        costs = np.full(shape, np.inf)
        choices: dict[tuple[int, ...], dict[str, int]] = {}
        for index in itertools.product(*map(range, shape)):
            found = reduced.finish(dict(zip(keep, index, strict=True)))
            if found is None:
                continue
            choices[index] = found
            costs[index] = objective_of(found, problem.unary, problem.pairs)
        if not choices:
            return None
        return BlockTable(
            program=self, problem=problem, keep=tuple(keep), costs=costs, choices=choices
        )

    def boundary_nodes(self) -> list[str]:
        """Nodes of the block's inputs and outputs that have a choice of states: at most one of each."""
        names = [f"in:{v}" for v in self.block.inputs] + [f"hub:{v}" for v in self.block.outputs]
        return [n for n in names if len(self.problem.states[n]) > 1]

    def assignment(self, table: BlockTable, index: tuple[int, ...]) -> Assignment:
        """The solution for given boundary states as strategies and states."""
        chosen: dict[str, Strategy] = {}
        states: dict[str, Placement] = {}
        picked = {name: table.problem.states[name][s] for name, s in table.choices[index].items()}
        for op in self.block.ops:
            chosen[op.name] = picked[op.name]  # type: ignore[assignment]
        for op in self.block.ops:
            for value, placement in zip(op.results, chosen[op.name].results, strict=True):
                hub = picked.get(f"hub:{value}")
                targets = self.layouts.targets(value, chosen)
                default = default_state(placement, targets, value in self.block.outputs)
                if not isinstance(hub, Placement) or hub == RP and targets == [RP]:
                    states[value] = default
                else:  # readers of a replicated value share one re-shard per kind anyway
                    states[value] = R if hub == RP and placement == R else hub
        for value in self.block.parameters:
            states[value] = picked[f"parameter:{value}"]  # type: ignore[assignment]
        return Assignment(strategies=chosen, states=states)


@dataclass(slots=True, kw_only=True)
class BlockTable:
    """Cost of a block over the states of its boundary nodes `keep`, and the choice behind each."""

    program: BlockProgram
    problem: PairwiseProblem
    keep: tuple[str, ...]
    costs: np.ndarray
    choices: Mapping[tuple[int, ...], Mapping[str, int]]

    def certify(
        self, index: tuple[int, ...], time_limit_s: float | None = 30.0
    ) -> Certificate | None:
        """The whole program handed to the solver, without elimination: an independent proof."""
        unary = dict(self.problem.unary)
        for name, state in zip(self.keep, index, strict=True):
            unary[name] = np.where(np.arange(len(unary[name])) == state, unary[name], np.inf)
        return solve_pairwise(unary, self.problem.pairs, time_limit_s=time_limit_s)


# --- exact elimination ---------------------------------------------------------------------------


@dataclass(slots=True)
class Reduced:
    """A problem after elimination: the core, and how to get the eliminated nodes back."""

    unary: dict[str, np.ndarray]
    pairs: dict[Pair, np.ndarray]
    steps: list[tuple[str, tuple[str, ...], np.ndarray]]

    def finish(self, fixed: Mapping[str, int]) -> dict[str, int] | None:
        """The best states given those of the fixed nodes; None if no finite assignment exists."""
        choice = dict(fixed)
        core = [name for name in self.unary if name not in fixed]
        if core:
            unary = {
                n: np.where(np.arange(len(c)) == fixed[n], c, np.inf) if n in fixed else c
                for n, c in self.unary.items()
            }
            found = solve_pairwise(unary, self.pairs)
            if found is None:
                return None
            choice = dict(found.choice)
        if not np.isfinite(objective_of(choice, self.unary, self.pairs)):
            return None
        for name, neighbours, best in reversed(self.steps):
            choice[name] = int(best[tuple(choice[n] for n in neighbours)])
        return choice


def eliminate(problem: PairwiseProblem, keep: Sequence[str]) -> Reduced:
    """Fold every node with at most two neighbours, except `keep`, into its neighbours. Exact."""
    unary = {n: c.copy() for n, c in problem.unary.items()}
    around: dict[str, dict[str, np.ndarray]] = {n: {} for n in unary}
    for (a, b), costs in problem.pairs.items():
        around[a][b], around[b][a] = costs, costs.T
    steps: list[tuple[str, tuple[str, ...], np.ndarray]] = []
    queue = [n for n in unary if n not in keep]
    while queue:
        name = queue.pop()
        if name not in unary or len(around[name]) > 2:
            continue
        costs, neighbours = unary.pop(name), list(around[name])
        edges = [around[name][n] for n in neighbours]
        if not neighbours:
            steps.append((name, (), np.asarray(costs.argmin())))
            continue
        if len(neighbours) == 1:
            combined = edges[0] + costs[:, None]
            unary[neighbours[0]] = unary[neighbours[0]] + combined.min(axis=0)
        else:
            combined = (edges[0] + costs[:, None])[:, :, None] + edges[1][:, None, :]
            a, b = neighbours
            merged = combined.min(axis=0)
            around[a][b] = around[a].get(b, 0.0) + merged
            around[b][a] = around[a][b].T
        steps.append((name, tuple(neighbours), combined.argmin(axis=0)))
        for n in neighbours:
            del around[n][name]
            if n not in keep:
                queue.append(n)
    order = {n: i for i, n in enumerate(unary)}
    pairs = {(a, b): m for a in unary for b, m in around[a].items() if order[a] < order[b]}
    return Reduced(unary, pairs, steps)


# --- pricing an assignment -----------------------------------------------------------------------


def price_block(
    pricer: Pricer, layouts: BlockLayouts, assignment: Assignment, inputs: Mapping[str, Placement]
) -> BlockPrice:
    """Cost and memory of a block from its assignment alone, as the executor will run it."""
    block, graph = layouts.block, layouts.graph
    cost = Cost()
    for op in block.ops:
        cost = cost + pricer.op_cost(op, assignment.strategies[op.name])
        for value, placement in zip(
            op.results, assignment.strategies[op.name].results, strict=True
        ):
            state = assignment.states[value]
            targets = layouts.targets(value, assignment.strategies)
            if len(targets) == 1 and value not in block.outputs:
                cost = cost + _moved(pricer, value, placement, targets[0], via=state)
                continue
            cost = cost + _legal(pricer.reshard(value, placement, state), value)
            leaves = value in block.outputs
            cost = cost + _read(pricer, value, state, targets, hub=leaves)
    for value in block.inputs:
        targets = layouts.targets(value, assignment.strategies)
        cost = cost + _read(pricer, value, inputs.get(value, R), targets, hub=True)
    parameters = frozen = 0.0
    for value in block.parameters:
        state = assignment.states[value]
        targets = layouts.targets(value, assignment.strategies)
        alone = all(t == RP for t in targets) or len(layouts.readers[value]) == 1
        price = pricer.reshard_parameter if alone else pricer.reshard
        cost = cost + pricer.parameter_cost(value, state)
        for target in targets:
            cost = cost + _legal(price(value, state, target), value)
        if graph.values[value].requires_grad:
            parameters += pricer.numel(value, state)
        else:
            frozen += pricer.nbytes(value, state)
    return BlockPrice(
        cost=cost,
        parameters=parameters,
        frozen_bytes=frozen,
        saved_bytes=_saved_bytes(pricer, layouts, assignment),
        input_bytes=sum(pricer.nbytes(v, inputs.get(v, R)) for v in block.inputs),
    )


def _legal(cost: Cost | None, value: str) -> Cost:
    if cost is None:
        raise ValueError(f"value {value}: no re-shard exists between the states the plan gives it")
    return cost


def _moved(
    pricer: Pricer, value: str, source: Placement, target: Placement, via: Placement
) -> Cost:
    if via in (source, target):
        return _legal(pricer.reshard(value, source, target), value)
    return _legal(pricer.reshard(value, source, via), value) + _legal(
        pricer.reshard(value, via, target), value
    )


def _read(
    pricer: Pricer, value: str, state: Placement, targets: Sequence[Placement], *, hub: bool
) -> Cost:
    """Re-shards from a value's state to its readers; a boundary value goes through one more state."""
    cost = Cost()
    if hub:
        inner = default_state(state, targets, False)
        cost, state = _legal(pricer.reshard(value, state, inner), value), inner
    for target in targets:
        cost = cost + _legal(pricer.reshard(value, state, target), value)
    return cost


def _saved_bytes(pricer: Pricer, layouts: BlockLayouts, assignment: Assignment) -> float:
    """What autograd keeps: per saved tensor once, views counted with what they view, block inputs and
    parameters left out (they are held anyway)."""
    graph, block, table = layouts.graph, layouts.block, layouts.table
    root: dict[str, str] = {}
    kept: dict[tuple[str, Placement], float] = {}
    for op in block.ops:
        made = table.ops[op.name]
        chosen = assignment.strategies[op.name]
        if made.view and op.operands and op.short not in ("cat", "stack"):
            for value in op.results:
                root[value] = root.get(op.operands[0], op.operands[0])
        if not any(graph.values[r].requires_grad for r in op.results):
            continue
        for i in made.saves:
            value = op.operands[i] if i >= 0 else op.results[-1 - i]
            placement = chosen.operands[i] if i >= 0 else chosen.results[-1 - i]
            base = root.get(value, value)
            if base in block.inputs or value in graph.parameters or layouts.fixed(value):
                continue
            kind = placement if placement.sharded else (P if placement == P else R)
            key = (base, Placement("S") if kind.sharded else kind)
            kept[key] = pricer.nbytes(value, placement)
    return sum(kept.values())

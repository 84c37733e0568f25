"""Operators between dispatch and combine, on copies of tokens that lie in another order where their
experts are; those that can't run so are known from the graph alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules import draws, is_pointwise, traits_of
from meshwright.costmodel.sharding import FactorTable
from meshwright.planner.plan.ranges import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """An operator on copies of tokens: the `dispatch` (by name) that they left from, to how many
    experts, and the operands from outside that must be sent after them."""

    dispatch: str
    experts: int = 0
    sent: frozenset[str] = frozenset()


def legs(
    ops: Sequence[Op], graph: Graph, table: FactorTable, outputs: Sequence[str]
) -> dict[str, Leg]:
    """Every operator of a block from a `dispatch` to its `combine`, by name. Raises `PlanError` for
    one that can't run on copies in another order."""
    by_op: dict[str, Leg] = {}
    experts: dict[str, int] = {}
    travelling: dict[str, Op] = {}  # value -> the dispatch it comes from
    for op in ops:
        sources = {travelling[v].name: travelling[v] for v in op.operands if v in travelling}
        if traits_of(op).experts == "dispatch" and not sources:
            by_op[op.name] = Leg(dispatch=op.name)
            travelling[op.results[0]] = op
            continue
        if not sources:
            if traits_of(op).experts == "product":
                raise refused(op, "its rows come from no dispatch of the same block")
            continue
        source, *others = sources.values()
        if others or traits_of(op).experts == "dispatch":
            raise refused(op, f"it mixes copies of {source.key} with others")
        if traits_of(op).experts == "combine":
            by_op[op.name] = Leg(dispatch=source.name)
            continue
        if traits_of(op).experts == "product":
            count = graph.values[op.operands[1]].shape[0]
            if experts.setdefault(source.name, count) != count:
                raise refused(op, f"another product of these copies has {experts[source.name]}")
        if draws(op):
            raise refused(op, "its mask is by token, and it does not know which it has")
        sent = _sent_after(op, source, travelling, graph, table)
        by_op[op.name] = Leg(dispatch=source.name, sent=sent)
        travelling |= dict.fromkeys(op.results, source)
    for value in outputs:
        if value in travelling:
            raise refused(travelling[value], "its copies are combined in another block")
    for op in ops:
        if op.name in by_op and by_op[op.name].dispatch not in experts:
            raise refused(op, "no grouped product takes its copies")
    return {name: replace(leg, experts=experts[leg.dispatch]) for name, leg in by_op.items()}


def _sent_after(
    op: Op, source: Op, travelling: Mapping[str, Op], graph: Graph, table: FactorTable
) -> frozenset[str]:
    """Operands of an operator on copies that have the copies' dims, and come from outside."""
    chosen = source.operands[1]
    if traits_of(op).experts == "product":
        if op.operands[2] != chosen or op.operands[0] not in travelling:
            raise refused(op, f"it takes other copies, or other experts, than {source.key} sends")
        return frozenset()
    copies = graph.values[chosen].shape
    shapes = {value: graph.values[value].shape for value in (*op.operands, *op.results)}
    inside = [shapes[v] for v in (*op.operands, *op.results) if v in travelling or v in op.results]
    if any(shape[:3] != copies for shape in inside):
        raise refused(op, f"its result has not the copies' dims {list(copies)} in front")
    if not is_pointwise(op):
        if not _by_copy(op, travelling, table):
            raise refused(op, "it does not work on each copy alone")
        return frozenset()
    rank = len(shapes[op.results[0]])
    sent = set()
    for value in op.operands:
        shape = (1,) * (rank - len(shapes[value])) + tuple(shapes[value])
        if value not in travelling and shape[:3] == copies:
            sent.add(value)
        elif shape[:3] != (copies if value in travelling else (1, 1, 1)):
            raise refused(op, f"an operand of shape {shapes[value]} has some of the copies' dims")
    return frozenset(sent)


def _by_copy(op: Op, travelling: Mapping[str, Op], table: FactorTable) -> bool:
    """Whether an operator maps the first three dims of its one travelling operand, and its others
    have none of them."""
    factors = table.ops[op.name]
    first, *more = (k for k, value in enumerate(op.operands) if value in travelling)
    dims = factors.operands[first][:3]
    names = set(chain(*dims))
    others = chain(*(dim for k, dims in enumerate(factors.operands) if k != first for dim in dims))
    return (
        factors.known
        and not more
        and names.isdisjoint(others)
        and all(factors.kinds[name] == "map" for name in names)
        and all(result[:3] == dims for result in factors.results)
    )


def refused(op: Op, why: str) -> PlanError:
    """The error of an operator that can't run on copies away from home."""
    return PlanError(
        f"plan: ep > 1: {op.key} can't run where experts are shared out: {why}; legal between "
        "dispatch and combine: operators that work on each copy alone; or ep=1"
    )

"""A loss in parts: the product that makes logits, what is done to each of them, and their
cross-entropy as one operator, of whose rows a part at a time has logits.

    logits [n, vocab] = steps(x [n, d] · weightᵀ + bias)    loss = Σ or mean cross_entropy(logits)

Its forward keeps x, the weight and one number per row (the logarithm of the row's Σ exponentials);
its backward makes each part's logits again. What moved whole rows of logits (views, slices) moves
rows of x instead.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Graph, Op, Ref, argument, map_refs
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.rules import LOSS_IN_PARTS, SCORES, draws, is_pointwise, traits_of
from meshwright.planner.blocks import blocks_from
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ranges import PlanError

# said where somebody asks for logits
NO_LOGITS = {
    "legal": "outputs without logits, or a plan with chunked_loss=1",
    "way_out": 'go on with replan(Overrides(forbid=["chunked_loss"]))',
}


@dataclass(slots=True, kw_only=True)
class _Tail:
    """Operators from the product that makes logits to their loss: those on `rows` and `steps` on
    single logits, each in order."""

    product: Op
    loss: Op
    rows: list[Op] = field(default_factory=list)
    steps: list[Op] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {op.name for op in (self.product, self.loss, *self.rows, *self.steps)}


def with_loss_in(problem: Problem, parts: int) -> Problem | None:
    """`problem_in` parts; None where the problem has no such loss."""
    try:
        return problem_in(problem, parts)
    except PlanError:
        return None


def problem_in(problem: Problem, parts: int) -> Problem:
    """The problem with its loss in so many parts, 1 for as traced. Raises `PlanError` where it has
    no such loss."""
    graph, factors = in_parts(problem.graph, problem.factors, parts)
    return replace(problem, graph=graph, factors=factors)


def has_parts(problem: Problem) -> bool:
    """Whether the problem's loss is one that can be in parts."""
    try:
        return problem.graph.loss_parts > 1 or bool(_tail(problem.graph, problem.factors))
    except PlanError:
        return False


def in_parts(
    graph: Graph, factors: sharding.FactorTable, parts: int
) -> tuple[Graph, sharding.FactorTable]:
    """A graph with its loss in so many parts, 1 for as traced, and its factors. Raises `PlanError`
    for a graph without such a loss."""
    if parts == graph.loss_parts:
        return graph, factors
    whole = graph.whole or graph
    table = factors if whole is graph else sharding.analyse(whole)
    if parts == 1:
        return whole, table
    changed = _rewritten(whole, table, _tail(whole, table), parts)
    return changed, sharding.analyse(changed)


def graph_for(
    plan: Plan, graph: Graph, factors: sharding.FactorTable
) -> tuple[Graph, sharding.FactorTable]:
    """A model's graph and factors with the loss in the parts of a plan. Raises `PlanError`."""
    return in_parts(graph, factors, plan.chunked_loss)


def check_parts(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` unless a graph has its loss in the parts of a plan."""
    if plan.chunked_loss != graph.loss_parts:
        raise PlanError.refused("plan: chunked_loss", plan.chunked_loss, legal=graph.loss_parts)


def _refused(why: str) -> PlanError:
    return PlanError(
        why,
        place="chunked_loss",
        legal="1; or more, where the loss is the cross-entropy of class numbers and of a product "
        "with a matrix of weights, with nothing between them but functions of single logits",
        way_out="leave chunked_loss out",
    )


# --- what is there --------------------------------------------------------------------------------


def _tail(graph: Graph, table: sharding.FactorTable) -> _Tail:
    """The tail of a graph. Raises `PlanError`."""
    losses = [op for op in graph.ops if (t := traits_of(op).loss) and t.kind == "cross_entropy"]
    if len(losses) != 1:
        raise _refused(f": the model has {len(losses)} cross-entropies, not one")
    (loss,) = losses
    logits = graph.values[loss.operands[0]]
    if argument(loss, 2, "weight", None) is not None or loss.kwargs:
        raise _refused(f": {loss.key} weighs its classes")
    if graph.values[loss.operands[1]].dtype.is_floating_point or len(logits.shape) != 2:
        raise _refused(f": {loss.key} is not of rows of logits with one class each")
    if argument(loss, 3, "reduction", 1) == 0:
        raise _refused(f": {loss.key} does not reduce its rows")
    makers = {result: op for op in graph.ops for result in op.results}
    readers = Counter(v for op in (*graph.ops, *graph.derived) for v in set(op.operands))
    leaving = {*graph.updates.values(), graph.loss}
    rows, steps, value = list[Op](), list[Op](), loss.operands[0]
    while True:
        op = makers.get(value)
        if op is None or readers[value] > 1 or value in leaving:
            raise _refused(f": something else than the loss reads {value}")
        if _is_product(graph, op):
            return _of_block(
                graph, _Tail(product=op, loss=loss, rows=rows[::-1], steps=steps[::-1])
            )
        if len(op.operands) != 1 or len(op.results) != 1:
            raise _refused(f": {op.key} ({op.target}) lies between the product and the loss")
        if _on_rows(graph, table, op):
            rows.append(op)
        elif (is_pointwise(op) or traits_of(op).casts) and not draws(op):
            steps.append(op)
        else:
            raise _refused(f": {op.key} ({op.target}) lies between the product and the loss")
        value = op.operands[0]


def _of_block(graph: Graph, tail: _Tail) -> _Tail:
    """The tail, if one block has it all."""
    homes = [b.name for b in graph.blocks if not tail.names.isdisjoint(op.name for op in b.ops)]
    if len(homes) > 1:
        raise _refused(f": blocks {' and '.join(homes)} share the product and the loss")
    return tail


def _is_product(graph: Graph, op: Op) -> bool:
    """Whether an operator is a plain product of activations with a matrix of weights."""
    product = traits_of(op).product
    if product is None or op.kwargs or len(op.args) != len(op.operands):
        return False
    if product.bias < product.weight and len(op.operands) == 2:
        return False
    sides = {product.weight: 2, product.bias: 1}
    held = {op.operands[k]: dims for k, dims in sides.items() if k < len(op.operands)}
    return all(
        value in graph.parameters and len(graph.values[value].shape) == dims
        for value, dims in held.items()
    )


def _on_rows(graph: Graph, table: sharding.FactorTable, op: Op) -> bool:
    """Whether an operator moves whole rows of logits: their last dim stays as it is."""
    before, after = (graph.values[v] for v in (op.operands[0], op.results[0]))
    if not before.shape or not after.shape or before.dtype != after.dtype:
        return False
    rule, traits = table.ops[op.name], traits_of(op)
    moves = rule.view or traits.copies or traits.stride_bound
    same = rule.operands[0][-1] == rule.results[0][-1]
    return moves and same and before.shape[-1] == after.shape[-1] > 1


# --- what comes in its place ----------------------------------------------------------------------


def _rewritten(graph: Graph, table: sharding.FactorTable, tail: _Tail, parts: int) -> Graph:
    """The graph with one operator in place of the tail, in the same blocks."""
    product = traits_of(tail.product).product
    assert product is not None
    x = tail.product.operands[product.x]
    values, rows = dict(graph.values), dict[str, Op]()
    names = {tail.product.results[0]: x}  # a step's result is what it was made of
    for op in sorted((*tail.rows, *tail.steps), key=graph.ops.index):
        before, after = names[op.operands[0]], op.results[0]
        if op in tail.steps:
            names[after] = before
            continue
        moved = names[after] = f"{after}_of_rows"  # another value than the rows of logits
        shape = (*graph.values[after].shape[:-1], graph.values[x].shape[-1])
        values[moved] = replace(values[x], shape=shape)
        sizes = table.ops[op.name].shape_arg
        rows[op.name] = replace(_moving(op, before, sizes, shape), name=moved, results=(moved,))
    loss = _in_one(graph, tail, names[tail.loss.operands[0]], parts)
    left_out = {op.name for op in (tail.product, *tail.steps)}
    gone = {v for op in (tail.product, *tail.steps, *tail.rows) for v in op.results}
    replaced = rows | {loss.name: loss}
    kept = [[replaced.get(op.name, op) for op in b.ops if op.name not in left_out]
            for b in graph.blocks]  # fmt: skip
    changed = replace(
        graph,
        ops=tuple(op for ops in kept for op in ops),
        values={name: meta for name, meta in values.items() if name not in gone},
        blocks=(),
        outputs=_without(graph, gone),
        whole=graph,
        loss_parts=parts,
    )
    at = itertools.accumulate(map(len, kept), initial=0)
    starts = dict(zip(at, (block.name for block in graph.blocks), strict=False))
    return replace(changed, blocks=blocks_from(changed, starts))


def _moving(op: Op, source: str, sizes: int | None, shape: Sequence[int]) -> Op:
    """An operator on rows of logits, on those of x; the argument `sizes` holds sizes."""
    args: tuple[Any, ...] = (Ref(source), *op.args[1:])
    if sizes is not None and sizes < len(args):
        args = (*args[:sizes], [*args[sizes][:-1], shape[-1]], *args[sizes + 1 :])
    return replace(op, args=args)


def _widened(graph: Graph, steps: Sequence[Op]) -> int:
    """The number of casts at the end that only widen, as the loss does anyway."""
    count = 0
    for op in reversed(steps):
        before, after = (graph.values[v].dtype for v in (op.operands[0], op.results[0]))
        if not traits_of(op).casts or str(after) != "torch.float32" or before.itemsize > 4:
            break
        count += 1
    return count


def _in_one(graph: Graph, tail: _Tail, x: str, parts: int) -> Op:
    """The operator of product, steps and loss: arguments of a cross-entropy where it has them, then
    the weight, the bias, whether it is transposed, the parts, the steps."""
    product, loss = traits_of(tail.product).product, tail.loss
    assert product is not None
    operands = [Ref(value) for value in tail.product.operands]
    kept = tail.steps[: len(tail.steps) - _widened(graph, tail.steps)]
    steps = tuple((op.target, *map_refs((op.args, dict(op.kwargs)), _scores)) for op in kept)
    return replace(
        loss,
        target=f"meshwright.{LOSS_IN_PARTS}.default",
        args=(
            Ref(x),
            Ref(loss.operands[1]),
            None,
            argument(loss, 3, "reduction", 1),
            argument(loss, 4, "ignore_index", -100),
            argument(loss, 5, "label_smoothing", 0.0),
            operands[product.weight],
            operands[product.bias] if len(operands) == 3 else None,
            product.transposed,
            parts,
            steps,
        ),
        module=tail.product.module,
    )


def _scores(name: str) -> str:
    return SCORES


def _without(graph: Graph, gone: set[str]) -> Any:
    """The outputs, of which these are made no more."""
    outputs = graph.outputs
    if outputs is None:
        return None
    return replace(outputs, values=tuple(None if v in gone else v for v in outputs.values))

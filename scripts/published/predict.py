"""The prediction for a row of a published table, by the code that prices plans.

A row names a model by its dims, a cluster by its GPUs and a plan by its degrees. From it come a
traced model (`models.py`), a catalog cluster, a target (`frameworks.py`) and a `Plan`, which is
checked and priced like any other (`plan/check.py`, `pricing/evaluate.py`). What a row leaves open
is assumed and listed; what can't be priced is refused with the reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import lru_cache

from meshwright.costmodel.graph import Block, Graph, Op, Ref, map_refs
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import FactorTable, analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.pricing import Evaluation, Evaluator
from meshwright.planner.tracing import trace
from scripts.published.frameworks import Unpriced
from scripts.published.models import TransformerDims, build
from scripts.published.rows import read_row
from scripts.published.setup import Setup, make_plan

TRACED_LAYERS = 4


def evaluate_row(row: Mapping[str, str]) -> Evaluation:
    """The plan of a published configuration, priced: step time (s) and peak memory (bytes).

    `peak_memory_bytes` is what the framework's allocator holds at most, per stage; the driver's
    context and communication libraries, which no allocator sees, are not in it. `assumptions` lists
    what the row leaves open and how it was taken. Raises `Unpriced` with the reason where a row
    can't be priced.
    """
    try:
        return evaluate(read_row(row))
    except Unpriced:
        raise
    except ValueError as error:  # sizes that no model or node of the catalog has
        raise Unpriced(str(error)) from error


def evaluate(setup: Setup) -> Evaluation:
    """The priced plan of a configuration; of one without micro-batch size or stages per device, the
    fastest power of two, and divisor of a stage's layers, that fit. Raises `Unpriced`."""
    tried = [_price(each) for each in _readings(setup)]
    fitting = [e for e in tried if not any(e.prediction.shortfall_bytes(setup.cluster))]
    return min(fitting, key=lambda e: e.prediction.step_time_s, default=tried[0])


def _readings(setup: Setup) -> list[Setup]:
    """The configurations that a setup may stand for."""
    share, layers = setup.global_batch // setup.dp, setup.dims.layers // setup.pp
    sizes, counts = [setup.micro_batch], [setup.chunks]
    if not setup.micro_batch:
        sizes = [2**k for k in range(share.bit_length()) if share % 2**k == 0]
    if not setup.chunks:
        even = setup.dims.layers % setup.pp == 0
        counts = [n for n in range(1, layers + 1) if n == 1 or (even and layers % n == 0)]
    return [
        dataclasses.replace(setup, micro_batch=size, chunks=count)
        for size in sizes
        for count in counts
        # where it is chosen, as Megatron's scripts want it
        if count in (1, setup.chunks) or share // size % setup.pp == 0
    ]


def _price(setup: Setup) -> Evaluation:
    graph, table = traced(setup.dims, setup.precision)
    plan = make_plan(setup, graph)
    problem = Problem(
        graph=graph,
        factors=table,
        cluster=setup.cluster,
        precision=setup.precision,
        target=setup.framework.target,
    )
    try:
        priced = Evaluator(problem).price(plan)
    except ValueError as error:
        raise Unpriced(str(error)) from error
    prediction = dataclasses.replace(priced.prediction, assumptions=setup.assumptions)
    return dataclasses.replace(priced, prediction=prediction)


@lru_cache(maxsize=64)
def traced(dims: TransformerDims, precision: str) -> tuple[Graph, FactorTable]:
    """The reference model of these dims, cut into blocks, and its factors; of a deep model, some
    layers are traced and the others copied from them."""
    few = TRACED_LAYERS + dims.dense_layers
    if dims.layers > few:
        shallow, _ = _traced(dataclasses.replace(dims, layers=few), precision)
        if sum(block.name.startswith("layers.") for block in shallow.blocks) == few:
            graph = deepen(shallow, "layers", dims.layers)
            return graph, analyse(graph)
    return _traced(dims, precision)


def _traced(dims: TransformerDims, precision: str) -> tuple[Graph, FactorTable]:
    model, example = build(dims)
    graph = trace(model, example, loss_fn=None, batch_size=2, precision=precision)
    table = analyse(graph)
    return cut_blocks(graph, table), table


# --- deep graphs from shallow traces -------------------------------------------------------------


def deepen(graph: Graph, stack: str, count: int) -> Graph:
    """`graph`, whose blocks `stack.0`, `stack.1`, ... are cut, with `count` of them: the last but
    one is copied, with its own parameters. What follows the stack reads the last copy, under the
    names that a full trace would have given.

    Raises ValueError unless there are at least three, the middle ones are one class with one input
    and one output, and `count` is no less than there are.
    """
    numbered = re.compile(rf"{re.escape(stack)}\.\d+")
    places = [k for k, block in enumerate(graph.blocks) if numbered.fullmatch(block.name)]
    if len(places) < 3 or count < len(places):
        raise Unpriced(
            f" has {len(places)} blocks",
            place=f"stack {stack!r}",
            legal=f"three or more to copy from, and no more than the {count} wanted",
            way_out="trace more layers, or ask for more",
        )
    *_, source, last = (graph.blocks[k] for k in places)
    before = graph.blocks[places[-3]]
    same = before.class_id == source.class_id
    if not same or len(source.inputs) != 1 or len(source.outputs) != 1:
        raise Unpriced(
            f"block {source.name} is not one of a chain of equals",
            place=f"stack {stack!r}",
            legal="blocks of one class, each with one input and one output",
            way_out="trace the whole model",
        )
    values, parameters = dict(graph.values), dict(graph.parameters)
    blocks = list(graph.blocks[: places[-1]])
    previous = source.outputs[0]
    for k in range(len(places) - 1, count - 1):
        names = {source.inputs[0]: previous}
        renamed = [*(r for op in source.ops for r in op.results), *source.parameters]
        names |= {name: f"{name}_copy{k}" for name in renamed}
        values |= {names[v]: values[v] for v in renamed}
        parameters |= {
            names[v]: _renumbered(graph.parameters[v], source.name, f"{stack}.{k}")
            for v in source.parameters
        }
        blocks.append(_copy(source, f"{stack}.{k}", names))
        previous = names[source.outputs[0]]
    names = {source.outputs[0]: previous}
    blocks.append(_copy(last, f"{stack}.{count - 1}", names, keep_results=True))
    for v in last.parameters:
        parameters[v] = _renumbered(parameters[v], last.name, f"{stack}.{count - 1}")
    blocks += graph.blocks[places[-1] + 1 :]
    return dataclasses.replace(
        graph,
        values=values,
        parameters=parameters,
        blocks=tuple(blocks),
        ops=tuple(op for block in blocks for op in block.ops),
    )


def _copy(
    block: Block, name: str, names: Mapping[str, str], *, keep_results: bool = False
) -> Block:
    def at(value: str) -> str:
        return names.get(value, value)

    def copied(op: Op) -> Op:
        return dataclasses.replace(
            op,
            name=op.name if keep_results else f"{op.name}_{name}",
            args=map_refs(op.args, lambda value: Ref(at(value))),
            kwargs=map_refs(op.kwargs, lambda value: Ref(at(value))),
            results=tuple(map(at, op.results)),
            key=_renumbered(op.key, block.name, name),
            module=_renumbered(op.module, block.name, name),
        )

    return dataclasses.replace(
        block,
        name=name,
        ops=tuple(map(copied, block.ops)),
        inputs=tuple(map(at, block.inputs)),
        outputs=tuple(map(at, block.outputs)),
        parameters=tuple(map(at, block.parameters)),
    )


def _renumbered(text: str, old: str, new: str) -> str:
    """A name inside of module `old`, moved to module `new`; any other as it is."""
    inside = text == old or text.startswith((f"{old}.", f"{old}:"))
    return new + text[len(old) :] if inside else text

"""The prediction for a row of a published table, by the code that prices plans.

A row names a model by its dims, a cluster by its GPUs and a plan by its degrees. From it come a
traced model (`models.py`), a catalog cluster, a target (`frameworks.py`) and a `Plan`, which is
checked and priced like any other (`plan/check.py`, `pricing/evaluate.py`). What a row leaves open
is assumed and listed; what can't be priced is refused with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import FactorTable, analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.pricing import Evaluation, Evaluator
from meshwright.planner.published.models import TransformerDims, build
from meshwright.planner.published.repeat import deepen
from meshwright.planner.published.rows import read_row
from meshwright.planner.published.setup import Setup, Unpriced, make_plan
from meshwright.planner.tracing import trace

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
        if count == 1 or share // size % setup.pp == 0
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

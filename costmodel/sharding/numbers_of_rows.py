"""The number of rows as a plain number: in a graph as it was where it was traced."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules import is_pointwise
from meshwright.costmodel.sharding.rows import is_number
from meshwright.profiles.inputs import MeshwrightError


def with_numbers_of(graph: Graph, whole: Graph) -> Graph:
    """A graph with the plain numbers of the same model traced at other rows, where they are no
    sizes of tensors: a loss divided by the number of rows is divided by that of the whole batch.
    Raises ValueError where the two are of other operators."""
    old, new = ([op for op in (*g.derived, *g.ops) if _has_numbers(op)] for g in (graph, whole))
    if [op.target for op in old] != [op.target for op in new]:
        raise MeshwrightError(
            f"the model runs other operators on {graph.batch_size} rows than on "
            f"{whole.batch_size}, so that what its loss is divided by can't be told",
            place="num_microbatches",
            legal="1, where the rows of a micro-batch change what is run",
            way_out="num_microbatches=1 keeps the batch together",
        )
    found = {a.name: _with_numbers(a, b) for a, b in zip(old, new, strict=True)}
    return replace(
        graph,
        ops=tuple(found.get(op.name, op) for op in graph.ops),
        derived=tuple(found.get(op.name, op) for op in graph.derived),
        constants={
            name: whole.constants.get(name, x) if x.numel() == 1 else x
            for name, x in graph.constants.items()
        },
        blocks=tuple(
            replace(block, ops=tuple(found.get(op.name, op) for op in block.ops))
            for block in graph.blocks
        ),
    )


def same_numbers(graph: Graph, other: Graph) -> bool:
    """Whether two graphs of a model, traced at other rows, have the same plain numbers where they
    are no sizes of tensors: nothing is divided by the number of rows."""
    return _plain(graph) == _plain(other)


def _plain(graph: Graph) -> list[object]:
    ops = [op for op in (*graph.derived, *graph.ops) if _has_numbers(op)]
    single = [x.item() for x in graph.constants.values() if x.numel() == 1]
    return [*single, *((op.target, [a for a in op.args if is_number(a)]) for op in ops)]


def _has_numbers(op: Op) -> bool:
    """Whether its plain numbers are no sizes."""
    size = {"full": 0, "new_full": 1}.get(op.short)
    single = size is not None and not op.args[size]
    return single or is_pointwise(op) or op.short == "scalar_tensor"


def _with_numbers(op: Op, other: Op) -> Op:
    pairs = zip(op.args, other.args, strict=True)
    return replace(op, args=tuple(b if is_number(b) else a for a, b in pairs))

"""Deep graphs from shallow traces, by copies of one layer's block.

Tracing is the slowest part of planning a deep model, and every layer of a stack traces alike. Here
the last but one of a graph's equal blocks is copied, with its own parameters, until there are as
many as asked for. What follows the stack reads the last copy, under the names that a full trace
would have given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshwright.costmodel.graph import Block, Graph, Op, Ref, map_refs
from meshwright.profiles.inputs import MeshwrightError


def deepen(graph: Graph, stack: str, count: int) -> Graph:
    """`graph`, whose blocks `stack.0`, `stack.1`, ... are cut, with `count` of them.

    Raises ValueError unless there are at least three, the middle ones are one class with one input
    and one output, and `count` is no less than there are.
    """
    numbered = re.compile(rf"{re.escape(stack)}\.\d+")
    places = [k for k, block in enumerate(graph.blocks) if numbered.fullmatch(block.name)]
    if len(places) < 3 or count < len(places):
        raise MeshwrightError(
            f" has {len(places)} blocks",
            place=f"stack {stack!r}",
            legal=f"three or more to copy from, and no more than the {count} wanted",
            way_out="trace more layers, or ask for more",
        )
    *_, source, last = (graph.blocks[k] for k in places)
    before = graph.blocks[places[-3]]
    same = before.class_id == source.class_id
    if not same or len(source.inputs) != 1 or len(source.outputs) != 1:
        raise MeshwrightError(
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
    return replace(
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
        return replace(
            op,
            name=op.name if keep_results else f"{op.name}_{name}",
            args=map_refs(op.args, lambda value: Ref(at(value))),
            kwargs=map_refs(op.kwargs, lambda value: Ref(at(value))),
            results=tuple(map(at, op.results)),
            key=_renumbered(op.key, block.name, name),
            module=_renumbered(op.module, block.name, name),
        )

    return replace(
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

"""Whether a graph that was traced for training computes an evaluation, too."""

from __future__ import annotations

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules import draws, traits_of
from meshwright.executor.errors import StateError


def why_not_evaluable(graph: Graph) -> str:
    """An operator that would compute in evaluation as it does in training, and the way out; empty
    where there is none.

    The graph was traced for training. Dropout, attention's dropout and leaves follow the mode in
    which they run, and norms read their running statistics in evaluation; other random draws do
    not follow it.
    """
    for op in graph.ops:
        if why := _training_only(op):
            return (
                f"eval_step: the model was planned for training, where {op.key} ({op.target}) "
                f"{why}; load full_state_dict() into the model, call .eval(), and evaluate that"
            )
    return ""


def check_evaluable(graph: Graph) -> None:
    """Raise ValueError with `why_not_evaluable`, where there is a reason."""
    if why := why_not_evaluable(graph):
        raise StateError(why)


def _training_only(op: Op) -> str:
    """The operator's difference from evaluation that the trace fixed; empty where there is none."""
    draw = traits_of(op).draw
    if draws(op) and not (draw and draw.training):
        return "draws random numbers"
    return ""

"""Whether a graph that was traced for training computes an evaluation, too."""

from __future__ import annotations

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.rules import draws, takes_batch_statistics, traits_of, updates_statistics
from meshwright.executor.errors import StateError


def why_not_evaluable(graph: Graph, num_microbatches: int = 1) -> str:
    """An operator that would compute in evaluation as it does in training, or of another part of
    the batch than the model itself, and the way out; empty where there is none.

    The graph was traced for training. Dropout, attention's dropout and leaves follow the mode in
    which they run, and norms read their running statistics in evaluation; other random draws do
    not follow it, and a norm without running statistics takes those of each micro-batch.
    """
    for op in graph.ops:
        draw = traits_of(op).draw
        if draws(op) and not (draw and draw.training):
            return (
                f"eval_step: the model was planned for training, where {op.key} ({op.target}) "
                "draws random numbers; load full_state_dict() into the model, call .eval(), and "
                "evaluate that"
            )
        running = updates_statistics(op) or not takes_batch_statistics(op)
        if num_microbatches > 1 and not running:
            return (
                f"eval_step: {op.key} ({op.target}) has no running statistics, so that it takes "
                "those of the batch in evaluation, too, and the plan cuts batches into "
                f"{num_microbatches} micro-batches, each with its own; plan with "
                "overrides=Overrides(num_microbatches=1), or load full_state_dict() into the "
                "model, call .eval(), and evaluate that"
            )
    return ""


def check_evaluable(graph: Graph, num_microbatches: int = 1) -> None:
    """Raise ValueError with `why_not_evaluable`, where there is a reason."""
    if why := why_not_evaluable(graph, num_microbatches):
        raise StateError(why)

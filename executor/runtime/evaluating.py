"""What a graph traced for training can't show of a model in evaluation.

Dropout, of activations and of attention's probabilities, and leaves follow the mode in which they
are run. The rest is as traced: a norm with running statistics takes those of the batch, and a draw
that is no dropout (a uniform number that drops a path, the masks within an LSTM) may be one that
the model makes in training alone.
"""

from __future__ import annotations

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules.traits import draws, traits_of, updates_statistics


def check_evaluable(graph: Graph) -> None:
    """Raise ValueError where an operator would compute what it computes in training."""
    for op in graph.ops:
        if why := _as_in_training(op):
            raise ValueError(
                f"eval_step: the model was planned for training, where {op.key} ({op.target}) "
                f"{why}; load full_state_dict() into the model, call .eval(), and evaluate that"
            )


def _as_in_training(op: Op) -> str:
    if updates_statistics(op):
        return "takes the statistics of the batch and adds them to its buffers"
    draw = traits_of(op).draw
    if draws(op) and not (draw and draw.training):
        return "draws random numbers"
    return ""

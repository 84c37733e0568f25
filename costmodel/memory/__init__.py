"""Bytes: model states, storages, and what autograd keeps of an operator."""

from meshwright.costmodel.memory.gradients import GradientBytes, Reduction, Trained
from meshwright.costmodel.memory.kept import SLICED, Call, keep, kept_tokens
from meshwright.costmodel.memory.optimizers import (
    FUSED,
    NEWTON_SCHULZ,
    Optimizer,
    Sides,
    fused,
    optimizer_named,
)
from meshwright.costmodel.memory.states import (
    ModelStates,
    fixed_bytes,
    frozen_bytes,
    late_bytes,
    model_states,
    working_bytes,
)
from meshwright.costmodel.memory.storage import (
    Held,
    Local,
    Origin,
    Storage,
    compact,
    fresh,
    permuted,
    reshaped,
)

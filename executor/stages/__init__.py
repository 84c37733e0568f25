"""Pipeline stages on a rank: built, run by instruction streams, connected."""

from meshwright.executor.stages.batches import Batches, BatchShape, Given, Rows, look_ups_named
from meshwright.executor.stages.buffers import HeldBuffer
from meshwright.executor.stages.build import Builder, BuiltStage
from meshwright.executor.stages.checked import CheckedPlan, check_evaluable, why_not_evaluable
from meshwright.executor.stages.lowered import LoweredStage, add_totals
from meshwright.executor.stages.optimizer_habits import (
    check_steps_alone,
    chosen_matrices,
    stepped_whole,
)
from meshwright.executor.stages.pipeline import (
    EarlyForwards,
    Keep,
    Observer,
    Phase,
    PipelineRun,
    RunStage,
    Unflushed,
    key_of,
)
from meshwright.executor.stages.rank_parameters import replicated
from meshwright.executor.stages.stage import Pass
from meshwright.executor.stages.user_model import (
    REFUSES_CALLS,
    UserModel,
    check_trains,
    current,
    follow,
)

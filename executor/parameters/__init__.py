"""Parameters as DTensors, their gradients, ZeRO, norms and the loss scale."""

from meshwright.executor.parameters.block_weights import BlockWeights, WeightGather
from meshwright.executor.parameters.compression import Memories
from meshwright.executor.parameters.loss_scale import LossScale, StepGuard
from meshwright.executor.parameters.named_optimizers import BY_NAME, name_of, named_kind
from meshwright.executor.parameters.norms import clip_, norm_share
from meshwright.executor.parameters.optimizer_steps import StepInBackward, UndoableStep, step_alone
from meshwright.executor.parameters.own_optimizers import LAMB, LARS, Muon
from meshwright.executor.parameters.parameters import (
    Home,
    ParameterSpec,
    StageParameter,
    accumulate_grads,
    as_torch,
    expose,
    load,
    local_of,
    make_parameter,
    part_of,
    refresh_frozen,
    shard_gradients,
    wrap_like,
    write_weights,
)
from meshwright.executor.parameters.partial_dtensors import Reduced, reduce_in_optimizers
from meshwright.executor.parameters.reducer import Reducer
from meshwright.executor.parameters.tied import TiedLayout, sum_tied_gradients
from meshwright.executor.parameters.whole_operands import whole_of
from meshwright.executor.parameters.whole_tensors import WholeTensors
from meshwright.executor.parameters.zero3 import (
    check_sharding,
    collect_gradients,
    packed,
    shard_stage,
    unpacked,
)
from meshwright.executor.states_in_files import empty_like, keep_states_in_files

"""The price of a stage: the sums of its blocks, its memory, whether it fits."""

from meshwright.costmodel.stages.course import BlockBytes, StageBytes, Walked, walked
from meshwright.costmodel.stages.offload import (
    Sent,
    blocks_here,
    held_bytes,
    host_bandwidth,
    sent_by_block,
)
from meshwright.costmodel.stages.outer_exchange import STATE_BYTES, OuterExchange
from meshwright.costmodel.stages.peak import (
    HELD,
    InFlight,
    Peak,
    device_peaks,
    fits,
    held_weights,
    late_at,
    room_bytes,
    stage_bytes,
    used_bytes,
)
from meshwright.costmodel.stages.stage import (
    COSTS,
    Beside,
    Passes,
    StageCosts,
    as_rows,
    mixed,
    of_one,
    of_rows,
    stage_costs,
    stage_passes,
)
from meshwright.costmodel.stages.stage_memory import communicator_bytes
from meshwright.costmodel.stages.sums import (
    LATER,
    NO_RECOMPUTE,
    Floats,
    Recompute,
    Sums,
    block_sums,
    parameter_sums,
)

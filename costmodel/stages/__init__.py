"""The price of a stage: the sums of its blocks, its memory, whether it fits."""

from meshwright.costmodel.stages.away import Sent, sent_by_block
from meshwright.costmodel.stages.course import BlockBytes, StageBytes, Walked, walked
from meshwright.costmodel.stages.memory import communicator_bytes, secondary_bytes
from meshwright.costmodel.stages.offload import blocks_here, host_bandwidth
from meshwright.costmodel.stages.peak import (
    InFlight,
    Peak,
    device_peaks,
    fits,
    room_bytes,
    shortfall_bytes,
    stage_bytes,
    used_bytes,
)
from meshwright.costmodel.stages.stage import (
    Beside,
    Passes,
    StageCosts,
    combined,
    of_one,
    of_policy,
    stage_costs,
    stage_passes,
)
from meshwright.costmodel.stages.sums import (
    LATER,
    NO_RECOMPUTE,
    Floats,
    Recompute,
    Sums,
    block_sums,
    in_a_row,
    parameter_sums,
)

__all__ = [
    "LATER", "NO_RECOMPUTE", "Beside", "BlockBytes", "Floats", "InFlight", "Passes", "Peak",
    "Recompute", "Sent", "StageBytes", "StageCosts", "Sums", "Walked", "block_sums", "blocks_here",
    "combined", "communicator_bytes", "device_peaks", "fits", "host_bandwidth", "in_a_row",
    "of_one", "of_policy", "parameter_sums", "room_bytes", "secondary_bytes", "sent_by_block",
    "shortfall_bytes", "stage_bytes", "stage_costs", "stage_passes", "used_bytes", "walked",
]  # fmt: skip

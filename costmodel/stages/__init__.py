"""The price of a stage: the sums of its blocks, its memory, whether it fits."""

from meshwright.costmodel.stages.away import Sent, sent_by_block
from meshwright.costmodel.stages.course import BlockBytes, Peak, StageBytes, course_peaks
from meshwright.costmodel.stages.offload import host_bandwidth, sent_gradients, weights_there
from meshwright.costmodel.stages.peak import (
    fits,
    peak_bytes,
    room_bytes,
    shortfall_bytes,
    stage_bytes,
)
from meshwright.costmodel.stages.stage import (
    Beside,
    HeldBytes,
    Passes,
    StageCosts,
    combined,
    communicator_bytes,
    held_bytes,
    of_one,
    of_policy,
    secondary_bytes,
    stage_costs,
    stage_passes,
)
from meshwright.costmodel.stages.sums import (
    NO_RECOMPUTE,
    Floats,
    Recompute,
    Sums,
    block_sums,
    parameter_sums,
)

__all__ = [
    "NO_RECOMPUTE", "Beside", "BlockBytes", "Floats", "HeldBytes", "Passes", "Peak", "Recompute",
    "Sent", "StageBytes", "StageCosts", "Sums", "block_sums", "combined", "communicator_bytes",
    "course_peaks", "fits", "held_bytes", "host_bandwidth", "of_one", "of_policy",
    "parameter_sums", "peak_bytes", "room_bytes", "secondary_bytes", "sent_by_block",
    "sent_gradients", "shortfall_bytes", "stage_bytes", "stage_costs", "stage_passes",
    "weights_there",
]  # fmt: skip

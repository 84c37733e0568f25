"""The price of a block and of a stage: seconds, saved bytes, peak memory, recompute."""

from meshwright.costmodel.blocks.backward import Moment
from meshwright.costmodel.blocks.course import BlockBytes, Peak, StageBytes, course_peaks
from meshwright.costmodel.blocks.known_steps import KnownSteps
from meshwright.costmodel.blocks.peak import (
    fits,
    peak_bytes,
    room_bytes,
    shortfall_bytes,
    stage_bytes,
)
from meshwright.costmodel.blocks.policies import (
    RECOMPUTE,
    REGATHER,
    REGATHERING,
    in_segments,
    parts_of,
    recomputable,
    segment_policy,
)
from meshwright.costmodel.blocks.price import (
    PassNeeds,
    PassPrice,
    price_block,
    price_pass,
    repeated_by_policy,
)
from meshwright.costmodel.blocks.repeated import Repeated, repeated_ops
from meshwright.costmodel.blocks.stage import (
    HeldBytes,
    StageCosts,
    combined,
    communicator_bytes,
    held_bytes,
    of_one,
    of_policy,
    secondary_bytes,
    stage_costs,
)
from meshwright.costmodel.blocks.sums import (
    NO_RECOMPUTE,
    Floats,
    Recompute,
    Sums,
    block_sums,
    parameter_sums,
)

__all__ = [
    "NO_RECOMPUTE", "RECOMPUTE", "REGATHER", "REGATHERING", "BlockBytes", "Floats", "HeldBytes",
    "KnownSteps", "Moment", "PassNeeds", "PassPrice", "Peak", "Recompute", "Repeated", "StageBytes",
    "StageCosts", "Sums", "block_sums", "combined", "communicator_bytes", "course_peaks", "fits",
    "held_bytes", "in_segments", "of_one", "of_policy", "parameter_sums", "parts_of", "peak_bytes",
    "price_block", "price_pass", "recomputable", "repeated_by_policy", "repeated_ops", "room_bytes",
    "secondary_bytes", "segment_policy", "shortfall_bytes", "stage_bytes", "stage_costs",
]  # fmt: skip

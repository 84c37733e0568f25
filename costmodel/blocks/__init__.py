"""The price of a block: seconds, saved bytes, what recompute repeats."""

from meshwright.costmodel.blocks.backward import Moment
from meshwright.costmodel.blocks.excess import Excess
from meshwright.costmodel.blocks.known_steps import KnownSteps
from meshwright.costmodel.blocks.price import (
    PassNeeds,
    PassPrice,
    Repeats,
    price_block,
    price_pass,
    priced_steps,
    repeated_by_policy,
    repriced,
)
from meshwright.costmodel.blocks.repeated import Repeated, repeated_ops

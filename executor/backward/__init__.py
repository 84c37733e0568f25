"""What a lowered block's backward does apart from autograd's own: repeat operators, put gradients of
weights off."""

from meshwright.executor.backward.deferred import (
    DeferredProduct,
    WeightGradientQueue,
    accumulate,
)
from meshwright.executor.backward.repeated import repeated

__all__ = ["DeferredProduct", "WeightGradientQueue", "accumulate", "repeated"]

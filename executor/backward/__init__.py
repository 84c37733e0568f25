"""What a lowered block's backward does besides autograd's own: operators repeated, gradients of
weights put off."""

from meshwright.executor.backward.deferred import DeferredProduct, WeightGradientQueue, accumulate
from meshwright.executor.backward.repeated import repeated

__all__ = ["DeferredProduct", "WeightGradientQueue", "accumulate", "repeated"]

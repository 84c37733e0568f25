"""What a lowered block's backward does besides autograd's own: operators repeated, gradients of
weights put off, what it reads fetched from host memory."""

from meshwright.executor.backward.away import Away
from meshwright.executor.backward.deferred import DeferredProduct, WeightGradientQueue, accumulate
from meshwright.executor.backward.repeated import repeated

__all__ = ["Away", "DeferredProduct", "WeightGradientQueue", "accumulate", "repeated"]

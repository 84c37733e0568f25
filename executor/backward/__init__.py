"""What a lowered block's backward does besides autograd's own: operators repeated, gradients of
weights put off, what it reads fetched from host memory, products in 8 bits."""

from meshwright.executor.backward.away import Away
from meshwright.executor.backward.deferred import DeferredProduct, WeightGradientQueue, accumulate
from meshwright.executor.backward.eight_bits import EightBitProduct
from meshwright.executor.backward.repeated import repeated

"""Backward of a lowered block beside autograd's own: repeated operators, deferred weight gradients,
reads from host memory, products in 8 bits, leaves that give their operands no gradient."""

from meshwright.executor.backward.away import Away
from meshwright.executor.backward.deferred import DeferredProduct, WeightGradientQueue, accumulate
from meshwright.executor.backward.eight_bits import EightBitExperts, EightBitProduct
from meshwright.executor.backward.gradient_flow import Edge, GradientFlow, edges_of, reached
from meshwright.executor.backward.repeated import repeated

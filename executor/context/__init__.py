"""Tokens that are split over the context axis: attention over them, shifts of them."""

from meshwright.executor.context.attention import ContextAttention

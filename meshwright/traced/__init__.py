"""The user's model as it was traced, and what of it must not change."""

from meshwright.traced.traced_model import TracedModel

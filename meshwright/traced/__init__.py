"""The traced model, and checks that it is unchanged."""

from meshwright.traced.traced_model import TracedModel

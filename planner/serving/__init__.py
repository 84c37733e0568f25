"""Plans to serve a causal language model: what is kept of tokens, seconds of forwards, choices."""

from meshwright.planner.serving.cache import Attention, attentions
from meshwright.planner.serving.choice import Asked, Serving, ServingPlan, Servings
from meshwright.planner.serving.price import Forwards

"""Published measurements: their rows read as plans of reference models, and priced."""

from meshwright.planner.published.frameworks import Unpriced, framework_of, with_experts
from meshwright.planner.published.models import Transformer, TransformerDims
from meshwright.planner.published.moe_layer import GroupedLinear, MoE
from meshwright.planner.published.predict import evaluate, evaluate_row, traced
from meshwright.planner.published.rows import read_row
from meshwright.planner.published.setup import Setup, make_plan, of_layers

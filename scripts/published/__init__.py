"""Published measurements: their rows read as plans of reference models, and priced."""

from scripts.published.frameworks import Unpriced, framework_of, with_experts
from scripts.published.models import Transformer, TransformerDims
from scripts.published.predict import evaluate, evaluate_row, traced
from scripts.published.rows import read_row
from scripts.published.setup import Setup, make_plan, of_layers

"""Prices of given decisions: of blocks, of stages, of a whole plan, simulated."""

from meshwright.planner.pricing.evaluate import (
    Evaluation,
    Evaluator,
    Prediction,
    evaluate,
    price_stages,
)
from meshwright.planner.pricing.stage_costs import Degrees, MeshKey, StageCoster, mesh_key

__all__ = [
    "Degrees", "Evaluation", "Evaluator", "MeshKey", "Prediction", "StageCoster", "evaluate",
    "mesh_key", "price_stages",
]  # fmt: skip

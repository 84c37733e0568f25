"""Prices of given decisions: of blocks, of stages, of a whole plan, simulated."""

from meshwright.planner.pricing.evaluate import (
    Evaluation,
    Evaluator,
    Prediction,
    RehearsedMemory,
    bytes_beside_tensors,
    evaluate,
    price_stages,
)
from meshwright.planner.pricing.stage_costs import Degrees, MeshKey, StageCoster, mesh_key
from meshwright.planner.pricing.work import KINDS_OF_BYTES, Work, priced_work

__all__ = [
    "KINDS_OF_BYTES", "Degrees", "Evaluation", "Evaluator", "MeshKey", "Prediction",
    "RehearsedMemory", "StageCoster", "Work", "bytes_beside_tensors", "evaluate", "mesh_key",
    "price_stages", "priced_work",
]  # fmt: skip

"""Prices of given decisions: of blocks, of stages, of a whole plan, simulated."""

from meshwright.planner.pricing.amounts import Amount, AxisAndKind, step_amounts
from meshwright.planner.pricing.course import bytes_beside_tensors
from meshwright.planner.pricing.evaluate import (
    Evaluation,
    Evaluator,
    Prediction,
    RehearsedMemory,
    evaluate,
    price_stages,
)
from meshwright.planner.pricing.held import MemoryParts, memory_parts
from meshwright.planner.pricing.stage_costs import StageCoster, mesh_of, stage_setting
from meshwright.planner.pricing.terms import PricedTerm, priced_terms, terms_of
from meshwright.planner.pricing.work import KINDS_OF_BYTES, Traffic, Work, priced_work, traffic

__all__ = [
    "KINDS_OF_BYTES", "Amount", "AxisAndKind", "Evaluation", "Evaluator", "MemoryParts",
    "Prediction", "PricedTerm", "RehearsedMemory", "StageCoster", "Traffic", "Work",
    "bytes_beside_tensors", "evaluate", "memory_parts", "mesh_of", "price_stages", "priced_terms",
    "priced_work", "stage_setting", "step_amounts", "terms_of", "traffic",
]  # fmt: skip

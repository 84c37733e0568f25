"""Prices of given decisions: of blocks, of stages, of a whole plan, simulated."""

from meshwright.planner.pricing.course import bytes_beside_tensors
from meshwright.planner.pricing.evaluate import (
    STATELESS,
    Evaluation,
    Evaluator,
    Prediction,
    RehearsedMemory,
    evaluate,
    price_blocks,
    price_stages,
)
from meshwright.planner.pricing.ledger import (
    KINDS_OF_BYTES,
    Ledger,
    Traffic,
    Work,
    priced_terms,
    terms_of,
)
from meshwright.planner.pricing.outer_loop import cluster_of_replica, replica_counts, state_bytes
from meshwright.planner.pricing.priced_stage import PricedStage
from meshwright.planner.pricing.served import served_shortage
from meshwright.planner.pricing.slice_work import attention_part, even_work
from meshwright.planner.pricing.stage_costs import Entered, StageBlocks, StageCoster, stage_blocks

"""Components of a stage on one rank, and the sums over its blocks that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.graph import Block
from costmodel.memory import model_state_bytes
from costmodel.pricing import Pricer, Setting
from costmodel.strategies import Placement
from planner.block_price import BlockPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Components of a stage on one rank; floats, or arrays over (first block, last block + 1).

    Seconds per micro-batch (`*_s`), once per step (`reduce_s`, `optimizer_s`); bytes in all
    (`static_bytes`) and per micro-batch in flight (`activation_bytes`).
    """

    forward_s: Any
    backward_s: Any
    forward_comm_s: Any
    backward_comm_s: Any
    reduce_s: Any
    optimizer_s: Any
    static_bytes: Any
    activation_bytes: Any
    parameters: Any

    def amortised_s(self, num_microbatches: int) -> Any:
        """Seconds per micro-batch with the once-per-step work spread over them."""
        once = (self.reduce_s + self.optimizer_s) / num_microbatches
        return self.forward_s + self.backward_s + once


# sums carried along a chain, in this order; the last one is a maximum
FIELDS = (
    "forward_s", "backward_s", "forward_comm_s", "backward_comm_s", "reduce_s", "optimizer_s",
    "parameters", "frozen_bytes", "saved_bytes", "input_bytes", "again_s", "again_comm_s",
    "again_bytes", "largest_bytes",
)  # fmt: skip


def components(price: BlockPrice, block: Block) -> np.ndarray:
    """One block's contribution to the sums. `again_*` is what full recompute repeats, or no longer
    keeps."""
    c = price.cost
    again = recomputable(block)
    return np.array([
        c.forward_s, c.backward_s, c.forward_comm_s, c.backward_comm_s, c.reduce_s, c.optimizer_s,
        price.parameters, price.frozen_bytes, price.saved_bytes, price.input_bytes,
        c.forward_s * again, c.forward_comm_s * again, price.saved_bytes * again,
        price.saved_bytes * again,
    ])  # fmt: skip


def joined(before: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Sums of two runs of blocks, one after the other."""
    together = before + added
    together[..., -1] = np.maximum(before[..., -1], added[..., -1])
    return together


def parameter_sums(pricer: Pricer, value: str, state: Placement) -> np.ndarray:
    """What one parameter contributes to the sums of each block that reads it."""
    cost = pricer.parameter_cost(value, state)
    trained = pricer.graph.values[value].requires_grad
    own = {
        "reduce_s": cost.reduce_s,
        "optimizer_s": cost.optimizer_s,
        "parameters": pricer.numel(value, state) * trained,
        "frozen_bytes": pricer.nbytes(value, state) * (not trained),
    }
    return np.array([own.get(name, 0.0) for name in FIELDS])


def recomputable(block: Block) -> bool:
    """Whether running a block twice is harmless: not where a forward updates running statistics."""
    return not any(op.short == "batch_norm" and op.args[5] for op in block.ops)


def stage_costs(sums: np.ndarray, setting: Setting, recompute: str) -> StageCosts:
    """Components of a stage from the sums of its blocks (last axis: `FIELDS`)."""
    get = {name: sums[..., k] for k, name in enumerate(FIELDS)}
    again = recompute == "full"
    states = model_state_bytes(
        get["parameters"], precision=setting.precision, zero=setting.zero, dp=setting.dp,
        optimizer=setting.optimizer,
    )  # fmt: skip
    owned = setting.dp if setting.zero else 1
    kept = get["saved_bytes"] + get["input_bytes"]
    return StageCosts(
        forward_s=get["forward_s"],
        backward_s=get["backward_s"] + again * get["again_s"],
        forward_comm_s=get["forward_comm_s"],
        backward_comm_s=get["backward_comm_s"] + again * get["again_comm_s"],
        reduce_s=get["reduce_s"],
        optimizer_s=get["optimizer_s"] / owned,
        static_bytes=states + get["frozen_bytes"] + again * get["largest_bytes"],
        activation_bytes=kept - again * get["again_bytes"],
        parameters=get["parameters"],
    )

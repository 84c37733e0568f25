"""A small GPT on one of four ranks, its ZeRO-3 collectives exact or in quantised blocks.

It learns sequences in which each token follows from the one before. Rank 0 writes, for each way,
the gradients' difference from the exact ones after the first step, and of two ways the losses of
runs from several seeds.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.model import ParallelModel
from meshwright.planner.plan import PlanError
from tests.parity.parity_launch import on_ranks, run_all

RANKS, ROWS, LENGTH, WORDS = 4, 16, 24, 61
STEPS, SEEDS = 40, (1, 2, 3)
TRAINED = ("exact", "both in hops")
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"quantized": "none"},
    "exact in bf16": {"quantized": "none", "precision": "bf16"},
    "weights": {"quantized": "weights"},
    "gradients": {"quantized": "gradients"},
    "both": {"quantized": "both"},
    "both in hops": {"quantized": "both", "hpz": 2},
    "both in bf16": {"quantized": "both", "hpz": 2, "precision": "bf16"},
}


def rows(step: int) -> dict[str, torch.Tensor]:
    """The step's batch: token t+1 is a function of token t."""
    torch.manual_seed(100 + step)
    following = torch.arange(WORDS).mul(17).add(5).remainder(WORDS)
    ids = [torch.randint(WORDS, (ROWS,))]
    for _ in range(LENGTH - 1):
        ids.append(following[ids[-1]])
    tokens = torch.stack(ids, dim=1)
    return {"input_ids": tokens, "labels": tokens}


def model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=64, n_head=4, vocab_size=WORDS, n_positions=LENGTH,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def parallel(seed: int, way: str, plan: Any = None) -> ParallelModel:
    given = {**WAYS[way]}
    precision = given.pop("precision", "fp32")
    decided = Overrides(dp=4, zero=3, dp_shard=4, num_microbatches=2, **{"hpz": 4, **given})
    return auto_parallelize(
        model(seed),
        Cluster.local(RANKS, "cpu", measure=False),
        example_inputs=rows(0),
        global_batch_size=ROWS,
        precision=precision,
        overrides=None if plan else decided,
        plan=plan,
        allow=["quantized"],
        profile=False,
    )


def train(way: str) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": []}
    plan = None
    for seed in SEEDS if way in TRAINED else SEEDS[:1]:
        result = parallel(seed, way, plan)
        plan = result.plan
        optimizer = torch.optim.AdamW(result.parameters(), lr=3e-3)
        losses = []
        for step in range(STEPS if way in TRAINED else 1):
            optimizer.zero_grad()
            losses.append(float(result.train_step(rows(step))))
            if step == 0 and seed == SEEDS[0]:
                grads = {n: p.grad for n, p in result.named_parameters()}
                whole = {n: g.full_tensor() for n, g in grads.items() if g is not None}  # type: ignore[attr-defined]
                KEPT[way] = torch.cat([g.flatten() for g in whole.values()])
            optimizer.step()
        found["losses"].append(losses)
    exact = KEPT["exact in bf16" if "bf16" in way else "exact"]
    found["gradient"] = float((KEPT[way] - exact).norm() / exact.norm())
    found["plan"] = [stage.quantized for stage in plan.stages]  # type: ignore[union-attr]
    return found


KEPT: dict[str, torch.Tensor] = {}


def refused() -> dict[str, Any]:
    """A plan that quantises, where that is not allowed."""
    plan = parallel(1, "both").plan
    try:
        auto_parallelize(
            model(1),
            Cluster.local(RANKS, "cpu", measure=False),
            example_inputs=rows(0),
            global_batch_size=ROWS,
            precision="fp32",
            plan=plan,
            profile=False,
        )
    except PlanError as error:
        return {"said": str(error)}
    return {"said": ""}


def main(folder: Path) -> None:
    work = {way: partial(train, way) for way in WAYS}
    run_all({**work, "refused": refused}, folder, "")


if __name__ == "__main__":
    on_ranks(main)

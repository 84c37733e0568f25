"""The cells of `test_eight_bits.py` on one rank, and small runs that learn.

A GPT learns sequences in which each token follows from the one before. Rank 0 writes the losses by
precision and seed, and the gradients' difference from those in bf16 after the first step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import Cluster, Overrides, auto_parallelize
from tests.executor.parameters.quantized_worker import rows
from tests.parity.eight_bit_cells import CELLS
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_worker import run_cell

RANKS, ROWS, LENGTH, WORDS, STEPS = 4, 16, 24, 64, 25
SEEDS = (1, 2, 3)
WAYS = ("bf16", "fp8", "fp8_rowwise")
KEPT: dict[str, torch.Tensor] = {}


def model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=64, n_head=4, vocab_size=WORDS, n_positions=LENGTH,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def train(precision: str) -> dict[str, Any]:
    runs, plan = [], None
    for seed in SEEDS:
        result = auto_parallelize(
            model(seed),
            Cluster.local(RANKS, "cpu", measure=False),
            example_inputs=rows(0),
            global_batch_size=ROWS,
            precision=precision,
            overrides=None if plan else Overrides(dp=2, tp=2, zero=1, num_microbatches=1),
            plan=plan,
            profile=False,
        )
        plan = result.plan
        optimizer = torch.optim.AdamW(result.parameters(), lr=3e-3)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            losses.append(float(result.train_step(rows(step)).detach()))
            if step == 0 and seed == SEEDS[0]:
                grads = [p.grad for p in result.parameters() if p.grad is not None]
                whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
                KEPT[precision] = torch.cat([g.float().flatten() for g in whole])
            optimizer.step()
        runs.append(losses)
    exact = KEPT["bf16"]
    return {"losses": runs, "gradient": float((KEPT[precision] - exact).norm() / exact.norm())}


def main(folder: Path) -> None:
    work: dict[str, Any] = {cell.name: partial(run_cell, folder, cell) for cell in CELLS}
    run_all(work | {way: partial(train, way) for way in WAYS}, folder, "eight")


if __name__ == "__main__":
    on_ranks(main)

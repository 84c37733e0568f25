"""Train on two hosts. Run the same command on both; HOST is the name of the first one:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/two_hosts.py [FOLDER]

`Cluster.detect` describes the hosts that torchrun started. FOLDER is shared by both hosts and holds
the plan and a checkpoint, so that with `--max-restarts 3` training resumes after a failure.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from meshwright import Cluster, auto_parallelize, distributed

ROWS, WIDTH, STEPS = 16, 64, 6


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole global batch, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.roll(1, dims=1)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    with distributed("nccl" if torch.cuda.is_available() else "gloo"):
        result = auto_parallelize(
            model,
            Cluster.detect(),
            example_inputs=batch(0),
            global_batch_size=ROWS,
            loss_fn=nn.functional.mse_loss,
            precision="fp32",
        )
        optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
        saved = folder / "checkpoint"
        if saved.exists():
            result.load_checkpoint(saved, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = result.train_step(batch(step)).item()
            optimizer.step()
        result.save_checkpoint(saved, optimizer)
        if os.environ["RANK"] == "0":
            result.plan.save(folder / "plan.json")
            print(f"{result.plan.num_ranks} ranks: loss {loss:.4f} after {STEPS} steps")


if __name__ == "__main__":
    main()

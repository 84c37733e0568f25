"""A mixture of experts of your own, shared out over the data axis.

    torchrun --nproc-per-node 2 examples/experts.py

`meshwright.moe.MoE` is a router with gated experts. `ep=2` gives each of two ranks half of the
experts; tokens go to them by all-to-all and come back. Without the override the search decides.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from meshwright import Cluster, Overrides, auto_parallelize, distributed
from meshwright.moe import MoE

ROWS, LENGTH, WIDTH, EXPERTS = 8, 16, 32, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.experts = MoE(hidden=WIDTH, ffn=64, experts=EXPERTS, topk=2)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(x)
        return nn.functional.mse_loss(hidden + self.experts(hidden), targets)


def main() -> None:
    torch.manual_seed(0)
    ranks = int(os.environ["WORLD_SIZE"])
    batch = (torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, WIDTH))
    with distributed("gloo"):
        result = auto_parallelize(
            Model(),
            Cluster.local(ranks, "cpu"),
            example_inputs=batch,
            global_batch_size=ROWS,
            precision="fp32",
            overrides=Overrides(dp=ranks, ep=ranks),
        )
        optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
        losses = [result.train_step(batch, optimizer=optimizer).item() for _ in range(5)]
        parts = {
            name: p.to_local().shape[0]
            for name, p in result.named_parameters()
            if name.endswith("up.weight")
        }
    if int(os.environ["RANK"]) == 0:
        print(f"experts of a rank, of {EXPERTS}: {parts}; loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

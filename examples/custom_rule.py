"""A sharding rule for an operator of your own, in one line.

    torchrun --nproc-per-node 2 examples/custom_rule.py

`mylib::mix` multiplies by a matrix in one opaque call, as a fused kernel would. Without a rule it
runs in full on every rank. The rule names its dims (b and s are rows, h is summed over, o is the
output), so that it splits like a linear layer. Before it is used, the rule is tested in parts on
small random tensors, forward and backward.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from meshwright import Cluster, Overrides, auto_parallelize, distributed, rule

ROWS, LENGTH, WIDTH, INNER = 8, 16, 32, 64


@torch.library.custom_op("mylib::mix", mutates_args=())
def mix(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@mix.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return mix(grad, weight.T.contiguous()), torch.einsum("bsh,bso->ho", x, grad)


mix.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)

rule("mylib::mix", "b s h, h o -> b s o", linear=[[0]], flops=2.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, INNER) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(INNER, WIDTH) / INNER**0.5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(mix(x, self.up))
        return nn.functional.mse_loss(mix(hidden, self.down), targets)


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
            overrides=Overrides(tp=ranks, shardings={"up": "S(1)@tp", "down": "S(0)@tp"}),
        )
        optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            losses.append(result.train_step(batch).item())
            optimizer.step()
        parts = {name: list(p.to_local().shape) for name, p in result.named_parameters()}
    if int(os.environ["RANK"]) == 0:
        print(f"on each of {ranks} ranks: {parts}; loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

"""A state-space model whose scan, a Python loop over the sequence, is a leaf: one node of the
graph, split by channels and by batch.

    state_t = exp(dt_t a) state_{t-1} + dt_t b_t x_t,      y_t = c_t state_t + skip x_t

This is the selective scan of Gu and Dao ("Mamba", 2023), written plainly. A kernel is declared in
the same way, with `result=` if it can't run on fake tensors. Traced operator by operator, each of
s steps would be a dozen nodes; the leaf is one node. Its rule says that channels d and rows b are
independent; the sequence and the states stay whole.

    torchrun --nproc-per-node 4 examples/leaf.py

plans it for dp2 x tp2, trains, and compares the losses with plain PyTorch on one device.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, auto_parallelize, distributed, leaf

VOCAB, WIDTH, INNER, STATES, RANK, LAYERS = 64, 32, 64, 4, 8, 2
BATCH, LENGTH = 8, 12


@leaf(rule="b _ d, b _ d, b _ _, b _ _, d _, d -> b _ d")
def selective_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, skip: Tensor) -> Tensor:
    """x, dt [rows, length, channels]; b, c [rows, length, states]; a [channels, states]."""
    state = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
    made = []
    for t in range(x.shape[1]):
        step = dt[:, t].unsqueeze(-1)
        state = torch.exp(step * a) * state + (step * x[:, t].unsqueeze(-1)) * b[:, t].unsqueeze(1)
        made.append((state * c[:, t].unsqueeze(1)).sum(-1))
    return torch.stack(made, 1) + skip * x


class Mixer(nn.Module):
    """A Mamba block without its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.value, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.select = nn.Linear(INNER, RANK + 2 * STATES, bias=False)
        self.step = nn.Linear(RANK, INNER)
        self.log_a = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(INNER, 1))
        self.skip = nn.Parameter(torch.ones(INNER))
        self.out = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        value = F.silu(self.value(hidden))
        rank, b, c = self.select(value).split([RANK, STATES, STATES], dim=-1)
        dt = F.softplus(self.step(rank))
        y = selective_scan(value, dt, b, c, -torch.exp(self.log_a), self.skip)
        return x + self.out(y * F.silu(self.gate(hidden)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Rows that count upwards from a random number, so that the next token can be learnt."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    ids = (start + torch.arange(LENGTH + 1)) % VOCAB
    return ids[:, :-1], ids[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    with distributed("gloo"):
        planned = auto_parallelize(
            model,
            Cluster.local(int(os.environ["WORLD_SIZE"]), "cpu"),
            example_inputs=batch(0),
            global_batch_size=BATCH,
            precision="fp32",
            overrides=Overrides(dp=2, tp=2, shardings={"layers.*:leaf": "d"}),
        )
        optimizer = torch.optim.AdamW(planned.parameters(), lr=1e-2)
        plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            plain.zero_grad()
            found = planned.train_step(batch(step)).item()
            loss = alone(*batch(step))
            loss.backward()
            losses.append((found, loss.item()))
            optimizer.step()
            plain.step()
    if int(os.environ["RANK"]) == 0:
        notes = [note for note in planned.report.notes if "one node" in note]
        print("\n".join(notes))
        apart = max(abs(found - loss) / loss for found, loss in losses)
        print(
            f"loss {losses[0][0]:.3f} -> {losses[-1][0]:.3f} in {steps} steps on dp2 x tp2; "
            f"largest relative difference from one device {apart:.1e}"
        )


if __name__ == "__main__":
    main()

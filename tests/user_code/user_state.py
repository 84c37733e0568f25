"""Small models whose forward depends on more than tensors of the batch and weights: numbers in the
batch, teachers in inference mode, tensors kept in attributes from step to step."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch.nn import functional as F

from tests.user_code.user_parts import WIDTH, Batch, Stack, UserModel, vectors


class Distilled(Stack):
    """A frozen teacher in inference mode, as a context and as a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(True)

    @torch.inference_mode()
    def taught(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.teacher[:2]:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        soft = self.taught(x).clone()
        with torch.inference_mode():
            softer = self.layers[0](x) * 2
            with torch.inference_mode(mode=False):
                extra = self.layers[1](x)
        loss = F.cross_entropy(super().forward(x), labels)
        return loss + F.mse_loss(extra, soft) + (extra * softer.clone()).mean()


class Annealed(Stack):
    """Numbers in the batch: a weight, a temperature, an exponent."""

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, beta: float, temperature: float, power: int
    ) -> torch.Tensor:
        logits = super().forward(x) / temperature
        penalty = logits.square().mean() * (1.0 - beta) ** power
        return F.cross_entropy(logits, labels) + penalty + beta * logits.mean()


def annealed(rows: int) -> Batch:
    x, labels = vectors(rows)
    beta, temperature = torch.rand(2).tolist()
    return {
        "x": x,
        "labels": labels,
        "beta": beta,
        "temperature": 0.5 + temperature,
        "power": int(torch.randint(1, 4, ())),
    }


class Centred(Stack):
    """Tensors in plain attributes: one replaced by every forward, one written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(WIDTH)
        self.spread = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - self.centre) / self.spread
        with torch.no_grad():
            self.spread.mul_(0.9).add_(x.square().mean(0), alpha=0.1)
        self.centre = 0.9 * self.centre + 0.1 * x.mean(0).detach()
        return super().forward(x)


STATES: Mapping[str, UserModel] = {
    "distilled": UserModel(build=Distilled, batch=vectors),
    "annealed": UserModel(build=Annealed, batch=annealed),
    "centred": UserModel(build=Centred, batch=vectors, loss_fn=F.cross_entropy),
}

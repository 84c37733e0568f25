"""A language model of expert layers in two forms with the same parameters: every expert for every
token, masked, which knows nothing of Meshwright's operators; and the copies sent to experts.

How tokens spread is set by a preference added to the router's logits: none, so that some experts
are more popular; `one`, all tokens to the first experts, the others without any; `even`, by the
token's place, all experts with the same number.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.moe import MoE as LibraryMoE
from meshwright.moe import combine, dispatch, grouped_linear
from tests.models.branching_models import Experts, MoE

VOCAB, SEQUENCE, WIDTH, INNER, EXPERTS, TOPK, LAYERS = 48, 8, 16, 24, 4, 2, 2


def preferences(spread: str) -> torch.Tensor:
    """What is added to the logits [s, E]."""
    if spread == "none":
        return torch.zeros(SEQUENCE, EXPERTS)
    if spread == "one":
        return torch.tensor([6.0, 5.0, -6.0, -6.0]).expand(SEQUENCE, EXPERTS).clone()
    places = torch.arange(SEQUENCE)
    found = torch.full((SEQUENCE, EXPERTS), -6.0)
    found[places, places % EXPERTS] = 6.0
    found[places, (places + 1) % EXPERTS] = 5.0
    return found


class Dense(Experts):
    """The reference form."""

    def __init__(self, spread: str) -> None:
        super().__init__(width=WIDTH, inner=INNER, experts=EXPERTS, topk=TOPK)
        self.register_buffer("preference", preferences(spread))

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        return (self.router(x) + self.preference).softmax(-1)

    def balance(self, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Σ_e (share of tokens) · (mean weight) · E (Switch Transformer, arXiv 2101.03961)."""
        return (chosen.mean((0, 1)) * weights.mean((0, 1))).sum() * EXPERTS

    def chosen(self, weights: torch.Tensor) -> torch.Tensor:
        return (weights >= weights.topk(TOPK).values[..., -1:]).to(weights.dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.probabilities(x)
        chosen = self.chosen(weights)
        inner = F.silu(torch.einsum("bsh,ehf->bsef", x, self.gate))
        inner = inner * torch.einsum("bsh,ehf->bsef", x, self.up)
        inner = inner * (weights * chosen).unsqueeze(-1)
        out = torch.einsum("bsef,efh->bsh", inner, self.down)
        return out, self.balance(weights, chosen)


class Routed(Dense):
    """The form that Meshwright plans."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.probabilities(x)
        kept, experts = weights.topk(TOPK)
        rows = dispatch(x, experts)
        inner = F.silu(grouped_linear(rows, self.gate, experts))
        inner = inner * grouped_linear(rows, self.up, experts) * kept.unsqueeze(-1)
        out = combine(grouped_linear(inner, self.down, experts))
        return out, self.balance(weights, self.chosen(weights))


FORMS: Mapping[str, type[Dense]] = {"dense": Dense, "routed": Routed}


def language_model(form: str, spread: str, seed: int = 0) -> nn.Module:
    """Forms of equal seeds have equal weights."""
    torch.manual_seed(seed)
    model = MoE(vocab=VOCAB, width=WIDTH, layers=LAYERS)
    for layer in model.layers:
        layer.experts = FORMS[form](spread)
    return model


class Library(nn.Module):
    """Two of the library's layers, with nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            LibraryMoE(hidden=WIDTH, ffn=INNER, experts=EXPERTS, topk=TOPK, shared=INNER)
            for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (rows, SEQUENCE), generator=generator)
    return ids, ids.roll(-1, 1)

"""Steps over packed documents under plans, against one device that sees each document alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, auto_parallelize, packed
from tests.parity.parity_reference import difference
from tests.user_code.shapes.shape_runs import MEGATRON, VOCAB, built

LENGTH, ROWS, RANKS = 16, 12, 4
SIZES = (7, 5, 3, 16, 1, 21, 9, 9, 4, 12, 2, 6, 15, 8, 8, 11)
LAYOUTS: Mapping[str, Overrides] = {
    "dp2 tp2": Overrides(dp=2, tp=2, pp=1, num_microbatches=2),
    "pp2 dp2": Overrides(dp=2, tp=1, pp=2, num_microbatches=2, schedule="1f1b"),
}
ON_RANKS = (
    ("llama", "dp2 tp2", "mask"),
    ("llama", "pp2 dp2", "bool"),
    ("gpt2", "dp2 tp2", "bool"),
    ("gpt2", "pp2 dp2", "mask"),
)


def documents() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (size,), generator=drawn) for size in SIZES]


def alone(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
    """The mean loss over all predicted tokens, each document (of a row at most) by itself. The
    shift is written out here, and no label is ignored."""
    losses, count = [], 0
    for ids in (piece for x in given for piece in x.split(LENGTH) if len(piece) > 1):
        logits = model(input_ids=ids[None]).logits[0]
        losses.append(F.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
        count += len(ids) - 1
    return torch.stack(losses).sum() / count


def run(kind: str, layout: str, attention: str) -> dict[str, float]:
    """How far losses and gradients are from those of the documents alone, at worst: of a batch of
    all documents, and of one whose rows are mostly empty."""
    model = built(kind)
    plain = copy.deepcopy(model)
    overrides = LAYOUTS[layout]
    if overrides.tp == 2:
        overrides = replace(overrides, shardings=MEGATRON[kind])
    collate = packed(LENGTH, rows=ROWS, attention=attention)
    result = auto_parallelize(
        model,
        Cluster.local(RANKS, measure=False),
        example_inputs=collate(documents()),
        global_batch_size=ROWS,
        precision="fp32",
        overrides=overrides,
    )
    mine = torch.optim.SGD(result.parameters(), lr=0.5)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    found = {"loss": 0.0, "gradient": 0.0}
    # of three documents most rows are empty: a whole micro-batch counts nothing
    for given in (documents(), documents()[:3]):
        mine.zero_grad()
        reference.zero_grad()
        loss = float(result.train_step(collate(given)))
        wanted = alone(plain, given)
        wanted.backward()
        gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        off = {
            "loss": abs(loss - float(wanted)),
            "gradient": difference(result.runtime.full_gradients(), gradients)[0],
        }
        found = {name: max(found[name], off[name]) for name in found}
        mine.step()
        reference.step()
    return found

"""A small GPT that learns sequences in which each token follows from the one before."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.helpers.stored import stored
from tests.models.models import Case, Traced, traced

LENGTH, WORDS = 24, 61


def rows(step: int, count: int = 16) -> dict[str, torch.Tensor]:
    """The step's batch: token t+1 is a function of token t."""
    torch.manual_seed(100 + step)
    following = torch.arange(WORDS).mul(17).add(5).remainder(WORDS)
    ids = [torch.randint(WORDS, (count,))]
    for _ in range(LENGTH - 1):
        ids.append(following[ids[-1]])
    tokens = torch.stack(ids, dim=1)
    return {"input_ids": tokens, "labels": tokens}


def _gpt() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=WORDS, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


GPT = Case(
    build=_gpt,
    batch=lambda count, step: rows(step, count),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
)


def gpt_of(count: int, precision: str) -> Traced:
    return stored(
        "learned", count, precision, make=lambda: traced(GPT, count, precision),
        models=(sys.modules[__name__],),
    )  # fmt: skip

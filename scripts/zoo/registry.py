"""The registry of the model zoo, and the batches that its models are traced by and trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SMALL, PUBLISHED = "small", "published"
SIZES = (SMALL, PUBLISHED)
VOCAB = 128  # of the small language models
SEQUENCES, IMAGES = 4, 32  # rows per device


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model with a batch to trace it by, and its loss where it has none of its own."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model: where it comes from, how it is built in a size for a number of rows, and how many
    rows of a global batch a device has in published trainings of its kind, about. `refused` is what
    the refusal says of one that can't be traced as it is."""

    library: str
    build: Callable[[str, int], Built]
    rows_per_device: int
    refused: str = ""


ZOO: dict[str, Entry] = {}


def entry(
    name: str, library: str, rows: int = SEQUENCES, refused: str = ""
) -> Callable[[Callable[[str, int], Built]], None]:
    def add(build: Callable[[str, int], Built]) -> None:
        ZOO[name] = Entry(library=library, build=build, rows_per_device=rows, refused=refused)

    return add


# --- batches --------------------------------------------------------------------------------------


def random_numbers() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(7)


def ids(rows: int, length: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (rows, length), generator=random_numbers(), device="cpu")


def pixels(rows: int, side: int, channels: int = 3) -> Tensor:
    return torch.randn(rows, channels, side, side, generator=random_numbers(), device="cpu")


def causal_batch(rows: int, length: int, vocab: int) -> dict[str, Tensor]:
    tokens = ids(rows, length, vocab)
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked_batch(rows: int, length: int, vocab: int) -> dict[str, Tensor]:
    """Inputs with a padding mask."""
    mask = torch.ones(rows, length, dtype=torch.int64, device="cpu")
    mask[-1, length // 2 :] = 0
    return {"attention_mask": mask, **causal_batch(rows, length, vocab)}


def image_batch(rows: int, side: int, classes: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(rows, side), "labels": ids(rows, 1, classes)[:, 0]}

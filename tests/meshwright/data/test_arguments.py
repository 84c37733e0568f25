"""What a loader is given and can't be is refused, with the argument's name, when it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshwright import data_loader
from meshwright.data.arguments import DataError, checked_lengths
from meshwright.profiles.inputs import MeshwrightError
from tests.meshwright.data.feeding import SAMPLES, Tokens, planned_alone


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2.0}, "seed"),
        ({"shuffle": "yes"}, "shuffle"),
        ({"drop_last": None}, "drop_last"),
        ({"collate_fn": 3}, "collate_fn"),
        ({"padding": {"input_ids": "x"}, "buckets": [8]}, "padding"),
        ({"num_workers": -1}, "num_workers"),
        ({"batch_size": 4}, "has no argument batch_size"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"buckets": [8, 4]}, "buckets"),
        ({"buckets": [8], "lengths": [1, 2]}, "lengths"),
        ({"buckets": [8], "lengths": "abc"}, "lengths"),
        ({"buckets": [8], "tokens_per_batch": 0}, "tokens_per_batch"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(given: dict[str, Any], place: str) -> None:
    with pytest.raises(MeshwrightError, match=place) as caught:
        data_loader(Tokens(), planned_alone(), **given)
    assert caught.value.place.startswith("data_loader") and caught.value.legal


@pytest.mark.parametrize("state", [None, {}, {"epoch": -1}, "state", {"seed": "x"}], ids=str)
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    loader = data_loader(Tokens(), planned_alone())
    with pytest.raises(DataError, match="data_loader: state"):
        loader.load_state_dict(state)
    right = loader.state_dict()
    with pytest.raises(DataError, match="has no position"):
        loader.load_state_dict({**right, "position": 10**30})
    loader.load_state_dict(right)


def test_samples_that_make_no_batch_are_told() -> None:
    class Ragged(Tokens):
        def __getitem__(self, number: int) -> Any:
            return torch.zeros(1 + number)

    with pytest.raises(DataError, match="make no batch"):
        next(iter(data_loader(Ragged(), planned_alone())))


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_lengths_may_be_arrays(make: Any) -> None:
    assert list(checked_lengths(make([3] * SAMPLES), SAMPLES)) == [3] * SAMPLES

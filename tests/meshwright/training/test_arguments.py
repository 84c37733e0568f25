"""What `fit` is given and can't be is refused, with the argument's name, before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright import fit
from meshwright.profiles.inputs import MeshwrightError
from tests.helpers.tiny import net
from tests.meshwright.data.feeding import Tokens, batch_of, planned_alone


def sgd(result: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(result.parameters(), lr=0.5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer": torch.optim.SGD}, "optimizer"),
        ({"optimizer": lambda: None}, "optimizer"),
        ({"optimizer": lambda result: 3}, "optimizer returned a int"),
        ({"schedule": 3}, "schedule"),
        ({"schedule": lambda optimizer: None}, "schedule returned a NoneType"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"resume": 1}, "resume"),
        ({"folder": 3}, "folder"),
        ({"log_to": "x" * 300}, "log_to"),
        ({"data": "text"}, "data"),
        ({"data": {"input_ids": 1}}, "data"),
        ({"data": [batch_of(range(8))], "seed": 3}, "seed"),
        ({"evaluation": 3}, "evaluation"),
        ({"model": "model"}, "model"),
        ({"model": net(), "planning": {"batch": 8}}, r"planning=\['batch'\]"),
        ({"model": net(), "planning": 8}, "planning=8"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given: dict[str, Any], says: str) -> None:
    asked = {"model": None, "data": Tokens(), "optimizer": sgd, "steps": 1, **given}
    asked["model"] = planned_alone() if asked["model"] is None else asked["model"]
    with pytest.raises(MeshwrightError, match=says) as caught:
        fit(asked.pop("model"), asked.pop("data"), **asked)
    assert caught.value.legal and caught.value.way_out

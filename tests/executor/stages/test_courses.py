"""Values that decide the course of a forward, looked for in each micro-batch of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.costmodel.sharding import analyse
from meshwright.executor.ranks import single_process
from meshwright.executor.stages import Batches, Given
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.tracing import trace
from tests.helpers import courses, tiny
from tests.helpers.courses import FLAGS, SIZES, Model, batch_of, selects, split


@pytest.mark.parametrize("way", [split, selects])
def test_a_batch_is_served_whose_every_micro_batch_takes_the_course(way: object) -> None:
    sample = batch_of(flags=FLAGS[[0, 2, 0, 2]])
    traced = trace(Model(way), sample, batch_size=2)
    graph = cut_blocks(traced, analyse(traced))
    plan = tiny.plan_for(graph, dp=1, tp=1, global_batch_size=4)
    batches = Batches(plan, graph, single_process(torch.device("cpu"), ()))

    def served(sizes: torch.Tensor, flags: torch.Tensor) -> bool:
        inputs = batches.checked(batch_of(sizes, flags))
        return batches.serves(Given(inputs, local=False))

    assert served(SIZES, sample["flags"]) and served(SIZES.int(), sample["flags"])
    of_sizes = way is split
    assert served(SIZES.flip(0), sample["flags"]) != of_sizes
    assert served(SIZES, sample["flags"].flip(0)) == of_sizes
    assert served(SIZES, FLAGS[[0, 2, 2, 0]]) == of_sizes  # the second micro-batch's alone
    assert f"{Path(courses.__file__).name}:" in str(batches.unserved())  # the user's line

"""Ranks of GPUs with states in host memory, rehearsed: what lies on the device, and in which
order."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import Overrides
from meshwright.executor.rehearsal import Rehearsal
from meshwright.executor.rehearsal.result import STATES, WEIGHTS
from meshwright.profiles.cluster import Cluster
from tests.helpers.tiers import tiered
from tests.helpers.tiny import batch, net, planned

GIVEN = ({"pp": 2}, {"recompute": "none"}, {"recompute": "full"}, {"dp": 2, "zero": 3})
MORE = "the change tier has states under ZeRO-3, and activations of a pipeline"


@pytest.mark.parametrize("zero", tiered((0, 1, 2, 3), {3}.__contains__, MORE))
def test_no_state_is_on_the_device_and_nothing_races(zero: int) -> None:
    result = planned(
        net(),
        cluster=Cluster.from_catalog("rtx-4090", devices_per_node=2),
        profile=False,
        precision="bf16",
        overrides=Overrides(dp=2, zero=zero, num_microbatches=2, offload={"optimizer": 1.0}),
    )
    found = result.rehearse()
    assert not found.mismatches
    numel = result._problem.graph.num_parameters()
    for log in found.logs.values():
        assert log.peak_by_kind.get(STATES, 0) == 0
        # of the weights what is computed with alone, in 16 bits
        assert log.peak_by_kind.get(WEIGHTS, 0) == (0 if zero == 3 else 2 * numel)


@pytest.mark.parametrize("given", tiered(GIVEN, GIVEN[:1].__contains__, MORE))
def test_saved_activations_leave_the_device_as_priced(given: dict[str, Any]) -> None:
    count = 1 if "recompute" in given else 2
    cluster = Cluster.from_catalog("rtx-4090", devices_per_node=count)

    def rehearsed(part: float) -> Rehearsal:
        own = Overrides(**given, num_microbatches=2, offload={"activations": part})
        return planned(
            net(), cluster=cluster, profile=False, precision="bf16", overrides=own,
            example_inputs=batch(256), global_batch_size=2048,
        ).rehearse()  # fmt: skip

    sent, stay = rehearsed(1.0), rehearsed(0.0)
    assert not sent.mismatches
    assert max(sent.peak_bytes) < 0.95 * max(stay.peak_bytes)
    for peak, priced in zip(sent.peak_bytes, sent.priced_bytes, strict=True):
        assert peak == pytest.approx(priced, rel=0.1)

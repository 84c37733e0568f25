"""Objectives and memory margins that contradict the cluster, overrides or a plan: the error says
the numbers, and its way out works."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from meshwright import Cluster, InfeasibleError, Overrides
from tests.helpers.tiny import host, net, planned

FORCED = Overrides(dp=4, zero=0, recompute="none", num_microbatches=1)


def tight() -> Cluster:
    """A host of whose memory the forced plan takes 10/11."""
    on = host(4)
    device = dataclasses.replace(on.device, reserved_bytes=0)
    roomy = dataclasses.replace(on, device=device)
    prediction = planned(net(), 4, cluster=roomy, overrides=FORCED).prediction
    memory = int(1.1 * max(prediction.peak_memory_bytes))
    return dataclasses.replace(on, device=dataclasses.replace(device, memory_bytes=memory))


def test_a_plan_within_the_device_but_not_the_margin_says_the_margin_that_holds() -> None:
    given: dict[str, Any] = {"cluster": tight(), "overrides": FORCED}
    with pytest.raises(InfeasibleError, match=r"memory_margin=0\.\d+ instead of 0\.2") as refused:
        planned(net(), 4, memory_margin=0.2, **given)
    text = str(refused.value)
    said = re.search(r"a plan takes [^,]+ of a device's [^,]+, the margin leaves [^)]+\)", text)
    assert said, text
    margin = float(re.findall(r"memory_margin=(0\.\d+) instead", text)[0])
    assert 0.08 < margin < 0.1  # 1 - 10 / 11
    assert planned(net(), 4, memory_margin=margin, **given).plan.num_microbatches == 1


def test_a_given_plan_beyond_the_margin_is_refused_with_the_way_out() -> None:
    on = tight()
    plan = planned(net(), 4, cluster=on, overrides=FORCED, memory_margin=0.0).plan
    assert planned(net(), 4, cluster=on, plan=plan).plan == plan
    with pytest.raises(InfeasibleError, match=r"plan: takes .* leaves") as refused:
        planned(net(), 4, cluster=on, plan=plan, memory_margin=0.2)
    margin = float(re.findall(r"Way out: memory_margin=(\S+) or", str(refused.value))[0])
    assert planned(net(), 4, cluster=on, plan=plan, memory_margin=margin).plan == plan


@pytest.mark.parametrize("margin", [-0.1, 1.0, 5, "much", True, float("nan")])
def test_a_margin_is_a_part_of_memory(margin: Any) -> None:
    with pytest.raises(ValueError, match=r"memory_margin=.*; legal: .* from 0 to less than 1"):
        planned(net(), 4, memory_margin=margin)


def test_a_margin_leaves_tensors_something() -> None:
    on = host(4)
    device = dataclasses.replace(on.device, reserved_bytes=on.device.memory_bytes // 4)
    on = dataclasses.replace(on, device=device)
    with pytest.raises(ValueError, match=r"tensors are left none; legal: less than 0.75"):
        planned(net(), 4, cluster=on, memory_margin=0.8)


def test_an_objective_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="objective='cheapest'; legal: robust, fastest"):
        planned(net(), 4, objective="cheapest")

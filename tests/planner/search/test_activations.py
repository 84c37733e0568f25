"""Activations go to host memory where nothing fits without, or where it pays, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright import Overrides, ParallelModel, auto_parallelize
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.profiles.cluster import Cluster
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import net, planned, with_stage
from tests.planner.search.test_offload import gpus

FREE = {"link_bandwidth": 1e15, "memory_bandwidth": 1e16}
SLOW = {"link_bandwidth": 1e6, "memory_bandwidth": 1e6}


def on(cluster: Cluster, **overrides: object) -> ParallelModel:
    own = Overrides(num_microbatches=1, **overrides)  # type: ignore[arg-type]
    return planned(net(), cluster=cluster, profile=False, overrides=own, memory_margin=0.0)


def part(result: ParallelModel) -> float:
    return result.plan.stages[0].offload.get("activations", 0.0)


@pytest.fixture(scope="module")
def roomy() -> ParallelModel:
    return on(gpus(2**33))


def peak(result: ParallelModel, **changes: object) -> int:
    """Bytes of a device of the plan with changes to its stage."""
    plan = with_stage(result.plan, **changes)
    return Evaluator(result._problem).price(plan).prediction.peak_memory_bytes[0]


def test_activations_stay_on_devices_that_have_room(roomy: ParallelModel) -> None:
    assert part(roomy) == 0
    assert '"offload"' not in roomy.plan.to_json()


def test_no_more_goes_to_a_host_at_no_cost_than_saves_recompute(roomy: ParallelModel) -> None:
    both = [peak(roomy, recompute="none", offload={"activations": f} if f else {}) for f in (0, 1)]
    cluster = gpus(sum(both) // 2, **FREE)
    result = on(cluster)
    own = part(result)
    assert set(result.plan.stages[0].policies) == {"none"}
    assert 0 < own < 1
    assert result.plan.stages[0].offload == {"activations": own}
    blocks = len(result.plan.stages[0].blocks)
    less = peak(result, offload={"activations": own - 1 / blocks} if own > 1 / blocks else {})
    assert less > cluster.device.memory_bytes >= result.prediction.peak_memory_bytes[0]
    without = on(cluster, forbid=["offload"])
    assert result.prediction.step_time_s < without.prediction.step_time_s
    said = str(result.report)
    assert f"activations of {own:.0%} of the blocks in host memory" in said
    row = result.report.to_dict()["stages"][0]
    assert row["offload"] == {"activations": own}
    assert row["host_bytes"] == result.prediction.host_memory_bytes[0] > 0
    assert Plan.from_json(result.plan.to_json()) == result.plan


def test_a_slow_link_does_not_pay(roomy: ParallelModel) -> None:
    both = [peak(roomy, recompute="none", offload={"activations": f} if f else {}) for f in (0, 1)]
    assert part(on(gpus(sum(both) // 2, **SLOW))) == 0


def test_where_nothing_fits_they_go_to_the_host_however_slow(roomy: ParallelModel) -> None:
    everything = {"optimizer": 1.0, "weights": 1.0, "activations": 1.0}
    room = peak(roomy, recompute="full", offload=everything)
    more = peak(roomy, recompute="full", offload={"optimizer": 1.0, "weights": 1.0})
    cluster = gpus((room + more) // 2, **SLOW)
    free = {"dp": 1, "segments": 1}
    result = on(cluster, **free)
    assert part(result) > 0
    assert result.prediction.peak_memory_bytes[0] <= cluster.device.memory_bytes
    with pytest.raises(InfeasibleError, match="does not fit"):
        on(cluster, forbid=["offload"], **free)


def test_a_user_decides(roomy: ParallelModel) -> None:
    forced = on(gpus(2**33), offload={"activations": 0.5})
    assert part(forced) == 0.5
    assert forced.prediction.step_time_s > roomy.prediction.step_time_s
    assert sum(forced.prediction.host_memory_bytes) > 0
    assert part(on(gpus(2**33), offload={"activations": 0})) == 0


def test_what_is_not_known_contradicts_or_is_not_priced_is_refused(roomy: ParallelModel) -> None:
    with pytest.raises(OverrideError, match="override offload: activations=2; legal: a part"):
        Overrides(offload={"activations": 2})
    with pytest.raises(OverrideError, match="contradicts forbid='offload'"):
        Overrides(offload={"activations": 1}, forbid=["offload"])
    with pytest.raises(OverrideError, match=r"says nothing of its hosts' memory"):
        on(replace(gpus(2**33), host=None), offload={"activations": 0.5})
    with pytest.raises(OverrideError, match="target 'megatron' is not priced with it"):
        given = Overrides(offload={"activations": 0.5})
        planned(net(), cluster=gpus(2**33), profile=False, target="megatron", overrides=given)
    plan = with_stage(roomy.plan, offload={"activations": 1.0})
    with pytest.raises(InfeasibleError, match=r"of a node's host memory, \S+ [KM]iB more"):
        planned(net(), cluster=gpus(2**33, host_bytes=2**10), profile=False, plan=plan)
    with pytest.raises(PlanError, match="legal: optimizer, weights, activations"):
        with_stage(roomy.plan, offload={"inputs": 1.0})
        planned(net(), cluster=gpus(2**33), profile=False,
                plan=with_stage(roomy.plan, offload={"inputs": 1.0}))  # fmt: skip


@second_tier("of its size; a small net's activations go there in the tests above")
def test_a_sequence_of_131072_tokens_on_one_card_of_24_gb() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=1024, intermediate_size=2816, num_hidden_layers=48,
        num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=2**17,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(1, 2**17, dtype=torch.long)
    card = Cluster.from_catalog("rtx-4090", devices_per_node=1)

    def run(**given: object) -> ParallelModel:
        return auto_parallelize(
            model, card, example_inputs={"input_ids": ids, "labels": ids}, global_batch_size=1,
            profile=False, overrides=Overrides(**given),  # type: ignore[arg-type]
        )  # fmt: skip

    result = run()
    assert part(result) > 0.5
    assert max(result.prediction.peak_memory_bytes) <= card.device.memory_bytes
    with pytest.raises(InfeasibleError):
        run(offload={"optimizer": 1.0})

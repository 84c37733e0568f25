"""Optimizer states go to host memory where nothing fits without, or where it pays, and no more."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Overrides, ParallelModel, auto_parallelize
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.offload import parts, trained_sizes
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.search.offload import held_by_flash, held_by_hosts
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import cluster, linears, problem_of
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import net, planned, with_stage

LARGE = second_tier("of its size; a small net's states and weights go there, too")
SPEED = {"nvme_read_bandwidth": 2e9, "nvme_write_bandwidth": 1e9}
FLASH = {"nvme_bytes": 2**30, **SPEED}
LLAMA_BYTES = 8.03e9 * 16  # of AdamW's states with their gradients, in host memory


def gpus(room_bytes: int, *, count: int = 1, host_bytes: int = 2**40, **host: float) -> Cluster:
    """GPUs with so much for tensors, and hosts with so much memory."""
    base = Cluster.from_catalog("rtx-4090", devices_per_node=count)
    assert base.host is not None
    device = replace(base.device, memory_bytes=room_bytes, reserved_bytes=0, communicator_bytes=0)
    return replace(base, device=device, host=replace(base.host, memory_bytes=host_bytes, **host))


def on(cluster: Cluster, **overrides: object) -> ParallelModel:
    own = Overrides(**overrides)  # type: ignore[arg-type]
    return planned(net(), cluster=cluster, profile=False, overrides=own, memory_margin=0.0)


def part(result: ParallelModel) -> float:
    return result.plan.stages[0].offload.get("optimizer", 0.0)


@pytest.fixture(scope="module")
def roomy() -> ParallelModel:
    return on(gpus(2**33))


def least(result: ParallelModel, given: float, recompute: str = "full") -> int:
    """Bytes of tensors of the plan with so much of the states in host memory, everything
    recomputed so and in the smallest micro-batches."""
    problem = result._problem
    plan = replace(result.plan, num_microbatches=result.plan.global_batch_size)
    plan = with_stage(plan, offload={"optimizer": given} if given else {}, recompute=recompute)
    return Evaluator(problem).price(plan).prediction.peak_memory_bytes[0]


def test_what_hosts_and_flash_hold_by_hand() -> None:
    """AdamW's states with weight and gradient in fp32 are 16 bytes, in files 12."""
    of = linears(64, 2, 4)
    numel = of.graph.num_parameters()
    on = cluster(2, nodes=3)
    assert on.host is not None
    host = replace(on.host, memory_bytes=numel, nvme_bytes=4 * numel, **SPEED)

    def search(**changes: Any) -> Search:
        whole = replace(on, host=replace(host, **changes))
        return Search(problem_of(of, whole), 4, Overrides())

    assert held_by_hosts(search()) == pytest.approx(3 * numel / (16 * numel))
    assert held_by_hosts(search(memory_bytes=6 * numel)) == 1
    assert held_by_flash(search()) == pytest.approx(3 * 4 * numel / (12 * numel))
    assert held_by_flash(search(nvme_bytes=0)) == 0


def test_states_stay_on_devices_that_have_room(roomy: ParallelModel) -> None:
    assert part(roomy) == 0
    assert '"offload"' not in roomy.plan.to_json()
    assert "host memory" not in str(roomy.report)


def test_no_more_goes_to_the_host_than_must(roomy: ParallelModel) -> None:
    room = (3 * least(roomy, 0.0, "none") + least(roomy, 1.0, "none")) // 4
    result = on(gpus(room), recompute="none")
    own = part(result)
    assert 0 < own < 1
    evaluator, memory = Evaluator(result._problem), result._problem.cluster.device.memory_bytes
    choices = parts(trained_sizes(result.plan.stages[0], result._problem.graph))
    less = choices[choices.index(own) - 1]
    there = result.plan.stages[0].offload
    peaks = [
        evaluator.price(with_stage(result.plan, offload={**there, "optimizer": p})).prediction
        for p in (less, own)
    ]
    assert peaks[0].peak_memory_bytes[0] > memory >= peaks[1].peak_memory_bytes[0]
    said = str(result.report)
    assert f"{own:.0%} of the optimizer states in host memory" in said
    row = result.report.to_dict()["stages"][0]
    assert row["offload"] == {"optimizer": own}
    assert row["host_bytes"] == pytest.approx(own * result._problem.graph.num_parameters() * 16)
    assert any("fused" in line for line in result.report.assumptions)
    assert Plan.from_json(result.plan.to_json()) == result.plan


def test_who_forbids_it_hears_what_lacks(roomy: ParallelModel) -> None:
    room = (least(roomy, 0.0) + least(roomy, 1.0)) // 2
    with pytest.raises(InfeasibleError, match="does not fit"):
        on(gpus(room), forbid=["offload"])


def test_a_host_that_is_too_small_is_named_with_what_it_lacks(roomy: ParallelModel) -> None:
    room = (least(roomy, 0.0) + 3 * least(roomy, 1.0)) // 4
    with pytest.raises(InfeasibleError, match=r"for all of them a host lacks \S+ [KM]iB") as error:
        on(gpus(room, host_bytes=2**12))
    assert "of the optimizer states in host memory nothing fits, either" in str(error.value)
    with pytest.raises(InfeasibleError, match="With all of the optimizer states"):
        on(gpus(least(roomy, 1.0) // 2))


def test_weights_go_to_the_host_where_states_do_not_suffice(roomy: ParallelModel) -> None:
    """As few of them as must, and where there is room for all no one."""
    room = int(0.85 * least(roomy, 1.0))
    result = on(gpus(room))
    there = result.plan.stages[0].offload
    assert there["optimizer"] == 1
    assert 0 < there["weights"] <= 1
    assert max(result.prediction.peak_memory_bytes) <= room
    assert "weights in host memory" in str(result.report)
    assert Plan.from_json(result.plan.to_json()) == result.plan
    evaluator = Evaluator(result._problem)
    choices = parts(trained_sizes(result.plan.stages[0], result._problem.graph))
    less = choices[choices.index(there["weights"]) - 1]
    other = with_stage(result.plan, offload={"optimizer": 1.0, "weights": less})
    assert max(evaluator.price(other).prediction.peak_memory_bytes) > room
    fewer = with_stage(result.plan, offload={"optimizer": 1.0})
    assert evaluator.price(fewer).prediction.step_time_s < result.prediction.step_time_s


@LARGE
def test_a_model_whose_weights_exceed_the_device_has_a_plan() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=90, n_embd=4096, n_head=32, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
    )
    with torch.device("meta"):
        model: nn.Module = GPT2LMHeadModel(config)
        ids = torch.zeros(32, 1024, dtype=torch.long)
    card = Cluster.from_catalog("v100-32gb", devices_per_node=1)
    result = auto_parallelize(
        model, card, example_inputs={"input_ids": ids, "labels": ids}, global_batch_size=32,
        precision="fp16", profile=False,
    )  # fmt: skip
    assert 2 * result._problem.graph.num_parameters() > card.device.memory_bytes
    assert max(result.prediction.peak_memory_bytes) <= card.device.memory_bytes
    assert result.plan.stages[0].offload["weights"] > 0.5


def test_a_given_plan_must_fit_the_host(roomy: ParallelModel) -> None:
    plan = with_stage(roomy.plan, offload={"optimizer": 1.0})
    with pytest.raises(InfeasibleError, match=r"of a node's host memory, \S+ [KM]iB more"):
        planned(net(), cluster=gpus(2**33, host_bytes=2**12), profile=False, plan=plan)
    unknown = replace(gpus(2**33), host=None)
    with pytest.raises(PlanError, match=r"stage 0: offload.* says nothing of its hosts' memory"):
        planned(net(), cluster=unknown, profile=False, plan=plan)


def test_a_user_decides(roomy: ParallelModel) -> None:
    forced = on(gpus(2**33), offload={"optimizer": 0.5})
    assert part(forced) == 0.5
    assert forced.prediction.step_time_s > roomy.prediction.step_time_s
    assert part(on(gpus(2**33), offload={"optimizer": 0})) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offload": {"optimizer": 2}}, "override offload: optimizer=2; legal: a part"),
        ({"offload": {"buffers": 1}}, "override offload='buffers'; legal: optimizer"),
        ({"offload": {"weights": 1}}, "override offload: weights=1: the optimizer steps weights"),
        ({"offload": {"weights": 1, "optimizer": 1}, "zero": 3}, "contradicts zero=3"),
        ({"offload": {"weights": 1, "optimizer": 1}, "segments": 2}, "contradicts segments"),
        ({"offload": 0.5}, "override offload=0.5; legal: parts from 0 to 1"),
        ({"offload": {"optimizer": 0.5}, "forbid": ["offload"]}, "contradicts forbid='offload'"),
    ],
)
def test_other_decisions_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(OverrideError, match=message):
        Overrides(**given)  # type: ignore[arg-type]


def test_what_is_not_known_or_not_priced_is_refused() -> None:
    with pytest.raises(OverrideError, match=r"says nothing of its hosts' memory.*\[host\]"):
        on(replace(gpus(2**33), host=None), offload={"optimizer": 0.5})
    with pytest.raises(OverrideError, match="target 'megatron' is not priced with it"):
        planned(
            net(),
            cluster=gpus(2**33),
            profile=False,
            target="megatron",
            overrides=Overrides(offload={"optimizer": 0.5}),
        )


def test_freed_memory_that_pays_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host at no cost: what a device then has room for need not be computed again. Activations,
    which would go there first, stay."""
    monkeypatch.setattr("meshwright.planner.search.activations.may_send", lambda _: False)
    free = {"link_bandwidth": 1e15, "memory_bandwidth": 1e16}
    tight = on(gpus(2**33), num_microbatches=1)
    problem = tight._problem
    states = problem.graph.num_parameters() * 12
    peak = tight.prediction.peak_memory_bytes[0]
    cluster = gpus(peak - states // 2, **free)
    with_it, without = (
        on(cluster, num_microbatches=1, **more) for more in ({}, {"forbid": ["offload"]})
    )
    assert set(without.plan.stages[0].policies) != {"none"}
    assert part(with_it) > 0
    assert with_it.prediction.step_time_s < without.prediction.step_time_s
    slow = gpus(peak - states // 2, link_bandwidth=1e6, memory_bandwidth=1e6)
    assert part(on(slow, num_microbatches=1)) == 0


@LARGE
def test_llama_3_8b_on_two_cards_of_24_gb() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
        ids = torch.zeros(16, 2048, dtype=torch.long)
    cards = Cluster.from_catalog("rtx-4090", devices_per_node=2)

    result = auto_parallelize(
        model, cards, example_inputs={"input_ids": ids, "labels": ids}, global_batch_size=16,
        profile=False,
    )  # fmt: skip
    assert part(result) > 0.5
    assert max(result.prediction.peak_memory_bytes) <= cards.device.memory_bytes
    (host,) = result.prediction.host_memory_bytes
    assert host >= 0.999 * part(result) * LLAMA_BYTES
    assert host <= cards.host.memory_bytes


def test_states_that_no_host_holds_lie_in_files_and_no_more_than_must(roomy: ParallelModel) -> None:
    room = (least(roomy, 0.0) + 3 * least(roomy, 1.0)) // 4
    numel = roomy._problem.graph.num_parameters()
    cluster = gpus(room, host_bytes=9 * numel, **FLASH)
    result = on(cluster)
    own, found = result.plan.stages[0].offload, result.prediction
    assert own["optimizer"] == 1
    assert found.flash_bytes[0] == pytest.approx(12 * own["nvme"] * numel, abs=1)
    staged = found.host_memory_bytes[0] - (16 * numel - found.flash_bytes[0])
    assert 0 < staged < 4 * numel  # weights on their way, of two blocks
    assert found.host_shortfall(cluster) == found.flash_shortfall(cluster) == 0
    choices = parts(trained_sizes(result.plan.stages[0], result._problem.graph))
    less = choices[choices.index(own["nvme"]) - 1]
    other = with_stage(result.plan, offload={**own, "nvme": less})
    priced = Evaluator(result._problem).price(other).prediction
    assert priced.host_shortfall(cluster) > 0
    said = str(result.report)
    assert "of the states in files on flash" in said and "MESHWRIGHT_NVME" in said
    report = result.report.to_dict()
    assert report["stages"][0]["flash_bytes"] == pytest.approx(found.flash_bytes[0], abs=1)
    assert report["summary"]["flash_bytes"] == list(found.flash_bytes)
    again = on(cluster, offload={**own})
    assert again.plan.stages[0].offload == own


def test_weights_that_no_device_and_states_that_no_host_holds_have_a_plan(
    roomy: ParallelModel,
) -> None:
    room = int(0.85 * least(roomy, 1.0))
    numel = roomy._problem.graph.num_parameters()
    cluster = gpus(room, host_bytes=12 * numel, **FLASH)
    with pytest.raises(InfeasibleError, match="in host memory nothing fits"):
        on(gpus(room, host_bytes=12 * numel))
    result = on(cluster)
    own, found = result.plan.stages[0].offload, result.prediction
    assert own["optimizer"] == 1 and 0 < own["weights"] <= 1 and 0 < own["nvme"] <= 1
    assert max(found.peak_memory_bytes) <= room
    assert found.host_shortfall(cluster) == found.flash_shortfall(cluster) == 0
    for fewer in ("weights", "nvme"):
        choices = parts(trained_sizes(result.plan.stages[0], result._problem.graph))
        less = choices[choices.index(own[fewer]) - 1]
        other = with_stage(result.plan, offload={**own, fewer: less})
        priced = Evaluator(result._problem).price(other).prediction
        assert priced.host_shortfall(cluster) or max(priced.peak_memory_bytes) > room


def test_files_stay_out_where_host_memory_holds_all(roomy: ParallelModel) -> None:
    room = (least(roomy, 0.0) + 3 * least(roomy, 1.0)) // 4
    assert "nvme" not in on(gpus(room, **FLASH)).plan.stages[0].offload
    numel = roomy._problem.graph.num_parameters()
    small = {**FLASH, "nvme_bytes": numel}
    lacking = (
        r"closest plan lacks \S+ KiB of a host's memory \(19.9 KiB a node, 3.98 KiB of flash\)"
    )
    with pytest.raises(InfeasibleError, match=lacking):
        on(gpus(room, host_bytes=5 * numel, **small))


@pytest.mark.parametrize("host_bytes", tiered([15, 17, 20], (17).__eq__, "one size stays"))
def test_copies_that_hosts_hold_once_alone_lie_in_files(host_bytes: int) -> None:
    """Ranks without ZeRO have all states each: what hosts hold once, they need not hold twice."""
    own = {"dp": 2, "zero": 0, "recompute": "full"}
    there, here = (
        on(gpus(2**33, count=2), **own, **more).prediction.peak_memory_bytes[0]
        for more in ({"offload": {"optimizer": 1}}, {})
    )
    numel = 4080
    cluster = gpus((there + here) // 2, count=2, host_bytes=host_bytes * numel, **FLASH)
    result = on(cluster, **own)
    assert result.plan.stages[0].offload["nvme"] > 0
    assert "weights" not in result.plan.stages[0].offload
    forced = on(cluster, **own, offload={"optimizer": 1, "nvme": 1})
    assert result.prediction.step_time_s <= forced.prediction.step_time_s


@pytest.mark.parametrize("host_bytes", tiered([8, 9, 10, 11], (9).__eq__, "one size stays"))
def test_files_are_those_of_the_stages_that_least_need_memory(host_bytes: int) -> None:
    """No other parts of two stages in files, which share a host, make much faster steps."""
    slow = {**FLASH, "nvme_read_bandwidth": 2e8, "nvme_write_bandwidth": 1e8}
    cluster = gpus(41875, count=2, host_bytes=host_bytes * 4080, **slow)
    result = on(cluster, pp=2, recompute="full", zero=0)
    problem, plan = result._problem, result.plan
    choices = [parts(trained_sizes(stage, problem.graph)) for stage in plan.stages]
    found = []
    for filed in itertools.product(*choices):
        stages = tuple(
            replace(s, offload={name: p for name, p in {**s.offload, "nvme": own}.items() if p})
            for s, own in zip(plan.stages, filed, strict=True)
            if own <= s.offload.get("optimizer", 0.0)
        )
        if len(stages) == len(plan.stages):
            priced = Evaluator(problem).price(replace(plan, stages=stages)).prediction
            if priced.memory_verdict(cluster) != "does not fit":
                found.append(priced.step_time_s)
    assert result.prediction.step_time_s <= 1.25 * min(found)


def test_flash_that_is_too_small_or_unknown_is_named(roomy: ParallelModel) -> None:
    plan = with_stage(roomy.plan, offload={"optimizer": 1.0, "nvme": 1.0})
    small = gpus(2**33, **{**FLASH, "nvme_bytes": 2**10})
    with pytest.raises(InfeasibleError, match=r"of the 1 KiB of a node's flash, \S+ KiB more"):
        planned(net(), cluster=small, profile=False, plan=plan)
    with pytest.raises(PlanError, match=r"says nothing of its hosts' flash.*nvme_read_bandwidth"):
        planned(net(), cluster=gpus(2**33), profile=False, plan=plan)
    with pytest.raises(OverrideError, match="says nothing of its hosts' flash"):
        on(gpus(2**33), offload={"optimizer": 1.0, "nvme": 1.0})
    for offload, said in (({"optimizer": 0.5, "nvme": 1.0}, "legal: 0 to 0.5"),):
        with pytest.raises(OverrideError, match=said):
            on(gpus(2**33, **FLASH), offload=offload)
    with pytest.raises(OverrideError, match="contradicts zero=3"):
        on(gpus(2**33, **FLASH), offload={"optimizer": 1.0, "nvme": 1.0}, zero=3)

"""States, weights and activations go to host memory, or states to files, where nothing fits
without, or where it pays, and no more."""

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright import Overrides, ParallelModel, auto_parallelize
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.stages.offload import PINNED
from meshwright.planner.drafts.equal_stages import EqualStages
from meshwright.planner.drafts.reliefs import held_by_flash, held_by_hosts, reliefs
from meshwright.planner.overrides import restrict
from meshwright.planner.overrides.overrides import OverrideError
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.offload import moved_parts, moved_sizes
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.words import sized
from meshwright.planner.pricing.evaluate import Evaluator, Prediction
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.host import MARGIN
from tests.helpers.planning import cluster, linears, problem_of
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import net, planned, with_stage

LARGE = second_tier("of its size; a small net's states, weights and activations go there, too")
SPEED = {"nvme_read_bandwidth": 2e9, "nvme_write_bandwidth": 1e9}
FLASH = {"nvme_bytes": 2**30, **SPEED}
FREE = {"link_bandwidth": 1e15, "memory_bandwidth": 1e16}
SLOW = {"link_bandwidth": 1e6, "memory_bandwidth": 1e6}
LLAMA_BYTES = 8.03e9 * 16  # of AdamW's states with their gradients, in host memory
NUMEL = 4080  # of the tiny net
BYTES = 8 * PINNED + 8  # of an element in host memory: weight and gradient pinned, two moments
ROOM = 1 - MARGIN


def gpus(room_bytes: int, *, count: int = 1, host_bytes: int = 2**40, **host: float) -> Cluster:
    """GPUs with so much for tensors, and hosts with so much memory."""
    base = Cluster.from_catalog("rtx-4090", devices_per_node=count)
    assert base.host is not None
    device = replace(base.device, memory_bytes=room_bytes, reserved_bytes=0, communicator_bytes=0)
    return replace(base, device=device, host=replace(base.host, memory_bytes=host_bytes, **host))


def on(cluster: Cluster, optimizer: str = "adamw", **overrides: object) -> ParallelModel:
    own = Overrides(**overrides)  # type: ignore[arg-type]
    given = {"profile": False, "memory_margin": 0.0, "optimizer": optimizer}
    return planned(net(), cluster=cluster, overrides=own, **given)


def part(result: ParallelModel, of: str = "optimizer") -> float:
    return result.plan.stages[0].offload.get(of, 0.0)


@pytest.fixture(scope="module")
def roomy() -> ParallelModel:
    return on(gpus(2**33))


def priced(result: ParallelModel, plan: Plan | None = None, **stage: object) -> Prediction:
    """The price of the plan, or of another, with changes to its stage."""
    plan = with_stage(plan or result.plan, **stage)
    return Evaluator(result._problem).price(plan).prediction


def least(result: ParallelModel, given: float, recompute: str = "full") -> int:
    """Bytes of tensors of the plan with so much of the states in host memory, everything
    recomputed so and in the smallest micro-batches."""
    plan = replace(result.plan, num_microbatches=result.plan.global_batch_size)
    offload = {"optimizer": given} if given else {}
    return priced(result, plan, offload=offload, recompute=recompute).peak_memory_bytes[0]


def with_less(result: ParallelModel, of: str) -> Prediction:
    """The price with the next smaller part of it off the device."""
    own = result.plan.stages[0].offload
    choices = moved_parts(moved_sizes(result.plan.stages[0], result._problem.graph))
    return priced(result, offload={**own, of: choices[choices.index(own[of]) - 1]})


def nothing_sent(stages: EqualStages, waiting: Any, relief: Any, offered: Any) -> list[float]:
    """Hosts with no room for activations."""
    return [0.0] * len(offered)


# --- states and weights in host memory -----------------------------------------------------------


def test_what_hosts_and_flash_hold_by_hand() -> None:
    """AdamW's states with weight and gradient in fp32 are 16 bytes, half of them pinned, in files
    12; a tenth stays free."""
    of = linears(64, 2, 4)
    numel = of.graph.num_parameters()
    on = cluster(2, nodes=3)
    assert on.host is not None
    host = replace(on.host, memory_bytes=numel, nvme_bytes=4 * numel, **SPEED)

    def problem(**changes: Any) -> Problem:
        return problem_of(of, replace(on, host=replace(host, **changes)))

    free = restrict(Overrides(), of.graph)
    assert held_by_hosts(problem(), free) == pytest.approx(ROOM * 3 / BYTES, rel=1e-3)
    assert held_by_hosts(problem(memory_bytes=8 * numel), free) == 1
    assert held_by_flash(problem()) == pytest.approx(ROOM * 3 * 4 / 12, rel=1e-3)
    assert held_by_flash(problem(nvme_bytes=0)) == 0


def test_all_stays_on_devices_that_have_room(roomy: ParallelModel) -> None:
    assert roomy.plan.stages[0].offload == {}
    assert '"offload"' not in roomy.plan.to_json()
    assert "host memory" not in str(roomy.report)


@second_tier("no more weights go there, and no more states into files, than must")
def test_no_more_goes_to_the_host_than_must(
    roomy: ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EqualStages, "_sendable", nothing_sent)
    room = (3 * least(roomy, 0.0, "none") + least(roomy, 1.0, "none")) // 4
    result = on(gpus(room), recompute="none", num_microbatches=8)
    own = part(result)
    assert 0 < own < 1
    less, enough = (
        p.peak_memory_bytes[0] for p in (with_less(result, "optimizer"), priced(result))
    )
    assert less > room >= enough
    assert f"{own:.0%} of the optimizer states in host memory" in str(result.report)
    row = result.report.to_dict()["stages"][0]
    assert row["offload"] == {"optimizer": own}
    assert row["host_bytes"] == pytest.approx(own * NUMEL * BYTES)
    assert any("fused" in line for line in result.report.assumptions)


def test_what_lacks_is_named(roomy: ParallelModel) -> None:
    none, every = least(roomy, 0.0), least(roomy, 1.0)
    with pytest.raises(InfeasibleError, match="does not fit"):
        on(gpus((none + every) // 2), forbid=["offload"])
    lacking = re.escape(f"for all of them a host lacks {sized(BYTES * NUMEL - ROOM * 2**12)}")
    with pytest.raises(InfeasibleError, match=lacking) as error:
        on(gpus((none + 3 * every) // 4, host_bytes=2**12))
    assert "of the optimizer states in host memory nothing fits, either" in str(error.value)
    with pytest.raises(InfeasibleError, match="With all of the optimizer states"):
        on(gpus(every // 2))


def test_weights_go_to_the_host_where_states_do_not_suffice(roomy: ParallelModel) -> None:
    """As few of them as must, and where there is room for all no one."""
    room = int(0.85 * least(roomy, 1.0))
    result = on(gpus(room))
    assert part(result) == 1
    assert 0 < part(result, "weights") <= 1
    assert max(result.prediction.peak_memory_bytes) <= room
    assert "weights in host memory" in str(result.report)
    assert max(with_less(result, "weights").peak_memory_bytes) > room
    fewer = priced(result, offload={"optimizer": 1.0})
    assert fewer.step_time_s < result.prediction.step_time_s


@second_tier("at no cost; what must go there stays, and segments that no host is faster than")
def test_freed_memory_that_pays_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host at no cost: what a device then has room for need not be computed again. Activations,
    which would go there first, stay."""
    monkeypatch.setattr(EqualStages, "_sendable", nothing_sent)
    tight = on(gpus(2**33), num_microbatches=1)
    room = tight.prediction.peak_memory_bytes[0] - NUMEL * 12 // 2
    with_it, without = (
        on(gpus(room, **FREE), num_microbatches=1, **more) for more in ({}, {"forbid": ["offload"]})
    )
    assert set(without.plan.stages[0].policies) != {"none"}
    assert part(with_it) > 0
    assert with_it.prediction.step_time_s < without.prediction.step_time_s
    assert part(on(gpus(room, **SLOW), num_microbatches=1)) == 0


@pytest.mark.parametrize("offload", [{"activations": 0.25}, {"optimizer": 0.25}, {"optimizer": 0}])
def test_what_the_user_decided_of_hosts_no_relief_changes(offload: dict[str, float]) -> None:
    of = linears(64, 2, 4)
    problem = problem_of(of, gpus(2**33))
    first, *others = reliefs(problem, restrict(Overrides(offload=offload), of.graph))
    assert first.host.states == offload.get("optimizer", 0)
    assert first.host.activations == offload.get("activations", 0)
    assert all(own.most == first.host for own in others)
    free = reliefs(problem, restrict(Overrides(), of.graph))
    assert {own.sends for own in free} == {0, 1}


# --- activations ---------------------------------------------------------------------------------


@second_tier("activations go to a host at no cost in test_recompute, too")
def test_no_more_activations_go_at_no_cost_than_save_recompute(
    roomy: ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no states go there, at no cost either."""
    monkeypatch.setattr("meshwright.planner.drafts.reliefs._held", lambda *_: ())
    both = [
        priced(roomy, recompute="none", offload={"activations": f} if f else {}) for f in (0, 1)
    ]
    room = sum(p.peak_memory_bytes[0] for p in both) // 2
    result = on(gpus(room, **FREE), num_microbatches=1)
    (stage,), own = result.plan.stages, part(result, "activations")
    assert set(stage.policies) == {"none"}
    assert 0 < own < 1
    assert stage.offload == {"activations": own}
    each = 1 / len(stage.blocks)
    less = priced(result, offload={"activations": own - each} if own > each else {})
    assert less.peak_memory_bytes[0] > room >= result.prediction.peak_memory_bytes[0]
    without = on(gpus(room, **FREE), num_microbatches=1, forbid=["offload"])
    assert result.prediction.step_time_s < without.prediction.step_time_s
    assert f"activations of {own:.0%} of the blocks in host memory" in str(result.report)
    row = result.report.to_dict()["stages"][0]
    assert row["offload"] == {"activations": own}
    assert row["host_bytes"] == pytest.approx(result.prediction.host_memory_bytes[0], abs=1)
    assert row["host_bytes"] > 0
    assert part(on(gpus(room, **SLOW), num_microbatches=1), "activations") == 0


@second_tier("activations go to a host in test_recompute; states and weights stay")
def test_activations_go_to_the_host_however_slow_where_nothing_fits(roomy: ParallelModel) -> None:
    states = {"optimizer": 1.0, "weights": 1.0}
    peaks = [
        priced(roomy, recompute="full", offload={**states, **more}).peak_memory_bytes[0]
        for more in ({}, {"activations": 1.0})
    ]
    cluster = gpus(sum(peaks) // 2, **SLOW)
    given = {"num_microbatches": 1, "dp": 1, "segments": 1}
    result = on(cluster, **given)
    assert part(result, "activations") > 0
    assert result.prediction.peak_memory_bytes[0] <= cluster.device.memory_bytes
    with pytest.raises(InfeasibleError, match="does not fit"):
        on(cluster, forbid=["offload"], **given)


# --- what users decide, and what is refused ------------------------------------------------------


@second_tier("what a user decides is on each relief above, and in a forced plan of test_ways_out")
@pytest.mark.parametrize("of", ["optimizer", "activations"])
def test_a_user_decides(of: str) -> None:
    """By the fused kernel, which the host's step is, too."""
    free = on(gpus(2**33), "adamw_fused")
    forced = on(gpus(2**33), "adamw_fused", num_microbatches=1, offload={of: 0.5})
    assert part(forced, of) == 0.5
    assert forced.prediction.step_time_s > free.prediction.step_time_s
    assert sum(forced.prediction.host_memory_bytes) > 0
    assert part(on(gpus(2**33), offload={of: 0}), of) == 0


HOSTS = second_tier("states that a host lacks room for stay")
UNKNOWN = second_tier("unknown hosts are refused in test_exact")


@pytest.mark.parametrize(
    ("offload", "host", "error", "says"),
    [
        ({"optimizer": 1.0}, {"host_bytes": 2**12}, InfeasibleError,
         r"that a node's host has for it, \S+ [KM]iB more"),
        pytest.param({"activations": 1.0}, {"host_bytes": 2**10}, InfeasibleError,
                     r"that a node's host has for it, \S+ [KM]iB more", marks=HOSTS),
        ({"optimizer": 1.0, "nvme": 1.0}, FLASH | {"nvme_bytes": 2**10}, InfeasibleError,
         r"that a node's flash has for it, \S+ KiB more"),
        pytest.param({"optimizer": 1.0}, None, PlanError,
                     r"stage 0: .* nothing of its hosts' memory", marks=UNKNOWN),
        pytest.param({"optimizer": 1.0, "nvme": 1.0}, {}, PlanError,
                     r"says nothing of its hosts' flash.*nvme_read_bandwidth", marks=UNKNOWN),
    ],
)  # fmt: skip
def test_a_given_plan_must_fit_the_host(
    roomy: ParallelModel, offload: Any, host: Any, error: type[Exception], says: str
) -> None:
    cluster = replace(gpus(2**33), host=None) if host is None else gpus(2**33, **host)
    with pytest.raises(error, match=says):
        planned(net(), cluster=cluster, profile=False, plan=with_stage(roomy.plan, offload=offload))


@second_tier("a plan for such hosts is refused in test_exact")
@pytest.mark.parametrize("of", ["optimizer", "activations"])
def test_hosts_of_which_nothing_is_known_are_asked_for_nothing(of: str) -> None:
    with pytest.raises(OverrideError, match=r"says nothing of its hosts' memory.*\[host\]"):
        on(replace(gpus(2**33), host=None), offload={of: 0.5})
    with pytest.raises(OverrideError, match="says nothing of its hosts' flash"):
        on(gpus(2**33), offload={"optimizer": 1.0, "nvme": 1.0})


# --- states in files -----------------------------------------------------------------------------


def test_states_that_no_host_holds_lie_in_files_and_no_more_than_must(roomy: ParallelModel) -> None:
    room = (least(roomy, 0.0) + 3 * least(roomy, 1.0)) // 4
    cluster = gpus(room, host_bytes=11 * NUMEL, **FLASH)
    result = on(cluster)
    own, found = result.plan.stages[0].offload, result.prediction
    assert own["optimizer"] == 1
    assert found.flash_bytes[0] == pytest.approx(12 * own["nvme"] * NUMEL, abs=1)
    there = BYTES * NUMEL - (4 * PINNED + 8) * own["nvme"] * NUMEL
    staged = found.host_memory_bytes[0] - there
    assert 0 < staged < 4 * PINNED * NUMEL  # weights on their way, of two blocks
    assert found.host_shortfall(cluster) == found.flash_shortfall(cluster) == 0
    assert with_less(result, "nvme").host_shortfall(cluster) > 0
    said = str(result.report)
    assert "of the states in files on flash" in said and "MESHWRIGHT_NVME" in said
    report = result.report.to_dict()
    assert report["stages"][0]["flash_bytes"] == pytest.approx(found.flash_bytes[0], abs=1)
    assert report["summary"]["flash_bytes"] == list(found.flash_bytes)
    assert on(cluster, offload={**own}).plan.stages[0].offload == own


@second_tier("weights on a host, and states in files, stay each by itself")
def test_weights_that_no_device_and_states_that_no_host_holds_have_a_plan(
    roomy: ParallelModel,
) -> None:
    room = int(0.85 * least(roomy, 1.0))
    cluster = gpus(room, host_bytes=19 * NUMEL, **FLASH)
    with pytest.raises(InfeasibleError, match="in host memory nothing fits"):
        on(gpus(room, host_bytes=19 * NUMEL))
    result = on(cluster)
    own, found = result.plan.stages[0].offload, result.prediction
    assert own["optimizer"] == 1 and 0 < own["weights"] <= 1 and 0 < own["nvme"] <= 1
    assert max(found.peak_memory_bytes) <= room
    assert found.host_shortfall(cluster) == found.flash_shortfall(cluster) == 0
    for fewer in ("weights", "nvme"):
        less = with_less(result, fewer)
        assert less.host_shortfall(cluster) or max(less.peak_memory_bytes) > room


@second_tier("no more goes to files than must, above")
def test_files_stay_out_where_host_memory_holds_all(roomy: ParallelModel) -> None:
    room = (least(roomy, 0.0) + 3 * least(roomy, 1.0)) // 4
    assert "nvme" not in on(gpus(room, **FLASH)).plan.stages[0].offload
    small = FLASH | {"nvme_bytes": NUMEL}
    lacking = (
        r"closest plan lacks \S+ KiB of a host's memory \(17.9 KiB a node, 3.59 KiB of flash\)"
    )
    with pytest.raises(InfeasibleError, match=lacking):
        on(gpus(room, host_bytes=5 * NUMEL, **small))


@second_tier("files of one rank stay")
def test_copies_that_hosts_hold_once_alone_lie_in_files() -> None:
    """Ranks without ZeRO have all states each: what hosts hold once, they need not hold twice."""
    own = {"dp": 2, "zero": 0, "recompute": "full"}
    there, here = (
        on(gpus(2**33, count=2), **own, **more).prediction.peak_memory_bytes[0]
        for more in ({"offload": {"optimizer": 1}}, {})
    )
    cluster = gpus((19 * there + here) // 20, count=2, host_bytes=21 * NUMEL, **FLASH)
    result = on(cluster, **own)
    assert part(result, "nvme") > 0
    assert "weights" not in result.plan.stages[0].offload
    forced = on(cluster, **own, offload={"optimizer": 1, "nvme": 1})
    assert result.prediction.step_time_s <= forced.prediction.step_time_s


@second_tier("files of one stage stay")
def test_files_are_those_of_the_stages_that_least_need_memory() -> None:
    """No other parts of two stages in files, which share a host, make much faster steps."""
    slow = FLASH | {"nvme_read_bandwidth": 2e8, "nvme_write_bandwidth": 1e8}
    cluster = gpus(41875, count=2, host_bytes=11 * NUMEL, **slow)
    result = on(cluster, pp=2, recompute="full", zero=0)
    problem, plan = result._problem, result.plan
    choices = [moved_parts(moved_sizes(stage, problem.graph)) for stage in plan.stages]
    found = []
    for filed in itertools.product(*choices):
        stages = tuple(
            replace(s, offload={name: p for name, p in {**s.offload, "nvme": own}.items() if p})
            for s, own in zip(plan.stages, filed, strict=True)
            if own <= s.offload.get("optimizer", 0.0)
        )
        if len(stages) == len(plan.stages):
            other = Evaluator(problem).price(replace(plan, stages=stages)).prediction
            if other.memory_verdict(cluster) != "does not fit":
                found.append(other.step_time_s)
    assert result.prediction.step_time_s <= 1.25 * min(found)


# --- large models --------------------------------------------------------------------------------


def large(cards: Cluster, rows: int, length: int, **config: int) -> ParallelModel:
    """A Llama's plan, which fits the cards."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=length, **config))
        ids = torch.zeros(rows, length, dtype=torch.long)
    result = auto_parallelize(
        model, cards, example_inputs={"input_ids": ids, "labels": ids}, global_batch_size=rows,
        profile=False,
    )  # fmt: skip
    assert max(result.prediction.peak_memory_bytes) <= cards.device.memory_bytes
    return result


@LARGE
def test_llama_3_8b_on_two_cards_of_24_gb() -> None:
    cards = Cluster.from_catalog("rtx-4090", devices_per_node=2)
    result = large(
        cards, 16, 2048, vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    assert part(result) > 0.5
    assert cards.host is not None
    (host,) = result.prediction.host_memory_bytes
    assert 0.999 * part(result) * LLAMA_BYTES <= host <= cards.host.memory_bytes


@LARGE
def test_a_sequence_of_131072_tokens_on_one_card_of_24_gb() -> None:
    result = large(
        Cluster.from_catalog("rtx-4090", devices_per_node=1), 1, 2**17, vocab_size=256,
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=48, num_attention_heads=16,
        num_key_value_heads=16,
    )  # fmt: skip
    assert part(result, "activations") > 0.5

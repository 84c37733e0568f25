"""What ranks do, send and hold in a rehearsed step is what the price counts: FLOPs, bytes on links,
memory by kind and block; and the estimate of a step from them: by hand, and on clusters where one
thing alone takes time."""

from typing import Any

import pytest
import torch

from meshwright import Overrides
from meshwright.executor.prices import Prices
from meshwright.executor.rehearsal import Estimate, Priced, Rehearsal
from meshwright.executor.rehearsal.estimate import estimate
from meshwright.executor.rehearsal.events import Event, Kind, RankLog, link_bytes
from meshwright.executor.rehearsal.memory import BUFFERS, SAVED, TRANSIENT, Memory
from meshwright.executor.rehearsal.result import STATES, WEIGHTS
from meshwright.planner.pricing import KINDS_OF_BYTES, Ledger, Work, bytes_beside_tensors, evaluate
from meshwright.profiles.cluster import Cluster
from tests.executor.rehearsal.rehearsal_runs import Checked, checked, checked_experts
from tests.helpers import planning
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import batch, host, net, planned
from tests.user_code.user_models import lora

REL, ABS = 1e-3, 400  # bytes: counts of rows, losses, norms, what batches are compared by
MESSAGES = {"forward", "backward"}

FIRST = (
    "llama tp2 1f1b m2 full", "mlp pp2xdp2 zb_v m4 zero1", "llama dp2xtp2 1f1b m2 powersgd-1",
    "mlp dp4 1f1b m2 powersgd-16 bf16_pure",  # whose factors have more bytes than the gradients
)  # fmt: skip
ALIKE = (
    *FIRST, "gpt2_untied dp2 1f1b m2 zero2 bf16", "gpt2_untied pp2 1f1b m4 mixed",
    "gpt2_deep 1 1f1b m2 widening", "gpt2_untied pp2xdp2 1f1b m4 topk-1",
    "gpt2_untied dp4 1f1b m2 powersgd-2 bf16", "gpt2_tied dp2 1f1b m2 zero1",
    "gpt2_untied dp4 1f1b m2 zero2 shard2 bf16", "gpt2_untied pp2xtp2 zb_h1 m4",
    "llama pp2xtp2 1f1b m2 slices10+6",
    "moe dp2 1f1b m2", "resnet dp2 1f1b m2", "resnet tp2 1f1b m2", "plain_gpt dp2 1f1b m2 full",
)  # fmt: skip
# Cells in which ranks send more or less than the price says, by so many bytes of each device group,
# and why.
KEPT = "the last block's weights, gathered for a forward, are kept for the backward that follows"
FILLED = f"the last block of a small shard is filled up to 256 elements; {KEPT}"
AHEAD = "fully_shard gathers a block ahead for a micro-batch that isn't next, and drops it"
NORMS = "gradients of norms that are partial on the tensor axis are priced without ZeRO alone"
TYPES = "the gradient of token types that were looked up is gathered on the data axis"
TABLE = "the gradient of a table that two blocks read is gathered in each backward; priced twice"
UNLIKE = {
    "gpt2_tied dp4 1f1b m2 zero3 hpz2": ((-12_544,), KEPT),
    "gpt2_tied dp4 1f1b m2 zero3 hpz2 quantized": ((-6_018,), FILLED),
    "llama dp2xtp2 1f1b m2 zero3 full": ((-6_272,), KEPT),
    "llama_lora dp2 1f1b m2 zero3": ((-12_288,), KEPT),
    "llama_tower dp2 1f1b m2 zero3": ((-12_288,), KEPT),
    "llama pp2xdp2 1f1b m4 zero3 full": ((18_560, -24_832), f"{AHEAD}; {KEPT}"),
    "llama dp2xtp2 1f1b m2 zero1 sequence": ((768,), NORMS),
    "bert dp2 1f1b m2": ((16_256,), TYPES),
    "bert tp4 1f1b m2": ((18_432,), TABLE),
}
FIRST_UNLIKE = {"llama_tower dp2 1f1b m2 zero3"}
REGATHERING = (
    ("llama tp2 1f1b m2 sequence", " regather"),
    ("gpt2_deep tp4 1f1b m2 sequence pointwise", "+regather"),
    ("llama pp2xtp2 zb_h1 m4 sequence", " regather"),
)
SPLIT = {"layers.*.experts.gate": "S(2)", "layers.*.experts.up": "S(2)",
         "layers.*.experts.down": "S(1)"}  # the matrices  # fmt: skip
SPREAD: tuple[tuple[str, dict[str, str]], ...] = (("dp4 m2 full", {}), ("dp2xtp2 m2", SPLIT))
MORE = "tensor ranks that recompute, and data ranks of a pipeline with ZeRO, are kept"
LEFT_OUT = "one model whose last block stays gathered is kept"
COPIES = "the price of exchanged copies by hand is kept (tests/costmodel)"


def of_plan(of: Checked) -> tuple[Rehearsal, list[Work]]:
    """A plan rehearsed, and the work of each device group at its price."""
    return of.rehearse(), Ledger.of(evaluate(*of.priced_on(host(of.plan.num_ranks)))).work()


def sent(log: RankLog) -> tuple[float, float]:
    """Bytes of collectives, and of messages between stages; not those of tied parameters."""
    found = link_bytes(log)
    messages = sum(nbytes for group, nbytes in found.items() if group in MESSAGES)
    tied = sum(nbytes for group, nbytes in found.items() if group.startswith("tied"))
    return sum(found.values()) - messages - tied, messages


def priced(work: Work) -> tuple[float, float]:
    *collectives, messages = (work.sent_bytes[kind] for kind in KINDS_OF_BYTES)
    return sum(collectives), messages


@pytest.mark.parametrize("line", tiered(ALIKE, FIRST.__contains__, MORE))
def test_ranks_do_and_send_what_is_priced(line: str) -> None:
    found, works = of_plan(checked(line))
    assert len(works) == len(found.plan.devices)
    for rank, log in found.logs.items():
        work = works[found.group_of[rank]]
        assert sum(log.flops.values()) == pytest.approx(work.flops, rel=REL)
        assert sent(log) == pytest.approx(priced(work), rel=REL, abs=ABS)


@pytest.mark.parametrize("line", tiered(UNLIKE, FIRST_UNLIKE.__contains__, LEFT_OUT))
def test_what_the_price_leaves_out_is_known(line: str) -> None:
    found, works = of_plan(checked(line))
    differences, why = UNLIKE[line]
    for rank, log in found.logs.items():
        group = found.group_of[rank]
        collectives, messages = priced(works[group])
        assert sum(log.flops.values()) == pytest.approx(works[group].flops, rel=REL)
        expected = collectives + differences[group], messages
        assert sent(log) == pytest.approx(expected, rel=REL, abs=ABS), why


@second_tier(MORE)
@pytest.mark.parametrize("of", REGATHERING, ids="".join)
def test_gathers_again_are_sent_as_priced(of: tuple[str, str]) -> None:
    """Beside what the plan without them sends."""
    runs = [of_plan(checked(line)) for line in (of[0], "".join(of))]
    for rank in runs[0][0].logs:
        before, after = (sent(found.logs[rank])[0] for found, _ in runs)
        asked, wanted = (priced(works[found.group_of[rank]])[0] for found, works in runs)
        assert 0 < after - before == pytest.approx(wanted - asked, rel=REL)


@second_tier(COPIES)
@pytest.mark.parametrize("of", SPREAD, ids=str)
def test_experts_receive_what_is_priced_and_the_weights_of_copies(
    of: tuple[str, dict[str, str]],
) -> None:
    """The exchange carries a number beside each copy of a token, and counts; the price has the
    copies alone."""
    found, works = of_plan(checked_experts(of[0], 2, of[1]))
    for rank, log in found.logs.items():
        work = works[found.group_of[rank]]
        assert sum(log.flops.values()) == pytest.approx(work.flops, rel=REL)
        weights = sum(
            e.nbytes * (len(e.group[1]) - 1) / len(e.group[1])
            for e in log.events[slice(*log.step)]
            if e.group[0] == "exchange" and (e.shapes[0][-1] == 1 or len(e.shapes[0]) == 1)
        )
        assert 0 < weights < 0.1 * work.sent_bytes[KINDS_OF_BYTES[0]]
        collectives, _ = sent(log)
        # statistics of the routing are summed over the data axis
        assert collectives - weights == pytest.approx(priced(work)[0], rel=REL, abs=2 * ABS)


@second_tier(MORE)
def test_attention_that_is_written_out_does_less_than_a_fused_one() -> None:
    """T5's, whose bias is trained: on a CPU there is no kernel for it, and its backward, which has
    the scores, does 4 products where a fused one does 5."""
    found, works = of_plan(checked("t5 pp2xdp2 1f1b m4 zero1"))
    for rank, log in found.logs.items():
        written_out = log.flops["aten.bmm"]
        fused = works[found.group_of[rank]].flops
        assert sum(log.flops.values()) + written_out / 6 == pytest.approx(fused, rel=REL)


def test_links_carry_parts_of_what_collectives_are_given() -> None:
    """By hand, of four ranks: 24 bytes to be summed, 24 each to be gathered, 24 of which each rank
    keeps a quarter, 24 exchanged, 24 sent on; what is not of the step isn't counted."""
    operations = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
    events = [
        Event(kind=Kind.COLLECTIVE, operation=name, group=(name, (0, 1, 2, 3)), nbytes=24)
        for name in operations
    ]
    events.append(Event(kind=Kind.SEND, operation="send", group=("forward", (0, 1)), nbytes=24))
    log = RankLog(rank=0, events=(events[0], *events, events[0]), step=(1, 6))
    expected = dict(zip((*operations, "forward"), (36, 72, 18, 18, 24), strict=True))
    assert link_bytes(log) == expected


# --- the second estimate of a step ----------------------------------------------------------------


GROUP = ("data", (0, 1))


def cluster(ranks: int, *, flops: float = 1e30, link: float = 1e30) -> Cluster:
    """FLOPs a second of products and bytes a second between ranks; all else is free."""
    return planning.cluster(ranks, flops=flops, bandwidth=link, memory_bandwidth=1e30)


def rehearsed(line: str, on: Cluster) -> tuple[Estimate, float]:
    """A cell's estimate with prices on a cluster, and its step at the plan's price there."""
    found = checked(line).rehearse(priced=Priced(prices=Prices(cluster=on)))
    assert found.estimate is not None and not found.mismatches
    return found.estimate, evaluate(*checked(line).priced_on(on)).prediction.step_time_s


PRODUCTS = (
    "gpt2_deep pp2 1f1b m8 full", "gpt2_untied tp2 1f1b m2", "mlp pp2 gpipe m4",
    "gpt2_deep 1 1f1b m8 full", "gpt2_deep pp2xdp2 interleaved_1f1b m4 v2",
    "gpt2_untied pp2 1f1b m1 slices7+5+4",
)  # fmt: skip
LINKS = ("gpt2_untied dp2 1f1b m2", "llama tp2 1f1b m2 full")
PIPELINE = "a pipeline's bubbles in both estimates are kept"


@pytest.mark.parametrize("line", tiered(PRODUCTS, {"mlp pp2 gpipe m4"}.__contains__, PIPELINE))
def test_where_products_alone_take_time_both_estimates_are_one(line: str) -> None:
    """Bubbles and repeated micro-batches included: the price simulates the schedule, the estimate
    replays what the executor did."""
    found, step_s = rehearsed(line, cluster(8, flops=1e9))
    assert found.step_s == pytest.approx(step_s, rel=1e-3)


@second_tier("estimates of collectives by hand, and of products, are kept")
@pytest.mark.parametrize("line", LINKS)
def test_where_links_alone_take_time_both_estimates_are_one(line: str) -> None:
    found, step_s = rehearsed(line, cluster(2, link=1e6))
    assert found.step_s == pytest.approx(step_s, rel=1e-3)
    assert found.parts["communication"] == pytest.approx(found.step_s, rel=1e-3)


# --- by hand -------------------------------------------------------------------------------------


def work(seconds: float, where: str = "forward") -> Event:
    return Event(kind=Kind.WORK, device_s=seconds, where=where)


def reduce(nbytes: int) -> Event:
    return Event(kind=Kind.COLLECTIVE, operation="allreduce_", group=GROUP, nbytes=nbytes)


def message(kind: Kind, peer: int) -> Event:
    group = ("forward", (0, 1))
    return Event(kind=kind, operation="send", group=group, nbytes=4, peer=peer)


def estimated(*ranks: list[Event], blocking: bool = False) -> Estimate:
    logs = {
        rank: RankLog(rank=rank, events=tuple(events), step=(0, len(events)))
        for rank, events in enumerate(ranks)
    }
    on = Prices(cluster=cluster(2, link=1.0))  # an all-reduce of two ranks takes its bytes' seconds
    return estimate(logs, {rank: rank for rank in logs}, on, blocking=blocking)


def test_a_collective_runs_beside_until_it_is_awaited() -> None:
    after = Event(kind=Kind.AWAIT, group=GROUP)
    both = [work(1.0), reduce(5), work(3.0, "backward"), after, work(1.0, "user code")]
    found = estimated(both, both)
    assert found.step_s == 1 + 5 + 1
    seconds = {"forward": 1.0, "backward": 3.0, "optimizer": 1.0, "beside": 0.0}
    assert found.parts == seconds | {"communication": 2.0, "waits": 0.0}
    assert estimated(both, both, blocking=True).step_s == 1 + 5 + 3 + 1
    # a wait leaves the last under way
    all_but_one = Event(kind=Kind.AWAIT, group=GROUP, count=1)
    both = [reduce(2), reduce(7), all_but_one, work(1.0)]
    assert estimated(both, both).step_s == 2 + 1


def test_a_collective_begins_when_all_are_at_it() -> None:
    late, early = [work(9.0), reduce(2)], [work(1.0), reduce(2)]
    found = estimated(early, late, blocking=True)
    assert found.step_s == 9 + 2
    # of the rank that is named, the first of those that end last
    assert found.parts["forward"] == 1.0
    assert found.parts["communication"] == 2.0
    assert found.parts["waits"] == 8.0


def test_a_receiver_waits_until_the_message_is_there() -> None:
    wait = Event(kind=Kind.WAIT, count=1)
    sender = [work(2.0), message(Kind.SEND, 1), message(Kind.SEND, 1), work(1.0)]
    receive = message(Kind.RECEIVE, 0)
    found = estimated(sender, [receive, receive, wait, work(1.0), wait, work(1.0)])
    # four bytes at a time: there after 6 and 10 seconds
    assert found.step_s == 11.0
    assert found.parts["forward"] == 2.0


def test_what_is_apart_is_named() -> None:
    price = Estimate(step_s=2.0, seconds={"forward": 1.0, "backward": 1.0})
    near = Estimate(step_s=2.02, seconds={"forward": 1.0, "backward": 1.02})
    far = Estimate(step_s=2.5, seconds={"forward": 1.1, "backward": 1.0, "optimizer": 0.4})
    assert near.beside(price) == "step 2020 ms by what ran, 2000 ms by price (+1.0%)"
    assert "+25.0%: most by optimizer, 400 ms, 0 ms by price" in far.beside(price)


# --- memory ---------------------------------------------------------------------------------------


def test_what_a_block_leaves_is_saved_and_the_rest_passes() -> None:
    memory = Memory()
    weight = torch.empty(100)
    memory.name([weight], "weights")
    memory.see(torch.empty(2000))  # before the peak is followed
    memory.begin()
    memory.enter("first")
    saved, passing = torch.empty(10), torch.empty(20)
    memory.see(saved)
    memory.see(passing)
    del passing
    memory.enter("")
    gathered, other = torch.empty(40), torch.empty(50)
    memory.see(other)
    memory.communicated([gathered])
    del other
    memory.end()
    late = torch.empty(1000)
    memory.see(late)
    assert memory.peak() == (800, {"weights": 400, SAVED: 40, BUFFERS: 160, TRANSIENT: 200})
    assert memory.saved == {"first": 40}
    assert saved.numel() == 10


PRICED = (
    "llama pp2xdp2 1f1b m4", "llama dp2xtp2 1f1b m2 zero1", "llama dp4 1f1b m1 zero3 hpz2",
    "llama dp4 1f1b m1 zero2", "llama pp2xtp2 1f1b m4", "bert dp4 1f1b m1",
    "llama dp4 1f1b m4 zero2", "gpt2_untied dp2xtp2 1f1b m4 zero2 bf16_pure",
    "gpt2_untied dp4 1f1b m2 zero3 bf16_pure", "gpt2_untied pp2xdp2 1f1b m4 zero1 bf16_pure",
    "llama dp4 1f1b m1 zero3", "llama_lora dp4 1f1b m1 zero3", "llama_lora dp4 1f1b m1",
    "mlp dp4 1f1b m1 topk-10 bf16_pure", "mlp dp4 1f1b m1 topk-10", "mlp dp4 1f1b m2 topk-10",
    "mlp dp4 1f1b m1 powersgd-4", "mlp dp4 1f1b m2 powersgd-4 bf16_pure",
)  # fmt: skip
FIRST_PRICED = {PRICED[0], "mlp dp4 1f1b m1 topk-10 bf16_pure", "mlp dp4 1f1b m1 powersgd-4"}
PEAKS = "the peaks of a pipeline with data ranks, and of one sum of each kind, are kept"


@pytest.mark.parametrize("line", tiered(PRICED, FIRST_PRICED.__contains__, PEAKS))
def test_the_price_is_near_the_rehearsed_peak(line: str) -> None:
    of = checked(line)
    found = of.rehearse()
    plan, problem, assignments = of.priced_on(host(4))
    evaluation = evaluate(plan, problem, assignments)
    prices = evaluation.prediction.peak_memory_bytes
    beside = bytes_beside_tensors(plan, evaluation.priced)
    for priced, less, peak in zip(prices, beside, found.peak_bytes, strict=True):
        assert priced - less == pytest.approx(peak, rel=0.02)
    for log in found.logs.values():
        assert sum(log.peak_by_kind.values()) == log.peak_bytes
        assert sum(log.saved_by_block.values()) == log.peak_by_kind[SAVED]


FROZEN = [(dtype, zero) for dtype in (torch.bfloat16, torch.float32) for zero in (0, 2, 3)]


@second_tier("copies of one frozen weight are kept (test_parameters.py), and their price by hand")
@pytest.mark.parametrize("of", FROZEN, ids=str)
def test_frozen_weights_lie_as_the_model_has_them(of: tuple[torch.dtype, int]) -> None:
    """In its dtype, without a master copy, divided by ZeRO-3; else beside bf16 ones, where that is
    another. With no gradients to come, the highest point is a forward under ZeRO-3."""
    dtype, zero = of
    model = lora(8, width=512).to(dtype)
    vectors = torch.empty(16, 512), torch.zeros(16, dtype=torch.long)
    result = planned(
        model, cluster=Cluster.from_catalog("dgx-h100", devices_per_node=2), precision="bf16",
        profile=False, example_inputs=vectors, loss_fn=torch.nn.functional.cross_entropy,
        global_batch_size=16, overrides=Overrides(dp=2, zero=zero, recompute="none"),
    )  # fmt: skip
    found, sizes = result.rehearse(), [(p.requires_grad, p.numel()) for p in model.parameters()]
    trained, frozen = (sum(n for flag, n in sizes if flag == own) for own in (True, False))
    each = dtype.itemsize if zero == 3 else 2 + dtype.itemsize * (dtype != torch.bfloat16)
    masters = {0: 4 + 2, 2: 4 / 2 + 2, 3: 4 / 2}[zero]
    for log, priced in zip(found.logs.values(), found.priced_bytes * 2, strict=True):
        held = masters * trained + each * frozen / (2 if zero == 3 else 1)
        assert log.peak_by_kind[WEIGHTS] == held
        assert log.peak_bytes == pytest.approx(priced, rel=0.02)


# --- what is in host memory -----------------------------------------------------------------------


GIVEN = ({"pp": 2}, {"recompute": "none"}, {"recompute": "full"}, {"dp": 2, "zero": 3})


@second_tier("rehearsed copies to host memory (test_device.py), and what lies there, are kept")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_no_state_is_on_the_device_and_nothing_races(zero: int) -> None:
    """ZeRO-3 has a block's frozen weights in one place with the states of its others."""
    states = Overrides(dp=2, zero=zero, num_microbatches=2, offload={"optimizer": 1.0})
    model = net()
    model.layers[0].up.requires_grad_(zero < 3)
    cluster = Cluster.from_catalog("rtx-4090", devices_per_node=2)
    result = planned(
        model, cluster=cluster, profile=False, precision="bf16", overrides=states
    )  # fmt: skip
    found = result.rehearse()
    assert not found.mismatches
    numel = result._problem.graph.num_parameters()
    for log in found.logs.values():
        assert log.peak_by_kind.get(STATES, 0) == 0
        # of the weights what is computed with alone, in 16 bits
        assert log.peak_by_kind.get(WEIGHTS, 0) == (0 if zero == 3 else 2 * numel)


@second_tier("training with activations in host memory is kept (test_away.py)")
@pytest.mark.parametrize("given", GIVEN, ids=str)
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

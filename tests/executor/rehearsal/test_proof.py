"""Proofs: on logs written by hand, of a pipeline of two stages of two ranks, and on what ranks
would save; right, and with faults."""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.executor.checkpoint import SavedTensor
from meshwright.executor.files import chunks
from meshwright.executor.files.chunks import untiled
from meshwright.executor.ranks import StageMesh
from meshwright.executor.rehearsal import unlike_saves
from meshwright.executor.rehearsal.events import Event, Kind, RankLog
from meshwright.executor.rehearsal.proof import Mismatch, mismatches
from meshwright.executor.rehearsal.rehearse import kinds_of_ranks
from tests.executor.rehearsal.rehearsal_runs import rehearsal
from tests.helpers.tiers import second_tier

MICROBATCHES = 3
EVERY = {rank: rank for rank in range(4)}
Streams = dict[int, list[Event]]


def collective(name: str, ranks: tuple[int, ...], size: int, root: int | None = None) -> Event:
    return Event(
        kind=Kind.COLLECTIVE, operation="allreduce_" if root is None else "broadcast_",
        group=(name, ranks), shapes=((size,),), dtype="float32", nbytes=4 * size, root=root,
    )  # fmt: skip


def message(kind: Kind, peer: int, *, way: str = "forward", tag: int = 1) -> Event:
    return Event(
        kind=kind, operation="send" if kind is Kind.SEND else "recv_", group=(way, (0, 1, 2, 3)),
        shapes=((2, 8),), dtype="float32", nbytes=64, peer=peer, tag=tag,
        where=f"{kind} of stage {peer // 2}",
    )  # fmt: skip


WAIT = Event(kind=Kind.WAIT, count=1, where="recv_activation of stage 1")


def pipeline() -> Streams:
    """Ranks 0, 1 are stage 0, 2, 3 stage 1; each stage is data parallel."""
    streams: Streams = {}
    for rank in range(4):
        first, peer = rank < 2, (rank + 2) % 4
        data = (0, 1) if first else (2, 3)
        events = [collective("default_pg", (0, 1, 2, 3), 5, root=0)]
        for _ in range(MICROBATCHES):
            events += [collective("tensor", data, 8)]
            if first:
                events += [message(Kind.SEND, peer), message(Kind.RECEIVE, peer, way="backward")]
                events += [WAIT, collective("tensor", data, 6)]
            else:
                events += [message(Kind.RECEIVE, peer), WAIT, collective("tensor", data, 6)]
                events += [message(Kind.SEND, peer, way="backward")]
        events += [collective("data", data, 100 if first else 80)]
        events += [collective("default_pg", (0, 1, 2, 3), 1)]
        streams[rank] = events
    return streams


def found(streams: Streams, kind_of: Mapping[int, int] = EVERY) -> list[Mismatch]:
    logs = {rank: RankLog(rank=rank, events=tuple(events)) for rank, events in streams.items()}
    return mismatches(logs, kind_of)


def place(streams: Streams, rank: int, kind: Kind, number: int = 0, group: str = "") -> int:
    of = [k for k, e in enumerate(streams[rank]) if e.kind is kind and group in ("", e.group[0])]
    return of[number]


KINDS = {0: 0, 1: 0, 2: 2, 3: 2}


def test_a_right_pipeline_matches_and_so_does_one_of_each_kind() -> None:
    streams = pipeline()
    assert found(streams) == []
    assert found({0: streams[0], 2: streams[2]}, KINDS) == []
    drop(0, Kind.SEND)(streams)
    said = found({0: streams[0], 2: streams[2]}, KINDS)
    assert said and said[0].proof == "messages"


# --- faults ---------------------------------------------------------------------------------------


def changed_to(
    rank: int, kind: Kind, number: int, group: str, new: Callable[[Event], list[Event]]
) -> Callable[[Streams], None]:
    """Other events in the place of one."""

    def fault(streams: Streams) -> None:
        k = place(streams, rank, kind, number, group)
        streams[rank][k : k + 1] = new(streams[rank][k])

    return fault


def drop(rank: int, kind: Kind, number: int = 0, group: str = "") -> Callable[[Streams], None]:
    return changed_to(rank, kind, number, group, lambda event: [])


def double(rank: int, kind: Kind, group: str = "") -> Callable[[Streams], None]:
    return changed_to(rank, kind, 0, group, lambda event: [event, event])


def change(rank: int, kind: Kind, of: str = "", **fields: Any) -> Callable[[Streams], None]:
    """Other fields of an event, of the group `of`."""
    return changed_to(rank, kind, 0, of, lambda event: [replace(event, **fields)])


def together(*faults: Callable[[Streams], None]) -> Callable[[Streams], None]:
    def fault(streams: Streams) -> None:
        for one in faults:
            one(streams)

    return fault


def swap_groups(streams: Streams) -> None:
    """The last two collectives, of different groups, in the other order on rank 0 alone."""
    events = streams[0]
    events[-1], events[-2] = events[-2], events[-1]


def swap_in_group(streams: Streams) -> None:
    events = streams[3]
    a, b = (place(streams, 3, Kind.COLLECTIVE, k, "tensor") for k in (0, 1))
    events[a], events[b] = events[b], events[a]


def wait_before_send(streams: Streams) -> None:
    """Both stages wait for the other's message before they send."""
    for rank in (0, 1):
        send = place(streams, rank, Kind.SEND)
        event = streams[rank].pop(send)
        streams[rank].insert(place(streams, rank, Kind.WAIT) + 1, event)


def reduce_before_send(streams: Streams) -> None:
    """Stage 0 takes part in the collective of all before its last send, stage 1 after it."""
    for rank in (0, 1):
        k = place(streams, rank, Kind.SEND, MICROBATCHES - 1)
        streams[rank].insert(k, streams[rank].pop())


ALL, SEND, RECEIVE = Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE

FAULTS: Mapping[str, tuple[Callable[[Streams], None], str]] = {
    "dropped send": (drop(0, SEND, 1), "messages"),
    "dropped receive": (drop(2, RECEIVE), "messages"),
    "a micro-batch more": (together(double(0, SEND), double(1, SEND)), "messages"),
    "send of another shape": (change(0, SEND, shapes=((2, 9),)), "messages"),
    "send with another tag": (change(0, SEND, tag=9), "messages"),
    "send in the other group": (change(0, SEND, group=("backward", (0, 1, 2, 3))), "messages"),
    "send to the wrong rank": (change(0, SEND, peer=1), "messages"),
    "crossed peers": (together(change(0, SEND, peer=3), change(1, SEND, peer=2)), "messages"),
    "doubled collective": (double(2, ALL, "tensor"), "collectives"),
    "collective of rank 0 alone": (lambda s: s[0].append(s[0][-1]), "collectives"),
    "collective of another shape": (change(1, ALL, "data", shapes=((101,),)), "collectives"),
    "collective of another dtype": (change(1, ALL, "data", dtype="float16"), "collectives"),
    "another collective": (change(3, ALL, "data", operation="_allgather_"), "collectives"),
    "another root": (change(3, ALL, "default_pg", root=2), "collectives"),
    "swapped in a group": (swap_in_group, "collectives"),
    "wrong group": (change(0, ALL, "data", group=("data", (0, 2))), "collectives"),
    "a rank that stops early": (lambda s: s[2].__delitem__(slice(8, None)), "collectives"),
    "groups in another order": (swap_groups, "replay"),
    "waits before sends": (wait_before_send, "replay"),
    "a collective before a send": (reduce_before_send, "replay"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    fault, proof = FAULTS[name]
    streams = pipeline()
    fault(streams)
    said = found(streams)
    assert proof in {m.proof for m in said}, said
    assert all(m.ranks and m.text for m in said)


def test_the_place_is_said() -> None:
    streams, place = pipeline(), "send_activation of stage 0"
    change(0, Kind.SEND, shapes=((2, 9),), where=place, block="layers.1")(streams)
    (mismatch, *_) = found(streams)
    assert mismatch.ranks == (0, 2)
    for part in ("[2, 9]", "[2, 8]", place, "layers.1", "message 0"):
        assert part in mismatch.text


# --- kinds ----------------------------------------------------------------------------------------


def mesh(first: int, dp: int, tp: int, **more: int) -> StageMesh:
    given = {"shards": dp, **more}
    return StageMesh(ranks=tuple(range(first, first + dp * tp)), dp=dp, tp=tp, **given)


@pytest.mark.parametrize(
    ("meshes", "alike"),
    [
        ([mesh(0, 8, 1), mesh(8, 8, 1)], [[0], range(1, 8), [8], range(9, 16)]),
        ([mesh(0, 8, 1, shards=4)], [[0], [1, 2, 3], [4], [5, 6, 7]]),
        ([mesh(0, 8, 1, experts=4)], [[0], [1, 2, 3], [4], [5, 6, 7]]),
        ([mesh(0, 12, 1, shards=4)], [[0], [1, 2, 3], [4, 8], [5, 6, 7, 9, 10, 11]]),
        ([mesh(0, 8, 1, cp=2)], [[0], [1], [2, 4, 6], [3, 5, 7]]),
        ([mesh(0, 3, 3)], [[0], [1, 2], [3, 6], [4, 5, 7, 8]]),
        ([mesh(0, 2, 1), mesh(2, 1, 2)], [[0], [1], [2], [3]]),
    ],
)
def test_ranks_that_are_first_on_the_same_axes_are_a_kind(
    meshes: list[StageMesh], alike: list[Collection[int]]
) -> None:
    assert kinds_of_ranks(meshes) == {r: min(ranks) for ranks in alike for r in ranks}
    assert len(set(kinds_of_ranks(meshes, every=True).values())) == sum(map(len, alike))


@pytest.mark.parametrize("more", [{"shards": 4}, {"experts": 4}, {"experts": 2, "shards": 4}])
def test_groups_of_ranks_that_are_alike_have_the_same_kinds(more: dict[str, int]) -> None:
    """So that the members of one can be replayed for the others'."""
    on = mesh(0, 16, 1, **more)
    kinds = kinds_of_ranks([on])
    for inner, outer in itertools.pairwise((1, *on.cuts)):
        groups = [{r for r in on.ranks if r // outer == o and r % inner == i}
                  for o in range(16 // outer) for i in range(inner)]  # fmt: skip
        found = {r: sorted({kinds[other] for other in own}) for own in groups for r in own}
        assert all(found[r] == found[kinds[r]] for r in on.ranks)


def test_other_parts_are_kinds() -> None:
    """10 over 8 ranks: parts of 2, 2, 2, 2, 2, 0, 0 and 0."""
    kinds = kinds_of_ranks([mesh(0, 1, 8)], (frozenset(), frozenset({10, 64})))
    assert kinds == {0: 0, **dict.fromkeys(range(1, 5), 1), **dict.fromkeys(range(5, 8), 5)}


def test_ranks_that_are_done_stop_nobody() -> None:
    """The last to come to a collective ends it for all; one of them has something left to do."""
    everyone = collective("default_pg", (0, 1, 2, 3), 5)
    streams = {rank: [everyone] for rank in range(4)}
    streams[3] = [message(Kind.SEND, 2), everyone]
    streams[2] = [message(Kind.RECEIVE, 3), everyone, WAIT]
    assert found(streams) == []


# --- what ranks would save ------------------------------------------------------------------------


# two stages of two data ranks, whose ZeRO-3 shards every weight; the tied one is on both stages
TIED = "gpt2_tied pp2xdp2 1f1b m4 zero3"
Logs = dict[int, RankLog]


def named(logs: Mapping[int, RankLog], rank: int, name: str) -> SavedTensor:
    return next(x for x in logs[rank].saved if x.name == name)


def changed(
    logs: Logs, rank: int, name: str, change: Callable[[SavedTensor], SavedTensor | None]
) -> None:
    found = [change(x) if x.name == name else x for x in logs[rank].saved]
    logs[rank] = replace(logs[rank], saved=tuple(x for x in found if x is not None))


def text_of(logs: Logs) -> str:
    found = unlike_saves(logs, EVERY)
    assert all(m.proof == "checkpoint" for m in found)
    return "\n".join(map(str, found))


def test_every_tensor_is_written_once() -> None:
    logs = dict(rehearsal(TIED).logs)
    assert unlike_saves(logs, EVERY) == []
    names = {x.name for log in logs.values() for x in log.saved}
    assert any(name.startswith("optimizer.") for name in names)
    both = {x.name for x in logs[0].saved} & {x.name for x in logs[2].saved}
    assert both, "the tied weight, whose first stage writes it"
    for name in both:
        assert named(logs, 2, name).boxes == () and named(logs, 2, name).group == (0, 1)


@second_tier("what all ranks write is kept, and that kinds of ranks do what all do")
def test_two_kinds_of_ranks_are_enough() -> None:
    found = rehearsal("mlp pp2xdp4 1f1b m4 zero1", every=False)
    assert len(found.logs) < 8
    assert unlike_saves(found.logs, found.kind_of) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: replace(x, writers=(0,)), "to be written by [0, 1], and by [0]"),
        (lambda x: replace(x, boxes=()), "elements"),
        (lambda x: replace(x, shape=(*x.shape, 1)), "float32"),
        (lambda x: replace(x, dtype="bfloat16"), "float32, and"),
        (lambda x: replace(x, fault="of dim 0 elements 1 to 2"), "of dim 0 elements 1 to 2"),
        (lambda x: replace(x, group=(2, 3)), "and by others"),
        (lambda x: replace(x, boxes=named(rehearsal(TIED).logs, 0, x.name).boxes), "written twice"),
    ],
)
def test_a_fault_of_saves_is_found(change: Callable[[SavedTensor], SavedTensor], says: str) -> None:
    logs = dict(rehearsal(TIED).logs)  # of which ranks 0 and 1 write half of a weight each
    name = next(x.name for x in logs[0].saved if x.writers == (0, 1) and x.boxes)
    changed(logs, 1, name, change)
    text = text_of(logs)
    assert says in text and repr(name) in text


def test_what_a_rank_writes_unasked_and_what_nobody_writes_are_found() -> None:
    logs = dict(rehearsal("mlp dp4 1f1b m2").logs)
    name = logs[0].saved[0].name
    (writer,) = named(logs, 0, name).writers
    boxes = named(logs, writer, name).boxes
    changed(logs, (writer + 1) % 4, name, lambda x: replace(x, boxes=boxes))
    assert f"also by rank {(writer + 1) % 4}" in text_of(logs)
    logs = dict(rehearsal(TIED).logs)
    name = next(x.name for x in logs[2].saved if x.group == (0, 1))
    for rank in (0, 1):
        changed(logs, rank, name, lambda x: None)
    assert "left to the ranks [0, 1], which don't hold it: written by nobody" in text_of(logs)


def test_layouts_tile_a_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    assert untiled.__wrapped__(10, (Shard(0),), (4,)) == ""
    assert untiled.__wrapped__(12, (_StridedShard(0, split_factor=3), Shard(0)), (2, 2)) == ""
    assert untiled.__wrapped__(0, (Shard(0),), (4,)) == ""
    # a rank that takes the part of another
    of = chunks.local_chunks
    monkeypatch.setattr(chunks, "local_chunks", lambda *x: of(*x[:3], [min(x[3][0], 2)]))
    assert untiled.__wrapped__(9, (Shard(0),), (4,)) == "elements 6 to 9 are written twice"
    monkeypatch.setattr(chunks, "local_chunks", lambda *x: of(*x[:3], [max(x[3][0], 1)])[:1])
    assert "written by nobody" in untiled.__wrapped__(8, (Shard(0),), (4,))

"""Proofs on logs written by hand: a pipeline of two stages of two ranks, right, and with faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from meshwright.executor.ranks import StageMesh
from meshwright.executor.rehearsal.events import Event, Kind, RankLog
from meshwright.executor.rehearsal.kinds import kinds_of_ranks
from meshwright.executor.rehearsal.proof import Mismatch, mismatches

MICROBATCHES = 3
EVERY = {rank: rank for rank in range(4)}
Streams = dict[int, list[Event]]


def collective(name: str, ranks: tuple[int, ...], size: int, root: int | None = None) -> Event:
    return Event(
        kind=Kind.COLLECTIVE,
        operation="allreduce_" if root is None else "broadcast_",
        group=(name, ranks),
        shapes=((size,),),
        dtype="float32",
        nbytes=4 * size,
        root=root,
    )


def message(kind: Kind, peer: int, *, way: str = "forward", tag: int = 1) -> Event:
    return Event(
        kind=kind,
        operation="send" if kind is Kind.SEND else "recv_",
        group=(way, (0, 1, 2, 3)),
        shapes=((2, 8),),
        dtype="float32",
        nbytes=64,
        peer=peer,
        tag=tag,
        where=f"{kind} of stage {peer // 2}",
    )


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
    at = [
        k
        for k, e in enumerate(streams[rank])
        if e.kind is kind and (not group or e.group[0] == group)
    ]
    return at[number]


def test_a_right_pipeline_matches() -> None:
    assert found(pipeline()) == []


def test_one_of_each_kind_matches_as_all_do() -> None:
    streams = pipeline()
    kinds = {0: 0, 1: 0, 2: 2, 3: 2}
    assert found({0: streams[0], 2: streams[2]}, kinds) == []


# --- faults ---------------------------------------------------------------------------------------


def drop(rank: int, kind: Kind, number: int = 0, group: str = "") -> Callable[[Streams], None]:
    def fault(streams: Streams) -> None:
        del streams[rank][place(streams, rank, kind, number, group)]

    return fault


def double(rank: int, kind: Kind, group: str = "") -> Callable[[Streams], None]:
    def fault(streams: Streams) -> None:
        k = place(streams, rank, kind, group=group)
        streams[rank].insert(k, streams[rank][k])

    return fault


def change(
    rank: int, kind: Kind, of: str = "", number: int = 0, **fields: Any
) -> Callable[[Streams], None]:
    """Other fields of an event, of the group `of`."""

    def fault(streams: Streams) -> None:
        k = place(streams, rank, kind, number, of)
        streams[rank][k] = replace(streams[rank][k], **fields)

    return fault


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
    a, b = (
        place(streams, 3, Kind.COLLECTIVE, 0, "tensor"),
        place(streams, 3, Kind.COLLECTIVE, 1, "tensor"),
    )
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
    "dropped last send": (drop(1, SEND, MICROBATCHES - 1), "messages"),
    "dropped gradient": (drop(3, SEND), "messages"),
    "dropped receive": (drop(2, RECEIVE), "messages"),
    "doubled send": (double(0, SEND), "messages"),
    "doubled receive": (double(3, RECEIVE), "messages"),
    "a micro-batch more": (together(double(0, SEND), double(1, SEND)), "messages"),
    "send of another shape": (change(0, SEND, shapes=((2, 9),)), "messages"),
    "send of another dtype": (change(1, SEND, dtype="bfloat16"), "messages"),
    "receive of another shape": (change(2, RECEIVE, shapes=((1, 8),)), "messages"),
    "send with another tag": (change(0, SEND, tag=9), "messages"),
    "send in the other group": (change(0, SEND, group=("backward", (0, 1, 2, 3))), "messages"),
    "send to the wrong rank": (change(0, SEND, peer=1), "messages"),
    "send to a rank that is not there": (change(0, SEND, peer=7), "messages"),
    "crossed peers": (together(change(0, SEND, peer=3), change(1, SEND, peer=2)), "messages"),
    "dropped collective": (drop(1, ALL, 0, "data"), "collectives"),
    "doubled collective": (double(2, ALL, "tensor"), "collectives"),
    "collective of rank 0 alone": (lambda s: s[0].append(s[0][-1]), "collectives"),
    "collective of another shape": (change(1, ALL, "data", shapes=((101,),)), "collectives"),
    "collective of another dtype": (change(1, ALL, "data", dtype="float16"), "collectives"),
    "another collective": (change(3, ALL, "data", operation="_allgather_"), "collectives"),
    "another root": (change(3, ALL, "default_pg", root=2), "collectives"),
    "swapped in a group": (swap_in_group, "collectives"),
    "wrong group": (change(0, ALL, "data", group=("data", (0, 2))), "collectives"),
    "a group of others": (change(0, ALL, "data", group=("data", (2, 3))), "collectives"),
    "a group of the same size": (
        change(0, ALL, "tensor", number=1, group=("tensor", (0, 3))), "collectives"
    ),
    "a smaller group": (change(2, ALL, "data", group=("data", (2,))), "collectives"),
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


def test_a_fault_of_one_kind_is_found() -> None:
    """Also where each kind has one log: what stage 0 sends is not what stage 1 receives."""
    streams = pipeline()
    drop(0, Kind.SEND)(streams)
    said = found({0: streams[0], 2: streams[2]}, {0: 0, 1: 0, 2: 2, 3: 2})
    assert [m.proof for m in said] and "messages" in said[0].proof


def test_the_place_is_said() -> None:
    streams = pipeline()
    change(0, Kind.SEND, shapes=((2, 9),), where="send_activation of stage 0", block="layers.1")(
        streams
    )
    (mismatch, *_) = found(streams)
    assert mismatch.ranks == (0, 2)
    for part in ("[2, 9]", "[2, 8]", "send_activation of stage 0", "layers.1", "message 0"):
        assert part in mismatch.text


# --- kinds ----------------------------------------------------------------------------------------


def mesh(first: int, dp: int, tp: int, **more: int) -> StageMesh:
    given = {"shards": dp, **more}
    return StageMesh(ranks=tuple(range(first, first + dp * tp)), dp=dp, tp=tp, **given)


def test_the_first_of_an_axis_is_a_kind() -> None:
    kinds = kinds_of_ranks([mesh(0, 8, 1), mesh(8, 8, 1)])
    assert sorted(set(kinds.values())) == [0, 1, 8, 9]
    assert kinds[7] == 1 and kinds[12] == 9


def test_the_first_of_shards_is_a_kind() -> None:
    kinds = kinds_of_ranks([mesh(0, 8, 1, shards=4)])
    assert sorted(set(kinds.values())) == [0, 1, 4]
    assert kinds[3] == kinds[2] == kinds[5] == 1


def test_the_first_of_experts_and_of_rows_is_a_kind_and_each_part_of_the_tokens() -> None:
    kinds = kinds_of_ranks([mesh(0, 8, 1, experts=4)])
    assert kinds == {0: 0, 4: 4, **dict.fromkeys((1, 2, 3, 5, 6, 7), 1)}
    kinds = kinds_of_ranks([mesh(0, 8, 1, cp=2)])
    assert kinds == {0: 0, 1: 1, **dict.fromkeys((2, 4, 6), 2), **dict.fromkeys((3, 5, 7), 3)}
    kinds = kinds_of_ranks([mesh(0, 3, 3)])
    firsts, others = dict.fromkeys((1, 2), 1), dict.fromkeys((4, 5, 7, 8), 4)
    assert kinds == {0: 0, **firsts, 3: 3, 6: 3, **others}


def test_other_parts_are_kinds() -> None:
    """10 over 8 ranks: parts of 2, 2, 2, 2, 2, 0, 0 and 0."""
    kinds = kinds_of_ranks([mesh(0, 1, 8)], (frozenset(), frozenset({10, 64})))
    assert kinds == {0: 0, **dict.fromkeys(range(1, 5), 1), **dict.fromkeys(range(5, 8), 5)}


def test_unequal_meshes_and_every() -> None:
    assert len(set(kinds_of_ranks([mesh(0, 4, 1), mesh(4, 2, 2)]).values())) == 8
    assert len(set(kinds_of_ranks([mesh(0, 8, 1)], every=True).values())) == 8


def test_ranks_that_are_done_stop_nobody() -> None:
    """The last to come to a collective ends it for all; one of them has something left to do."""
    everyone = collective("default_pg", (0, 1, 2, 3), 5)
    streams = {rank: [everyone] for rank in range(4)}
    streams[3] = [message(Kind.SEND, 2), everyone]
    streams[2] = [message(Kind.RECEIVE, 3), everyone, WAIT]
    logs = {rank: RankLog(rank=rank, events=tuple(e)) for rank, e in streams.items()}
    assert mismatches(logs, EVERY) == []

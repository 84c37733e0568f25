"""Proofs on what ranks would save: logs of a rehearsal, right, and with faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.executor.checkpoint import SavedTensor
from meshwright.executor.files import chunks
from meshwright.executor.files.chunks import untiled
from meshwright.executor.rehearsal import RankLog, unlike_saves
from tests.executor.rehearsal.rehearsal_runs import rehearsal

# two stages of two data ranks, whose ZeRO-3 shards every weight; the tied one is on both stages
TIED = "gpt2_tied pp2xdp2 1f1b m4 zero3"
EVERY = {rank: rank for rank in range(4)}
Logs = dict[int, RankLog]


def logs_of(line: str) -> Logs:
    return dict(rehearsal(line).logs)


def named(logs: Logs, rank: int, name: str) -> SavedTensor:
    return next(x for x in logs[rank].saved if x.name == name)


def changed(
    logs: Logs, rank: int, name: str, change: Callable[[SavedTensor], SavedTensor | None]
) -> None:
    found = [change(x) if x.name == name else x for x in logs[rank].saved]
    logs[rank] = replace(logs[rank], saved=tuple(x for x in found if x is not None))


def split_weight(logs: Logs) -> str:
    """A weight that ranks 0 and 1 write half of each."""
    return next(x.name for x in logs[0].saved if x.writers == (0, 1) and x.boxes)


def text_of(logs: Logs) -> str:
    found = unlike_saves(logs, EVERY)
    assert all(m.proof == "checkpoint" for m in found)
    return "\n".join(map(str, found))


def test_every_tensor_is_written_once() -> None:
    logs = logs_of(TIED)
    assert unlike_saves(logs, EVERY) == []
    names = {x.name for log in logs.values() for x in log.saved}
    assert any(name.startswith("optimizer.") for name in names)
    both = {x.name for x in logs[0].saved} & {x.name for x in logs[2].saved}
    assert both, "the tied weight, whose first stage writes it"
    for name in both:
        assert named(logs, 2, name).boxes == () and named(logs, 2, name).group == (0, 1)


def test_two_kinds_of_ranks_are_enough() -> None:
    found = rehearsal("mlp pp2xdp4 1f1b m4 zero1", every=False)
    assert len(found.logs) < 8
    assert unlike_saves(found.logs, found.kind_of) == []


@pytest.mark.parametrize(
    ("rank", "change", "says"),
    [
        (1, lambda x: replace(x, writers=(0,)), "to be written by [0, 1], and by [0]"),
        (1, lambda x: replace(x, boxes=()), "elements"),
        (1, lambda x: replace(x, shape=(*x.shape, 1)), "float32"),
        (1, lambda x: replace(x, dtype="bfloat16"), "float32, and"),
        (1, lambda x: replace(x, fault="of dim 0 elements 1 to 2"), "of dim 0 elements 1 to 2"),
        (1, lambda x: replace(x, group=(2, 3)), "and by others"),
    ],
)
def test_a_fault_is_found(
    rank: int, change: Callable[[SavedTensor], SavedTensor], says: str
) -> None:
    logs = logs_of(TIED)
    name = split_weight(logs)
    changed(logs, rank, name, change)
    text = text_of(logs)
    assert says in text and repr(name) in text


def test_what_two_ranks_write_is_found() -> None:
    logs = logs_of(TIED)
    name = split_weight(logs)
    twice = named(logs, 0, name).boxes
    changed(logs, 1, name, lambda x: replace(x, boxes=twice))
    assert "written twice" in text_of(logs)


def test_what_a_rank_writes_unasked_is_found() -> None:
    logs = logs_of("mlp dp4 1f1b m2")
    name = logs[0].saved[0].name
    (writer,) = named(logs, 0, name).writers
    other = (writer + 1) % 4
    boxes = named(logs, writer, name).boxes
    changed(logs, other, name, lambda x: replace(x, boxes=boxes))
    assert f"also by rank {other}" in text_of(logs)


def test_what_nobody_writes_is_found() -> None:
    logs = logs_of(TIED)
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

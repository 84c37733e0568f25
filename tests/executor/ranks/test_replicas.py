"""The ranks of a stage's axes, what ranks must give alike, and what they tell each other:
collectives on objects, their errors, and the watchdog's phases meanwhile."""

import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from meshwright.executor.ranks import StageMesh, launch, replicas
from meshwright.executor.ranks import object_collectives as talk
from meshwright.executor.ranks.background import Background
from meshwright.executor.ranks.watchdog import progress
from tests.executor.checkpoint.checkpoint_runs import start
from tests.helpers.ranks import on_ranks
from tests.helpers.threaded_ranks import talking_ranks

CPU = torch.device("cpu")


def of_all(x: Any) -> list[Any]:
    every: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(every, x)
    return every


def weights() -> None:
    mine = torch.full((2, 3), float(launch.rank())).t()  # not contiguous
    with pytest.raises(ValueError, match=r"1 of 2 tensors .* from rank 0's, e.g. 'a' on ranks \[1"):
        replicas.check_equal({"a": mine, "b": torch.ones(2)})
    replicas.make_equal(
        {"a": mine, "none": torch.empty(0), "meta": torch.empty(3, device="meta")}, CPU
    )
    assert torch.equal(mine, torch.zeros(3, 2))
    replicas.check_equal({"a": mine})
    odd: list[Callable[[], dict[str, torch.Tensor]]] = [
        lambda: {"a": torch.ones(2 + launch.rank())},
        lambda: {"a": torch.ones(2, dtype=(torch.float32, torch.float64)[launch.rank()])},
        lambda: {"a": torch.ones(2, device=("cpu", "meta")[launch.rank()])},
        lambda: {"ab"[launch.rank()]: torch.ones(2)},
    ]
    for made in odd:
        with pytest.raises(ValueError, match=r"model differs between ranks: on rank 1 \(shape"):
            replicas.make_equal(made(), CPU)


def batches() -> None:
    """The first three, and every hundredth, are compared."""
    me, check, noticed = launch.rank(), replicas.BatchCheck(), []
    for k in range(202):
        try:
            check.check(["x"], {"x": torch.tensor([me])}, CPU)
        except ValueError as error:
            assert "from rank 0's in 'x' on ranks [1]: every rank gives the same" in str(error)
            noticed.append(k)
    assert noticed == [0, 1, 2, 100, 200]


def shares() -> None:
    me = launch.rank()

    def check(x: torch.Tensor | None, rows: int, share: tuple[int, int]) -> None:
        given = None if x is None else {"x": x, "alike": torch.ones(2)}
        replicas.BatchCheck().check(
            ["x", "alike"], given, CPU, share=share, rows={"x"}, rows_in_all=rows
        )

    check(torch.full((2, 3), me), 4, (me, 2))  # other rows in each share
    for x, rows, share, says in (
        (torch.full((2, 3), me), 4, (0, 2), r"differs .*'x' on ranks \[1\]: with local=True"),
        (torch.zeros(2, 3 + me), 4, (me, 2), r"'x' on ranks \[1\]: rows have the same dtype"),
        (torch.zeros(2 + me, 3), 4 + 2 * me, (me, 2), r"give \[2, 3\] rows, where the shares of"),
        (None if me else torch.zeros(2, 3), 4, (me, 2), r"not as planned on ranks \[1\], which"),
    ):
        with pytest.raises(ValueError, match=says):
            check(x, rows, share)


def riding() -> None:
    """Batches of steps that nobody compares before: by what rides on an exchange at their end."""
    me = launch.rank()
    same = {"x": torch.arange(4096.0), "y": torch.ones(2, 3)}

    def concluded(inputs: Any, rows: Collection[str] = (), rows_in_all: int = 2) -> None:
        check = replicas.BatchCheck()
        check.batches = replicas.FIRST
        check.check([*same], inputs, CPU, rows=rows, rows_in_all=rows_in_all)
        numbers = torch.tensor(check.riding, dtype=torch.float64)
        dist.all_reduce(numbers)
        check.conclude(numbers.tolist(), CPU)

    own = {**same, "y": torch.full((2 + me, 3), me)}
    for inputs, rows in ((same, ()), (None if me else same, ()), (own, {"y"})):
        concluded(inputs, rows)
    strided = torch.arange(2 * 4096.0)[::2] / 2
    concluded({**same, "x": strided if me else same["x"]})
    wrong: list[tuple[Any, Collection[str], int, str]] = [
        ({**same, "y": torch.ones(2, 3 + me)}, (), 2, r"on ranks \[1\] than on rank 0: rows have"),
        ({**same, "y": torch.ones(2, 3 + me)}, {"y"}, 2, "rows have the same dtype"),
        (
            {**same, "y": own["y"].double() if me else own["y"]},
            {"y"},
            2,
            "rows have the same dtype",
        ),
        ({**same, "x": same["x"] + me}, (), 2, r"on ranks \[1\] .*every rank gives the same"),
        (same, (), 2 + me, "rows have the same dtype"),
    ]
    for inputs, rows, rows_in_all, says in wrong:
        with pytest.raises(ValueError, match=says):
            concluded(inputs, rows, rows_in_all)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def draws() -> None:
    """As rank 0 does inside; then each goes on with its own."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(launch.rank())
    with replicas.same_random_state():
        inside = of_all(drawn())
    after = of_all(drawn())
    assert inside[0] == inside[1] == after[0]
    assert after[1] != after[0]


@pytest.mark.parametrize("function", [weights, batches, shares, riding, draws])
def test_ranks_agree(function: Callable[[], None]) -> None:
    on_ranks(2, function)


def test_a_digest_is_of_values_shape_and_dtype() -> None:
    x = torch.arange(6.0)
    others = [x + 1, x.view(2, 3), x.double(), x.int(), x[:5], torch.empty(0)]
    assert len({replicas.digest(y) for y in [x, *others]}) == 7
    assert replicas.digest(x) == replicas.digest(x.clone()) and 0 < replicas.digest(x) < 2**63
    assert replicas.digest(torch.empty(3, device="meta")) == 0


# --- the ranks of a stage's axes ------------------------------------------------------------------


SIZES = st.sampled_from([1, 2, 3, 4])


@given(SIZES, SIZES, SIZES, SIZES, SIZES, st.randoms(use_true_random=False))
def test_axes_are_lines_of_the_grid(
    replicas: int, runs: int, low: int, tp: int, cp: int, order: Any
) -> None:
    high, dp = low * runs, low * runs * replicas * cp
    ranks = list(range(5, 5 + dp * tp))
    order.shuffle(ranks)
    mesh = StageMesh(ranks=tuple(ranks), dp=dp, tp=tp, shards=high, cp=cp)
    place_of = {rank: divmod(k, tp) for k, rank in enumerate(ranks)}
    assert mesh.outer == ((dp // cp, cp) if cp > 1 else (dp,))
    for rank, (d, t) in place_of.items():
        assert mesh.coordinate(rank) == (d, t) and mesh.rank(d, t) == rank
        assert mesh.row(d) == tuple(r for r in ranks if place_of[r][0] == d)
        assert mesh.column(t) == tuple(r for r in ranks if place_of[r][1] == t)
        assert mesh.outer_coordinate(d) == ((d // cp, d % cp) if cp > 1 else (d,))
        column = {r: place_of[r][0] for r in mesh.column(t)}
        line = [r for r, k in column.items() if k // high == d // high and k % low == d % low]
        assert mesh.line(rank, low, high) == (tuple(line), line.index(rank))


@pytest.mark.parametrize(
    ("given", "shards", "cuts", "experts", "others"),
    [
        ({"dp": 8, "shards": 4, "experts": 2}, 4, (2, 4, 8), "shard shard part",
         "replicate shard shard"),
        ({"dp": 8, "shards": 8, "experts": 4}, 2, (4, 8), "shard part", "shard shard"),
        ({"dp": 8, "shards": 1, "experts": 2}, 1, (2, 8), "replicate part",
         "replicate replicate"),
        ({"dp": 4, "tp": 2, "shards": 4, "experts": 4, "folded": True}, 2, (2, 4), "shard part",
         "shard shard"),
        ({"dp": 12, "shards": 4, "experts": 2}, 2, (2, 4, 12), "replicate shard part",
         "replicate shard shard"),
        ({"dp": 1, "shards": 1}, 1, (1,), "replicate", "replicate"),
    ],
)  # fmt: skip
def test_a_weight_of_experts_is_cut_as_its_holders_are(
    given: dict[str, Any], shards: int, cuts: tuple[int, ...], experts: str, others: str
) -> None:
    """Of 8 data ranks with experts of 2, 4 hold the same: ZeRO over 4 neighbours shards over
    these."""
    tp = given.get("tp", 1)
    mesh = StageMesh(ranks=tuple(range(given["dp"] * tp)), **{"tp": tp, **given})
    assert (mesh.expert_shards, mesh.cuts) == (shards, cuts)
    assert mesh.data_dims(experts=True) == experts.split()
    assert mesh.data_dims(experts=False) == others.split()


# --- collectives on objects -----------------------------------------------------------------------


def _talk() -> dict[str, Any]:
    """Everything once, on each of four ranks."""
    group, me = dist.group.WORLD, dist.get_rank()
    calls: list[int] = []

    def decide() -> str:
        calls.append(me)
        return f"decided by {me}"

    def on_two() -> int:
        if me >= 2:
            raise ValueError(f"no on {me}")
        return me

    def on_none() -> None:
        raise ValueError("nothing on 0")

    said = []
    for mistake in (
        lambda: talk.run_on_all(group, on_two),
        lambda: talk.run_on_first(group, on_none),
    ):
        with pytest.raises(ValueError) as caught:
            mistake()
        said.append(str(caught.value))
    return {
        "all": talk.all_gather_object(group, f"{me}"),
        "to first": talk.gather_object(group, f"{me}"),
        "by 2": talk.broadcast_object(group, 2, f"{me}"),
        "together": talk.run_on_all(group, lambda: me),
        "decided": talk.run_on_first(group, decide), "calls": calls, "said": said,
    }  # fmt: skip


def test_what_one_rank_tells_reaches_those_it_is_for() -> None:
    with talking_ranks() as ranks:
        found = ranks.run((4, 1), lambda *_: _talk())
    for me, (_, result) in enumerate(found.items()):
        assert result["all"] == ["0", "1", "2", "3"]
        assert result["to first"] == (["0", "1", "2", "3"] if me == 0 else [])
        assert result["by 2"] == "2"
        assert result["together"] == me
        assert result["decided"] == "decided by 0"
        assert result["calls"] == ([0] if me == 0 else [])
        assert result["said"] == ["no on 2", "nothing on 0"]


# --- phases ---------------------------------------------------------------------------------------


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The phases entered from now on, each with whether the rank waits."""
    seen: list[tuple[str, bool]] = []
    enter = progress.enter

    def entering(phase: str, **details: Any) -> None:
        seen.append((phase, details.get("waits", False)))
        enter(phase, **details)

    monkeypatch.setattr(progress, "enter", entering)
    return seen


def test_who_waits_for_others_is_in_a_phase_of_its_own(
    phases: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    group: Any = object()
    with progress.during("saving"):
        talk.all_gather_object(group, 0)
        talk.gather_object(group, 0)
        talk.broadcast_object(group, 0, 0)
    assert phases == [("saving", False), *[(talk.WAITING, True), ("saving", False)] * 3]


def test_a_save_and_a_load_are_phases_for_the_watchdog(
    tmp_path: Path, phases: list[tuple[str, bool]]
) -> None:
    """Who writes or reads is at work, and begins anew. What is saved in the background is no
    phase."""
    run = start("mlp", "alone")
    run.save(tmp_path / "at")
    saving = ("saving a checkpoint", False)
    assert phases == [saving, ("writing a checkpoint", False), saving]
    phases.clear()
    run.load(tmp_path / "at")
    loading = ("loading a checkpoint", False)
    assert phases == [loading, ("reading a checkpoint", False), loading]
    assert progress.activity.phase is None
    phases.clear()
    run.save(tmp_path / "at", asynchronous=True).wait()
    assert phases == [saving, ("copying a checkpoint to the host", False), saving]
    phases.clear()

    def work() -> None:
        with talk.phase("not to be seen"):
            pass

    with progress.during("training"):
        Background("work", work).wait()
    assert phases == [("training", False)]


def test_an_old_checkpoint_that_cannot_be_removed_is_left_to_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", "alone")
    run.save(tmp_path / "at")

    def refuse(path: Any, *, dir_fd: Any = None) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", refuse)
        run.save(tmp_path / "at")
    assert (tmp_path / ".at.old").exists()
    run.load(tmp_path / "at")
    run.save(tmp_path / "at")
    assert not list(tmp_path.glob(".at*"))

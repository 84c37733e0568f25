"""What a run keeps: checkpoints, of which the newest sound one is resumed, and plans for as many
hosts and for others."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright.plan_search
from meshwright import Cluster, Overrides, Plan, fit
from meshwright.executor.errors import DamagedError, SavedError
from meshwright.profiles.inputs import MeshwrightError
from meshwright.training.fit import KeptPlans
from meshwright.training.kept import KeptCheckpoints
from tests.executor.checkpoint.checkpoint_runs import start
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import Net, batch, host, loss, net
from tests.meshwright.data.feeding import ROWS, Tokens

ASKED: dict[str, Any] = {
    "example_inputs": batch(4), "global_batch_size": ROWS, "loss_fn": loss, "precision": "fp32",
}  # fmt: skip
ONE = host(1)


def test_the_newest_are_kept_and_resumed(tmp_path: Path) -> None:
    run, kept = start("mlp", "alone"), KeptCheckpoints(folder=tmp_path / "run", keep=2)
    loaded: list[Path] = []
    assert kept.steps() == [] and kept.resume(loaded.append) is None
    for step in (5, 10, 1_000_000_000):
        run.save(kept.path(step))
        kept.drop_old(step)
    assert kept.steps() == [10, 1_000_000_000]
    (kept.folder / "step-best").mkdir()
    (kept.folder / "notes.txt").write_text("mine")
    leftover = kept.folder / ".step-00000015.0123abcd.saving"
    leftover.mkdir()
    kept.path(10).rename(kept.folder / ".step-00000010.old")  # killed between two renames
    assert kept.steps() == [10, 1_000_000_000]
    assert kept.resume(loaded.append) == 1_000_000_000
    assert loaded == [kept.path(1_000_000_000)] and not leftover.exists()
    assert (kept.folder / "notes.txt").exists() and (kept.folder / "step-best").exists()


def test_a_damaged_one_is_left_and_the_one_before_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, kept = start("mlp", "alone"), KeptCheckpoints(folder=tmp_path, keep=3)
    for step in (1, 2):
        run.save(kept.path(step))
    (shard,) = kept.path(2).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert kept.resume(run.load) == 1
    assert "is damaged" in caplog.text and "the checkpoint before it is tried" in caplog.text
    assert kept.steps() == [1, 2]
    (shard,) = kept.path(1).glob("*.safetensors")
    shard.write_bytes(b"")
    with pytest.raises(DamagedError):
        kept.resume(run.load)


def test_a_checkpoint_of_another_model_is_an_error(tmp_path: Path) -> None:
    kept = KeptCheckpoints(folder=tmp_path, keep=3)
    start("mlp", "alone").save(kept.path(1))
    with pytest.raises(SavedError):
        kept.resume(start("gpt2_tied", "alone").load)


def test_what_was_just_saved_is_never_dropped(tmp_path: Path) -> None:
    """A damaged newer checkpoint, which the run went on before, does not count; a folder with
    somebody's file stays, with a warning."""
    run, kept = start("mlp", "alone"), KeptCheckpoints(folder=tmp_path, keep=1)
    for step in (5, 6, 7, 60):
        run.save(kept.path(step))
    (kept.path(5) / "mine.txt").write_text("1")
    kept.drop_old(7)
    assert kept.steps() == [5, 7, 60]
    assert (kept.path(5) / "mine.txt").exists()


def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: Any) -> None:
        raise AssertionError("a search, where a plan was there")

    monkeypatch.setattr(meshwright.plan_search, "_searched", searched)


def test_a_plan_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptPlans(folder=tmp_path, asked={**ASKED, "overrides": Overrides(recompute="full")})
    first = kept.planned(net(), ONE)
    no_search(monkeypatch)
    assert kept.planned(net(), ONE).plan == first.plan == Plan.load(kept.path(ONE))


def test_another_cluster_and_other_wishes_have_other_plans(tmp_path: Path) -> None:
    kept = KeptPlans(folder=tmp_path, asked=ASKED)
    wishes = [{"overrides": Overrides(zero=1)}, {"global_batch_size": 16}, {"optimizer": "sgd"}]
    others = [KeptPlans(folder=tmp_path, asked={**ASKED, **wish}).path(ONE) for wish in wishes]
    clusters = [
        dataclasses.replace(ONE, num_nodes=2),
        dataclasses.replace(ONE, devices_per_node=2),
        Cluster.from_catalog("h100-sxm", devices_per_node=1),
    ]
    paths = {kept.path(ONE), *others, *map(kept.path, clusters)}
    assert len(paths) == 1 + len(wishes) + len(clusters)
    again = {**ASKED, "example_inputs": batch(4, 1)}
    assert kept.path(ONE) == KeptPlans(folder=tmp_path, asked=again).path(ONE)


def test_a_plan_of_another_model_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptPlans(folder=tmp_path, asked=ASKED)
    kept.planned(net(), ONE)
    changed = Net()
    changed.head = torch.nn.Linear(16, 24, bias=True)
    result = kept.planned(changed, ONE)
    assert "made again" in caplog.text and str(kept.path(ONE)) in caplog.text
    assert result.plan == Plan.load(kept.path(ONE))


def test_plans_for_other_numbers_of_hosts_are_made_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptPlans(folder=tmp_path, asked=ASKED)
    result = kept.planned(net(), ONE)
    kept.plan_ahead(result, ONE, [1, 2, 4])
    for count in (2, 4):
        other = dataclasses.replace(ONE, num_nodes=count)
        assert Plan.load(kept.path(other)).num_ranks == count
    no_search(monkeypatch)
    kept.plan_ahead(result, ONE, [1, 2, 4])


@second_tier("plans for other numbers of hosts are made ahead in the test above")
def test_hosts_on_which_a_run_cannot_go_on_are_named_before_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, gradients and states take 65 KB: one device of 48 KiB has no room, four have."""
    room = {"memory_bytes": 48 * 1024, "reserved_bytes": 0, "communicator_bytes": 0}
    four = dataclasses.replace(ONE, device=dataclasses.replace(ONE.device, **room), num_nodes=4)
    kept = KeptPlans(folder=tmp_path, asked={**ASKED, "memory_margin": 0.0})
    kept.plan_ahead(kept.planned(net(), four), four, [1])
    assert "with 1 hosts this run can't go on" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plans").touch()
    KeptPlans(folder=tmp_path / "plans", asked=ASKED).planned(net(), ONE)
    assert "a plan is not kept" in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"folder": None}, r"fit: hosts are given, but no folder"),
        ({"planning": {**ASKED, "plan": "plan.json"}}, r"fit: hosts are given, but the plan is"),
        ({"hosts": (2, 0)}, r"fit: hosts\[1\]=0"),
        ({"hosts": 2}, r"fit: hosts=2"),
        ({"hosts": range(10**12)}, r"fit: hosts=range"),
    ],
)
def test_hosts_that_cannot_be_are_refused(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    asked = {"planning": ASKED, "hosts": (2,), "folder": tmp_path, **given}
    with pytest.raises(MeshwrightError, match=says):
        fit(net(), Tokens(), optimizer=lambda r: torch.optim.SGD(r.parameters()), **asked)

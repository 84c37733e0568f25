"""`meshwright profile`: what is measured, once, and what the files and the terminal get."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.measure import host_work
from meshwright.profiles.measure import operators as measure_ops
from meshwright.profiles.measure.collectives import COLLECTIVES, SIZES_BYTES
from meshwright.profiles.profile import MEASURED, cores_busy, load_profile
from meshwright.profiles.store import DeviceId, Measurements, Store, export_json
from meshwright.profiles.timings import CollectiveTiming
from meshwright.shell import profile_command
from meshwright.shell.profile_command import Effort, calls, microbatch_rows, profile_model, progress
from tests.helpers import tiny
from tests.helpers.tiers import second_tier
from tests.meshwright.commands import Captured, failed, printed, terminal, timing


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Launches of ranks that were asked for; none is started."""
    asked: list[tuple[int, str]] = []

    def launch_local(ranks: int, backend: str, *, budget_s: float) -> list[CollectiveTiming]:
        asked.append((ranks, backend))
        return [timing(backend=backend, ranks=ranks, size=ranks, per_node=ranks)]

    monkeypatch.setattr(profile_command, "launch_local", launch_local)
    return asked


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few repetitions as there can be, of little."""
    monkeypatch.setattr(host_work, "STEP_ELEMENTS", 2**16)
    monkeypatch.setattr(host_work, "FILE_BYTES", 2**16)
    real = measure_ops.measure
    monkeypatch.setattr(
        measure_ops, "measure", lambda one, device, *, budget_s: real(one, device, budget_s=0.0)
    )


def profiled(store: Store, cluster: Cluster, **changes: Any) -> profile_command.Summary:
    batch = changes.pop("batch", 4)
    effort = Effort(**{"budget_s": 600.0, **changes})
    of = tiny.net(), tiny.batch(4), tiny.loss
    return profile_model(*of, cluster, batch=batch, precision="fp32", effort=effort, store=store)


def test_rows_are_divisors_of_the_batch_with_both_ends() -> None:
    for batch, rows in ((1, [1]), (12, [1, 2, 3, 4, 6, 12]), (64, [1, 2, 4, 16, 32, 64])):
        assert microbatch_rows(batch) == rows


@cache
def traced() -> tuple[Graph, FactorTable]:
    return tiny.cut(tiny.net())


def test_every_degree_and_every_number_of_rows_is_covered() -> None:
    """The first layer's projection by hand: [rows, 6, 16] x [32, 16], whole and split both ways."""
    found = calls(*traced(), tiny.host(2), batch=2)
    shapes = {
        tuple(shape for _, shape, _ in one.operands) for one in found if one.short == "linear"
    }
    for rows in (1, 2):
        assert ((rows, 6, 16), (32, 16), (32,)) in shapes
        assert ((rows, 6, 16), (16, 16), (16,)) in shapes  # colwise on two
        assert ((rows, 6, 8), (32, 8), (32,)) in shapes  # rowwise on two
        assert ((rows, 6, 16), (8, 16), (8,)) not in shapes  # that were four


def test_three_equal_layers_are_measured_once_and_the_most_work_first() -> None:
    """A linear layer's FLOPs are 2 · elements of its input · outputs; all others come after."""
    graph, table = traced()
    found = calls(graph, table, tiny.host(1), batch=1)
    assert len({one.text for one in found}) == len(found)
    assert len(found) < len(graph.ops) - 2 * len(graph.ops) // 4
    flops = [
        2 * math.prod(one.operands[0][1]) * one.operands[1][1][0] if one.short == "linear" else 0
        for one in calls(graph, table, tiny.host(2), batch=4)
    ]
    assert flops[0] > 0
    assert flops == sorted(flops, reverse=True)


@second_tier("a profile that travels as a file is measured, and known the next time")
def test_what_was_measured_is_known_to_the_planner_and_the_next_time(store: Store) -> None:
    cluster = tiny.host(1)
    first = profiled(store, cluster)
    assert first.timed == first.calls > 10 and first.skipped == {}
    profile = load_profile(cluster, store)
    assert profile is not None
    for one in calls(*traced(), cluster, batch=4):
        found = profile.op(one.text)
        assert found is not None and found[0] > 0 and found[2] == MEASURED
        assert (found[1] > 0) == one.differentiable
    second = profiled(store, cluster)
    assert (second.known, second.timed) == (first.calls, 0)
    assert profiled(store, cluster, again=True).timed == first.calls


def test_a_spent_budget_leaves_the_rest_to_the_roofline(store: Store) -> None:
    summary = profiled(store, tiny.host(1), budget_s=1e-6)
    assert summary.timed == 0
    assert summary.skipped == {"the time budget was spent": summary.calls}
    assert f"{summary.calls} left to the roofline: the time budget was spent" in str(summary)


@pytest.mark.parametrize(
    ("ranks", "collectives", "expected"), [(2, True, [(2, "gloo")]), (2, False, []), (1, True, [])]
)
def test_collectives_take_as_many_ranks_as_the_cluster_has(
    store: Store,
    launches: list[tuple[int, str]],
    ranks: int,
    collectives: bool,
    expected: list[tuple[int, str]],
) -> None:
    cluster = tiny.host(ranks)
    profiled(store, cluster, collectives=collectives, budget_s=1e-6)
    assert launches == expected
    profile = load_profile(cluster, store)
    found = profile.collective("all_reduce", 1024, ranks, ranks) if profile else None
    assert found == ((0.5, MEASURED) if expected else None)


@second_tier(
    "operators that are known are not timed again; collectives are asked for as ranks there are"
)
def test_whole_curves_are_not_timed_again(store: Store, launches: list[tuple[int, str]]) -> None:
    cluster = tiny.host(2)
    for known in (0, len(SIZES_BYTES) - 1, len(SIZES_BYTES)):
        found = [timing(kind=kind, nbytes=4**k) for kind in COLLECTIVES for k in range(known)]
        here = DeviceId.here("cpu", cores_busy(cluster))
        store.add(Measurements(device=here, operators={}, collectives=tuple(found)))
        launches.clear()
        profiled(store, cluster, budget_s=1e-6)
        assert launches == ([] if known == len(SIZES_BYTES) else [(2, "gloo")])
    profiled(store, cluster, budget_s=1e-6, again=True)
    assert launches == [(2, "gloo")]


@pytest.mark.parametrize("changes", [{"budget_s": 0.0}, {"batch": 0}])
def test_wrong_numbers_are_refused(store: Store, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="legal: seconds above 0, rows from 1"):
        profiled(store, tiny.host(1), **changes)


@pytest.mark.parametrize(
    ("gpu", "says"),
    [(None, r"'h100-sxm' devices and this machine has no GPU"), ("My", r"'h100-sxm'.*'My'")],
)
def test_a_device_that_is_not_here_cannot_be_measured(
    store: Store, monkeypatch: pytest.MonkeyPatch, gpu: str | None, says: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu is not None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index=0: gpu)
    with pytest.raises(ValueError, match=says):
        profiled(store, Cluster.from_catalog("h100-sxm"))


OF = ["cli_targets:mlp", "--batch", "2", "--precision", "fp32", "--cluster", "local:1"]
COMMAND = ["profile", *OF, "--budget", "600"]


def test_a_profile_travels_as_a_file(in_a_folder: Path, capsys: Captured) -> None:
    first = json.loads(printed(capsys, *COMMAND, "--json", "--export", "p.json"))
    assert first["timed"] == first["calls"]
    for file in (in_a_folder / "cache").glob("profile-*.json"):
        file.unlink()
    second = json.loads(printed(capsys, *COMMAND, "--json", "--import", "p.json"))
    assert (second["known"], second["timed"]) == (first["calls"], 0)


def test_files_on_flash_are_timed_in_the_folder_that_is_named(
    in_a_folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = printed(capsys, *COMMAND, "--again")
    assert "host, optimizer step: from" in said
    assert "to flash" not in said
    said = printed(capsys, *COMMAND, "--flash", str(in_a_folder))
    assert "host, from flash: from" in said and "host, to flash: from" in said
    monkeypatch.setenv("MESHWRIGHT_NVME", str(in_a_folder / "nowhere"))
    said = failed(capsys, [*COMMAND, "--again"])
    assert "MESHWRIGHT_NVME" in said and "No such file" in said


@pytest.mark.usefixtures("in_a_folder")
def test_a_profile_of_another_device_is_refused_and_nothing_is_nothing_to_export(
    capsys: Captured,
) -> None:
    other = DeviceId(name="another chip", driver="1", torch="1")
    export_json(Measurements(device=other, operators={}, collectives=()), "p.json")
    said = failed(capsys, [*COMMAND, "--import", "p.json"])
    assert "'another chip'" in said and DeviceId.here("cpu").name in said
    said = failed(capsys, [*COMMAND, "--budget", "1e-6", "--export", "none.json"])
    assert "nothing to export" in said and not Path("none.json").exists()


def test_calls_that_were_measured_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    assert list(progress(range(3), 3)) == [0, 1, 2]
    assert "3 of 3" in stream.getvalue()

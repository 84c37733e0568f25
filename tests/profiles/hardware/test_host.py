"""The host of a node: its numbers, where they come from, the link that is measured, and the speed
of files in a folder."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.catalog_reader import catalog_names, read_entry
from meshwright.profiles.hardware.host import Host
from meshwright.profiles.measure import host_work, measure_host
from meshwright.profiles.measure.host_work import measure_flash
from meshwright.profiles.profile import profile_of
from meshwright.profiles.store import DeviceId, Measurements
from meshwright.profiles.timings import COPIES, FLASH, HOST_STEP, OF_HOST

NODES = [name for name in catalog_names() if read_entry(name).is_node]


def _host(**changes: Any) -> Host:
    sizes = {"memory_bytes": 2**30, "memory_bandwidth": 1e10, "link_bandwidth": 1e9}
    return Host(**{**sizes, **changes})


@pytest.mark.parametrize("name", NODES)
def test_every_node_has_a_host_and_says_what_is_assumed_of_it(name: str) -> None:
    entry, cluster = read_entry(name), Cluster.from_catalog(name)
    host = cluster.host
    assert host is not None
    assert host.memory_bytes >= 8 * 2**30
    # a rank's part of the memory moves no slower than an order below its link
    assert 1e9 < host.link_bandwidth < 1e12
    assumed = [k for k, q in entry.quantities.items() if k[:5] == "host." and q.kind == "assumed"]
    assert len(host.assumptions) == len(assumed)
    assert not any(": host." in note.partition(" = ")[0] for note in cluster.assumptions)


def test_copies_and_flash_by_the_hosts_numbers() -> None:
    assert _host(link_latency_s=0.5).moved_s(2e9) == pytest.approx(2.5)
    known = {"nvme_bytes": 1, "nvme_read_bandwidth": 1e9, "nvme_write_bandwidth": 1e9}
    assert _host(**known).has_flash
    assert not any(_host(**{**known, name: 0}).has_flash for name in known)
    for name in ("memory_bytes", "memory_bandwidth", "link_bandwidth"):
        with pytest.raises(ValueError, match=f"host: {name} is 0"):
            _host(**{name: 0})
    with pytest.raises(ValueError, match="nvme_read_bandwidth is -1"):
        _host(nvme_read_bandwidth=-1.0)


def test_a_file_changes_the_host_of_its_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "rtx-4090"\n[host]\nmemory_bytes = 137438953472\n')
    cluster, base = Cluster.load(path), Cluster.from_catalog("rtx-4090")
    assert cluster.host is not None and base.host is not None
    assert cluster.host == replace(base.host, memory_bytes=137438953472)
    path.write_text('base = "rtx-4090"\n[host]\nmemory = "128 GiB"\n')
    assert Cluster.load(path).host == cluster.host


def test_hosts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_work, "STEP_ELEMENTS", 2**20)
    monkeypatch.setattr(host_work, "FILE_BYTES", 2**22)
    cpu = torch.device("cpu")
    measure = partial(measure_host, cpu, backend="gloo", ranks=2, cores=1, flash=str(tmp_path))
    found = measure()
    assert {c.kind for c in found} == set(OF_HOST)
    assert not [*tmp_path.iterdir()]
    cluster = Cluster.from_catalog("local-host")
    device = DeviceId(name="a CPU", driver="", torch="")
    measured = Measurements(device=device, operators={}, collectives=tuple(found))
    profile = profile_of(cluster, measured)
    for kind in OF_HOST:
        longest = max((c for c in found if c.kind == kind), key=lambda c: c.nbytes)
        bandwidth = profile.host_bandwidth(kind, 2 if kind in FLASH else 1)
        assert bandwidth == pytest.approx(longest.nbytes / longest.seconds)
        assert 1e6 < longest.nbytes / longest.seconds < 1e13
    assert profile.host_bandwidth("sideways") is None
    assert profile.host_bandwidth("to_flash") is None  # by one rank
    # copies are no collectives: what prices rest on is still modelled
    assert "collectives modelled" in profile.basis
    assert {c.kind for c in measure(known={HOST_STEP, *COPIES})} == {*FLASH}
    assert {c.kind for c in measure(known=set(OF_HOST))} == {*FLASH}  # another folder, maybe
    assert measure(known={HOST_STEP, *COPIES}, flash=None) == []
    assert measure(deadline_s=time.monotonic()) == []
    monkeypatch.setattr(host_work, "TIMEOUT_S", 0.0)
    assert {c.kind for c in measure()} == {HOST_STEP, *COPIES}  # what was timed stays


def test_what_was_measured_is_assumed_no_more() -> None:
    host = Cluster.from_catalog("dgx-h100").host
    assert host is not None
    of_flash = {each for each in host.assumptions if "host.nvme_read_bandwidth" in each}
    assert of_flash and {*host.assumptions} - {*host.assumed({"from_flash"})} == of_flash
    assert not [each for each in host.assumed(OF_HOST) if "bandwidth = " in each]


def test_files_are_timed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, taken = measure_flash(tmp_path, ranks=2, nbytes=2**22 + 1)
    assert nbytes == 2 * (2**22 + 1)
    assert [*taken] == ["from_flash", "to_flash"]
    assert all(
        len(times) == host_work.FLASH_REPETITIONS and min(times) > 0 for times in taken.values()
    )
    assert not list(tmp_path.iterdir())
    _, taken = measure_flash(tmp_path, nbytes=4096, deadline_s=time.monotonic())
    assert [len(times) for times in taken.values()] == [1, 1]
    with pytest.raises(ValueError, match=r"--flash.*nowhere.*No such file.*legal: a folder"):
        measure_flash(tmp_path / "nowhere")
    monkeypatch.setattr(host_work, "TIMEOUT_S", 0.0)
    with pytest.raises(RuntimeError, match=r"profile: flash.*not read and written in 0 s"):
        measure_flash(tmp_path)
    assert not list(tmp_path.iterdir())

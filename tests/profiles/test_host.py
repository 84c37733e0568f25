"""The host of a node: its numbers, where they come from, and the link that is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.profiles.catalog_reader import catalog_names, read_entry
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.host import Host
from meshwright.profiles.measure import measure_host_link
from meshwright.profiles.profile import profile_of
from meshwright.profiles.store import DeviceId, Measurements
from meshwright.profiles.timings import COPIES

NODES = [name for name in catalog_names() if read_entry(name).is_node]


def _host(**changes: object) -> Host:
    numbers: dict[str, object] = {
        "memory_bytes": 2**30, "memory_bandwidth": 1e10, "link_bandwidth": 1e9
    }  # fmt: skip
    return Host(**numbers | changes)  # type: ignore[arg-type]


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


def test_a_copy_takes_its_latency_and_the_bytes_over_the_bandwidth() -> None:
    assert _host(link_latency_s=0.5).moved_s(2e9) == pytest.approx(2.5)


@pytest.mark.parametrize("name", ["memory_bytes", "memory_bandwidth", "link_bandwidth"])
def test_numbers_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"host: {name} is 0"):
        _host(**{name: 0})


def test_flash_is_known_with_its_bytes_and_both_bandwidths() -> None:
    known = {"nvme_bytes": 1, "nvme_read_bandwidth": 1e9, "nvme_write_bandwidth": 1e9}
    assert _host(**known).has_flash
    assert not any(_host(**{**known, name: 0}).has_flash for name in known)
    with pytest.raises(ValueError, match="nvme_read_bandwidth is -1"):
        _host(nvme_read_bandwidth=-1.0)


def test_a_file_changes_the_host_of_its_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "rtx-4090"\n[host]\nmemory_bytes = 137438953472\n')
    cluster, base = Cluster.load(path), Cluster.from_catalog("rtx-4090")
    assert cluster.host is not None
    assert base.host is not None
    assert cluster.host == replace(base.host, memory_bytes=137438953472)
    path.write_text('base = "rtx-4090"\n[host]\nmemory = 1\n')
    with pytest.raises(ValueError, match=r"\[host\] key 'memory' is unknown.*memory_bytes"):
        Cluster.load(path)


def test_the_link_of_this_machine_is_measured_and_asked_by_bytes() -> None:
    found = measure_host_link(torch.device("cpu"), "gloo")
    assert {c.kind for c in found} == set(COPIES)
    cluster = Cluster.from_catalog("local-host")
    device = DeviceId(name="a CPU", driver="", torch="")
    profile = profile_of(
        cluster, Measurements(device=device, operators={}, collectives=tuple(found))
    )
    largest = max((c for c in found if c.kind == "to_host"), key=lambda c: c.nbytes)
    assert profile.host_copy("to_host", largest.nbytes) == largest.seconds
    assert (profile.host_copy("to_host", 4 * largest.nbytes) or 0) >= largest.seconds
    assert profile.host_copy("sideways", 1.0) is None
    # copies are no collectives: what prices rest on is still modelled
    assert "collectives modelled" in profile.basis

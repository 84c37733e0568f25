"""Cluster files: units, lines as they should be, files made anew or begun, the schema."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.profiles.cluster import Cluster
from meshwright.profiles.cluster_file import TABLES, converted, initial, keys_of, schema
from meshwright.profiles.hardware.catalog_reader import catalog_names
from meshwright.profiles.hardware.units import EXAMPLES, UNITS, in_si, written
from meshwright.profiles.inputs import MeshwrightError


def loaded(folder: Path, text: str) -> Cluster:
    path = folder / "mine.toml"
    path.write_text(text)
    return Cluster.load(path)


# --- units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("48 GiB", "bytes", 48 * 2**30), ("80GB", "bytes", 80e9), ("25 Gb/s", "bytes/s", 3.125e9),
        ("25Gbps", "bytes/s", 3.125e9), ("25 Gbit/s", "bytes/s", 3.125e9),
        ("1.5e1 GB/s", "bytes/s", 1.5e10), ("312 TFLOP/s", "FLOP/s", 3.12e14),
        ("312 TFLOPS", "FLOP/s", 3.12e14), ("5 us", "seconds", 5e-6), (".5 µs", "seconds", 5e-7),
    ],
)  # fmt: skip
def test_quantities_are_read_as_people_write_them(text: str, dimension: str, value: float) -> None:
    assert in_si(text, dimension, "here") == pytest.approx(value, rel=1e-12)


@given(st.sampled_from(sorted(UNITS)), st.floats(1e-9, 1e18))
def test_what_is_written_is_read_again(dimension: str, value: float) -> None:
    assert in_si(written(value, dimension), dimension, "") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("25", "is '25'; legal: a number with a unit, as 25 GB/s or 200 Gb/s; units: B/s, "),
        ("25 GiB", "'GiB' is no unit of bytes/s; legal"),
        ("25 gb/s", "did you mean 25 GB/s or 25 Gb/s?"),
        ("fast GB/s", "is 'fast GB/s'"),
        ("1" * 5000 + " GB/s", "legal: a number with a unit"),
    ],
)
def test_what_is_no_quantity_is_refused(text: str, says: str) -> None:
    with pytest.raises(MeshwrightError, match=re.escape(says)):
        in_si(text, "bytes/s", "here")


# --- files ----------------------------------------------------------------------------------------


def test_each_key_takes_its_units(tmp_path: Path) -> None:
    cluster = loaded(
        tmp_path,
        """
        base = "rtx-4090"
        device = { memory = "48 GiB", launch_overhead_s = 4e-6, peak_flops.bf16 = "200 TFLOP/s" }
        [intra_link]
        latency = "3 us"
        efficiency = [["64 KiB", 0.5], ["1 GB", 1]]
        group_efficiency = [[2, 0.5], [8, 1]]
        [inter_link]
        bandwidth = "20 Gb/s"
        [host]
        memory_bytes = 1000000000
        """,
    )
    device, host = cluster.device, cluster.host
    assert (device.memory_bytes, device.launch_overhead_s) == (48 * 2**30, 4e-6)
    assert device.flops("bf16") == 2e14
    assert (cluster.intra_link.latency_s, cluster.inter_link.bandwidth) == (3e-6, 2.5e9)
    assert cluster.intra_link.efficiency(2**16) == 0.5
    assert host is not None and host.memory_bytes == 10**9


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("inter_link.bandwidth = 25", 'without a unit; .*write bandwidth = "25 Gb/s"'),
        ("inter_link.bandwidth = 25e9", 'without a unit; .*write bandwidth = "25 GB/s"'),
        ("device.memory_bandwidth = 900", 'write memory_bandwidth = "900 GB/s"'),
        ("device.memory = 34e9", r'is 34000000000\.0, without .*write memory = "34 GB"'),
        ("device.peak_flops.bf16 = 3e14", r'peak_flops\.bf16 is 3.*write bf16 = "300 TFLOP/s"'),
        ("device.memory_efficiency = [[1e6, 1]]", r'without a unit.*write \["1 MB", 1\]'),
        ('inter_link.bandwidth = "25 B/s"', 'no link has; .*did you mean bandwidth = "25 Gb/s"'),
        ('intra_link.bandwidth = "900 TB/s"', "legal: 10 MB/s to 10 TB/s; did you mean"),
        ('device.memory = "48 GB/s"', "'GB/s' is no unit of bytes"),
        ('device = { memory = "1 GB", memory_bytes = 9 }', "memory_bytes are the same"),
        ("device.memory_bytes = true", "memory_bytes is True"),
        ('intra_link.efficiency = [["1 MB"]]', "efficiency"),
    ],
)
def test_a_refused_line_is_given_as_it_should_be(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(MeshwrightError, match=rf"mine\.toml.*{says}"):
        loaded(tmp_path, f'base = "rtx-4090"\n{line}\n')


OLD = """\
# our cluster
base = "h100-sxm"
name = "mine" # 2 racks
num_nodes = 4
[device]
memory_bytes = 90_000_000_000
memory_bandwidth = 3.0e12  # measured
memory_efficiency = [
    [1000.0, 0.3],  # small
    [1e6, 0.9],
]
[ device.peak_flops ]
bf16 = 9e14

[inter_link]
bandwidth = 5e10
efficiency = 0.9
latency_s = 5e-6
name = "400 Gb/s"
"""


def test_a_file_of_bare_numbers_is_made_anew(tmp_path: Path) -> None:
    text = converted(OLD)
    same = [line for line in OLD.splitlines() if "#" in line and "[" not in line][:2]
    assert all(line in text for line in same) and 'memory_bandwidth = "3 TB/s"  # measured' in text
    cluster = loaded(tmp_path, text)
    base = Cluster.from_catalog("h100-sxm", num_nodes=4)
    device = replace(
        base.device, memory_bytes=90_000_000_000, memory_bandwidth=3e12,
        memory_efficiency=[[1000, 0.3], [1e6, 0.9]],  # type: ignore[arg-type]
        peak_flops={**base.device.peak_flops, "bf16": 9e14},
    )  # fmt: skip
    link = replace(
        base.inter_link, bandwidth=5e10, efficiency=0.9, latency_s=5e-6,  # type: ignore[arg-type]
        name="400 Gb/s",
    )  # fmt: skip
    assert (cluster.device, cluster.inter_link) == (device, link)
    assert converted(text) == text
    one_line = 'base = "l4"\ninter_link = { bandwidth = 1e9, name = "x" }\n'
    assert converted(one_line) == 'base = "l4"\ninter_link = { bandwidth = "1 GB/s", name = "x" }\n'


@pytest.mark.parametrize("gpu", catalog_names())
def test_a_file_that_is_begun_is_its_entry(tmp_path: Path, gpu: str) -> None:
    base = Cluster.from_catalog(gpu, num_nodes=2)
    text = initial(base, gpu=gpu, nodes=2, per_node=base.devices_per_node, net=None)
    assert loaded(tmp_path, text) == base
    free = re.sub(r"(?m)^# (?=\[|\w+ = )", "", text)  # every number that it shows
    shown = loaded(tmp_path, free)
    assert shown.device.memory_bytes == pytest.approx(base.device.memory_bytes, rel=1e-3)
    assert shown.inter_link.bandwidth == pytest.approx(base.inter_link.bandwidth, rel=1e-3)
    wired = initial(base, gpu=gpu, nodes=2, per_node=base.devices_per_node, net="25Gb/s")
    assert loaded(tmp_path, wired).inter_link.bandwidth == 0.8 * 25e9 / 8


def test_the_schema_has_every_key() -> None:
    found = schema(catalog_names())
    properties: dict[str, Any] = found["properties"]
    json.dumps(found)
    assert properties["base"]["enum"] == list(catalog_names())
    for table in TABLES:
        assert properties[table]["properties"].keys() == keys_of(table).keys()
    link = properties["inter_link"]["properties"]
    assert "anyOf" not in link["bandwidth"] and link["latency_s"]["anyOf"][1]["type"] == "number"
    for dimension, example in EXAMPLES.items():
        for text in example.split(" or "):
            in_si(text, dimension, "")
    pattern = link["bandwidth"]["pattern"]
    assert re.fullmatch(pattern, "25 Gb/s") and not re.fullmatch(pattern, "25")
    checked = pytest.importorskip("jsonschema")
    checked.validate({"base": "l4", "inter_link": {"bandwidth": "25 Gb/s"}}, found)
    with pytest.raises(checked.ValidationError):
        checked.validate({"base": "l4", "inter_link": {"bandwidth": 25}}, found)


def test_a_file_of_two_pools(tmp_path: Path) -> None:
    """What the link between pools is not said to be, the nodes' is."""
    file = tmp_path / "sites.toml"
    file.write_text(
        'base = "h100-sxm"\nnum_nodes = 4\nnum_pools = 2\n'
        '[pool_link]\nbandwidth = "1 Gb/s"\nlatency = "20 ms"\n'
    )
    cluster = Cluster.load(file)
    assert cluster.pool_link is not None
    assert (cluster.num_pools, cluster.pool_link.bandwidth) == (2, 1.25e8)
    assert cluster.pool_link.latency_s == 0.02
    assert cluster.pool_link.efficiency == cluster.inter_link.efficiency
    assert "2 pools with 0.125 GB/s between" in cluster.describe()

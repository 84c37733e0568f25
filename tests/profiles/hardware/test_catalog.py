"""The catalog is complete and sourced, and a file that is wrong says where and how."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.profiles import cluster as cluster_module
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.catalog_reader import (
    CATALOG_DIR,
    SOURCE_KINDS,
    catalog_names,
    read_file,
)

FILES = sorted(CATALOG_DIR.glob("*.json"))
PROMISED = (
    *("h100-sxm", "h200-sxm", "b200", "a100-80gb", "a100-40gb", "v100-32gb", "v100-16gb"),
    *("h100-pcie", "h100-96gb", "b300", "gb200", "gb300"),
    *("mi300x", "l4", "a10g", "rtx-4090", "l40s", "local-cpu"),
    *("dgx-1-v100", "dgx-2-v100", "dgx-a100", "dgx-h100", "dgx-b200", "grand-teton-h100"),
    *("p3.16xlarge", "p4d.24xlarge", "p5.48xlarge", "jean-zay-a100", "abci-a", "oci-bm.gpu4.8"),
)


def _numbers(value: Any, inside: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The innermost object around every number of a JSON document."""
    if isinstance(value, dict):
        for nested in value.values():
            yield from _numbers(nested, value)
    elif isinstance(value, list):
        for nested in value:
            yield from _numbers(nested, inside)
    elif isinstance(value, int | float):
        yield inside


class TestCatalog:
    @pytest.mark.parametrize("name", PROMISED)
    def test_promised_names_load(self, name: str) -> None:
        cluster = Cluster.from_catalog(name, num_nodes=2)
        assert cluster.num_devices == 2 * cluster.devices_per_node
        assert cluster.device.usable_bytes > 0

    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_every_number_has_its_source(self, path: Path) -> None:
        numbers = list(_numbers(json.loads(path.read_text()), {}))
        assert len(numbers) >= 5
        for number in numbers:
            assert {"unit", "source", "kind", "date"} < set(number)
            assert len({"value", "points"} & set(number)) == 1
            assert number["kind"] in SOURCE_KINDS
            assert len(number["source"]) >= 10
            assert re.fullmatch(r"20\d\d-\d\d", number["date"])

    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_references_resolve(self, path: Path) -> None:
        data = json.loads(path.read_text())
        other = data["device"] if data["entry"] == "node" else data["usual_node"]
        referenced = json.loads((CATALOG_DIR / f"{other}.json").read_text())
        assert referenced["entry"] != data["entry"]
        if data["entry"] == "device":
            assert referenced["device"] == data["name"]

    def test_driver_names_are_unambiguous(self) -> None:
        names = [name for path in FILES for name in read_file(path).driver_names]
        assert len(names) == len(set(names)) > 0

    def test_device_and_its_usual_node_agree(self) -> None:
        device, node = Cluster.from_catalog("h100-sxm"), Cluster.from_catalog("dgx-h100")
        assert dataclasses.replace(device, name=node.name) == node

    def test_units_are_converted(self) -> None:
        cluster = Cluster.from_catalog("p3.16xlarge")
        assert cluster.device.flops("fp16") == 125e12
        assert cluster.device.memory_bytes == 16160 * 2**20
        assert cluster.device.memory_bandwidth == 900e9
        assert cluster.inter_link.bandwidth < 25e9 / 8
        assert 1e-6 < cluster.intra_link.latency_s < 1e-3

    def test_assumed_numbers_are_listed(self) -> None:
        data = json.loads((CATALOG_DIR / "a10g.json").read_text())
        assert data["matmul_efficiency"]["kind"] == "assumed"
        notes = Cluster.from_catalog("a10g").assumptions
        assert any(
            note.startswith("a10g: matmul_efficiency =")
            and data["matmul_efficiency"]["source"] in note
            for note in notes
        )
        assert not any("a10g: memory_bandwidth" in note for note in notes)

    def test_unknown_name_lists_nearest_and_all(self) -> None:
        with pytest.raises(ValueError, match="did you mean 'h100-sxm'") as caught:
            Cluster.from_catalog("H100-smx")
        assert all(name in str(caught.value) for name in catalog_names())

    def test_more_devices_than_the_node_has(self) -> None:
        with pytest.raises(ValueError, match=r"devices_per_node is 9; .*1 to 8.*base = 'b200'"):
            Cluster.from_catalog("b200", devices_per_node=9)

    @pytest.mark.parametrize(
        ("key", "change", "message"),
        [
            ("memory", {"unit": "GB/s"}, "unit is 'GB/s'; legal: for bytes: B, GB, GiB, KiB, MiB"),
            ("memory", {"value": -1}, "memory: value is -1; legal: above 0"),
            ("memory", {"value": "80"}, "memory: value is '80'"),
            ("matmul_efficiency", {"value": 1.2}, "efficiency: value is 1.2; legal: .*up to 1"),
            ("memory_bandwidth", {"kind": "guess"}, "kind is 'guess'; legal: datasheet"),
            ("memory_bandwidth", {"source": " "}, "memory_bandwidth: source is ' '"),
            ("launch_overhead", {"date": "2026"}, "launch_overhead: date is '2026'; legal: YYYY"),
            ("overlap_slowdown", {"value": 1.5}, "slowdown: value is 1.5; legal: 0 or more, up to"),
            ("host_overhead", {"value": -1}, "host_overhead: value is -1; legal: 0 or more"),
            ("compute_units", {"value": 0}, "compute_units: value is 0; legal: above 0"),
            ("memory_efficiency", {"points": []}, "points is .*; legal: .*x increasing"),
            ("memory_efficiency", {"points": [[1, 0.5], 2]}, r"points\[1\] is 2; legal: a pair"),
            ("memory_efficiency", {"points": [[1, 1.2]]}, r"points\[0\] y is 1.2; .*up to 1"),
            ("memory_efficiency", {"points": [["1", 1]]}, r"points\[0\] x is '1'; .*finite number"),
            (
                "memory_efficiency",
                {"points": [[2, 1], [2, 1]]},
                r"points\[1\] x is 2; legal: above 2",
            ),
            ("memory_efficiency", {"x_unit": "GFLOP"}, "x_unit is 'GFLOP'; legal: for bytes: B, "),
            ("tiles", {"value": [128, 128]}, r"tiles: value is \[128, 128\]; legal: \[\[rows"),
        ],
    )
    def test_bad_numbers_are_refused(
        self, tmp_path: Path, key: str, change: dict[str, Any], message: str
    ) -> None:
        data = json.loads((CATALOG_DIR / "l4.json").read_text())
        data[key] |= change
        path = tmp_path / "l4.json"
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=rf"l4\.json.*{message}"):
            read_file(path)

    def test_unknown_and_missing_keys_are_refused(self, tmp_path: Path) -> None:
        data = json.loads((CATALOG_DIR / "l4.json").read_text())
        path = tmp_path / "l4.json"
        path.write_text(json.dumps({**data, "memory_bandwith": data["memory_bandwidth"]}))
        with pytest.raises(ValueError, match="did you mean 'memory_bandwidth'"):
            read_file(path)
        del data["memory"]
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"l4\.json: missing memory"):
            read_file(path)
        del data["memory_bandwidth"]["value"]
        path.write_text(json.dumps({**data, "memory": data["reserved"]}))
        with pytest.raises(ValueError, match=r"l4\.json: memory_bandwidth is .*an object with"):
            read_file(path)
        path.write_text(json.dumps({**data, "entry": "switch"}))
        with pytest.raises(ValueError, match="entry is 'switch'; legal: device, node"):
            read_file(path)

    def test_a_number_may_not_be_a_curve_everywhere(self, tmp_path: Path) -> None:
        data = json.loads((CATALOG_DIR / "l4.json").read_text())
        curve = data["memory_efficiency"]
        path = tmp_path / "l4.json"
        path.write_text(json.dumps({**data, "memory_bandwidth": curve}))
        with pytest.raises(ValueError, match=r"memory_bandwidth is .*legal: a number as an object"):
            read_file(path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not JSON"),
            ("[1]", "is a list; legal: an object"),
            ('{"driver_names": "NVIDIA L4"}', "driver_names is 'NVIDIA L4'; legal: a list"),
        ],
    )
    def test_files_that_are_no_catalog_are_refused(
        self, tmp_path: Path, text: str, message: str
    ) -> None:
        path = tmp_path / "l4.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"l4\.json.*{message}"):
            read_file(path)

    def test_curves_are_converted_on_both_axes(self) -> None:
        data = json.loads((CATALOG_DIR / "a100-80gb.json").read_text())["matmul_efficiency"]
        assert (data["x_unit"], data["unit"]) == ("GFLOP", "fraction")
        curve = Cluster.from_catalog("a100-80gb").device.matmul_efficiency
        assert curve.points == tuple((x * 1e9, y) for x, y in data["points"])

    def test_a_number_is_a_constant_curve(self) -> None:
        data = json.loads((CATALOG_DIR / "a10g.json").read_text())["matmul_efficiency"]
        curve = Cluster.from_catalog("a10g").device.matmul_efficiency
        assert curve(1.0) == curve(1e15) == data["value"]

    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_every_file_makes_hardware(self, path: Path) -> None:
        """Every curve within range, tiles in order, an effect only where the hardware has it."""
        cluster = Cluster.from_catalog(path.stem, num_nodes=2)
        device = cluster.device
        assert device.compute_units > 1 or device.kind == "cpu"
        assert bool(device.tiles) == (device.kind == "cuda")
        for curve in (device.matmul_efficiency, device.memory_efficiency):
            assert curve(1.0) <= curve(1e15) <= 1.0
        for link in (cluster.intra_link, cluster.inter_link):
            assert link.efficiency(1e3) <= link.efficiency(1e12) == 1.0

    def test_a_curve_no_hardware_can_have_names_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = json.loads((CATALOG_DIR / "l4.json").read_text())
        data["memory_efficiency"]["points"] = [[1, 0.1], [1.01, 0.9]]
        path = tmp_path / "l4.json"
        path.write_text(json.dumps(data))
        entry, real = read_file(path), cluster_module.read_entry
        monkeypatch.setattr(
            cluster_module, "read_entry", lambda name: entry if name == "l4" else real(name)
        )
        with pytest.raises(ValueError, match=r"^l4\.json: .*memory_efficiency: y rises"):
            Cluster.from_catalog("l4")

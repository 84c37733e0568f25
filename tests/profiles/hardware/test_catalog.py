"""The catalog is complete and sourced, and a file that is wrong says where and how."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.profiles import cluster as cluster_module
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.catalog_reader import (
    CATALOG_DIR,
    FOLDERS_VARIABLE,
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


L4 = json.loads((CATALOG_DIR / "l4.json").read_text())


def written(folder: Path, data: Any) -> Path:
    path = folder / "l4.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def l4(folder: Path, **changes: Any) -> Path:
    return written(folder, {**L4, **changes})


class TestCatalog:
    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_every_number_has_its_source_and_references_resolve(self, path: Path) -> None:
        data = json.loads(path.read_text())
        numbers = list(_numbers(data, {}))
        assert len(numbers) >= 5
        for number in numbers:
            assert {"unit", "source", "kind", "date"} < set(number)
            assert len({"value", "points"} & set(number)) == 1
            assert number["kind"] in SOURCE_KINDS
            assert len(number["source"]) >= 10
            assert re.fullmatch(r"20\d\d-\d\d", number["date"])
        other = data["device"] if data["entry"] == "node" else data["usual_node"]
        referenced = json.loads((CATALOG_DIR / f"{other}.json").read_text())
        assert referenced["entry"] != data["entry"]
        if data["entry"] == "device":
            assert referenced["device"] == data["name"]

    def test_files_are_those_promised_and_agree_with_each_other(self) -> None:
        assert {path.stem for path in FILES} >= set(PROMISED)
        names = [name for path in FILES for name in read_file(path).driver_names]
        assert len(names) == len(set(names)) > 0
        device, node = Cluster.from_catalog("h100-sxm"), Cluster.from_catalog("dgx-h100")
        assert dataclasses.replace(device, name=node.name) == node

    def test_units_are_converted_on_both_axes_and_a_number_is_a_constant_curve(self) -> None:
        cluster = Cluster.from_catalog("p3.16xlarge")
        assert cluster.device.flops("fp16") == 125e12
        assert cluster.device.memory_bytes == 16160 * 2**20
        assert cluster.device.memory_bandwidth == 900e9
        assert cluster.inter_link.bandwidth < 25e9 / 8
        assert 1e-6 < cluster.intra_link.latency_s < 1e-3
        data = json.loads((CATALOG_DIR / "a100-80gb.json").read_text())["matmul_efficiency"]
        assert (data["x_unit"], data["unit"]) == ("GFLOP", "fraction")
        curve = Cluster.from_catalog("a100-80gb").device.matmul_efficiency
        assert curve.points == tuple((x * 1e9, y) for x, y in data["points"])
        data = json.loads((CATALOG_DIR / "a10g.json").read_text())["matmul_efficiency"]
        curve = Cluster.from_catalog("a10g").device.matmul_efficiency
        assert curve(1.0) == curve(1e15) == data["value"]

    def test_assumed_numbers_are_listed(self) -> None:
        data = json.loads((CATALOG_DIR / "a10g.json").read_text())
        assert data["matmul_efficiency"]["kind"] == "assumed"
        notes = Cluster.from_catalog("a10g").assumptions
        (note,) = [x for x in notes if x.startswith("a10g: matmul_efficiency =")]
        assert data["matmul_efficiency"]["source"] in note
        assert not any("a10g: memory_bandwidth" in note for note in notes)

    def test_unknown_names_and_too_many_devices_are_refused(self) -> None:
        with pytest.raises(ValueError, match="did you mean 'h100-sxm'") as caught:
            Cluster.from_catalog("H100-smx")
        assert all(name in str(caught.value) for name in catalog_names())
        with pytest.raises(ValueError, match=r"devices_per_node is 9; .*1 to 8.*base = 'b200'"):
            Cluster.from_catalog("b200", devices_per_node=9)

    @pytest.mark.parametrize(
        ("key", "change", "message"),
        [
            ("memory", {"unit": "GB/s"}, "unit is 'GB/s'; legal: for bytes: B, GB, GiB, KiB, MB"),
            ("memory", {"value": -1}, "memory: value is -1; legal: above 0"),
            ("memory", {"value": "80"}, "memory: value is '80'"),
            ("matmul_efficiency", {"value": 1.2}, "efficiency: value is 1.2; legal: .*up to 1"),
            ("memory_bandwidth", {"kind": "guess"}, "kind is 'guess'; legal: datasheet"),
            ("memory_bandwidth", {"source": " "}, "memory_bandwidth: source is ' '"),
            ("launch_overhead", {"date": "2026"}, "launch_overhead: date is '2026'; legal: YYYY"),
            ("overlap_slowdown", {"value": 1.5}, "slowdown: value is 1.5; legal: 0 or more, up to"),
            ("host_overhead", {"value": -1}, "host_overhead: value is -1; legal: 0 or more"),
            ("memory_efficiency", {"points": []}, "points is .*; legal: .*x increasing"),
            ("memory_efficiency", {"points": [[1, 0.5], 2]}, r"points\[1\] is 2; legal: a pair"),
            ("memory_efficiency", {"points": [[1, 1.2]]}, r"points\[0\] y is 1.2; .*up to 1"),
            ("memory_efficiency", {"points": [[2, 1], [2, 1]]}, r"\] x is 2; legal: above 2"),
            ("memory_efficiency", {"x_unit": "GFLOP"}, "x_unit is 'GFLOP'; legal: for bytes: B, "),
            ("tiles", {"value": [128, 128]}, r"tiles: value is \[128, 128\]; legal: \[\[rows"),
        ],
    )
    def test_bad_numbers_are_refused(
        self, tmp_path: Path, key: str, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=rf"l4\.json.*{message}"):
            read_file(l4(tmp_path, **{key: L4[key] | change}))

    def test_unknown_and_missing_keys_are_refused(self, tmp_path: Path) -> None:
        less = {key: value for key, value in L4.items() if key != "memory"}
        no_value = {k: v for k, v in L4["memory_bandwidth"].items() if k != "value"}
        curve = L4["memory_efficiency"]
        for data, message in (
            ({**L4, "memory_bandwith": L4["memory_bandwidth"]}, "did you mean 'memory_bandwidth'"),
            (less, r"l4\.json: missing memory"),
            ({**L4, "memory_bandwidth": no_value}, "memory_bandwidth is .*an object with"),
            ({**L4, "memory_bandwidth": curve}, "memory_bandwidth is .*legal: a number as an obj"),
            ({**L4, "entry": "switch"}, "entry is 'switch'; legal: device, node"),
            ("{", r"l4\.json.*not JSON"),
            ([1], r"l4\.json.*is a list; legal: an object"),
            ({"driver_names": "L4"}, "driver_names is 'L4'; legal: a list"),
        ):
            with pytest.raises(ValueError, match=message):
                read_file(written(tmp_path, data))

    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_every_file_makes_hardware(self, path: Path) -> None:
        """Every curve within range, tiles in order, an effect only where the hardware has it."""
        cluster = Cluster.from_catalog(path.stem, num_nodes=2)
        device = cluster.device
        assert cluster.num_devices == 2 * cluster.devices_per_node and device.usable_bytes > 0
        assert device.compute_units > 1 or device.kind == "cpu"
        assert bool(device.tiles) == (device.kind == "cuda")
        for curve in (device.matmul_efficiency, device.memory_efficiency):
            assert curve(1.0) <= curve(1e15) <= 1.0
        for link in (cluster.intra_link, cluster.inter_link):
            assert link.efficiency(1e3) <= link.efficiency(1e12) == 1.0

    def test_a_curve_no_hardware_can_have_names_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        curve = {**L4["memory_efficiency"], "points": [[1, 0.1], [1.01, 0.9]]}
        entry, real = read_file(l4(tmp_path, memory_efficiency=curve)), cluster_module.read_entry
        monkeypatch.setattr(
            cluster_module, "read_entry", lambda name: entry if name == "l4" else real(name)
        )
        with pytest.raises(ValueError, match=r"^l4\.json: .*memory_efficiency: y rises"):
            Cluster.from_catalog("l4")


class TestFolders:
    """Entries of a user's own, by the variable."""

    def _folder(self, folder: Path, name: str = "my-card") -> Path:
        data = json.loads((CATALOG_DIR / "l4.json").read_text())
        (folder / f"{name}.json").write_text(json.dumps(data | {"name": name, "driver_names": []}))
        return folder

    def test_entries_are_added(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(FOLDERS_VARIABLE, f"{self._folder(tmp_path)}{os.pathsep}")
        assert "my-card" in catalog_names() and "l4" in catalog_names()
        cluster = Cluster.from_catalog("my-card", num_nodes=2)
        assert cluster.device.memory_bytes == Cluster.from_catalog("l4").device.memory_bytes
        monkeypatch.delenv(FOLDERS_VARIABLE)
        with pytest.raises(ValueError, match="hardware name 'my-card' is unknown"):
            Cluster.from_catalog("my-card")

    def test_what_adds_none_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path / "missing"))
        with pytest.raises(ValueError, match=f"{FOLDERS_VARIABLE} is .*missing.*legal: folders"):
            catalog_names()
        monkeypatch.setenv(FOLDERS_VARIABLE, str(self._folder(tmp_path, "l4")))
        with pytest.raises(ValueError, match=r"has l4\.json, and .* has it, too; legal: names"):
            catalog_names()
        (tmp_path / "l4.json").unlink()
        (tmp_path / "odd.json").write_text("{}")
        assert "odd" in catalog_names()
        with pytest.raises(ValueError, match=r"odd\.json: entry"):
            Cluster.from_catalog("odd")

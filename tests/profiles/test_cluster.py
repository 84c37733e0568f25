"""Clusters are built, overridden and checked as promised."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.profiles import measure_cpu as measure_cpu_module
from meshwright.profiles.cluster import Cluster, Device, Host, Link
from meshwright.profiles.hardware.curve import Curve
from meshwright.profiles.measure_cpu import measure_cpu
from meshwright.profiles.timings import CpuRates


def _device(**changes: Any) -> Device:
    fields: dict[str, Any] = {
        "name": "toy", "kind": "cuda", "memory_bytes": 1000, "reserved_bytes": 100,
        "peak_flops": {"fp32": 10.0, "bf16": 20.0}, "memory_bandwidth": 5.0,
        "matmul_efficiency": 0.5, "memory_efficiency": 0.5, "launch_overhead_s": 0.0,
    }  # fmt: skip
    return Device(**{**fields, **changes})


class TestValues:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"kind": "tpu"}, "kind is 'tpu'; legal: cuda, cpu"),
            ({"memory_bytes": True}, "memory_bytes is True"),
            ({"reserved_bytes": 1000}, "below memory_bytes = 1000"),
            ({"matmul_efficiency": 1.01}, "matmul_efficiency is 1.01; legal: above 0, up to 1"),
            ({"memory_bandwidth": float("inf")}, "memory_bandwidth is inf"),
            ({"launch_overhead_s": -1e-6}, "launch_overhead_s is -1e-06; legal: 0 or more"),
            ({"peak_flops": {"bf16": 1.0}}, "peak_flops has no fp32"),
            ({"peak_flops": {"fp32": 1.0, "bf61": 1.0}}, "did you mean 'bf16'"),
            ({"peak_flops": {"fp32": 0}}, "peak_flops.fp32 is 0"),
            ({"memory_efficiency": [[1, 0.5], [9, 2]]}, "memory_efficiency: y reaches 2.0; legal"),
            ({"memory_efficiency": [[1, 0.1], [1.1, 1]]}, "memory_efficiency: y rises .*more work"),
            ({"tiles": [[64, 64], [128, 64]]}, "tiles is .*the largest area first"),
            ({"tiles": [[64]]}, r"tiles: a tile is \[64\]; legal: pairs"),
            ({"overlap_slowdown": 1.1}, "overlap_slowdown is 1.1; legal: 0 or more, up to 1"),
        ],
    )
    def test_impossible_devices_are_refused(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=f"device 'toy'.*{message}"):
            _device(**change)

    def test_what_is_reserved_is_not_usable(self) -> None:
        assert _device().usable_bytes == 900

    def test_impossible_links_and_clusters_are_refused(self) -> None:
        for change, message in (
            ({"bandwidth": 0}, "bandwidth is 0; legal: above 0"),
            ({"direct_efficiency": 1.1}, "direct_efficiency is 1.1; legal: above 0, up to 1"),
            ({"switch_bandwidth": -1}, "switch_bandwidth is -1; legal: above 0"),
            ({"efficiency": [[1, 0.1], [1.1, 1]]}, "efficiency: y rises"),
            ({"group_efficiency": [[2, 1.5]]}, "group_efficiency: y reaches 1.5"),
        ):
            with pytest.raises(ValueError, match=f"link 'wire': {message}"):
                Link(**{"name": "wire", "latency_s": 0, "bandwidth": 1} | change)
        assert Link(name="mesh", latency_s=0, bandwidth=1, group_efficiency=[[2, 0.1], [3, 1]])
        base = Cluster.from_catalog("l4")
        with pytest.raises(ValueError, match="num_nodes is 0; legal: a whole number, 1 or more"):
            dataclasses.replace(base, num_nodes=0)
        with pytest.raises(ValueError, match="backend is 'mpi'; legal: nccl, gloo"):
            dataclasses.replace(base, backend="mpi")

    def test_missing_dtype_runs_at_fp32_rate(self) -> None:
        assert _device().flops("bf16") == 20.0
        assert _device().flops("fp16") == 10.0
        assert _device().flops("fp4") == _device().flops("fp8") == 20.0  # emulated
        with pytest.raises(ValueError, match="dtype 'int4' is unknown"):
            _device().flops("int4")

    def test_clusters_are_values_and_json(self) -> None:
        one, two = (Cluster.from_catalog("h100-sxm", num_nodes=n) for n in (1, 2))
        assert one == Cluster.from_catalog("h100-sxm") != two
        assert len({one, two, Cluster.from_catalog("h100-sxm")}) == 2
        assert _device(peak_flops={"bf16": 20, "fp32": 10}) == _device()
        cluster = Cluster.from_catalog("p4d.24xlarge", num_nodes=3)
        data = json.loads(json.dumps(cluster.to_dict()))
        fields = {"device": Device, "intra_link": Link, "inter_link": Link, "host": Host}
        made: dict[str, Any] = {name: kind(**data[name]) for name, kind in fields.items()}
        again = Cluster(**data | made | {"assumptions": tuple(data["assumptions"])})
        assert again == cluster
        text = Cluster.from_catalog("h100-sxm", num_nodes=16).describe()
        assert "16 x 8 h100-sxm" in text and "989 TFLOP/s bf16" in text and "\n" not in text


class TestLoad:
    def _load(self, tmp_path: Path, text: str) -> Cluster:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return Cluster.load(path)

    def test_overrides_replace_only_what_they_name(self, tmp_path: Path) -> None:
        cluster = self._load(
            tmp_path,
            """
            base = "a100-80gb"
            name = "mine"
            num_nodes = 3
            device.memory_bytes = 40_000_000_000
            device.peak_flops.bf16 = "250 TFLOP/s"
            inter_link.bandwidth = "100 Gb/s"
            inter_link.efficiency = [["1 MB", 0.5], ["1 GB", 1]]
            """,
        )
        base = Cluster.from_catalog("a100-80gb")
        assert (cluster.name, cluster.num_nodes) == ("mine", 3)
        assert dict(cluster.device.peak_flops) == {**base.device.peak_flops, "bf16": 250e12}
        assert cluster.device.memory_bytes == 40_000_000_000
        assert cluster.device.memory_bandwidth == base.device.memory_bandwidth
        changes: dict[str, Any] = {"bandwidth": 12.5e9, "efficiency": [[1e6, 0.5], [1e9, 1.0]]}
        assert cluster.inter_link == dataclasses.replace(base.inter_link, **changes)
        assert cluster.intra_link == base.intra_link
        replaced = [note for note in cluster.assumptions if note.startswith("mine.toml: ")]
        assert len(replaced) == 4
        assert self._load(tmp_path, 'base = "l4"') == Cluster.from_catalog("l4")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('base = "l4"\nnum_node = 2', "did you mean 'num_nodes'"),
            ('base = "l4"\n[devise]', "did you mean 'device'"),
            ('base = "l4"\n[device]\nmemery = 1', r"\[device\] key 'memery'.*mean 'memory'"),
            ('base = "l4"\n[intra_link]\nlatncy = 1', r"\[intra_link\] key.*did you mean"),
            ('base = "l4"\n[device.peak_flops]\nfp23 = 1', "did you mean 'fp32'"),
            ('base = "l4"\n[device]\npeak_flops = 1', "peak_flops is 1; legal: a table"),
            (
                'base = "l4"\n[device]\nmemory_efficiency = [["2 B", 1], ["1 B", 1]]',
                "curve: x is 1.0; legal",
            ),
            ('base = "l4"\ndevice = 1', r"\[device\] is 1; legal: a table"),
            ('base = "l4"\nnum_nodes = 0', "num_nodes is 0"),
            ('base = "l5"', "did you mean 'l4'"),
            ("num_nodes = 2", "base None.*legal: .*h100-sxm"),
            ("base = ", "not TOML"),
        ],
    )
    def test_mistakes_name_the_way_out(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=rf"mine\.toml.*{message}"):
            self._load(tmp_path, text)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")


class TestLocal:
    @pytest.mark.usefixtures("no_gpu")
    def test_without_measuring_it_is_the_catalog(self) -> None:
        cluster = Cluster.local(4, measure=False)
        assert (cluster.num_nodes, cluster.devices_per_node) == (1, 4)
        assert (cluster.device.kind, cluster.backend) == ("cpu", "gloo")
        assert cluster.device == Cluster.from_catalog("local-cpu").device
        assert cluster == Cluster.local(4, measure=False)

    @pytest.mark.usefixtures("no_gpu")
    @pytest.mark.parametrize(("n", "share"), [(1, 1.0), (4, 1.0), (16, 0.25)])
    def test_measured_cores_are_shared_out(
        self, monkeypatch: pytest.MonkeyPatch, n: int, share: float
    ) -> None:
        rates = CpuRates(
            fp32_flops=8e10, bf16_flops=4e10, copy_bandwidth=1e10, stream_bandwidth=5e9,
            launch_overhead_s=2e-6, date="2026-11-26", busy=n == 4,
        )  # fmt: skip
        monkeypatch.setattr(measure_cpu_module, "local_rates", lambda ranks: rates)
        monkeypatch.setattr(measure_cpu_module, "total_memory_bytes", lambda: 64 * 2**30)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        cluster = Cluster.local(n)
        device = cluster.device
        assert device.memory_bytes == 64 * 2**30 // n
        assert dict(device.peak_flops) == {"fp32": 8e10 * share, "bf16": 4e10 * share}
        assert device.memory_bandwidth == 5e9 * share
        assert cluster.host is not None and cluster.host.link_bandwidth == 1e10 * share / 2
        assert device.matmul_efficiency == device.memory_efficiency == Curve.constant(1.0)
        # where four ranks share a core, a message waits for three others' turns
        link = Cluster.from_catalog("local-host").intra_link
        waits_s = (1 / share - 1) * 3e-3
        assert cluster.intra_link.latency_s == pytest.approx(link.latency_s + waits_s)
        assert any("share 4 cores" in note for note in cluster.assumptions) == (share < 1)
        said = next(note for note in cluster.assumptions if "measured here on 2026-11-26" in note)
        assert ("busy with something else" in said) == (n == 4)
        assert f"--cluster local:{n} --again" in said

    def test_measuring_gives_plausible_rates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure_cpu_module, "_BUDGET_S", 0.001)
        monkeypatch.setattr(measure_cpu_module, "_COPY_BYTES", 2**20)
        monkeypatch.setattr(measure_cpu_module, "_LINEAR", (128, 64, 128))
        monkeypatch.setattr(measure_cpu_module, "_ROWS", (16, 32))
        threads = torch.get_num_threads()
        monkeypatch.setattr(measure_cpu_module, "_APART_S", 0.0)
        rates = measure_cpu()
        assert 1e8 < rates.fp32_flops < 1e13
        assert 1e7 < rates.bf16_flops < 1e14
        assert 1e8 < rates.copy_bandwidth < 1e13
        assert 1e-8 < rates.launch_overhead_s < 1e-3
        assert torch.get_num_threads() == threads

    def test_rates_are_kept_and_those_of_a_busy_machine_taken_again(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
        first = CpuRates(
            fp32_flops=4.0, bf16_flops=2.0, copy_bandwidth=9.0, stream_bandwidth=7.0,
            launch_overhead_s=3.0, date="2026-11-25", busy=True,
        )  # fmt: skip
        second = dataclasses.replace(
            first, fp32_flops=5.0, copy_bandwidth=8.0, date="2026-11-26", busy=False
        )
        found = iter((first, second))
        monkeypatch.setattr(measure_cpu_module, "measure_cpu", lambda: next(found))
        rates = measure_cpu_module.local_rates.__wrapped__
        assert rates(2) == first
        better = dataclasses.replace(second, copy_bandwidth=9.0)
        assert rates(2) == better == rates(2)  # and nothing is measured a third time
        monkeypatch.setattr(measure_cpu_module, "measure_cpu", lambda: first)
        assert rates(2, again=True) == first
        monkeypatch.setenv("MESHWRIGHT_CACHE", __file__)
        assert rates(3, again=True) == first and "this process alone" in caplog.text

    @pytest.mark.usefixtures("eight_gpus")
    def test_gpus_are_looked_up_by_driver_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cluster = Cluster.local(4)
        assert (cluster.device.name, cluster.backend) == ("h200-sxm", "nccl")
        assert (cluster.num_nodes, cluster.devices_per_node) == (1, 4)
        assert Cluster.local(9, measure=False).device.kind == "cpu"
        assert Cluster.local(2, "cpu", measure=False).device.kind == "cpu"
        with pytest.raises(ValueError, match="9 GPUs asked for and 8 found"):
            Cluster.local(9, "cuda")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GTX 1")
        with pytest.raises(ValueError, match=r"'GTX 1' is not in the catalog; .*TOML"):
            Cluster.local(1)


class TestDetect:
    @pytest.mark.usefixtures("no_gpu")
    def test_shape_is_torchruns(self) -> None:
        for ranks, local, shape in ((None, None, (1, 1)), (4, None, (1, 4)), (12, 4, (3, 4))):
            given = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local}
            cluster = Cluster.detect({name: str(n) for name, n in given.items() if n})
            assert (cluster.num_nodes, cluster.devices_per_node) == shape
            assert cluster.device == Cluster.from_catalog("local-cpu").device

    @pytest.mark.usefixtures("eight_gpus")
    def test_gpu_nodes(self) -> None:
        cluster = Cluster.detect({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
        assert cluster == Cluster.from_catalog("h200-sxm", num_nodes=2)

    def test_contradictions_and_bad_arguments_are_refused(self) -> None:
        for local, message in (
            ({"n": 0}, "n is 0; legal: a whole number, 1 or more"),
            ({"n": 1, "device": "gpu"}, "device is 'gpu'; legal: 'cuda', 'cpu' or None"),
        ):
            with pytest.raises(ValueError, match=message):
                Cluster.local(**local)
        for world, of_node, message in (
            ("6", "4", "6 is not a multiple"),
            ("two", "1", "WORLD_SIZE is 'two'; legal: a whole number"),
            ("4", "0", "LOCAL_WORLD_SIZE is '0'"),
        ):
            with pytest.raises(ValueError, match=message):
                Cluster.detect({"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": of_node})

"""Cluster: the description of the hardware that everything else plans for.

Rank r sits on node `r // devices_per_node`. Both links carry *achieved* figures where any are
published: bandwidths that long messages reach, and the fractions of them that shorter ones do.
Values are SI (bytes, seconds, FLOP/s, bytes/s).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.profiles.cluster_file import PLAIN, TABLES, changes_of
from meshwright.profiles.hardware.catalog_reader import (
    Entry,
    catalog_names,
    device_of_driver,
    read_entry,
    unknown_name,
)
from meshwright.profiles.hardware.curve import FULL, Curve
from meshwright.profiles.hardware.device import DTYPES, Device, Link, Rates, check_whole
from meshwright.profiles.hardware.host import Host, host_of, is_of_host
from meshwright.profiles.inputs import ClusterError, HardwareError, read_toml, shown
from meshwright.profiles.inputs.limits import MAX_DEVICES, MAX_TEXT

__all__ = ["DTYPES", "LOCAL_NODE", "Cluster", "Device", "Host", "Link", "Rates", "catalog_names"]

LOCAL_NODE = "local-host"
MEASURED_HERE = "local: rates of a core measured here"
_SLICE_S = 3e-3  # a thread runs so long before Linux gives its core to another one that waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices; `intra_link` is per rank, `inter_link` a node's NICs together.

    Nodes lie in `num_pools` equal pools (sites, buildings) that follow each other: `pool_link` is
    what all nodes of a pool together have to other pools, one direction.
    `host` is each node's memory beside its devices', None where nothing is known of it: then
    nothing is moved there. `assumptions` are sentences for the report about numbers that are
    neither measured nor published. Frozen, hashable and equal by value.
    """

    name: str
    device: Device
    num_nodes: int
    devices_per_node: int
    intra_link: Link
    inter_link: Link
    backend: str
    assumptions: tuple[str, ...] = ()
    host: Host | None = None
    num_pools: int = 1
    pool_link: Link | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_TEXT:
            raise ClusterError.refused(
                "cluster name", self.name, legal=f"a text of 1 to {MAX_TEXT} characters"
            )
        what = f"cluster {self.name!r}"
        check_whole(f"{what}: num_nodes", self.num_nodes, most=MAX_DEVICES)
        check_whole(f"{what}: devices_per_node", self.devices_per_node, most=MAX_DEVICES)
        if self.num_devices > MAX_DEVICES:
            raise ClusterError(
                f" is {self.num_nodes} nodes of {self.devices_per_node} devices",
                place=what,
                legal=f"up to {MAX_DEVICES} devices",
            )
        self._check_pools(what)
        if self.backend not in (backends := ("nccl", "gloo")):
            raise ClusterError(
                f" is {shown(self.backend)}", place=f"{what}: backend", legal=backends
            )

    def _check_pools(self, what: str) -> None:
        check_whole(f"{what}: num_pools", self.num_pools, most=MAX_DEVICES)
        if self.num_nodes % self.num_pools:
            raise ClusterError(
                f" is {self.num_pools}, of {self.num_nodes} nodes",
                place=f"{what}: num_pools",
                legal=f"a divisor of {self.num_nodes}: pools have as many nodes each",
            )
        if (self.pool_link is None) != (self.num_pools == 1):
            raise ClusterError(
                f" is {'missing' if self.pool_link is None else 'given'}, with num_pools = "
                f"{self.num_pools}",
                place=f"{what}: pool_link",
                legal="a link between pools where there are several, and there alone",
                way_out="give [pool_link] beside num_pools, or leave out both",
            )

    @property
    def pool_devices(self) -> int:
        """Devices of one pool."""
        return self.num_devices // self.num_pools

    def on_nodes(self, num_nodes: int) -> Cluster:
        """The cluster with so many nodes, the first of them if these are fewer: in pools as they
        are where they divide the number, else in one."""
        pools, rest = divmod(num_nodes, self.num_nodes // self.num_pools)
        if rest or pools <= 1 or self.num_pools == 1:
            return dataclasses.replace(self, num_nodes=num_nodes, num_pools=1, pool_link=None)
        return dataclasses.replace(self, num_nodes=num_nodes, num_pools=pools)

    @property
    def measured(self) -> bool:
        """Whether its devices' rates were measured here (`Cluster.local`)."""
        return any(note.startswith(MEASURED_HERE) for note in self.assumptions)

    @property
    def num_devices(self) -> int:
        """Devices in all nodes together."""
        return self.num_nodes * self.devices_per_node

    @classmethod
    def from_catalog(
        cls, name: str, *, num_nodes: int = 1, devices_per_node: int | None = None
    ) -> Cluster:
        """A cluster of catalog hardware: `name` is a device (in its usual node) or a node.

        Raises ValueError for an unknown name, with the nearest and all names, and for more devices
        per node than the node has.
        """
        entry = read_entry(name if isinstance(name, str) else shown(name))
        node = entry if entry.is_node else read_entry(entry.texts["usual_node"])
        device = read_entry(node.texts["device"])
        most = int(node.value("devices_per_node"))
        count = most if devices_per_node is None else devices_per_node
        check_whole("devices_per_node", count)
        # Processes of a CPU host may outnumber its cores; a GPU node has as many as it has.
        if count > most and node.texts["backend"] != "gloo":
            raise ClusterError(
                f" is {count}",
                place="devices_per_node",
                legal=(
                    f"for node {node.name!r}: 1 to {most}. Describe another node in a TOML file "
                    f"with base = {name!r}, and Cluster.load it"
                ),
            )
        return cls(
            name=name,
            device=_device(device, host_s=node.optional("host_overhead")),
            num_nodes=num_nodes,
            devices_per_node=count,
            intra_link=_link(node, "intra_link"),
            inter_link=_link(node, "inter_link"),
            backend=node.texts["backend"],
            assumptions=device.assumptions()
            + tuple(note for note in node.assumptions() if not is_of_host(note)),
            host=host_of(node),
        )

    @classmethod
    def local(cls, n: int, device: str | None = None, *, measure: bool = True) -> Cluster:
        """`n` ranks on this machine: its GPUs if it has that many, else CPU processes over gloo.

        `device` "cuda" or "cpu" forces the choice. A CPU's rates are measured (a few seconds) the
        first time and kept in the cache of measurements, unless `measure` is False, which takes the
        catalog's figures, the same everywhere.
        """
        import torch

        check_whole("Cluster.local: n", n, most=MAX_DEVICES)
        if device not in (None, "cuda", "cpu"):
            raise ClusterError(
                f" is {shown(device)}", place="Cluster.local: device", legal="'cuda', 'cpu' or None"
            )
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device == "cuda" and num_gpus < n:
            raise ClusterError(
                f"{n} GPUs asked for and {num_gpus} found",
                place="Cluster.local",
                legal=f"up to {num_gpus}, or device='cpu'",
            )
        if device == "cuda" or (device is None and num_gpus >= n):
            base = cls.from_catalog(_local_gpu())
            return dataclasses.replace(base, name=f"local-{base.name}", devices_per_node=n)
        base = cls.from_catalog(LOCAL_NODE, devices_per_node=n)
        return _measured(base, n) if measure else base

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """A cluster from a TOML file: `base` (a catalog name) and whatever differs from it.

        Keys: base, name, num_nodes, devices_per_node, num_pools; tables [device] (peak_flops is a
        sub-table), [intra_link], [inter_link], [pool_link], [host] with the catalog's keys, each
        quantity with its unit (`cluster_file.py`). A curve is a number or an array of [x, y] pairs.
        Raises ValueError.
        """
        place = Path(path)
        data = read_toml(place, error=ClusterError)
        for key in data:
            if key not in (*PLAIN, *TABLES):
                raise unknown_name(f"{place} key", key, (*PLAIN, *TABLES))
        if str(data.get("base")) not in catalog_names():
            raise unknown_name(f"{place} base", data.get("base"), catalog_names())
        cluster = cls.from_catalog(data["base"])
        changes = {key: data[key] for key in PLAIN[1:] if key in data}
        for table in TABLES:
            if table in data:
                where = f"{place} [{table}]"
                given = changes_of(table, data[table], where)
                base = cluster.inter_link if table == "pool_link" else getattr(cluster, table)
                changes[table] = _override(base, given, where)
        assumptions = cluster.assumptions + tuple(
            f"{place.name}: {key} = {value} replaces the catalog's"
            for table in TABLES
            for key, value in _flat(data.get(table, {}), table)
        )
        try:
            return dataclasses.replace(cluster, **changes, assumptions=assumptions)
        except ValueError as error:
            raise ClusterError.of(error, place) from None

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Cluster:
        """The cluster this process was started on by torchrun, from WORLD_SIZE, LOCAL_WORLD_SIZE.

        CPU nodes take the catalog's figures: every rank must describe the same cluster, and two
        measurements never agree.
        """
        import torch

        world = _env_count(environ, "WORLD_SIZE", 1)
        per_node = _env_count(environ, "LOCAL_WORLD_SIZE", world)
        if world % per_node:
            raise ClusterError(
                f" = {world} is not a multiple of LOCAL_WORLD_SIZE = {per_node}",
                place="environment WORLD_SIZE",
                legal=f"a multiple of {per_node}",
                way_out="start as many ranks on each node",
            )
        base = cls.from_catalog(_local_gpu() if torch.cuda.is_available() else LOCAL_NODE)
        return dataclasses.replace(base, num_nodes=world // per_node, devices_per_node=per_node)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, field by field; a curve is a number or a list of [x, y]."""
        fields: dict[str, Any] = _plain(self)
        if self.num_pools == 1:
            del fields["num_pools"], fields["pool_link"]
        return fields

    def describe(self) -> str:
        """One line for people."""
        device, dtype, pools = self.device, self.device.fastest, ""
        if self.pool_link is not None:
            pools = (
                f"{self.num_pools} pools with {self.pool_link.bandwidth / 1e9:.3g} GB/s between, "
            )
        return (
            f"{self.name}: {self.num_nodes} x {self.devices_per_node} {device.name} "
            f"({device.memory_bytes / 2**30:.0f} GiB, {device.flops(dtype) / 1e12:.4g} TFLOP/s "
            f"{dtype}), {self.intra_link.bandwidth / 1e9:.3g} GB/s per rank inside a node, "
            f"{self.inter_link.bandwidth / 1e9:.3g} GB/s per node between nodes, "
            f"{pools}{self.backend}"
        )


def _device(entry: Entry, host_s: float | None) -> Device:
    """The device of a catalog entry; `host_s` is its node's host overhead, if that has its own."""
    prefix = "peak_flops."
    with _naming(entry):
        return Device(
            name=entry.name,
            kind=entry.texts["device_kind"],
            memory_bytes=round(entry.value("memory")),
            peak_flops={
                key.removeprefix(prefix): entry.value(key)
                for key in entry.quantities
                if key.startswith(prefix)
            },
            memory_bandwidth=entry.value("memory_bandwidth"),
            matmul_efficiency=entry.curve("matmul_efficiency"),
            attention_efficiency=entry.curve("attention_efficiency"),
            tuned_attention_efficiency=entry.optional_curve("tuned_attention_efficiency"),
            memory_efficiency=entry.curve("memory_efficiency"),
            compute_units=round(entry.value("compute_units")),
            tiles=entry.tiles(),
            launch_overhead_s=entry.value("launch_overhead"),
            host_overhead_s=entry.value("host_overhead") if host_s is None else host_s,
            overlap_slowdown=entry.value("overlap_slowdown"),
            reserved_bytes=round(entry.value("reserved")),
            communicator_bytes=round(entry.optional("communicator") or 0),
        )


def _link(entry: Entry, key: str) -> Link:
    direct = entry.optional(f"{key}.direct_efficiency")
    with _naming(entry):
        return Link(
            name=entry.texts[f"{key}.name"],
            latency_s=entry.value(f"{key}.latency"),
            bandwidth=entry.value(f"{key}.bandwidth"),
            efficiency=entry.curve(f"{key}.efficiency"),
            group_efficiency=entry.curve(f"{key}.group_efficiency"),
            per_rank_bandwidth=entry.optional(f"{key}.per_rank_bandwidth"),
            switch_bandwidth=entry.optional(f"{key}.switch_bandwidth"),
            switch_latency_s=entry.optional(f"{key}.switch_latency") or 0.0,
            direct_efficiency=1.0 if direct is None else direct,
        )


@contextmanager
def _naming(entry: Entry) -> Iterator[None]:
    """Put the catalog file's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise HardwareError.of(error, f"{entry.name}.json") from None


def _measured(cluster: Cluster, n: int) -> Cluster:
    """`cluster` with its CPU device's rates measured, divided among `n` ranks where these are more
    than cores."""
    from meshwright.profiles import measure_cpu  # with torch

    rates, cores = measure_cpu.local_rates(n), os.cpu_count() or 1
    share = min(1.0, cores / n)
    device = dataclasses.replace(
        cluster.device,
        memory_bytes=measure_cpu.total_memory_bytes() // n,
        peak_flops={"fp32": rates.fp32_flops * share, "bf16": rates.bf16_flops * share},
        memory_bandwidth=rates.stream_bandwidth * share,
        matmul_efficiency=FULL,
        memory_efficiency=FULL,
        launch_overhead_s=rates.launch_overhead_s / share,
        host_overhead_s=rates.launch_overhead_s / share,
    )
    waits_s = (n / cores - 1) * _SLICE_S if share < 1 else 0.0
    latency_s = cluster.intra_link.latency_s + waits_s
    link = dataclasses.replace(cluster.intra_link, latency_s=latency_s)
    notes = [
        f"{MEASURED_HERE} on {rates.date}"
        + ", while it was busy with something else" * rates.busy
        + f"; `meshwright profile ... --cluster local:{n} --again` takes them again",
        f"local: each of {n} ranks has 1/{n} of this machine's memory",
    ]
    if share < 1:
        notes.append(
            f"local: {n} ranks share {cores} cores, so FLOP/s and bandwidth are {share:.3g} of one "
            f"core's, and a message waits {waits_s * 1e3:.2g} ms for a core"
        )
    unmeasured = tuple(
        note
        for note in cluster.assumptions
        if not note.startswith(f"{cluster.device.name}: ") or ": reserved =" in note
    )
    host = cluster.host and dataclasses.replace(
        cluster.host,
        memory_bytes=measure_cpu.total_memory_bytes(),
        memory_bandwidth=rates.copy_bandwidth * share * n,
        link_bandwidth=rates.copy_bandwidth * share / 2,
        assumptions=("local: device and host memory are one, of which each is counted whole",),
    )
    assumptions = (*unmeasured, *notes)
    return dataclasses.replace(
        cluster, device=device, intra_link=link, assumptions=assumptions, host=host
    )


def _local_gpu() -> str:
    import torch

    driver_name = torch.cuda.get_device_name(0)
    if name := device_of_driver(driver_name):
        return name
    raise ClusterError(
        " is not in the catalog",
        place=f"GPU {driver_name!r}",
        legal=catalog_names(),
        way_out="describe it in a TOML file with the nearest of these as base, and Cluster.load it",
    )


def _override(base: Any, changes: Mapping[str, Any], place: str) -> Any:
    """`base` (a Device, Link or Host) with fields replaced. Raises ValueError with the `place` for
    illegal values, and where there is no base."""
    if base is None:
        raise ClusterError(
            ": the base says nothing of a host", place=place, legal="no [host]",
            way_out="take another base",
        )  # fmt: skip
    if "peak_flops" in changes:
        changes = {**changes, "peak_flops": {**base.peak_flops, **changes["peak_flops"]}}
    try:
        return dataclasses.replace(base, **changes)
    except ValueError as error:
        raise ClusterError.of(error, place) from None


def _plain(value: Any) -> Any:
    """`value` in JSON types, dataclasses by field."""
    if isinstance(value, Curve):
        return value.to_plain()
    if isinstance(value, Rates):
        return dict(value)
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for inner, nested in value.items():
            yield from _flat(nested, f"{key}.{inner}")
    else:
        yield key, value


def _env_count(environ: Mapping[str, str], key: str, default: int) -> int:
    text = environ.get(key, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        legal = "a whole number, 1 or more"
        raise ClusterError(f" is {shown(text)}", place=f"environment {key}", legal=legal)
    return int(text)

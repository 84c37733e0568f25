"""Host: the memory of a node's CPUs, its flash, and the links to the devices.

Values are SI, and all are of a whole node but those of the link: `link_bandwidth` is what one rank
reaches in one direction while all ranks of its node move as much, and `memory_bandwidth` what an
optimizer's step on all cores reaches, read plus written. `nvme_read_bandwidth` and
`nvme_write_bandwidth` are what all ranks reach together in files on the node's flash that they map.
A rank of n on a node has 1/n of both memories, of the flash and of these bandwidths.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshwright.profiles.hardware.catalog_reader import Entry
from meshwright.profiles.hardware.device import check_number, check_whole

BANDWIDTHS = MappingProxyType(
    {
        "to_device": "link_bandwidth",
        "to_host": "link_bandwidth",
        "optimizer_step": "memory_bandwidth",
        "from_flash": "nvme_read_bandwidth",
        "to_flash": "nvme_write_bandwidth",
    }
)  # by a kind of `timings.OF_HOST`
FOLDER_VARIABLE = "MESHWRIGHT_NVME"  # names the folder on the flash of each node
MARGIN = 0.1  # of hosts' memory and flash, for the system, data loaders and their page cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node's host: its memory, and the link to each device; `nvme_bytes` of local flash (0 where
    there is none, or none is known). `assumptions` are sentences about numbers that are neither
    measured nor published."""

    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    link_latency_s: float = 0.0
    nvme_bytes: int = 0
    nvme_read_bandwidth: float = 0.0
    nvme_write_bandwidth: float = 0.0
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        check_whole("host: memory_bytes", self.memory_bytes)
        check_number("host: memory_bandwidth", self.memory_bandwidth)
        check_number("host: link_bandwidth", self.link_bandwidth)
        check_number("host: link_latency_s", self.link_latency_s, zero=True)
        check_whole("host: nvme_bytes", self.nvme_bytes, least=0)
        check_number("host: nvme_read_bandwidth", self.nvme_read_bandwidth, zero=True)
        check_number("host: nvme_write_bandwidth", self.nvme_write_bandwidth, zero=True)

    @property
    def room_bytes(self) -> int:
        """Bytes of its memory that plans may take."""
        return int((1 - MARGIN) * self.memory_bytes)

    @property
    def flash_room_bytes(self) -> int:
        """Bytes of its flash that plans may take."""
        return int((1 - MARGIN) * self.nvme_bytes)

    @property
    def has_flash(self) -> bool:
        """Whether it has flash of which all is known that states in files need."""
        return min(self.nvme_bytes, self.nvme_read_bandwidth, self.nvme_write_bandwidth) > 0

    def bandwidth(self, kind: str) -> float:
        """Bytes per second of a kind of `timings.OF_HOST`."""
        bandwidth: float = getattr(self, BANDWIDTHS[kind])
        return bandwidth

    def slower(self, factor: float) -> Host:
        """The same, all of whose bandwidths are divided by a factor."""
        names = dict.fromkeys(BANDWIDTHS.values())
        return replace(self, **{name: getattr(self, name) / factor for name in names})

    def assumed(self, measured: Collection[str]) -> list[str]:
        """The assumptions that are left where some of `timings.OF_HOST` were measured."""
        known = {BANDWIDTHS[kind] for kind in measured}
        return [a for a in self.assumptions if _quantity(a).removeprefix("host.") not in known]

    def moved_s(self, nbytes: float) -> float:
        """Seconds to move so many bytes of a rank, in one direction."""
        return self.link_latency_s + nbytes / self.link_bandwidth


def host_of(entry: Entry) -> Host | None:
    """The host of a node's catalog entry; None where it says nothing of one."""
    memory = entry.optional("host.memory")
    if memory is None:
        return None
    return Host(
        memory_bytes=round(memory),
        memory_bandwidth=entry.value("host.memory_bandwidth"),
        link_bandwidth=entry.value("host.link_bandwidth"),
        link_latency_s=entry.value("host.link_latency"),
        nvme_bytes=round(entry.optional("host.nvme") or 0),
        nvme_read_bandwidth=entry.optional("host.nvme_read_bandwidth") or 0.0,
        nvme_write_bandwidth=entry.optional("host.nvme_write_bandwidth") or 0.0,
        assumptions=tuple(note for note in entry.assumptions() if is_of_host(note)),
    )


def is_of_host(assumption: str) -> bool:
    """Whether a catalog entry's assumption is about its host."""
    return _quantity(assumption).startswith("host.")


def _quantity(assumption: str) -> str:
    """Quantity of an assumption, "entry: quantity = ..."."""
    return assumption.partition(" = ")[0].rpartition(": ")[2]

"""Device and Link: the performance model of one accelerator and of one interconnect.

Values are SI (bytes, seconds, FLOP/s, bytes/s). Both are frozen, hashable and equal by value. A
field that takes a curve takes a number, too, which is then the fraction at every size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.profiles.hardware.catalog_reader import unknown_name
from meshwright.profiles.hardware.curve import FULL, Curve, as_curve
from meshwright.profiles.inputs import HardwareError, shown
from meshwright.profiles.inputs.limits import LEAST_NUMBER, MAX_COUNT, MOST_NUMBER, is_number

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
INSTEAD = {"fp8": "bf16", "fp4": "fp8"}  # of some products alone -> where units for it lack
_EFFICIENCIES = (
    *("matmul_efficiency", "attention_efficiency", "memory_efficiency"),
    "tuned_attention_efficiency",
)


class Rates(Mapping[str, float]):
    """Peak FLOP/s by dtype name: read-only, ordered, hashable."""

    __slots__ = ("_pairs",)

    def __init__(self, rates: Mapping[str, float]) -> None:
        self._pairs = tuple(sorted((dtype, float(rate)) for dtype, rate in rates.items()))

    def __getitem__(self, dtype: str) -> float:
        return dict(self._pairs)[dtype]

    def __iter__(self) -> Iterator[str]:
        return (dtype for dtype, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __eq__(self, other: object) -> bool:
        return self._pairs == other._pairs if isinstance(other, Rates) else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return repr(dict(self._pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator or CPU process.

    `peak_flops` is by dtype ("fp32", "bf16", "fp16", "fp8", "fp4"; fp32 always present), "tf32"
    that of fp32 products whose operands may be rounded. Fractions of it: `matmul_efficiency`, over
    the FLOPs of one matrix product and before its output is cut into `tiles` (largest first) that
    `compute_units` share in waves; `attention_efficiency`, over the sequence length, for fused
    attention, and `tuned_attention_efficiency` for kernels written for this device (cuDNN's), the
    same where there are none. `memory_efficiency` is the fraction of
    `memory_bandwidth`, over the bytes moved. Each kernel costs the device `launch_overhead_s`, and
    the host `host_overhead_s` to issue where operators run eagerly. While a collective runs,
    compute is slower by the fraction `overlap_slowdown`. `reserved_bytes` is never available to
    tensors (driver context, buffers of two communicators: the world's, and an axis'); each
    communicator more that a rank takes part in takes `communicator_bytes`.

    The defaults describe a device without the effect: one compute unit and no tiles, so that no
    product is rounded up; a host that is never waited for; no slowdown.
    """

    name: str
    kind: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    matmul_efficiency: Curve
    memory_efficiency: Curve
    launch_overhead_s: float
    reserved_bytes: int
    attention_efficiency: Curve = FULL
    tuned_attention_efficiency: Curve | None = None
    compute_units: int = 1
    tiles: tuple[tuple[int, int], ...] = ()
    host_overhead_s: float = 0.0
    overlap_slowdown: float = 0.0
    communicator_bytes: int = 0

    def __post_init__(self) -> None:
        what = f"device {self.name!r}"
        if self.kind not in ("cuda", "cpu"):
            raise HardwareError(f" is {self.kind!r}", place=f"{what}: kind", legal="cuda, cpu")
        for dtype in self.peak_flops:
            if dtype not in DTYPES:
                raise unknown_name(f"dtype in {what}: peak_flops", dtype, DTYPES)
        if "fp32" not in self.peak_flops:
            raise HardwareError(
                "peak_flops has no fp32",
                place=what,
                legal="fp32, and bf16, fp16, fp8 and fp4 where the device has them",
                way_out="give the fp32 rate",
            )
        for dtype, rate in self.peak_flops.items():
            check_number(f"{what}: peak_flops.{dtype}", rate)
        check_whole(f"{what}: memory_bytes", self.memory_bytes)
        check_number(f"{what}: memory_bandwidth", self.memory_bandwidth)
        for name in _EFFICIENCIES:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, efficiency_curve(f"{what}: {name}", value))
        check_number(f"{what}: launch_overhead_s", self.launch_overhead_s, zero=True)
        check_number(f"{what}: host_overhead_s", self.host_overhead_s, zero=True)
        check_number(f"{what}: overlap_slowdown", self.overlap_slowdown, zero=True, most=1.0)
        check_whole(f"{what}: compute_units", self.compute_units)
        object.__setattr__(self, "tiles", checked_tiles(f"{what}: tiles", self.tiles))
        check_whole(f"{what}: reserved_bytes", self.reserved_bytes, least=0)
        check_whole(f"{what}: communicator_bytes", self.communicator_bytes, least=0)
        if self.reserved_bytes >= self.memory_bytes:
            raise HardwareError(
                f" is {self.reserved_bytes}",
                place=f"{what}: reserved_bytes",
                legal=f"below memory_bytes = {self.memory_bytes}, or nothing is left for tensors",
            )
        object.__setattr__(self, "peak_flops", Rates(self.peak_flops))

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`; one the device has no units for (V100 bf16) runs at fp32's, or
        in fp8, which is emulated, at bf16's; in fp4 at fp8's."""
        if dtype not in DTYPES:
            raise unknown_name("dtype", dtype, DTYPES)
        while dtype in INSTEAD and dtype not in self.peak_flops:
            dtype = INSTEAD[dtype]
        return self.peak_flops.get(dtype, self.peak_flops["fp32"])

    @property
    def fastest(self) -> str:
        """The dtype of the highest peak, but for those that are for some products alone."""
        return max((dtype for dtype in self.peak_flops if dtype not in INSTEAD), key=self.flops)

    def product_rate(self, dtype: str, flops: float) -> float:
        """FLOP/s of one matrix product of so many FLOPs, before tiles and waves. One in 8 bits
        or 4 is as far from its peak as one in 16 that would take as long."""
        if dtype not in INSTEAD or dtype not in self.peak_flops:
            return self.flops(dtype) * self.matmul_efficiency(flops)
        faster = self.flops(dtype) / self.flops("bf16")
        return self.flops(dtype) * self.matmul_efficiency(flops / faster)

    def in_tf32(self) -> Device:
        """The device whose fp32 products are in TF32; itself where it has none."""
        if "tf32" not in self.peak_flops:
            return self
        return replace(self, peak_flops={**self.peak_flops, "fp32": self.peak_flops["tf32"]})

    @property
    def usable_bytes(self) -> int:
        """Memory left for tensors."""
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Seconds per message and bytes/s per direction.

    `bandwidth` is what the longest messages approach, `efficiency` the fraction of it over the
    bytes that one rank sends; `direct_efficiency` is the fraction that is left where every rank
    sends to every other at once, as in an all-to-all.

    Inside a node, `group_efficiency` is the fraction over the number of ranks in a ring (a mesh of
    wires has fewer of them between fewer ranks). `switch_bandwidth` is what each rank sends to
    switches that add up and multicast, None where they can't, and `switch_latency_s` the time to
    them or back. For a node's NICs together, `per_rank_bandwidth` is what a single rank can drive
    of them (its own NIC), None where one rank can fill them all.
    """

    name: str
    latency_s: float
    bandwidth: float
    efficiency: Curve = FULL
    group_efficiency: Curve = FULL
    per_rank_bandwidth: float | None = None
    switch_bandwidth: float | None = None
    switch_latency_s: float = 0.0
    direct_efficiency: float = 1.0

    def __post_init__(self) -> None:
        what = f"link {self.name!r}"
        check_number(f"{what}: latency_s", self.latency_s, zero=True)
        check_number(f"{what}: switch_latency_s", self.switch_latency_s, zero=True)
        check_number(f"{what}: bandwidth", self.bandwidth)
        efficiency = efficiency_curve(f"{what}: efficiency", self.efficiency)
        object.__setattr__(self, "efficiency", efficiency)
        group = efficiency_curve(f"{what}: group_efficiency", self.group_efficiency, work=False)
        object.__setattr__(self, "group_efficiency", group)
        check_number(f"{what}: direct_efficiency", self.direct_efficiency, most=1.0)
        for name in ("per_rank_bandwidth", "switch_bandwidth"):
            if getattr(self, name) is not None:
                check_number(f"{what}: {name}", getattr(self, name))


def check_number(what: str, value: object, *, most: float = math.inf, zero: bool = False) -> None:
    """Raise ValueError unless `value` is a finite number above 0 (or `zero`), up to `most`."""
    legal = f"{'0 or more' if zero else 'above 0'}{f', up to {most:g}' if most < math.inf else ''}"
    if not is_number(value):
        legal = f"a finite number, {legal}"
    elif value > MOST_NUMBER or (0 < value < LEAST_NUMBER and not zero):
        legal = f"{LEAST_NUMBER:g} to {MOST_NUMBER:g}"
    elif (0 if zero else LEAST_NUMBER) <= value <= most:
        return
    raise HardwareError(f" is {shown(value)}", place=what, legal=legal)


def efficiency_curve(what: str, value: object, *, work: bool = True) -> Curve:
    """`value` as a Curve of fractions in (0, 1]. Over an amount of `work` it may rise by at most
    its first power, so that more work never takes less time. Raises ValueError otherwise."""
    if isinstance(value, int | float):
        check_number(what, value, most=1.0)
    try:
        curve = as_curve(value)
    except ValueError as error:
        raise HardwareError.of(error, what) from None
    if curve.largest > 1.0:
        raise HardwareError(f"y reaches {curve.largest!r}", place=what, legal="above 0, up to 1")
    if work and curve.steepest() > 1.0:
        raise HardwareError(
            f"y rises by a factor of up to x ** {curve.steepest():.3g}, so that more work takes "
            "less time",
            place=what,
            legal="up to x ** 1",
            way_out="Take the points further apart",
        )
    return curve


def checked_tiles(what: str, value: object) -> tuple[tuple[int, int], ...]:
    """`value` as a tuple of (rows, columns), the largest area first. Raises ValueError for anything
    else."""
    legal = "pairs of whole numbers (rows, columns), the largest area first"
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise HardwareError(f" is {shown(value)}", place=what, legal=legal)
    for tile in value:
        if not isinstance(tile, Sequence) or isinstance(tile, str) or len(tile) != 2:
            raise HardwareError(f" is {shown(tile)}", place=f"{what}: a tile", legal=legal)
        for side in tile:
            check_whole(f"{what}: a side", side)
    areas = [rows * columns for rows, columns in value]
    if areas != sorted(areas, reverse=True):
        raise HardwareError(f" is {shown(value)}", place=what, legal=legal)
    return tuple((rows, columns) for rows, columns in value)


def check_whole(what: str, value: object, *, least: int = 1, most: int = MAX_COUNT) -> None:
    """Raise ValueError unless `value` is a whole number, `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        legal = f"a whole number, {least} or more, up to {most}"
        raise HardwareError(f" is {shown(value)}", place=what, legal=legal)

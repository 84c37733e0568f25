"""Device and Link: what one accelerator and one wire can do.

Values are SI (bytes, seconds, FLOP/s, bytes/s). Both are frozen, hashable and equal by value, and
refuse a number out of its range when they are made, whoever makes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from profiles.catalog_reader import unknown_name

DTYPES = ("fp32", "bf16", "fp16")


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

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return repr(dict(self._pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator or CPU process.

    `peak_flops` is by dtype ("fp32", "bf16", "fp16"; fp32 always present). The efficiencies are the
    fractions of `peak_flops` and `memory_bandwidth` that large operators achieve;
    `launch_overhead_s` is paid per operator; `reserved_bytes` is never available to tensors
    (driver context, communication buffers).
    """

    name: str
    kind: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    matmul_efficiency: float
    memory_efficiency: float
    launch_overhead_s: float
    reserved_bytes: int

    def __post_init__(self) -> None:
        what = f"device {self.name!r}"
        if self.kind not in ("cuda", "cpu"):
            raise ValueError(f"{what}: kind is {self.kind!r}; legal: cuda, cpu")
        for dtype in self.peak_flops:
            if dtype not in DTYPES:
                raise unknown_name(f"dtype in {what}: peak_flops", dtype, DTYPES)
        if "fp32" not in self.peak_flops:
            raise ValueError(f"{what}: peak_flops has no fp32; the other dtypes are optional")
        for dtype, rate in self.peak_flops.items():
            check_number(f"{what}: peak_flops.{dtype}", rate)
        check_whole(f"{what}: memory_bytes", self.memory_bytes)
        check_number(f"{what}: memory_bandwidth", self.memory_bandwidth)
        check_number(f"{what}: matmul_efficiency", self.matmul_efficiency, most=1.0)
        check_number(f"{what}: memory_efficiency", self.memory_efficiency, most=1.0)
        check_number(f"{what}: launch_overhead_s", self.launch_overhead_s, zero=True)
        check_whole(f"{what}: reserved_bytes", self.reserved_bytes, least=0)
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(
                f"{what}: reserved_bytes is {self.reserved_bytes}; it must be below memory_bytes = "
                f"{self.memory_bytes}, or nothing is left for tensors"
            )
        object.__setattr__(self, "peak_flops", Rates(self.peak_flops))

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`; one the device has no units for (V100 bf16) runs at fp32's."""
        if dtype not in DTYPES:
            raise unknown_name("dtype", dtype, DTYPES)
        return self.peak_flops.get(dtype, self.peak_flops["fp32"])

    @property
    def usable_bytes(self) -> int:
        """Memory left for tensors."""
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Seconds per message and bytes/s per direction.

    `per_rank_bandwidth` is for a node's NICs together: what a single rank can drive of them (its
    own NIC), None where one rank can fill them all.
    """

    name: str
    latency_s: float
    bandwidth: float
    per_rank_bandwidth: float | None = None

    def __post_init__(self) -> None:
        what = f"link {self.name!r}"
        check_number(f"{what}: latency_s", self.latency_s, zero=True)
        check_number(f"{what}: bandwidth", self.bandwidth)
        if self.per_rank_bandwidth is not None:
            check_number(f"{what}: per_rank_bandwidth", self.per_rank_bandwidth)


def check_number(what: str, value: object, *, most: float = math.inf, zero: bool = False) -> None:
    """Raise unless `value` is a finite number above 0 (or `zero`), up to `most`."""
    legal = f"{'0 or more' if zero else 'above 0'}{f', up to {most:g}' if most < math.inf else ''}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{what} is {value!r}; legal: a finite number, {legal}")
    if value < 0 or (value == 0 and not zero) or value > most:  # type: ignore[operator]
        raise ValueError(f"{what} is {value!r}; legal: {legal}")


def check_whole(what: str, value: object, *, least: int = 1) -> None:
    """Raise unless `value` is a whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {value!r}; legal: a whole number, {least} or more")

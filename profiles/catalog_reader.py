"""Reads the shipped hardware catalog: one JSON file per device and per node, checked key by key.

Every number in a file is an object `{"value", "unit", "source", "kind", "date"}`. The reader
converts it to SI (bytes, seconds, FLOP/s, bytes/s) once, here, and keeps where it came from, so
that whatever is computed later can say which of its inputs were only assumed. `date` is the month
in which the source was consulted or the measurement made.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

CATALOG_DIR = Path(__file__).parent / "catalog"
SOURCE_KINDS = ("datasheet", "published", "measured", "assumed")

# unit -> (dimension, factor to the SI unit of that dimension)
_UNITS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "MiB": ("bytes", 2.0**20),
        "GiB": ("bytes", 2.0**30),
        "s": ("seconds", 1.0),
        "us": ("seconds", 1e-6),
        "TFLOP/s": ("FLOP/s", 1e12),
        "GFLOP/s": ("FLOP/s", 1e9),
        "GB/s": ("bytes/s", 1e9),
        "fraction": ("fraction", 1.0),
        "count": ("count", 1.0),
    }
)
# entry -> key -> dimension; a key ending in "?" may be absent
_QUANTITIES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "device": {
            "memory": "bytes",
            "reserved": "bytes",
            "peak_flops.fp32": "FLOP/s",
            "peak_flops.bf16?": "FLOP/s",
            "peak_flops.fp16?": "FLOP/s",
            "memory_bandwidth": "bytes/s",
            "matmul_efficiency": "fraction",
            "memory_efficiency": "fraction",
            "launch_overhead": "seconds",
        },
        "node": {
            "devices_per_node": "count",
            "intra_link.latency": "seconds",
            "intra_link.bandwidth": "bytes/s",
            "inter_link.latency": "seconds",
            "inter_link.bandwidth": "bytes/s",
            "inter_link.per_rank_bandwidth?": "bytes/s",
        },
    }
)
_TEXTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "device": ("entry", "name", "title", "device_kind", "usual_node"),
        "node": (
            *("entry", "name", "title", "device", "backend"),
            *("intra_link.name", "inter_link.name"),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of the catalog: `value` in SI units, `text` as written, and its provenance."""

    value: float
    text: str
    source: str
    kind: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One catalog file: texts and quantities by dotted key; `driver_names` of a device."""

    texts: Mapping[str, str]
    quantities: Mapping[str, Quantity]
    driver_names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name under which the entry is asked for; also its file's stem."""
        return self.texts["name"]

    @property
    def is_node(self) -> bool:
        """Whether this is a node (devices and links) and not a bare device."""
        return self.texts["entry"] == "node"

    def value(self, key: str) -> float:
        """The SI value of a quantity the schema requires."""
        return self.quantities[key].value

    def optional(self, key: str) -> float | None:
        """The SI value of a quantity, None where the file leaves it out."""
        quantity = self.quantities.get(key)
        return None if quantity is None else quantity.value

    def assumptions(self) -> tuple[str, ...]:
        """One sentence per number of this file that is assumed, not sourced."""
        return tuple(
            f"{self.name}: {key} = {quantity.text} is assumed ({quantity.source})"
            for key, quantity in self.quantities.items()
            if quantity.kind == "assumed"
        )


def unknown_name(what: str, name: str, legal: Iterable[str]) -> ValueError:
    """The error for a misspelt name: the nearest legal names first, then all of them."""
    names = sorted(legal)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return ValueError(f"unknown {what} {name!r}: {hint}legal: {', '.join(names)}")


@cache
def catalog_names() -> tuple[str, ...]:
    """Every name `Cluster.from_catalog` accepts, sorted."""
    return tuple(sorted(path.stem for path in CATALOG_DIR.glob("*.json")))


@cache
def read_entry(name: str) -> Entry:
    """The catalog entry of that name. Raises ValueError with the nearest names if unknown."""
    if name not in catalog_names():
        raise unknown_name("hardware name", name, catalog_names())
    return read_file(CATALOG_DIR / f"{name}.json")


def device_of_driver(driver_name: str) -> str | None:
    """The catalog name of the device a GPU driver reports as `driver_name`, if any."""
    for name in catalog_names():
        if driver_name in read_entry(name).driver_names:
            return name
    return None


def read_file(path: Path) -> Entry:
    """Parse and check one catalog file; every error names the file, the key and the legal range."""
    data = json.loads(path.read_text(encoding="utf-8"))
    driver_names = tuple(data.pop("driver_names", ()))
    leaves = dict(_leaves(data))
    entry = str(leaves.get("entry"))
    if entry not in _QUANTITIES:
        raise ValueError(f"{path.name}: entry is {entry!r}; legal: {', '.join(_QUANTITIES)}")
    schema = _QUANTITIES[entry]
    dimensions = {key.removesuffix("?"): dimension for key, dimension in schema.items()}
    required = {*_TEXTS[entry], *(key for key in schema if not key.endswith("?"))}
    for key in leaves:
        if key not in dimensions and key not in _TEXTS[entry]:
            raise unknown_name(f"{path.name} key", key, {*dimensions, *_TEXTS[entry]})
    if missing := sorted(required - set(leaves)):
        raise ValueError(f"{path.name}: missing {', '.join(missing)}; a {entry} needs every one")
    for key in _TEXTS[entry]:
        if not isinstance(leaves[key], str) or not leaves[key]:
            raise ValueError(f"{path.name}: {key} is {leaves[key]!r}; it must be a non-empty text")
    if leaves["name"] != path.stem:
        raise ValueError(f"{path.name}: name is {leaves['name']!r}; it must be {path.stem!r}")
    quantities = {
        key: _quantity(leaves[key], f"{path.name}: {key}", dimension)
        for key, dimension in dimensions.items()
        if key in leaves
    }
    texts = {key: str(leaves[key]) for key in _TEXTS[entry]}
    return Entry(
        texts=MappingProxyType(texts),
        quantities=MappingProxyType(quantities),
        driver_names=driver_names,
    )


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and "value" not in value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _quantity(data: Any, place: str, dimension: str) -> Quantity:
    fields = {"value", "unit", "source", "kind", "date"}
    if not isinstance(data, dict) or set(data) != fields:
        raise ValueError(f"{place} is {data!r}; a number is an object with {sorted(fields)}")
    value, unit = data["value"], data["unit"]
    units = sorted(name for name, (of, _) in _UNITS.items() if of == dimension)
    if unit not in units:
        raise ValueError(f"{place}: unit is {unit!r}; legal for {dimension}: {', '.join(units)}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{place}: value is {value!r}; it must be a finite number")
    if value <= 0 or (dimension == "fraction" and value > 1):
        raise ValueError(
            f"{place}: value is {value!r}; legal: above 0{', up to 1' * (dimension == 'fraction')}"
        )
    if data["kind"] not in SOURCE_KINDS:
        raise ValueError(f"{place}: kind is {data['kind']!r}; legal: {', '.join(SOURCE_KINDS)}")
    if not isinstance(data["source"], str) or not data["source"].strip():
        raise ValueError(f"{place}: source is {data['source']!r}; say where the number comes from")
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", str(data["date"])):
        raise ValueError(f"{place}: date is {data['date']!r}; legal: YYYY-MM")
    return Quantity(
        value=value * _UNITS[unit][1],
        text=f"{value:g} {unit}",
        source=data["source"],
        kind=data["kind"],
        date=data["date"],
    )

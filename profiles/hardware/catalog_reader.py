"""Reader of the hardware catalog: one JSON file per device and per node, checked key by key.

Every number in a file is an object `{"value", "unit", "source", "kind", "date"}`. One that depends
on a size may be a curve, `{"points": [[x, y], ...], "x_unit", "unit", "source", "kind", "date"}`.
Both are converted to SI here, once. `date` is the month in which the source was consulted or the
measurement made.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.profiles.hardware.curve import FULL, Curve
from meshwright.profiles.hardware.units import UNITS
from meshwright.profiles.inputs import HardwareError, MeshwrightError, read_json, shown
from meshwright.profiles.inputs.limits import LEAST_NUMBER, MAX_TEXT, MOST_NUMBER, is_number

CATALOG_DIR = Path(__file__).parents[1] / "catalog"
FOLDERS_VARIABLE = "MESHWRIGHT_CATALOG"  # names folders of more entries
SOURCE_KINDS = ("datasheet", "published", "measured", "fitted", "assumed")

# of what has no unit in SI, the dimension by the word that stands for one
_PLAIN: Mapping[str, str] = MappingProxyType(
    {
        "fraction": "fraction",
        "fraction of compute time": "slowdown",
        "count": "count",
        "tokens": "tokens",
        "ranks": "ranks",
        "rows, columns": "tiles",
    }
)
_UP_TO_ONE = ("fraction", "slowdown")
_MAY_BE_ZERO = ("seconds", "slowdown")
# entry -> key -> dimension; a key ending in "?" may be absent; "y over x" may be a curve
_QUANTITIES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "device": {
            "memory": "bytes",
            "reserved": "bytes",
            "communicator?": "bytes",
            "peak_flops.fp32": "FLOP/s",
            "peak_flops.tf32?": "FLOP/s",
            "peak_flops.bf16?": "FLOP/s",
            "peak_flops.fp16?": "FLOP/s",
            "peak_flops.fp8?": "FLOP/s",
            "peak_flops.fp4?": "FLOP/s",
            "memory_bandwidth": "bytes/s",
            "matmul_efficiency": "fraction over FLOP",
            "attention_efficiency": "fraction over tokens",
            "tuned_attention_efficiency?": "fraction over tokens",
            "memory_efficiency": "fraction over bytes",
            "compute_units": "count",
            "tiles?": "tiles",
            "launch_overhead": "seconds",
            "host_overhead": "seconds",
            "overlap_slowdown": "slowdown",
        },
        "node": {
            "devices_per_node": "count",
            "host_overhead?": "seconds",
            "intra_link.latency": "seconds",
            "intra_link.bandwidth": "bytes/s",
            "intra_link.efficiency?": "fraction over bytes",
            "intra_link.direct_efficiency?": "fraction",
            "intra_link.group_efficiency?": "fraction over ranks",
            "intra_link.switch_bandwidth?": "bytes/s",
            "intra_link.switch_latency?": "seconds",
            "inter_link.latency": "seconds",
            "inter_link.bandwidth": "bytes/s",
            "inter_link.efficiency?": "fraction over bytes",
            "inter_link.direct_efficiency?": "fraction",
            "inter_link.per_rank_bandwidth?": "bytes/s",
            "host.memory?": "bytes",
            "host.memory_bandwidth?": "bytes/s",
            "host.link_bandwidth?": "bytes/s",
            "host.link_latency?": "seconds",
            "host.nvme?": "bytes",
            "host.nvme_read_bandwidth?": "bytes/s",
            "host.nvme_write_bandwidth?": "bytes/s",
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

Tiles = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number, curve or list of tiles in SI units, its provenance, and its `text` as written."""

    value: float | Curve | Tiles
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
        """Its file's stem."""
        return self.texts["name"]

    @property
    def is_node(self) -> bool:
        """Whether this is a node (devices and links) and not a bare device."""
        return self.texts["entry"] == "node"

    def value(self, key: str) -> float:
        """A number that the schema requires, in SI units."""
        value = self.quantities[key].value
        assert isinstance(value, float)
        return value

    def optional(self, key: str) -> float | None:
        """A number in SI units; None where the file leaves it out."""
        return self.value(key) if key in self.quantities else None

    def curve(self, key: str) -> Curve:
        """A curve, in SI units on both axes; constantly 1 where the file leaves it out."""
        return self.optional_curve(key) or FULL

    def optional_curve(self, key: str) -> Curve | None:
        """A curve, in SI units on both axes; None where the file leaves it out."""
        curve = self.quantities[key].value if key in self.quantities else None
        assert curve is None or isinstance(curve, Curve)
        return curve

    def tiles(self) -> Tiles:
        """Output tiles of a device's matrix products, none where the file leaves them out."""
        tiles = self.quantities["tiles"].value if "tiles" in self.quantities else ()
        assert isinstance(tiles, tuple)
        return tiles

    def assumptions(self) -> tuple[str, ...]:
        """One sentence per number that is assumed, or fitted to whole steps."""
        return tuple(
            f"{self.name}: {key} = {quantity.text} is {quantity.kind} ({quantity.source})"
            for key, quantity in self.quantities.items()
            if quantity.kind in ("assumed", "fitted")
        )


def unknown_name(what: str, name: object, legal: Iterable[str]) -> MeshwrightError:
    """The error for a misspelt name: the nearest legal names first, then all of them."""
    names = sorted(legal)
    near = difflib.get_close_matches(str(name)[:MAX_TEXT].lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else ""
    return HardwareError(f" {shown(name)} is unknown", place=what, legal=names, way_out=hint)


def catalog_names() -> tuple[str, ...]:
    """Every name `Cluster.from_catalog` accepts, sorted. Raises ValueError as `_files` does."""
    return tuple(_files(os.environ.get(FOLDERS_VARIABLE, "")))


def read_entry(name: str) -> Entry:
    """The catalog entry of that name. Raises ValueError with the nearest names if unknown."""
    files = _files(os.environ.get(FOLDERS_VARIABLE, ""))
    if name not in files:
        raise unknown_name("hardware name", name, files)
    return _read(files[name])


_read = cache(lambda path: read_file(path))


@cache
def _files(folders: str) -> Mapping[str, Path]:
    """The file of each entry, by its name: those of the package, and of the folders that the user
    adds. Raises ValueError for a path that is no folder, and for a name that is in two."""
    own = {path.stem: path for path in CATALOG_DIR.glob("*.json")}
    for folder in filter(None, folders.split(os.pathsep)):
        place, path = f"environment {FOLDERS_VARIABLE}", Path(folder)
        if not path.is_dir():
            raise _not(folder, place, "folders of catalog files (*.json)", "make it, or unset it")
        for file in path.glob("*.json"):
            if (other := own.setdefault(file.stem, file)) is not file:
                raise HardwareError(
                    f" has {file.name}, and {other.parent} has it, too",
                    place=place,
                    legal="names that are new",
                    way_out="rename the file, and its name in it",
                )
    return MappingProxyType(dict(sorted(own.items())))


def device_of_driver(driver_name: str) -> str | None:
    """The catalog name of the device a GPU driver reports as `driver_name`, if any."""
    names = (name for name in catalog_names() if driver_name in read_entry(name).driver_names)
    return next(names, None)


def read_file(path: Path) -> Entry:
    """Parse and check one catalog file; every error names the file, the key and the legal range."""
    data = read_json(path, error=HardwareError)
    if not isinstance(data, dict):
        what = f" is a {type(data).__name__}"
        raise HardwareError(what, place=path.name, legal="an object of keys")
    drivers = data.pop("driver_names", [])
    if not isinstance(drivers, list) or not all(isinstance(name, str) for name in drivers):
        raise _not(drivers, f"{path.name}: driver_names", "a list of texts")
    leaves = dict(_leaves(data))
    entry = str(leaves.get("entry"))
    if entry not in _QUANTITIES:
        raise _not(entry, f"{path.name}: entry", _QUANTITIES)
    schema, texts = _QUANTITIES[entry], _TEXTS[entry]
    dimensions = {key.removesuffix("?"): dimension for key, dimension in schema.items()}
    required = {*texts, *(key for key in schema if not key.endswith("?"))}
    for key in leaves:
        if key not in dimensions and key not in texts:
            raise unknown_name(f"{path.name} key", key, {*dimensions, *texts})
    if "host.memory" in leaves:
        hosts = {key for key in dimensions if key.startswith("host.")}
        required |= {key for key in hosts if not key.startswith("host.nvme")}
    if missing := sorted(required - set(leaves)):
        raise HardwareError(
            f"missing {', '.join(missing)}",
            place=path.name,
            legal=f"all of {', '.join(sorted(required))}",
            way_out="write them",
        )
    for key in texts:
        if not isinstance(leaves[key], str) or not leaves[key]:
            raise _not(leaves[key], f"{path.name}: {key}", "a non-empty text")
    if leaves["name"] != path.stem:
        raise _not(leaves["name"], f"{path.name}: name", repr(path.stem))
    quantities = {
        key: _quantity(leaves[key], f"{path.name}: {key}", dimension)
        for key, dimension in dimensions.items()
        if key in leaves
    }
    return Entry(
        texts=MappingProxyType({key: leaves[key] for key in texts}),
        quantities=MappingProxyType(quantities),
        driver_names=tuple(drivers),
    )


def _not(value: object, place: str, legal: object, way_out: str = "") -> MeshwrightError:
    """The error of a value that can't be at its place in a file."""
    return HardwareError(f" is {shown(value)}", place=place, legal=legal, way_out=way_out)


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and not {"value", "points", "unit"} & set(value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _quantity(data: Any, place: str, dimension: str) -> Quantity:
    y_dimension, _, x_dimension = dimension.partition(" over ")
    is_curve = isinstance(data, dict) and "points" in data and bool(x_dimension)
    fields = {"unit", "source", "kind", "date"} | ({"points", "x_unit"} if is_curve else {"value"})
    if not isinstance(data, dict) or set(data) != fields:
        form = "a curve" if is_curve else "a number"
        raise _not(data, place, f"{form} as an object with {sorted(fields)}", "write it so")
    factor = _factor(data["unit"], f"{place}: unit", y_dimension)
    value: float | Curve | Tiles
    if is_curve:
        x_factor = _factor(data["x_unit"], f"{place}: x_unit", x_dimension)
        value = _curve(data["points"], place, y_dimension, x_factor, factor)
        text = f"{_plain(data['points'])} ({data['unit']} over {data['x_unit']})"
    elif y_dimension == "tiles":
        value = _tiles(data["value"], place)
        text = f"{_plain(data['value'])} {data['unit']}"
    else:
        value = _number(data["value"], f"{place}: value", y_dimension) * factor
        text = f"{data['value']:g} {data['unit']}"
        value = Curve.constant(value) if x_dimension else value
    source, kind, date = data["source"], data["kind"], data["date"]
    if kind not in SOURCE_KINDS:
        raise _not(kind, f"{place}: kind", SOURCE_KINDS)
    if not isinstance(source, str) or not source.strip():
        raise _not(source, f"{place}: source", "a text", "say where the number comes from")
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", str(date)):
        raise _not(date, f"{place}: date", "YYYY-MM")
    return Quantity(value=value, text=text, source=source, kind=kind, date=date)


def _factor(unit: object, place: str, dimension: str) -> float:
    """The factor from `unit` to the SI unit of `dimension`. Raises ValueError for another."""
    plain = {word: 1.0 for word, measured in _PLAIN.items() if measured == dimension}
    units = plain or UNITS[dimension]
    if unit not in units:
        raise _not(unit, place, f"for {dimension}: {', '.join(sorted(units))}")
    return units[str(unit)]


def _number(value: object, place: str, dimension: str) -> float:
    """`value` as a float. Raises ValueError outside the range of its dimension."""
    legal = "0 or more" if dimension in _MAY_BE_ZERO else "above 0"
    legal += ", up to 1" if dimension in _UP_TO_ONE else ""
    if not is_number(value) or (value and not LEAST_NUMBER <= abs(value) <= MOST_NUMBER):
        raise _not(value, place, f"a finite number, {legal}")
    too_small = value < 0 or (value == 0 and dimension not in _MAY_BE_ZERO)
    if too_small or (dimension in _UP_TO_ONE and value > 1):
        raise _not(value, place, legal)
    return float(value)


def _curve(points: object, place: str, dimension: str, x_factor: float, y_factor: float) -> Curve:
    """The SI curve through `points` as written."""
    if not isinstance(points, list) or not points:
        raise _not(points, f"{place}: points", "[[x, y], ...], x increasing")
    scaled: list[tuple[float, float]] = []
    for number, point in enumerate(points):
        where = f"{place}: points[{number}]"
        if not isinstance(point, list) or len(point) != 2:
            raise _not(point, where, "a pair [x, y]")
        x = _number(point[0], f"{where} x", "count") * x_factor
        if scaled and x <= scaled[-1][0]:
            raise _not(point[0], f"{where} x", f"above {points[number - 1][0]!r}")
        scaled.append((x, _number(point[1], f"{where} y", dimension) * y_factor))
    return Curve(points=tuple(scaled))


def _tiles(value: object, place: str) -> Tiles:
    """`value` as pairs (rows, columns), whose range Device checks."""
    if not isinstance(value, list) or not all(
        isinstance(tile, list) and all(map(is_number, tile)) for tile in value
    ):
        raise _not(value, f"{place}: value", "[[rows, columns], ...]")
    return tuple(tuple(tile) for tile in value)


def _plain(pairs: list[list[float]]) -> str:
    return ", ".join(":".join(f"{number:g}" for number in pair) for pair in pairs)

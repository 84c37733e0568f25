"""Units of quantities: numbers as people write them, as "25 Gb/s", and in SI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshwright.profiles.inputs import HardwareError, shown
from meshwright.profiles.inputs.limits import MAX_TEXT

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in (*_DECIMAL.items(), *_BINARY.items())}
_BITS = {f"{prefix}b": factor / 8 for prefix, factor in _DECIMAL.items()}
_FLOP = {f"{prefix}FLOP": factor for prefix, factor in _DECIMAL.items()}

# dimension -> unit -> its factor to the SI unit of that dimension
UNITS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "bytes": _BYTES,
        "bytes/s": {f"{unit}/s": factor for unit, factor in (*_BYTES.items(), *_BITS.items())},
        "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
        "FLOP": _FLOP,
        "FLOP/s": {f"{unit}/s": factor for unit, factor in _FLOP.items()},
    }
)
# another spelling -> the unit
_ALSO = MappingProxyType(
    {"µs": "us", "μs": "us", "sec": "s"}
    | {f"{p}bps": f"{p}b/s" for p in _DECIMAL}
    | {f"{p}bit/s": f"{p}b/s" for p in _DECIMAL}
    | {f"{p}FLOPS": f"{p}FLOP/s" for p in _DECIMAL}
    | {f"{p}FLOPs": f"{p}FLOP/s" for p in _DECIMAL}
)
# families of units in which a quantity of a dimension may be written, each the largest first
_WRITTEN: Mapping[str, Sequence[Sequence[str]]] = MappingProxyType(
    {
        "bytes": (("TiB", "GiB", "MiB", "KiB", "B"), ("TB", "GB", "MB", "kB", "B")),
        "bytes/s": (("TB/s", "GB/s", "MB/s", "kB/s", "B/s"),),
        "seconds": (("s", "ms", "us", "ns"),),
        "FLOP": (("TFLOP", "GFLOP", "MFLOP", "FLOP"),),
        "FLOP/s": (("TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s"),),
    }
)
EXAMPLES = MappingProxyType(
    {
        "bytes": "48 GiB",
        "bytes/s": "25 GB/s or 200 Gb/s",
        "seconds": "5 us",
        "FLOP": "17 GFLOP",
        "FLOP/s": "312 TFLOP/s",
    }
)
_QUANTITY = re.compile(
    r"\s*([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+)\s*([^\s\d.]\S*)\s*"
)


def in_si(text: str, dimension: str, place: str) -> float:
    """A quantity as it is written, in the SI unit of its dimension. Raises `MeshwrightError`."""
    units, example = UNITS[dimension], EXAMPLES[dimension]
    legal = f"a number with a unit, as {example}; units: {', '.join(units)}"
    found = _QUANTITY.fullmatch(text) if len(text) <= MAX_TEXT else None
    if found is None:
        raise HardwareError(f" is {shown(text)}", place=place, legal=legal)
    number, unit = found.groups()
    if (factor := units.get(_ALSO.get(unit, unit))) is None:
        near = [name for name in units if name.lower() == unit.lower()]
        way_out = (
            f"did you mean {' or '.join(f'{number} {name}' for name in near)}?" if near else ""
        )
        what = f" is {shown(text)}: {shown(unit)} is no unit of {dimension}"
        raise HardwareError(what, place=place, legal=legal, way_out=way_out)
    return float(number) * factor


def written(value: float, dimension: str, digits: int = 15) -> str:
    """A quantity in SI as people write it, "25 GB/s", in the units that make it shortest."""
    factors, said = UNITS[dimension], list[str]()
    for units in _WRITTEN[dimension]:
        unit = next((u for u in units if abs(value) >= factors[u]), units[-1])
        said.append(f"{value / factors[unit]:.{digits}g} {unit}")
    return min(said, key=lambda text: len(text.split()[0]))

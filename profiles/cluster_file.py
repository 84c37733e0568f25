"""Cluster files: a catalog entry and what differs from it, in TOML, each quantity with its unit.

    base = "rtx-4090"
    num_nodes = 2

    [device]
    memory = "48 GiB"

    [inter_link]
    bandwidth = "20 Gb/s"

Keys are those of the catalog. Where the unit stands in the key (`memory_bytes`, `latency_s`) a bare
number is one of that unit; elsewhere it is refused, with the line as it should be.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from meshwright.profiles.hardware.catalog_reader import unknown_name
from meshwright.profiles.hardware.device import DTYPES, Device, Link
from meshwright.profiles.hardware.host import Host
from meshwright.profiles.hardware.units import EXAMPLES, UNITS, in_si, written
from meshwright.profiles.inputs import ClusterError, shown
from meshwright.profiles.inputs.limits import is_number

PLAIN = ("base", "name", "num_nodes", "devices_per_node", "num_pools")
TABLES: Mapping[str, type] = MappingProxyType(
    {"device": Device, "intra_link": Link, "inter_link": Link, "pool_link": Link, "host": Host}
)
# of a curve of fractions, what it is over: a quantity, or a number of things
_OVER = MappingProxyType(
    {
        "matmul_efficiency": "FLOP",
        "memory_efficiency": "bytes",
        "efficiency": "bytes",
        "attention_efficiency": "",
        "tuned_attention_efficiency": "",
        "group_efficiency": "",
    }
)
_SUFFIXES = MappingProxyType({"_bytes": "bytes", "_s": "seconds"})
SLOWEST, FASTEST = 1e7, 1e13  # bytes/s of a link that is one
MOST_LINES = 400  # of one value
LINE_RATE = 0.8  # of it long messages reach over Ethernet and InfiniBand, in the catalog's entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a table: the `field` that it sets, and the `dimension` of its quantity, of which a
    number without a unit is one of `bare`; of a curve what it is `over`."""

    field: str
    dimension: str = ""
    bare: bool = True
    over: str | None = None


def keys_of(table: str) -> dict[str, Key]:
    """The keys of a table: those of the catalog, then those with the unit in them."""
    found: dict[str, Key] = {}
    for field in dataclasses.fields(TABLES[table]):
        name, suffix = field.name, next((s for s in _SUFFIXES if field.name.endswith(s)), "")
        if name == "assumptions":
            continue
        if suffix:
            found[name.removesuffix(suffix)] = Key(
                field=name, dimension=_SUFFIXES[suffix], bare=False
            )
            found[name] = Key(field=name, dimension=_SUFFIXES[suffix])
        elif "bandwidth" in name:
            found[name] = Key(field=name, dimension="bytes/s", bare=False)
        elif name == "peak_flops":
            found[name] = Key(field=name, dimension="FLOP/s", bare=False)
        else:
            found[name] = Key(field=name, over=_OVER.get(name))
    return found


# --- reading --------------------------------------------------------------------------------------


def changes_of(table: str, given: Any, place: str) -> dict[str, Any]:
    """The fields of a table of a file, in SI. Raises `MeshwrightError` for unknown keys, quantities
    without a unit, and for what no link of its kind has."""
    keys, changes = keys_of(table), dict[str, Any]()
    for name, value in _table(given, place).items():
        if name not in keys:
            raise unknown_name(f"{place} key", name, keys)
        key = keys[name]
        if key.field in changes:
            raise ClusterError(
                f" and {key.field} are the same", place=f"{place}: {name}", legal="one of the two"
            )
        changes[key.field] = _value(key, name, value, f"{place}: {name}")
    if table.endswith("_link") and is_number(bandwidth := changes.get("bandwidth", 1e9)):
        _check_plausible(bandwidth, given.get("bandwidth", ""), place)
    return changes


def _table(value: Any, place: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ClusterError(f" is {shown(value)}", place=place, legal="a table of key = value")


def _value(key: Key, name: str, value: Any, place: str) -> Any:
    """A value in SI, as its field takes it; what is of another type, the field refuses."""
    if key.field == "peak_flops":
        rates = _table(value, place)
        for dtype in rates:
            if dtype not in DTYPES:
                raise unknown_name(f"{place} key", dtype, DTYPES)
        return {
            dtype: _quantity(key, dtype, rate, f"{place}.{dtype}") for dtype, rate in rates.items()
        }
    if key.over is not None and isinstance(value, list):
        return [_point(key.over, name, point, place) for point in value]
    return _quantity(key, name, value, place) if key.dimension else value


def _quantity(key: Key, name: str, value: Any, place: str) -> Any:
    if isinstance(value, str):
        found = in_si(value, key.dimension, place)
        return round(found) if key.dimension == "bytes" else found
    if key.bare or not is_number(value):
        return value
    meant = _quoted(value, key.dimension)
    if key.dimension == "bytes/s" and value < SLOWEST:  # was never meant in bytes a second
        meant = f'"{value:g} Gb/s"' if name == "bandwidth" else f'"{value:g} GB/s"'
    raise ClusterError(
        f" is {shown(value)}, without a unit",
        place=place,
        legal=f"a number with a unit, as {EXAMPLES[key.dimension]}",
        way_out=f"write {name} = {meant}; `meshwright cluster convert` writes a file of bare "
        "numbers anew",
    )


def _point(over: str, name: str, point: Any, place: str) -> Any:
    """A point of a curve, whose x may have a unit, and has one where it is a quantity."""
    if not over or not isinstance(point, list) or len(point) != 2:
        return point
    x, y = point
    if isinstance(x, str):
        return [in_si(x, over, place), y]
    if not is_number(x):
        return point
    raise ClusterError(
        f" has a point at {shown(x)}, without a unit",
        place=place,
        legal=f"points as [{EXAMPLES[over]!r}, 0.5]",
        way_out=f"write [{_quoted(x, over)}, {y}]; `meshwright cluster convert` writes a file of "
        "bare numbers anew",
    )


def _quoted(value: float, dimension: str) -> str:
    return f'"{written(value, dimension)}"'


def _check_plausible(bandwidth: float, said: Any, place: str) -> None:
    if bandwidth <= 0 or SLOWEST <= bandwidth <= FASTEST:  # the link refuses none
        return
    number = re.match(r"[-+.\deE]*", str(said).strip())
    guess = f'did you mean bandwidth = "{number[0]} Gb/s"?' if number and number[0] else ""
    raise ClusterError(
        f" is {shown(said)}, {written(bandwidth, 'bytes/s')}, which no link has",
        place=f"{place}: bandwidth",
        legal=f"{written(SLOWEST, 'bytes/s')} to {written(FASTEST, 'bytes/s')}",
        way_out=guess,
    )


# --- converting -----------------------------------------------------------------------------------

_HEAD = re.compile(r"\s*\[\s*([\w.\s]+?)\s*\]\s*(?:#.*)?")
_LINE = re.compile(r"(\s*)([\w.]+)(\s*=\s*)(\S.*?)(\s*(?:#.*)?)")


def converted(text: str) -> str:
    """A file of bare numbers in SI with the unit of each, entry by entry. All else stays; comments
    within a value of several lines come to stand above it."""
    lines, done, table, at = text.splitlines(), list[str](), "", 0
    while at < len(lines):
        if head := _HEAD.fullmatch(lines[at]):
            table = head[1].replace(" ", "")
        entry, notes, end = _entry(lines, at) if not head else (None, (), at + 1)
        done += lines[at:end] if entry is None else [*notes, _line(entry, table)]
        at = end
    return "\n".join(done) + "\n"


def _entry(lines: Sequence[str], at: int) -> tuple[re.Match[str] | None, Sequence[str], int]:
    """The entry that begins at a line, on as many lines as its value takes, with the comments on
    those; and where the next one may begin."""
    found, value, notes = _LINE.fullmatch(lines[at]), "", list[str]()
    for end in range(at, min(at + MOST_LINES, len(lines)) if found else at):
        text, mark, note = lines[end].partition("#")  # of a text that has one, all is left as it is
        value += text
        try:
            tomllib.loads(value)
        except tomllib.TOMLDecodeError:
            notes += [mark + note] * bool(mark)
            continue
        entry = found if end == at else _LINE.fullmatch(f"{value.rstrip()}  {mark}{note}".rstrip())
        return entry, notes, end + 1
    return None, (), at + 1


def _line(found: re.Match[str], table: str) -> str:
    indent, name, equals, value, rest = found.groups()
    path = [*filter(None, table.split(".")), *name.split(".")]
    read = tomllib.loads(f"x = {value}")["x"]
    if path[0] not in TABLES:
        return found[0]
    for name in reversed(path[1:]):  # of a table of its own
        read = {name: read}
    if not isinstance(read, dict):
        return found[0]
    keys, said = keys_of(path[0]), dict[str, str]()
    for name, inner in read.items():
        said[name] = _with_units(keys[name], inner) if name in keys else _toml(inner)
    text = "{ " + ", ".join(f"{name} = {x}" for name, x in said.items()) + " }"
    if len(path) > 1:
        text = said[path[1]]
        if len(path) > 2:  # a dtype's peak
            text = _with_units(keys[path[1]], read[path[1]][path[2]]) if path[1] in keys else value
    return f"{indent}{found[2]}{equals}{text}{rest}"


def _with_units(key: Key, value: Any) -> str:
    """A value as a file has it, with the unit that it lacks."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_with_units(key, x)}" for k, x in value.items()) + " }"
    if isinstance(value, list) and key.over:
        return f"[{', '.join(_toml(_point_with_unit(key.over, point)) for point in value)}]"
    if key.dimension and not key.bare and is_number(value):
        return _quoted(value, key.dimension)
    return _toml(value)


def _point_with_unit(over: str, point: Any) -> Any:
    pair = isinstance(point, list) and len(point) == 2 and is_number(point[0])
    return [written(point[0], over), point[1]] if pair else point


def _toml(value: Any) -> str:
    """A plain value in TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(x)}" for k, x in value.items()) + " }"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- writing --------------------------------------------------------------------------------------

_WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "device": {
            "memory": "of each device",
            "memory_bandwidth": "",
            "reserved": "never for tensors: driver, NCCL",
        },
        "intra_link": {
            "bandwidth": "of one device, in one direction, as long messages reach it",
            "latency": "of a message",
        },
        "inter_link": {
            "bandwidth": "of all NICs of a node together, in one direction, as long messages reach",
            "latency": "of a message",
        },
        "host": {
            "memory": "of a node",
            "link_bandwidth": "between the host and one device, in one direction",
        },
    }
)


def initial(base: Any, *, gpu: str, nodes: int, per_node: int, net: str | None) -> str:
    """A file for so many nodes of a catalog entry, whose cluster `base` is, with what people change
    first in comments; `net` is the line rate of a node's NICs, as "25Gb/s"."""
    lines = [
        "# A cluster for meshwright. Numbers that are not given here are the catalog's:",
        f"# meshwright catalog {gpu}; what follows of all of them: meshwright cluster show FILE.",
        f'base = "{gpu}"',
        f"num_nodes = {nodes}",
        f"devices_per_node = {per_node}",
    ]
    for table, words in _WORDS.items():
        if (held := getattr(base, table)) is None:
            continue
        keys, wired = keys_of(table), net is not None and table == "inter_link"
        lines += ["", f"{'' if wired else '# '}[{table}]"]
        for name, what in words.items():
            quantity = written(getattr(held, keys[name].field), keys[name].dimension, digits=4)
            lines.append(f'# {name} = "{quantity}"' + f"  # {what}" * bool(what))
        if wired:
            rate = in_si(str(net), "bytes/s", "--net")
            _check_plausible(rate, net, "--net")
            lines.append(f"bandwidth = {_quoted(LINE_RATE * rate, 'bytes/s')}")
            lines.append(f"# that is {LINE_RATE:g} of a line rate of {net}; measured is better")
        if table == "device":
            rates = base.device.peak_flops.items()
            peaks = ", ".join(f"{k} = {_quoted(v, 'FLOP/s')}" for k, v in rates)
            lines.append(f"# peak_flops = {{ {peaks} }}  # dense, without sparsity")
    return "\n".join(lines) + "\n"


def schema(names: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a file, by which editors complete it; `names` are those of the catalog."""
    tables = {table: _table_schema(table) for table in TABLES}
    count = {"type": "integer", "minimum": 1}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A cluster of Meshwright",
        "type": "object",
        "required": ["base"],
        "additionalProperties": False,
        "properties": {
            "base": {"enum": [*names], "description": "what is not given is as in this entry"},
            "name": {"type": "string", "minLength": 1},
            "num_nodes": count,
            "devices_per_node": count,
            "num_pools": count,
            **tables,
        },
    }


def _table_schema(table: str) -> dict[str, Any]:
    found = {name: _key_schema(key) for name, key in keys_of(table).items()}
    return {"type": "object", "additionalProperties": False, "properties": found}


def _key_schema(key: Key) -> dict[str, Any]:
    number: dict[str, Any] = {"type": "number", "minimum": 0}
    if key.field == "peak_flops":
        rates = dict.fromkeys(DTYPES, _quantity_schema("FLOP/s"))
        return {"type": "object", "additionalProperties": False, "properties": rates}
    if key.dimension:
        quantity = _quantity_schema(key.dimension)
        return {"anyOf": [quantity, number]} if key.bare else quantity
    if key.over is not None:
        x = _quantity_schema(key.over) if key.over else number
        point = {"type": "array", "items": [x, number], "minItems": 2, "maxItems": 2}
        return {"anyOf": [number, {"type": "array", "items": point, "minItems": 1}]}
    if key.field in ("name", "kind"):
        return {"type": "string"}
    return {"type": "array"} if key.field == "tiles" else number


def _quantity_schema(dimension: str) -> dict[str, Any]:
    units = "|".join(map(re.escape, UNITS[dimension]))
    number = r"[-+]?([0-9]+(\\.[0-9]*)?|\\.[0-9]+)([eE][-+]?[0-9]+)?".replace("\\\\", "\\")
    return {
        "type": "string",
        "pattern": f"^ *{number} *({units}) *$",
        "examples": EXAMPLES[dimension].split(" or "),
    }

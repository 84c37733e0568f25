"""The cache of measured times: one SQLite file, exchanged as JSON.

A measurement belongs to a device (its name, its driver, the torch that drove it) and is found by
its dtype and signature, or by its collective, backend, group and bytes. A file that is corrupt
(`cache_file.py`), or that holds a number no clock can have read, is moved aside with a warning and
a new one begun: what was measured can be measured again, what is wrong must not be used.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from meshwright.profiles.hardware.device import check_number, check_whole
from meshwright.profiles.inputs import MeshwrightError, parse_json, read_json, write_text
from meshwright.profiles.inputs.cache_file import CacheFile, rows_of
from meshwright.profiles.inputs.files import MAX_MEASURED_BYTES
from meshwright.profiles.op_signature import OpSignature
from meshwright.profiles.steps import COMPONENTS, TERMS, StepTiming
from meshwright.profiles.timings import CollectiveTiming, Timing

T = TypeVar("T", Timing, CollectiveTiming, StepTiming)
Record: TypeAlias = Timing | CollectiveTiming | StepTiming

FORMAT = 1  # of the JSON
KIND = "meshwright profile"
LOCK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DeviceId:
    """The device of measurements: the name its driver gives, the driver, the torch version."""

    name: str
    driver: str
    torch: str

    @staticmethod
    def here(kind: str, at_once: int = 1) -> DeviceId:
        """This machine's device of a kind, "cpu" or "cuda"; for a CPU one core while `at_once` are
        busy."""
        if kind == "cuda":
            name, driver = torch.cuda.get_device_name(0), _nvidia_driver()
        else:
            name, driver = _cpu_name(), torch.backends.cpu.get_cpu_capability()
            name += f", {at_once} cores busy" if at_once > 1 else ""
        return DeviceId(name=name, driver=driver, torch=torch.__version__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements of one device: operators by signature text, collectives, and steps of plans
    that ran on it."""

    device: DeviceId
    operators: Mapping[str, Timing] = field(default_factory=dict)
    collectives: tuple[CollectiveTiming, ...] = ()
    steps: tuple[StepTiming, ...] = ()


def default_path() -> Path:
    """`profile.sqlite` in $MESHWRIGHT_CACHE, or in this platform's cache folder of the user."""
    given = os.environ.get("MESHWRIGHT_CACHE")
    if given:
        return Path(given) / "profile.sqlite"
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "meshwright" / "profile.sqlite"


class Store:
    """The cache at `path`, which processes may share. Every call raises OSError where the file
    can't be had: locked for longer than the timeout, another user's, on a full disk."""

    def __init__(
        self, path: str | Path | None = None, *, lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._file = CacheFile(self.path, lock_timeout_s=lock_timeout_s)

    def read(self, device: DeviceId) -> Measurements:
        """The measurements of a device; empty where there are none."""
        nothing = Measurements(device=device, operators={}, collectives=())
        return self._file.read(lambda connection: _read(connection, device), nothing)

    def devices(self) -> list[DeviceId]:
        """The devices that have measurements, sorted."""
        nothing: set[DeviceId] = set()
        return sorted(self._file.read(_devices, nothing))

    def add(self, measurements: Measurements) -> None:
        """Store measurements, replacing those of the same signature or message. Raises ValueError
        for numbers that no measurement can have given."""
        _check(measurements, "measured")
        key = (measurements.device.name, measurements.device.driver, measurements.device.torch)
        operators = [
            (*key, OpSignature.parse(text).dtype, text, *_values(t))
            for text, t in measurements.operators.items()
        ]
        collectives = [(*key, *_values(c)) for c in measurements.collectives]
        steps = [(*key, *_values(step)) for step in measurements.steps]

        def write(connection: sqlite3.Connection) -> None:
            tables = ("operators", operators), ("collectives", collectives), ("steps", steps)
            for table, rows in tables:
                if rows:
                    marks = ", ".join("?" * len(rows[0]))
                    connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)

        self._file.write(write)

    def forget_steps(self, of: Callable[[str], bool]) -> int:
        """Delete the measured steps of all devices of such names; how many plans those were of."""
        forgotten = [device for device in self.devices() if of(device.name)]
        plans = {(device, *s.key[:-1]) for device in forgotten for s in self.read(device).steps}

        def delete(connection: sqlite3.Connection) -> None:
            names = [(device.name, device.driver, device.torch) for device in forgotten]
            connection.executemany(f"DELETE FROM steps {_MINE}", names)

        if plans:
            self._file.write(delete)
        return len(plans)


_MINE = "WHERE device = ? AND driver = ? AND torch = ?"


def _devices(connection: sqlite3.Connection) -> set[DeviceId]:
    found = set()
    for table in ("operators", "collectives", "steps"):
        for names in rows_of(connection, f"SELECT DISTINCT device, driver, torch FROM {table}"):
            if not all(isinstance(name, str) for name in names):
                raise _wrong(f"cached device {names!r:.80}", "its names must be texts")
            found.add(DeviceId(name=names[0], driver=names[1], torch=names[2]))
    return found


def _read(connection: sqlite3.Connection, device: DeviceId) -> Measurements:
    key = (device.name, device.driver, device.torch)
    operators = rows_of(
        connection, f"SELECT signature, {_columns(Timing)} FROM operators {_MINE}", key
    )
    collectives, steps = (
        rows_of(connection, f"SELECT {_columns(kind)} FROM {table} {_MINE}", key)
        for table, kind in (("collectives", CollectiveTiming), ("steps", StepTiming))
    )
    measurements = Measurements(
        device=device,
        operators={text: _record(Timing, values) for text, *values in operators},
        collectives=tuple(_record(CollectiveTiming, values) for values in collectives),
        steps=tuple(_record(StepTiming, values) for values in steps),
    )
    _check(measurements, "cached")
    measurements = replace(
        measurements, steps=tuple(sorted(measurements.steps, key=lambda step: step.key))
    )
    found = measurements.collectives
    if len({(c.backend, c.kind, c.ranks, c.size, c.per_node, c.nbytes) for c in found}) < len(
        found
    ):
        raise _wrong("cached collectives", "one of them is there twice")
    if len({step.key for step in measurements.steps}) < len(measurements.steps):
        raise _wrong("cached steps", "one of them is there twice")
    return measurements


def _field_names(kind: type[Record]) -> list[str]:
    return [field.name for field in fields(kind)]


def _columns(kind: type[Record]) -> str:
    return ", ".join(_field_names(kind))


def _values(record: Record) -> tuple[Any, ...]:
    """A record's fields as the cache has them: what a step is made of is a JSON text."""
    found = (getattr(record, name) for name in _field_names(type(record)))
    return tuple(json.dumps(x) if isinstance(x, Mapping) else x for x in found)


def _record(kind: type[T], values: Iterable[Any]) -> T:
    """A record from its fields' values, in order."""
    given = dict(zip(_field_names(kind), values, strict=True))
    if isinstance(parts := given.get("parts"), str):
        given["parts"] = parse_json(parts, place="parts of a step")
    return kind(**given)


def _wrong(place: str, what: str) -> MeshwrightError:
    legal = "measurements as `meshwright profile` takes them"
    return MeshwrightError(what, place=place, legal=legal, way_out="drop it, or measure again")


def _check(measurements: Measurements, place: str) -> None:
    """Raise ValueError for a value that no measurement can have given."""
    for text, timing in measurements.operators.items():
        if not isinstance(text, str):
            raise _wrong(f"{place} operator {text!r:.80}", "its signature must be a text")
        OpSignature.parse(text)
        where = f"{place} operator {text[:80]}"
        check_number(f"{where}: forward_s", timing.forward_s)
        check_number(f"{where}: backward_s", timing.backward_s, zero=True)
        check_whole(f"{where}: repetitions", timing.repetitions)
        check_number(f"{where}: spread", timing.spread, zero=True)
    for c in measurements.collectives:
        where = f"{place} {c.kind!r} of {c.nbytes!r} bytes"
        if not all(isinstance(text, str) for text in (c.kind, c.backend, c.source)):
            raise _wrong(where, "kind, backend and source must be texts")
        for name in ("ranks", "size", "per_node", "nbytes", "repetitions"):
            check_whole(f"{where}: {name}", getattr(c, name))
        check_number(f"{where}: seconds", c.seconds)
        check_number(f"{where}: spread", c.spread, zero=True)
    _check_steps(measurements.steps, place)


def _check_steps(steps: Iterable[StepTiming], place: str) -> None:
    """Raise ValueError for a value that no step can have given."""
    for step in steps:
        where = f"{place} step of plan {step.plan!r:.40}"
        if not all(isinstance(text, str) for text in step.key):
            raise _wrong(where, "what it is of must be texts")
        if step.term not in TERMS:
            raise _wrong(where, f"term {step.term!r:.40} is none of {', '.join(TERMS)}")
        check_number(f"{where}: measured_s", step.measured_s, zero=True)
        check_number(f"{where}: predicted_s", step.predicted_s, zero=True)
        check_whole(f"{where}: samples", step.samples)
        if not isinstance(step.parts, Mapping) or not set(step.parts) <= set(COMPONENTS):
            raise _wrong(where, f"parts must be of {', '.join(COMPONENTS)}")
        for name, seconds in step.parts.items():
            # what passes behind something else may cost less than nothing
            size = abs(seconds) if isinstance(seconds, int | float) else seconds
            check_number(f"{where}: {name}", size, zero=True)


# --- JSON -----------------------------------------------------------------------------------------


def export_json(measurements: Measurements, path: str | Path) -> None:
    """Write measurements as sorted JSON, for another machine or a repository."""
    operators = [
        {"signature": json.loads(text), **asdict(timing)}
        for text, timing in sorted(measurements.operators.items())
    ]
    collectives = [asdict(c) for c in sorted(measurements.collectives, key=_values)]
    steps = [asdict(step) for step in sorted(measurements.steps, key=lambda step: step.key)]
    lines = [
        f'  "format": {FORMAT},',
        f'  "kind": {json.dumps(KIND)},',
        f'  "device": {json.dumps(asdict(measurements.device))},',
        '  "operators": ' + _listed(operators) + ",",
        '  "collectives": ' + _listed(collectives) + ",",
        '  "steps": ' + _listed(steps),
    ]
    write_text(path, "{\n" + "\n".join(lines) + "\n}\n", "export of measurements")


def _listed(items: Iterable[Mapping[str, Any]]) -> str:
    """A JSON list with one item a line, to be read and compared."""
    rows = [f"    {json.dumps(item)}" for item in items]
    return "[\n" + ",\n".join(rows) + "\n  ]" if rows else "[]"


def import_json(path: str | Path, *, accepts: Callable[[str], bool], expected: str) -> Measurements:
    """Read what `export_json` wrote; `accepts` says whether a device of that name is `expected`.

    Raises ValueError naming the file and the key for malformed content, and both devices' names
    for a profile of another device.
    """
    place = f"profile {path}"
    data = read_json(path, most=MAX_MEASURED_BYTES)
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("format") != FORMAT:
        raise MeshwrightError(
            " is none",
            place=place,
            legal=f"a {KIND} of format {FORMAT}",
            way_out="`meshwright profile --export` writes one",
        )
    with _naming(place):
        device = DeviceId(**{key: str(data["device"][key]) for key in ("name", "driver", "torch")})
        measurements = Measurements(
            device=device,
            operators={
                OpSignature.parse(json.dumps(row["signature"])).text: _from_row(Timing, row)
                for row in data["operators"]
            },
            collectives=tuple(_from_row(CollectiveTiming, row) for row in data["collectives"]),
            steps=tuple(_from_row(StepTiming, row) for row in data.get("steps", ())),
        )
        _check(measurements, "imported")
    if not accepts(device.name):
        raise MeshwrightError(
            f" is of device {device.name!r}, but the cluster's device is {expected!r}",
            place=place,
            legal=f"a profile of {expected}",
            way_out="profile that device, or name the cluster the profile is of",
        )
    return measurements


def _from_row(kind: type[T], row: Mapping[str, Any]) -> T:
    """A record from an object of the JSON, with other keys ignored."""
    known = fields(kind)
    values = (row[f.name] if f.default is MISSING else row.get(f.name, f.default) for f in known)
    return _record(kind, values)


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise _malformed(f"no key {error.args[0]!r}", place) from None
    except (TypeError, AttributeError) as error:
        raise _malformed(f"malformed ({error})", place) from None
    except ValueError as error:
        if isinstance(error, MeshwrightError):
            raise MeshwrightError.of(error, place) from None
        raise _malformed(str(error), place) from None


def _malformed(what: str, place: str) -> MeshwrightError:
    legal = "what `meshwright profile --export` writes"
    return MeshwrightError(what, place=place, legal=legal, way_out="export it again")


# --- this machine ---------------------------------------------------------------------------------


def _cpu_name() -> str:
    """The processor's name and this machine's number of cores, e.g. of a virtual machine."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line[:10] == "model name")
    return f"{name}, {os.cpu_count()} cores"


def _nvidia_driver() -> str:
    """E.g. `CUDA 12.8, driver 550.54.15`: torch's CUDA version, and the installed driver's."""
    version = "unknown"
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        version = text.split("Kernel Module")[1].split()[0]
    return f"CUDA {torch.version.cuda}, driver {version}"

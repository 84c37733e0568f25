"""The cache of measured times: a folder with a JSON file for each device, exchanged as such.

A measurement belongs to a device (its name, its driver, the torch that drove it). A file is read
within the limits of all files of users, and replaced whole under a lock beside it. One that is
malformed, or that holds a number no clock can have read, is moved aside with a warning and a new
one begun: what was measured can be measured again, what is wrong must not be used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from filelock import FileLock

from meshwright.profiles.hardware.device import check_number, check_whole
from meshwright.profiles.inputs import (
    MeshwrightError,
    ProfileError,
    irregular,
    read_json,
    write_text,
)
from meshwright.profiles.inputs.files import MAX_MEASURED_BYTES
from meshwright.profiles.op_signature import OpSignature
from meshwright.profiles.steps import COMPONENTS, TERMS, StepTiming
from meshwright.profiles.timings import CollectiveTiming, CpuRates, Timing

T = TypeVar("T", Timing, CollectiveTiming, StepTiming, CpuRates)
Record: TypeAlias = Timing | CollectiveTiming | StepTiming | CpuRates

log = logging.getLogger(__name__)

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
        import torch

        if kind == "cuda":
            name, driver = torch.cuda.get_device_name(0), _nvidia_driver()
        else:
            name, driver = _cpu_name(), torch.backends.cpu.get_cpu_capability()
            name += f", {at_once} cores busy" if at_once > 1 else ""
        return DeviceId(name=name, driver=driver, torch=torch.__version__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements of one device: operators by signature text, collectives, steps of plans that
    ran on it, and of a CPU its rates."""

    device: DeviceId
    operators: Mapping[str, Timing] = field(default_factory=dict)
    collectives: tuple[CollectiveTiming, ...] = ()
    steps: tuple[StepTiming, ...] = ()
    rates: CpuRates | None = None

    @property
    def count(self) -> int:
        """Operators, collectives and steps."""
        return len(self.operators) + len(self.collectives) + len(self.steps)

    def updated(self, newer: Measurements) -> Measurements:
        """With newer ones of the device, which replace those of the same signature, message or
        step."""
        collectives = {c.key: c for c in (*self.collectives, *newer.collectives)}
        steps = {step.key: step for step in (*self.steps, *newer.steps)}
        return Measurements(
            device=self.device,
            operators={**self.operators, **newer.operators},
            collectives=tuple(collectives.values()),
            steps=tuple(steps[key] for key in sorted(steps)),
            rates=newer.rates or self.rates,
        )


def default_path() -> Path:
    """$MESHWRIGHT_CACHE, or `meshwright` in this platform's cache folder of the user."""
    if folder := os.environ.get("MESHWRIGHT_CACHE"):
        return Path(folder)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "meshwright"


class Store:
    """The cache in the folder `path`, which processes may share. Every call raises OSError where a
    file can't be had: locked for longer than the timeout, another user's, on a full disk."""

    def __init__(
        self, path: str | Path | None = None, *, lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        self.path = Path(path) if path is not None else default_path()
        self.lock_timeout_s = lock_timeout_s

    def file_of(self, device: DeviceId) -> Path:
        """The file of a device: its name for people, and a hash of name, driver and torch."""
        name = re.sub("[^a-z0-9]+", "-", device.name.lower()).strip("-")[:40]
        parts = json.dumps([device.name, device.driver, device.torch])
        return self.path / f"profile-{name}-{hashlib.sha256(parts.encode()).hexdigest()[:10]}.json"

    def read(self, device: DeviceId) -> Measurements:
        """The measurements of a device; empty where there are none."""
        with self._errors():
            stored = self._stored(self.file_of(device))
        return stored if stored and stored.device == device else Measurements(device=device)

    def devices(self) -> list[DeviceId]:
        """The devices that have measurements, sorted."""
        with self._errors():
            files = map(self._stored, sorted(self.path.glob("profile-*.json")))
            return sorted(stored.device for stored in files if stored is not None)

    def add(self, measurements: Measurements) -> None:
        """Store measurements, replacing those of the same signature or message. Raises ValueError
        for numbers that no measurement can have given."""
        _check(measurements, "measured")
        self._change(measurements.device, lambda known: known.updated(measurements))

    def forget_steps(self, of: Callable[[str], bool]) -> int:
        """Delete the measured steps of all devices of such names. Returns of how many plans."""
        plans = 0
        for device in self.devices():
            if of(device.name) and (steps := self.read(device).steps):
                plans += len({step.key[:-1] for step in steps})
                self._change(device, lambda known: replace(known, steps=()))
        return plans

    def _change(self, device: DeviceId, change: Callable[[Measurements], Measurements]) -> None:
        path = self.file_of(device)
        text = _text(change(Measurements(device=device)))  # what is wrong is not the file's fault
        if len(text) > MAX_MEASURED_BYTES:
            raise _wrong(f"profile of {device.name:.40}", f"it has {len(text):,} bytes")
        with self._errors(), self._alone(path):
            stored = self._stored(path, alone=True) or Measurements(device=device)
            new = path.with_suffix(".new")
            new.write_text(_text(change(stored)), encoding="utf-8")
            os.replace(new, os.path.realpath(path))  # a link to it stays

    def _stored(self, path: Path, *, alone: bool = False) -> Measurements | None:
        """The measurements in a file; None where there is none, or none that can be used, which is
        moved aside."""
        try:
            if kind := irregular(path):
                raise OSError(f"{path.name} is {kind}")
            with path.open("rb"):  # or whoever may not read it is told so
                pass
        except FileNotFoundError:  # there is none, or another process has just moved it aside
            return None
        try:
            return _measurements(
                read_json(path, error=ProfileError, most=MAX_MEASURED_BYTES), f"cached {path.name}"
            )
        except MeshwrightError as error:
            if alone:
                self._move_aside(path, error)
                return None
        with self._alone(path):  # another process may have put a new one in its place
            return self._stored(path, alone=True)

    def _move_aside(self, path: Path, error: Exception) -> None:
        """Rename a file that can't be used. To be called alone."""
        aside = path.with_name(f"{path.name}.unusable-{time.time_ns()}")
        os.replace(os.path.realpath(path), aside)
        log.warning(
            "the profile cache %s can't be used (%s); it is kept as %s and a new one is begun: "
            "run `meshwright profile` again",
            path,
            error,
            aside.name,
        )

    @contextlib.contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{path}.lock", timeout=self.lock_timeout_s):
                yield
        except NotImplementedError as error:  # the file system has no locks
            raise OSError(str(error)) from error

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """An OSError inside the block as one that names the cache."""
        try:
            yield
        except OSError as error:
            if isinstance(error, MeshwrightError):
                raise
            raise OSError(
                f"profile cache {self.path}: {error}; wait for the process that has it, or name "
                "another folder in MESHWRIGHT_CACHE"
            ) from error


def _wrong(place: str, what: str) -> MeshwrightError:
    legal = "measurements as `meshwright profile` takes them"
    return ProfileError(what, place=place, legal=legal, way_out="drop it, or measure again")


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
    if rates := measurements.rates:
        for name in (f.name for f in fields(CpuRates) if f.name not in ("date", "busy")):
            check_number(f"{place} rates: {name}", getattr(rates, name))
        if not isinstance(rates.date, str) or not isinstance(rates.busy, bool):
            raise _wrong(f"{place} rates", "date must be a text, busy true or false")


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
            magnitude = abs(seconds) if isinstance(seconds, int | float) else seconds
            check_number(f"{where}: {name}", magnitude, zero=True)


# --- JSON -----------------------------------------------------------------------------------------


def export_json(measurements: Measurements, path: str | Path) -> None:
    """Write measurements as sorted JSON, for another machine or a repository."""
    write_text(path, _text(measurements), "export of measurements")


def _text(measurements: Measurements) -> str:
    """Measurements as sorted JSON."""
    operators = [
        {"signature": json.loads(text), **asdict(timing)}
        for text, timing in sorted(measurements.operators.items())
    ]
    collectives = [asdict(c) for c in sorted(measurements.collectives, key=lambda c: c.key)]
    steps = [asdict(step) for step in sorted(measurements.steps, key=lambda step: step.key)]
    entries = {
        "format": json.dumps(FORMAT),
        "kind": json.dumps(KIND),
        "device": json.dumps(asdict(measurements.device)),
        "operators": _listed(operators),
        "collectives": _listed(collectives),
        "steps": _listed(steps),
    }
    if measurements.rates:
        entries["rates"] = json.dumps(asdict(measurements.rates))
    return "{\n" + ",\n".join(f'  "{name}": {text}' for name, text in entries.items()) + "\n}\n"


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
    measurements = _measurements(
        read_json(path, error=ProfileError, most=MAX_MEASURED_BYTES), place
    )
    if not accepts(measurements.device.name):
        raise ProfileError(
            f" is of device {measurements.device.name!r}, but the cluster's device is {expected!r}",
            place=place,
            legal=f"a profile of {expected}",
            way_out="profile that device, or name the cluster the profile is of",
        )
    return measurements


def _measurements(data: Any, place: str) -> Measurements:
    """The measurements in a file's data. Raises `MeshwrightError` for data that `_text` can't have
    written."""
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("format") != FORMAT:
        raise ProfileError(
            " is none",
            place=place,
            legal=f"a {KIND} of format {FORMAT}",
            way_out="`meshwright profile --export` writes one",
        )
    with _naming(place):
        rates = data.get("rates")
        measurements = Measurements(
            device=DeviceId(
                **{key: str(data["device"][key]) for key in ("name", "driver", "torch")}
            ),
            operators={
                OpSignature.parse(json.dumps(row["signature"])).text: _from_row(Timing, row)
                for row in data["operators"]
            },
            collectives=tuple(_from_row(CollectiveTiming, row) for row in data["collectives"]),
            steps=tuple(_from_row(StepTiming, row) for row in data.get("steps", ())),
            rates=None if rates is None else _from_row(CpuRates, rates),
        )
        _check(measurements, "read")
    return measurements


def _from_row(kind: type[T], row: Mapping[str, Any]) -> T:
    """A record from an object of the JSON, with other keys ignored."""
    return kind(
        **{f.name: row[f.name] for f in fields(kind) if f.default is MISSING or f.name in row}
    )


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except MeshwrightError as error:
        raise ProfileError.of(error, place) from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = str(error) if isinstance(error, ValueError) else f"malformed ({error})"
        if isinstance(error, KeyError):
            what = f"no key {error.args[0]!r}"
        legal = "what `meshwright profile --export` writes"
        raise ProfileError(what, place=place, legal=legal, way_out="export it again") from None


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
    import torch

    version = "unknown"
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        version = text.split("Kernel Module")[1].split()[0]
    return f"CUDA {torch.version.cuda}, driver {version}"

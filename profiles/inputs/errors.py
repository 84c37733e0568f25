"""MeshwrightError: an input that can't be used, its place, the legal values and the way out; the
kinds of it that are about inputs, files, hardware and measurements.

Each class that is raised has a code: MW1.. inputs, 2.. models and plans, 3.. runs, 4.. what a run
saved. `docs/reference/errors.md` has an entry for each, which `scripts/write_errors.py` writes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar, Self

PAGE = "docs/reference/errors.md"
_GOES_ON = ("=", " ", "[", ",", ":")  # a clause that begins so continues its place


class MeshwrightError(ValueError):
    """The base of the errors that users are given. `place` names the input (an argument, a file and
    its key), `what` says what is wrong there, `legal` what may stand there, and `way_out` what to
    do; the text is made of the four, and of those alone that are given: the others are the class',
    for all of its errors. A note, which a traceback ends with, has the code.

    What is raised is a subclass with a `CODE`; one without has its parent's.
    """

    CODE: ClassVar[str] = ""
    PLACE: ClassVar[str] = ""
    LEGAL: ClassVar[str] = ""
    WAY_OUT: ClassVar[str] = ""

    def __init__(
        self, what: object, *, place: object = "", legal: object = "", way_out: str = ""
    ) -> None:
        super().__init__(str(what))
        choices = () if isinstance(legal, str) or not isinstance(legal, Iterable) else legal
        listed = ", ".join(map(str, choices)) or str(legal)
        self._said = (str(what), str(place), listed, way_out)
        self.what = str(what)
        self.place = str(place) or self.PLACE
        self.legal = listed or self.LEGAL
        self.way_out = way_out or self.WAY_OUT
        if self.CODE:
            self.add_note(f"({self.CODE}: {PAGE}#{self.CODE.lower()})")

    @classmethod
    def refused(cls, place: object, value: object, *, legal: object, way_out: str = "") -> Self:
        """The error of a `value` out of range, not a choice or of another type, as the text
        `place=value; legal: …`."""
        return cls(f"={shown(value)}", place=place, legal=legal, way_out=way_out)

    @classmethod
    def of(cls, error: ValueError, place: object) -> Self:
        """An error with the fields of another, found inside `place`."""
        if not isinstance(error, MeshwrightError):
            return cls(error, place=place)
        what, inner_place, legal, way_out = error._said
        return cls(what, place=f"{place}{_joined(inner_place)}", legal=legal, way_out=way_out)

    def __str__(self) -> str:
        what, place, legal, way_out = self._said
        where = f"{place}{_joined(what)}" if place else what
        return "; ".join(filter(None, (where, legal and f"legal: {legal}", way_out)))

    def with_code(self) -> str:
        """The text, and a last line with the code and where it is explained."""
        return "\n".join((str(self), *getattr(self, "__notes__", ())))


class ArgumentError(MeshwrightError):
    """An argument of a function that is out of range, no choice, or of another type."""

    CODE = "MW101"
    PLACE = "an argument"
    LEGAL = "values of the type, the range or the choices that the message names"
    WAY_OUT = "give such a value, or leave the argument out"


class FileError(MeshwrightError):
    """A path that no file can have, or a file that can't be read as what it should be."""

    CODE = "MW103"
    PLACE = "a file that is read"
    LEGAL = "a regular file, in its format and within the limits of its size and depth"
    WAY_OUT = "name another file, or write it again"


class NotInstalledError(MeshwrightError, ImportError):
    """A package that only some calls need, and that is not there."""

    CODE = "MW105"
    PLACE = "the Python environment"
    LEGAL = "one with the package"
    WAY_OUT = "install it with pip"


class HardwareError(MeshwrightError):
    """A name or a key that the catalog lacks, or a number that no device, link or host has."""

    CODE = "MW111"
    PLACE = "a file of the catalog or of a cluster, or a Device, Host, Link or Curve"
    LEGAL = "names of `meshwright catalog`, numbers in their range and with their unit"
    WAY_OUT = "correct it, or describe other hardware in a file of MESHWRIGHT_CATALOG"


class ClusterError(MeshwrightError):
    """A cluster, or a file of one, that can't be, or that is another one than runs."""

    CODE = "MW112"
    PLACE = "a cluster file, or a Cluster"
    LEGAL = "keys and units of docs/reference/cluster_file.md, and as many devices as there are"
    WAY_OUT = "correct it; `meshwright cluster init` begins a file"


class ProfileError(MeshwrightError):
    """A profile, a log or a table of measurements that can't be taken, or that is of another
    device."""

    CODE = "MW121"
    PLACE = "a file of measurements"
    LEGAL = "what `meshwright profile --export` wrote, nccl-tests or a table, of the same device"
    WAY_OUT = "name another file, or measure again"


class MeasuringError(MeshwrightError, RuntimeError):
    """A measurement that this machine did not finish."""

    CODE = "MW122"
    PLACE = "profile: collectives"
    LEGAL = "a machine that can start the ranks and processes of a measurement"
    WAY_OUT = "measure again when the machine is less busy"


def _joined(clause: str) -> str:
    """A clause after its place."""
    return clause if not clause or clause.startswith(_GOES_ON) else f": {clause}"


class _Shown(reprlib.Repr):
    """`repr` of a value of any size, depth or number of digits, short, without an error."""

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 256 else f"an integer of {x.bit_length()} bits"


_SHOWN = _Shown()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 3, 80, 80
_SHOWN.maxdict = _SHOWN.maxlist = _SHOWN.maxtuple = 8


def shown(value: Any) -> str:
    """A value as a message shows it: `repr`, shortened where it is long."""
    return _SHOWN.repr(value)

"""MeshwrightError: an input that can't be used, its place, the legal values and the way out."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar, Self

_GOES_ON = ("=", " ", "[", ",", ":")  # a clause that begins so continues its place


class MeshwrightError(ValueError):
    """The base of the errors about inputs. `place` names the input (an argument, a file and its
    key), `what` says what is wrong there, `legal` what may stand there, and `way_out` what to do;
    the text is made of the four. Where legal values are given and nothing else, one of them is the
    way out.

    An error of a text alone has the fields that its class has for all of its errors.
    """

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
        self.way_out = way_out or self.WAY_OUT or (listed and f"give one of: {listed}")

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


class NotInstalledError(MeshwrightError, ImportError):
    """A package that only some calls need, and that is not there."""

    PLACE = "the Python environment"
    LEGAL = "one with the package"
    WAY_OUT = "install it with pip"


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


# --- measuring ------------------------------------------------------------------------------------

# The error of a measurement.


class MeasuringError(MeshwrightError, RuntimeError):
    """A measurement that this machine did not finish."""

    PLACE = "profile: collectives"
    LEGAL = "a machine that can start the ranks and processes of a measurement"
    WAY_OUT = "measure again when the machine is less busy"

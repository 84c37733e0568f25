"""Errors of tracing, and the place in the user's code that they name."""

from __future__ import annotations


class TraceError(ValueError):
    """The model can't be traced: says where in the user's source, why, and what to do."""


class Untraceable(TraceError):
    """A failure inside of modules (`places`, innermost first) that may be kept as leaves, and
    `why`, as a part of a sentence."""

    def __init__(self, message: str, *, places: tuple[str, ...], why: str) -> None:
        super().__init__(message)
        self.places, self.why = places, why


def around(place: str) -> tuple[str, ...]:
    """A module's FQN and those of the modules around it, but for the model itself."""
    parts = place.split(".") if place else []
    return tuple(".".join(parts[:k]) for k in range(len(parts), 0, -1))

"""Errors of tracing."""

from __future__ import annotations

from meshwright.profiles.inputs import MeshwrightError


class TraceError(MeshwrightError):
    """The model can't be traced, at a place of the user's source."""

    PLACE = "the model's forward, or its loss"
    LEGAL = "tensor operations whose shapes and order depend on no value of a tensor"
    WAY_OUT = "write it so, or keep the module as one node (meshwright.leaf)"


class SolverError(MeshwrightError, RuntimeError):
    """No solver of linear programs is installed."""

    PLACE = "the Python environment"
    LEGAL = "one with a solver of linear programs"
    WAY_OUT = "pip install highspy"


class Untraceable(TraceError):
    """A failure inside of `modules` (FQNs, innermost first), one of which may be kept as a leaf;
    `reason` is a clause for the note about it."""

    def __init__(self, message: str, *, modules: tuple[str, ...], reason: str) -> None:
        super().__init__(message)
        self.place = reason.removesuffix(" can't be traced") or self.place
        self.modules = modules
        self.reason = reason


class KeptTensors(Exception):
    """A forward leaves tensors in `attributes`, as (path, name), that the next one reads: they are
    to be carried like buffers, and the model traced again."""

    def __init__(self, attributes: frozenset[tuple[str, str]]) -> None:
        super().__init__(str(sorted(attributes)))
        self.attributes = attributes


def enclosing_modules(fqn: str) -> tuple[str, ...]:
    """FQNs of a module and those around it, innermost first, without the model's ""."""
    parts = fqn.split(".") if fqn else []
    return tuple(".".join(parts[:k]) for k in range(len(parts), 0, -1))

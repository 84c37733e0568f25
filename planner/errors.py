"""Errors of the model, its sample batch, and tracing."""

from __future__ import annotations

from meshwright.profiles.inputs import MeshwrightError


class ModelError(MeshwrightError):
    """A model, a loss or a parameter that no plan can be made for."""

    CODE = "MW201"
    PLACE = "the model, or its loss"
    LEGAL = "a module of dense parameters of known shapes, and a loss without parameters"
    WAY_OUT = "change the module, or give another one"


class ExampleInputsError(MeshwrightError):
    """A sample batch that is none, or that does not fit the model's forward."""

    CODE = "MW202"
    PLACE = "example_inputs, or a batch"
    LEGAL = "a dict or a tuple of the forward's arguments, as dense tensors, the batch dim first"
    WAY_OUT = "give such a batch; its values don't matter"


class TraceError(MeshwrightError):
    """The model can't be traced, at a place of the user's source."""

    CODE = "MW203"
    PLACE = "the model's forward, or its loss"
    LEGAL = "tensor operations whose shapes and order depend on no value of a tensor"
    WAY_OUT = "write it so, or keep the module as one node (meshwright.leaf)"


class ServingError(MeshwrightError):
    """A model that can't be served as asked, or numbers that ask for nothing."""

    CODE = "MW213"
    PLACE = "a serving plan"
    LEGAL = "a causal language model whose attention is torch's, in 16 bits or fp32"
    WAY_OUT = "give such a model"


class SolverError(MeshwrightError, RuntimeError):
    """No solver of linear programs is installed."""

    CODE = "MW211"
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

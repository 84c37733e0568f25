"""What commands are given: the model, as module:function, and the cluster, as a name or a file."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from meshwright.profiles.cluster import Cluster


def cluster_named(text: str) -> Cluster:
    """The cluster of `--cluster`. Raises ValueError."""
    if text.endswith(".toml"):
        return Cluster.load(text)
    if text == "detect":
        return Cluster.detect()
    name, _, count = text.partition(":")
    if count and not count.isdigit():
        raise ValueError(
            f"--cluster {text!r}: after the colon comes a number of nodes, e.g. h100-sxm:8, or of "
            "processes, e.g. local:4"
        )
    number = int(count or 1)
    return (
        Cluster.local(number) if name == "local" else Cluster.from_catalog(name, num_nodes=number)
    )


def model_named(text: str) -> tuple[Any, ...]:
    """(model, example_inputs[, loss_fn]) from `module:function`. Raises ValueError."""
    module, colon, function = text.partition(":")
    if not colon:
        raise ValueError(f"model {text!r}: expected module:function, e.g. my_models:gpt2")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"model {text!r}: {error}; it is looked for in {os.getcwd()} and on PYTHONPATH"
        ) from error
    make = getattr(found, function, None)
    if not callable(make):
        near = difflib.get_close_matches(function, [n for n in vars(found) if n[:1] != "_"], n=3)
        raise ValueError(
            f"model {text!r}: module {module!r} has no function {function!r}; "
            f"nearest: {', '.join(near) or 'none'}"
        )
    built = make()
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise ValueError(
            f"model {text!r}: returned a {type(built).__name__}; legal: a tuple "
            "(model, example_inputs) or (model, example_inputs, loss_fn)"
        )
    return built

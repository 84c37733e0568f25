"""The reference of the API, from signatures and docstrings of what the packages export."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import meshwright
from scripts.site.markdown import cell, directive, prose, table

# page -> title, first sentence, names by module
PAGES: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "planning": (
        "API: planning",
        "One call plans; a cluster, decisions that are fixed, and the plan itself.",
        {
            "meshwright": (
                "auto_parallelize",
                "Cluster",
                "Device",
                "Link",
                "Host",
                "Overrides",
                "Plan",
            )
        },
    ),
    "training": (
        "API: training",
        "The planned model, whole runs, data, and what logs them.",
        {
            "meshwright": (
                *("distributed", "ParallelModel", "fit", "data_loader", "packed", "Ema"),
                *("Reduced", "progress_shown"),
            ),
            "meshwright.training": ("Fitted", "RunEvent"),
            "meshwright.hf": ("Trainer",),
            "meshwright.monitor": (
                *("Monitor", "JsonLinesLogger", "TensorBoardLogger", "WandbLogger"),
            ),
        },
    ),
    "extending": (
        "API: extending",
        "Rules for operators, leaves, experts of your own, schedules.",
        {
            "meshwright": ("rule", "leaf", "register_schedule", "Schedule"),
            "meshwright.moe": ("MoE", "GroupedLinear", "dispatch", "grouped_linear", "combine"),
        },
    ),
    "exceptions": (
        "API: exceptions",
        "Classes of errors; [Errors](../errors.md) lists the errors themselves.",
        {
            "meshwright": (
                *("MeshwrightError", "PlanError", "OverrideError", "TraceError", "RuleError"),
                "InfeasibleError",
            )
        },
    ),
}


def pages() -> Iterator[tuple[str, str]]:
    """Each page's name and text. Raises where a public name is on none of them."""
    shown = {name for _, _, of in PAGES.values() for name in of.get("meshwright", ())}
    if missing := {*meshwright.__all__} ^ shown:
        raise ValueError(f"scripts/site/api.py and the public names differ: {sorted(missing)}")
    for page, (title, first, modules) in PAGES.items():
        parts = [f"# {title}\n\n{first}\n"]
        for module, names in modules.items():
            home = importlib.import_module(module)
            parts += [f"## {module}\n", f"```{{py:currentmodule}} {module}\n```\n"]
            parts += [described(name, getattr(home, name)) for name in names]
        yield page, "\n".join(parts)


def described(name: str, thing: Any) -> str:
    """An object's signature, docstring, and what a class has."""
    text = prose(inspect.getdoc(thing) or "")
    if not inspect.isclass(thing):
        return directive("py:function", f"{name}{signature(thing)}", text)
    members = "\n".join(_members(thing))
    kind = "py:exception" if issubclass(thing, Exception) else "py:class"
    return directive(kind, f"{name}{signature(thing)}", f"{text}\n\n{members}", depth=4)


class Written:
    """Text that stands in a signature as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature(thing: Any) -> str:
    """What is to be given, with defaults that can be written."""
    if thing is meshwright.Overrides:  # its fields are records, listed beside
        return "(**decisions)"
    try:
        found = inspect.signature(thing)
    except ValueError:
        return "()"
    parameters = []
    for parameter in found.parameters.values():
        default, annotation = parameter.default, parameter.annotation
        if default is not found.empty and not re.fullmatch(r"[\w.'\"()-]+", repr(default)):
            default = Written("...")
        annotation = Written(annotation) if isinstance(annotation, str) else found.empty
        parameters.append(parameter.replace(default=default, annotation=annotation))
    returned = found.return_annotation
    returned = Written(returned) if isinstance(returned, str) else found.empty
    return str(found.replace(parameters=parameters, return_annotation=returned))


def _members(of: type) -> Iterator[str]:
    """Fields of a dataclass, then methods and properties that are defined here or by a base of
    ours, each with a docstring."""
    if dataclasses.is_dataclass(of):
        fields = [
            [f"`{f.name}`", f"`{f.type}`"] for f in dataclasses.fields(of) if f.name[0] != "_"
        ]
        yield table(["field", "type"], [[cell(x) for x in row] for row in fields])
    for name, member in sorted(inspect.getmembers_static(of)):
        inner = getattr(member, "__func__", member)  # of a class's or a static method
        inner = getattr(inner, "fget", getattr(inner, "func", inner))  # of a property
        doc = inspect.getdoc(inner)
        ours = str(getattr(inner, "__module__", "")).startswith("meshwright")
        if name[0] != "_" and ours and doc and inspect.isfunction(inner):
            yield _member(name, member, inner, doc)


def _member(name: str, member: Any, inner: Any, doc: str) -> str:
    """A method, without what it is called on, or a property."""
    if isinstance(member, staticmethod):
        return directive("py:staticmethod", f"{name}{signature(inner)}", prose(doc))
    called = re.sub(r"^\((?:self|cls)(?:, )?", "(", signature(inner))
    if isinstance(member, classmethod):
        return directive("py:classmethod", f"{name}{called}", prose(doc))
    if inspect.isfunction(member):
        return directive("py:method", f"{name}{called}", prose(doc))
    return directive("py:attribute", name, prose(doc))

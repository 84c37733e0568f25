"""The language of sharding rules, and the operators that have one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from meshwright.costmodel.rules import auto, language, moe, registry
from scripts.site.markdown import cell, prose, table


def files() -> Iterator[tuple[str, str]]:
    """What the page of rules includes."""
    yield "generated/rule_language.md", prose(inspect.getdoc(language) or "") + "\n"
    automatic = prose((inspect.getdoc(auto) or "").partition("\n\n")[2])
    yield "generated/rules.md", f"{_written()}\nOthers need none: {automatic}\n"


def _written() -> str:
    """Operators with a rule of their own; the spec, where one tells it all."""
    rows = []
    for name, rule in {**registry.RULES, **moe.MOE_RULES}.items():
        spec = inspect.getclosurevars(rule).nonlocals.get("spec", "")
        about = (inspect.getdoc(rule) or "").partition("\n\n")[0]
        rows.append([f"`{name}`", f"`{spec}`" if "->" in spec else "", cell(about)])
    return table(("operator", "rule", "note"), rows)

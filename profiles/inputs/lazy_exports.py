"""Exports of a package that are imported when they are first asked for.

The package imports them under `if TYPE_CHECKING:` alone. No name may be that of a module of the
package, which would take its place once it is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of the package whose `__init__.py` is at `file`."""
    homes = {
        alias.name: statement.module or ""
        for branch in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(branch, ast.If)
        for statement in branch.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return get, sorted(homes)

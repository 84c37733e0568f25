"""The lines of the executor that depend on the device, and which of them were run."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tests.helpers.source_files import PACKAGE, files_in

Line = tuple[str, int]  # file of the product, number
DEPENDS = re.compile(
    r"\b(has_streams|module_of|synchronize|to_device|to_host|seeded|Clock|kind_of|on_gpus|device_here"
    r"|current_stream|record_stream|GradScaler|autocast)\(|torch\.(cuda|accelerator)"
    r"|\b(non_blocking|is_cpu|is_cuda|pin_memory|fused|device_type)\b"
)
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Assert)
OWN = ("executor/rehearsal/", "executor/stand_in/")  # stand in for devices, depend on none


def device_lines() -> dict[Line, str]:
    """(file, line) -> text of the statements in functions that depend on the device; of a branch by
    the device the first statement of either way."""
    found: dict[Line, str] = {}
    for file in files_in("executor"):
        if file.path.startswith(OWN):
            continue
        lines = file.text.splitlines()
        functions = [n for n in file.nodes if isinstance(n, ast.FunctionDef)]
        for node in (n for function in functions for n in ast.walk(function)):
            for chosen in _depending(node):
                found[file.path, chosen.lineno] = lines[chosen.lineno - 1].strip()
    return found


def _depending(node: ast.AST) -> list[ast.stmt]:
    if isinstance(node, SIMPLE):
        spoken = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return [node] if not spoken and DEPENDS.search(_code(node)) else []
    if isinstance(node, ast.If) and DEPENDS.search(ast.unparse(node.test)):
        return [*node.body[:1], *node.orelse[:1]]
    if isinstance(node, ast.With) and DEPENDS.search(ast.unparse(node.items[0].context_expr)):
        return node.body[:1]
    return []


def _code(node: ast.stmt) -> str:
    """A statement's text without strings, which speak of devices, too."""
    plain = [n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    text = ast.unparse(node)
    for n in plain:
        if " " in str(n.value):
            text = text.replace(repr(n.value), "''")
    return text


@contextmanager
def lines_run(root: Path) -> Iterator[set[Line]]:
    """Context in which the lines of device-dependent files that run are gathered."""
    wanted = {path for path, _ in device_lines()}
    names = {str(root / PACKAGE / path): path for path in wanted}
    names |= {str(root / path): path for path in wanted}
    found: set[Line] = set()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found.add((names[frame.f_code.co_filename], frame.f_lineno))
        return local

    def called(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename in names else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield found
    finally:
        sys.settrace(before)

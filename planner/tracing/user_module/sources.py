"""Source lines of the user's code, for messages."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

UNKNOWN = "an unknown place"

_FOLDERS = (Path(torch.__file__).parent, Path(__file__).parents[3])
_SKIPPED = (*(f"{folder}{os.sep}" for folder in _FOLDERS), "<")


def calling_place() -> str:
    """file:line of the user's code that is running: the innermost frame outside of torch and this
    package."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            return f"{name}:{line}"
    return UNKNOWN


def user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """file:line and text of the innermost frame outside of torch and this package."""
    frame = _innermost(frames)
    return f"{frame.filename}:{frame.lineno}: {frame.line}" if frame else UNKNOWN


def condition(frames: Sequence[traceback.FrameSummary]) -> str:
    """The condition of the `if`, `while` or `assert` in which a trace stopped; "" if none."""
    frame = _innermost(frames)
    if frame is None or frame.lineno is None:
        return ""
    source = "".join(linecache.getlines(frame.filename))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    branches = (ast.If, ast.While, ast.Assert, ast.IfExp)
    tests = [node.test for node in ast.walk(tree) if isinstance(node, branches)]
    at_line = [t for t in tests if t.lineno <= frame.lineno <= (t.end_lineno or t.lineno)]
    return " ".join(str(ast.get_source_segment(source, at_line[-1])).split()) if at_line else ""


def _innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    return next((f for f in reversed(frames) if not f.filename.startswith(_SKIPPED)), None)

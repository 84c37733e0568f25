"""Source lines of the user's code, for messages."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch

UNKNOWN = "an unknown place"

_SKIPPED = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[3])
)


def calling_place() -> str:
    """file:line of the user's code that is running: the innermost frame outside of torch and this
    package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_SKIPPED, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
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
    texts = [ast.get_source_segment(source, t) for t in at_line]
    return " ".join(str(texts[-1]).split()) if texts else ""


def _innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    outside = [f for f in frames if not f.filename.startswith((*_SKIPPED, "<"))]
    return outside[-1] if outside else None

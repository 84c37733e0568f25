"""The user's source lines, for messages."""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch


def user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """file:line of the innermost frame outside torch and this package."""
    found = _innermost(frames)
    return f"{found.filename}:{found.lineno}: {found.line}" if found else "an unknown place"


def condition(frames: Sequence[traceback.FrameSummary]) -> str:
    """What the `if`, `while` or `assert` asks at which a trace stopped; empty if it is none."""
    found = _innermost(frames)
    if found is None or found.lineno is None:
        return ""
    source = "".join(linecache.getlines(found.filename))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    asking = (ast.If, ast.While, ast.Assert, ast.IfExp)
    tests = [node.test for node in ast.walk(tree) if isinstance(node, asking)]
    here = [t for t in tests if t.lineno <= found.lineno <= (t.end_lineno or t.lineno)]
    texts = [ast.get_source_segment(source, t) for t in here]
    return " ".join(str(texts[-1]).split()) if texts else ""


def _innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    skipped = (Path(torch.__file__).parent, Path(__file__).parents[3])
    own = [
        f
        for f in frames
        if not f.filename.startswith("<") and not set(skipped) & set(Path(f.filename).parents)
    ]
    return own[-1] if own else None

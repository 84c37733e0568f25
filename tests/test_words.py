"""Plain words: variables are nouns of the field, docstrings begin with their subject."""

import ast
import re
from collections import Counter

from tests.helpers.source_files import PRODUCT, SourceFile, files_in

VAGUE = {"found", "made", "own", "given", "each", "whole", "kept", "left"}
MOST_VAGUE = 0.01  # of what is bound to a name: `left` stands beside `right`
DANGLING = re.compile(r"(What|Those|That|Which|Who|How|Where|Of|As)\b")


def bound_names(file: SourceFile) -> list[str]:
    """Variables and parameters of a file, as often as they are bound."""
    names = [n.id for n in file.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return names + [node.arg for node in file.nodes if isinstance(node, ast.arg)]


def dangling_docstrings(file: SourceFile) -> list[str]:
    """Docstrings of a file that begin with a clause about a thing, before the thing is named."""
    texts = [
        (node, ast.get_docstring(node))
        for node in file.nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    return [
        f"{file.path}: {getattr(node, 'name', 'module')}: {text.splitlines()[0]}"
        for node, text in texts
        if text and DANGLING.match(text)
    ]


def test_variables_are_nouns() -> None:
    names = Counter(name for file in files_in(*PRODUCT) for name in bound_names(file))
    vague = {name: count for name, count in names.items() if name.strip("_") in VAGUE}
    assert sum(vague.values()) <= MOST_VAGUE * names.total(), vague


def test_docstrings_begin_with_their_subject() -> None:
    found = [line for file in files_in(*PRODUCT) for line in dangling_docstrings(file)]
    assert not found, "\n".join(found)


def test_words_are_found() -> None:
    text = 'def f(own):\n    """What f does."""\n    for each in own:\n        found = each\n'
    file = SourceFile("planner/a.py", text)
    assert bound_names(file) == ["each", "found", "own"]
    assert dangling_docstrings(file) == ["planner/a.py: f: What f does."]
    assert not dangling_docstrings(SourceFile("planner/a.py", '"""Offload."""\n'))

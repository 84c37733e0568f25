"""Values that should not be there, and texts and trees with something wrong in them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

HUGE = 10**30
LONG = "x" * 5000


def deep(levels: int, leaf: Any = 0) -> Any:
    for _ in range(levels):
        leaf = [leaf]
    return leaf


def cyclic() -> Any:
    found: list[Any] = [1]
    found.append(found)
    return found


# every file can say these
PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 8, 2**31, 2**63, 10**18, HUGE, -HUGE, 10**400),
    *(0.5, -0.0, 1e308, 5e-324, 1e-31, "", "0", "a", "\0", "ä" * 9, "1" * 400, LONG, "*" * 60),
    *("**" * 30 + "z", "*a" * 30, "0-99999999999", "h.0-99999999999", "layers.0-2", "1-0"),
    *([], [[]], [0], [None], ["a", 1], [1, 1], {}, {"a": 1}, {"value": 1}, {"": {}}),
    *("colwise", "S(0)@tp", "S(99)", "none", "full", "1f1b", "fp32", "nan", "h100-sxm"),
)
# and a program these
OF_PYTHON: tuple[Any, ...] = (math.nan, math.inf, object(), b"a", 1j, {1, 2}, len, deep(5000), int)


def value(rng: Random, *, python: bool = False) -> Any:
    """One of the values; of Python's too where a program gives it."""
    if python and rng.random() < 0.05:
        return cyclic()
    return rng.choice(PLAIN + OF_PYTHON if python else PLAIN)


def _places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    if isinstance(tree, dict | list):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found += _places(inner, (*at, key))
    return found


def mutated(tree: Any, rng: Random) -> Any:
    """A copy of a tree with one to three changes: another value, a key less, more or elsewhere."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 2, 3))):
        places = _places(tree)
        if not places:
            return tree
        *path, last = rng.choice(places)
        inside = tree
        for key in path:
            inside = inside[key]
        change = rng.random()
        if change < 0.6:
            inside[last] = value(rng)
        elif change < 0.75:
            del inside[last]
        elif change < 0.85 and isinstance(inside, dict):
            inside[rng.choice(("extra", "", "format", "value", LONG))] = value(rng)
        elif isinstance(inside, dict):
            inside[last], inside["moved"] = inside.get("moved", 0), inside[last]
        else:
            inside.append(copy.deepcopy(inside[last]))
    return tree


def spoilt(text: str, rng: Random) -> bytes:
    """A text with something wrong in it, that no tree has."""
    data = text.encode()
    at = rng.randrange(len(data) + 1)
    other = rng.randrange(len(data) + 1)
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: data[:at],
        lambda: data[:at] + data[min(at, other) : max(at, other)] + data[at:],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + b"[" * 100_000 + data[at:],
        lambda: data[:at] + b'{"a":' * 900 + b"1" + b"}" * 900 + data[at:],
        lambda: data[:at] + b"9" * 5000 + data[at:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.replace(b"1", b"NaN", 1),
        lambda: data.replace(b"2", b"1e999", 1),
        lambda: _doubled(text, rng).encode(),
        lambda: b"",
        lambda: data * 3,
        lambda: b" " * 2**27,
    )
    return rng.choice(changes)()


def _doubled(text: str, rng: Random) -> str:
    """A line of the text twice: a key that is there twice."""
    lines = text.split("\n")
    k = rng.randrange(len(lines))
    return "\n".join([*lines[: k + 1], *lines[k:]])


def json_case(tree: Any, rng: Random) -> bytes:
    """A JSON file with something wrong in it."""
    if rng.random() < 0.3:
        return spoilt(json.dumps(tree, indent=1), rng)
    return json.dumps(mutated(tree, rng)).encode()


def toml_text(tree: dict[str, Any], prefix: str = "") -> str:
    """A tree as TOML; what TOML has no word for is left out."""
    lines, tables = [], []
    for key, inner in tree.items():
        name = json.dumps(key)
        if isinstance(inner, dict):
            tables.append(f"[{prefix}{name}]\n{toml_text(inner, f'{prefix}{name}.')}")
        elif inner is not None:
            lines.append(f"{name} = {json.dumps(inner)}")
    return "\n".join([*lines, *tables]) + "\n"

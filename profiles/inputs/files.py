"""The reader of users' JSON and TOML files: sizes, depths, keys and numbers are checked here, once.

What is read is a tree of dicts, lists, texts, finite numbers, booleans and None, at most
`MAX_DEPTH` deep; what its keys mean is checked by whoever asked for it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.profiles.inputs.errors import FileError, MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_DEPTH

MAX_BYTES = 2**20  # of a file that people edit; a plan for 16,384 ranks has a hundredth
MAX_MEASURED_BYTES = 2**25  # of a file that a machine writes
MAX_INTEGER_BITS = 256
_MEND = "correct the file, or write it again"

# a key of more parts than a tree may be deep
_DOTTED = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}")

Error = type[MeshwrightError]


def read_json(
    path: str | os.PathLike[str], *, error: Error = FileError, most: int = MAX_BYTES
) -> Any:
    """The tree of a JSON file. Raises `error` for one that can't be read, is longer than `most`
    bytes, has a key twice, a number that is not finite, or is nested too deeply."""
    return parse_json(read_text(path, error=error, most=most), place=path, error=error, most=most)


def parse_json(
    text: str,
    *,
    place: object,
    error: Error = FileError,
    most: int = MAX_BYTES,
    infinite: bool = False,
) -> Any:
    """The tree of a JSON text; as `read_json`, with `place` for errors. `infinite`: numbers may be
    infinite or NaN, as arguments of operators may."""
    if not isinstance(text, str):
        raise error(f" is a {type(text).__name__}", place=place, legal="a JSON text")
    if len(text) > most:
        raise _too_long(error, place, len(text), most)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            what = f"key {shown(max(counts, key=counts.__getitem__))} is there twice"
            way_out = "remove one of the two"
            raise error(what, place=place, legal="every key once", way_out=way_out)
        return tree

    def constant(name: str) -> float:
        if infinite:
            return float(name)
        what = f"{name} is no number of JSON"
        raise error(what, place=place, legal="finite numbers", way_out="write a number")

    def load() -> Any:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)

    return _parsed(load, place, error, "JSON", infinite=infinite)


def read_toml(path: str | os.PathLike[str], *, error: Error = FileError) -> dict[str, Any]:
    """The tree of a TOML file; as `read_json`."""
    text = read_text(path, error=error, most=MAX_BYTES)
    if _DOTTED.search(text):  # in time quadratic in its dots, elsewhere
        raise _too_deep(error, path)
    tree: dict[str, Any] = _parsed(lambda: tomllib.loads(text), path, error, "TOML")
    return tree


def read_text(
    path: str | os.PathLike[str], *, error: Error = FileError, most: int = MAX_MEASURED_BYTES
) -> str:
    """A file's text, read no further than it may be long. Raises `error` for a folder, a pipe, a
    socket or a device, which it does not open."""
    place: object = path
    try:
        if kind := irregular(Path(path)):  # a pipe would be waited for, a device has no end
            what = f" is {kind}"
        else:
            with Path(path).open("rb") as file:
                content = file.read(most + 1)
            if len(content) > most:
                raise _too_long(error, path, max(len(content), os.stat(path).st_size), most)
            return content.decode("utf-8")
    except OSError as failure:
        what = failure.strerror or str(failure)
    except UnicodeDecodeError as failure:
        what = f"not a text file in UTF-8 ({failure.reason} at byte {failure.start})"
    except MeshwrightError:
        raise
    except ValueError as failure:  # a name with a zero byte
        what, place = str(failure), shown(str(path))
    legal = "a readable text file in UTF-8"
    raise error(what, place=place, legal=legal, way_out="name another file")


def irregular(path: Path) -> str:
    """Kind of a path that is no regular file, links followed; empty where it is one. Raises
    OSError where there is nothing."""
    mode = path.stat().st_mode
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return "" if stat.S_ISREG(mode) else kinds.get(stat.S_IFMT(mode), "a device")


def _too_long(error: Error, place: object, nbytes: int, most: int) -> MeshwrightError:
    what, legal = f" has {nbytes:,} bytes", f"up to {most:,}"
    return error(what, place=place, legal=legal, way_out="name another file")


def _parsed(
    load: Callable[[], Any], place: object, error: Error, language: str, *, infinite: bool = False
) -> Any:
    try:
        tree = load()
    except MeshwrightError:
        raise
    except RecursionError:
        raise _too_deep(error, place) from None
    except ValueError as failure:
        what = f"not {language} ({str(failure).partition(';')[0]})"  # digits by the thousand, too
        if isinstance(failure, json.JSONDecodeError):
            what = f"line {failure.lineno} is not JSON ({failure.msg})"
        raise error(what, place=place, legal=f"a {language} text", way_out=_MEND) from None
    _check_tree(tree, place, error, infinite)
    return tree


def _check_tree(tree: Any, place: object, error: Error, infinite: bool) -> None:
    """Raise unless the tree is of legal depth and numbers; without recursion."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                children += node.values()
            elif isinstance(node, list):
                children += node
            elif isinstance(node, float) and not (infinite or math.isfinite(node)):
                what, way_out = (
                    f"{node} is no finite number",
                    "write a number that a float can hold",
                )
                raise error(what, place=place, legal="finite numbers", way_out=way_out)
            elif isinstance(node, int) and node.bit_length() > MAX_INTEGER_BITS:
                what, legal = f"a number has {node.bit_length()} bits", f"up to {MAX_INTEGER_BITS}"
                raise error(what, place=place, legal=legal, way_out="write a smaller number")
        if not children:
            return
        level = children
    raise _too_deep(error, place)


def _too_deep(error: Error, place: object) -> MeshwrightError:
    legal = f"up to {MAX_DEPTH} levels"
    return error("nested too deeply", place=place, legal=legal, way_out=_MEND)

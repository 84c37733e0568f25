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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.profiles.inputs.errors import MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_DEPTH

MAX_BYTES = 2**20  # of a file that people edit; a plan for 16,384 ranks has a hundredth
MAX_MEASURED_BYTES = 2**25  # of a file that a machine writes
MAX_INTEGER_BITS = 256

# a key of more parts than a tree may be deep
_DOTTED = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}")

Error = type[MeshwrightError]


def read_json(
    path: str | os.PathLike[str], *, error: Error = MeshwrightError, most: int = MAX_BYTES
) -> Any:
    """Data of a JSON file. Raises `error` for one that can't be read, is longer than `most` bytes,
    has a key twice, a number that is not finite, or is nested too deeply."""
    return parse_json(read_text(path, error=error, most=most), place=path, error=error, most=most)


def parse_json(
    text: str,
    *,
    place: object,
    error: Error = MeshwrightError,
    most: int = MAX_BYTES,
    infinite: bool = False,
) -> Any:
    """Data of a JSON text; as `read_json`, with `place` for errors. `infinite`: numbers may be
    infinite or NaN, as arguments of operators may."""
    if not isinstance(text, str):
        raise error(f" is a {type(text).__name__}", place=place, legal="a JSON text")
    if len(text) > most:
        raise _too_long(error, place, len(text), most)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            unseen = dict(entries)
            twice = next(key for key, _ in pairs if unseen.pop(key, unseen) is unseen)
            raise error(
                f"key {shown(twice)} is there twice", place=place, legal="every key once",
                way_out="remove one of the two",
            )  # fmt: skip
        return entries

    def constant(name: str) -> float:
        if infinite:
            return float(name)
        raise error(f"{name} is no number of JSON", place=place, legal="finite numbers",
                    way_out="write a number")  # fmt: skip

    def load() -> Any:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)

    return _parsed(load, place, error, "JSON", infinite=infinite)


def read_toml(path: str | os.PathLike[str], *, error: Error = MeshwrightError) -> dict[str, Any]:
    """Data of a TOML file; as `read_json`."""
    text = read_text(path, error=error, most=MAX_BYTES)
    if _DOTTED.search(text):  # in time quadratic in its dots, elsewhere
        raise _too_deep(error, path)
    table: dict[str, Any] = _parsed(lambda: tomllib.loads(text), path, error, "TOML")
    return table


def read_text(
    path: str | os.PathLike[str], *, error: Error = MeshwrightError, most: int = MAX_MEASURED_BYTES
) -> str:
    """A file's text, read no further than it may be long. Raises `error` for a folder, a pipe, a
    socket or a device, which it does not open."""
    legal, way_out = "a readable text file in UTF-8", "name another file"
    try:
        if kind := irregular(Path(path)):  # a pipe would be waited for, a device has no end
            raise error(f" is {kind}", place=path, legal=legal, way_out=way_out)
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise _too_long(error, path, max(len(data), os.stat(path).st_size), most)
        return data.decode("utf-8")
    except OSError as found:
        raise error(
            found.strerror or str(found), place=path, legal=legal, way_out=way_out
        ) from None
    except UnicodeDecodeError as found:
        what = f"not a text file in UTF-8 ({found.reason} at byte {found.start})"
        raise error(what, place=path, legal=legal, way_out=way_out) from None
    except ValueError as found:  # a name with a zero byte
        if isinstance(found, MeshwrightError):
            raise
        raise error(str(found), place=shown(str(path)), legal=legal, way_out=way_out) from None


def irregular(path: Path) -> str:
    """Kind of a path, links followed, that is no regular file; empty where it is one. Raises
    OSError where there is nothing."""
    mode = path.stat().st_mode
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return "" if stat.S_ISREG(mode) else kinds.get(stat.S_IFMT(mode), "a device")


def _too_long(error: Error, place: object, length: int, most: int) -> MeshwrightError:
    return error(
        f" has {length:,} bytes", place=place, legal=f"up to {most:,}", way_out="name another file"
    )


def _parsed(
    load: Callable[[], Any], place: object, error: Error, language: str, *, infinite: bool = False
) -> Any:
    legal, way_out = f"a {language} text", "correct the file, or write it again"
    try:
        data = load()
    except MeshwrightError:
        raise
    except RecursionError:
        raise _too_deep(error, place) from None
    except json.JSONDecodeError as found:
        what = f"line {found.lineno} is not JSON ({found.msg})"
        raise error(what, place=place, legal=legal, way_out=way_out) from None
    except ValueError as found:  # TOMLDecodeError, and integers of thousands of digits
        what = f"not {language} ({str(found).partition(';')[0]})"
        raise error(what, place=place, legal=legal, way_out=way_out) from None
    _check_tree(data, place, error, infinite)
    return data


def _check_tree(data: Any, place: object, error: Error, infinite: bool) -> None:
    """Raise unless the tree is of legal depth and numbers; without recursion."""
    level = [data]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, float) and not (infinite or math.isfinite(value)):
                raise error(f"{value} is no finite number", place=place, legal="finite numbers",
                            way_out="write a number that a float can hold")  # fmt: skip
            elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
                raise error(f"a number has {value.bit_length()} bits", place=place,
                            legal=f"up to {MAX_INTEGER_BITS}",
                            way_out="write a smaller number")  # fmt: skip
        if not inner:
            return
        level = inner
    raise _too_deep(error, place)


def _too_deep(error: Error, place: object) -> MeshwrightError:
    return error(
        "nested too deeply",
        place=place,
        legal=f"up to {MAX_DEPTH} levels",
        way_out="correct the file, or write it again",
    )

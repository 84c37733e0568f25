"""Texts of configurations as keys with dots, and back: nothing in them is executed."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any

from meshwright.planner.frameworks.correspondence import ConfigurationError, Found
from meshwright.profiles.inputs import NotInstalledError, parse_json, shown

JSON_ONLY = re.compile(r"\s*\{")
MOST_BRACKETS = 500  # of a configuration in YAML, which hardly has any
PLAIN = "a mapping of plain values: texts, numbers, true, false, lists"


def flattened(tree: Any, place: str, prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree by keys with dots; lists, and mappings without keys, are leaves."""
    if not isinstance(tree, Mapping):
        raise ConfigurationError("is no mapping", place=place, legal=PLAIN)
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str):
            raise ConfigurationError(
                f"has the key {key!r}", place=place, legal="keys that are texts"
            )
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, place, f"{name}.")
        else:
            flat[name] = value
    return flat


def nested(found: Found) -> dict[str, Any]:
    """The tree of keys with dots."""
    tree: dict[str, Any] = {}
    for key, value in found.items():
        *path, last = key.split(".")
        at = tree
        for name in path:
            at = at.setdefault(name, {})
        at[last] = value
    return tree


def parse_tree(text: str, place: str) -> dict[str, Any]:
    """The keys of a text in JSON."""
    return flattened(parse_json(text, place=place, error=ConfigurationError), place)


def parse_toml(text: str, place: str) -> dict[str, Any]:
    """The keys of a text in TOML."""
    try:
        return flattened(tomllib.loads(text), place)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f": {error}", place=place, legal="TOML") from None


def parse_yaml(text: str, place: str) -> dict[str, Any]:
    """The keys of a text in YAML without anchors and tags, which make something else of a text than
    what is read there."""
    try:
        import yaml
    except ImportError as error:
        way_out = "pip install pyyaml, or give JSON"
        raise NotInstalledError(
            error, place=place, legal="YAML with pyyaml", way_out=way_out
        ) from None
    if text.count("[") + text.count("{") > MOST_BRACKETS:
        raise ConfigurationError("has too many brackets", place=place, legal=PLAIN)
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.AnchorToken | yaml.AliasToken | yaml.TagToken):
                raise ConfigurationError(
                    f"line {token.start_mark.line + 1} has an anchor, an alias or a tag",
                    place=place,
                    legal=PLAIN,
                    way_out="write the value where it stands",
                )
        tree = yaml.load(text, Loader=_unique(yaml, place))
    except yaml.YAMLError as error:
        raise ConfigurationError(f": {error}", place=place, legal="YAML") from None
    return flattened(tree, place)


def _unique(yaml: Any, place: str) -> Any:
    """A safe loader that refuses a key that is there twice."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [self.construct_object(key, deep=deep) for key, _ in node.value]
            if len(names) > len(set(map(str, names))):
                twice = next(str(name) for name in names if names.count(name) > 1)
                raise ConfigurationError(
                    f"has the key {twice!r} twice", place=place, legal="every key once"
                )
            return super().construct_mapping(node, deep)

    return Loader


SHELL = re.compile(r"[$`;|&<>(){}*?!\\]")
FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")


def parse_flags(text: str, place: str) -> dict[str, Any]:
    """Flags `--a-b 1` as keys a_b; True where nothing follows. Lines that begin with # are left
    out; what a shell would work on is refused."""
    found: dict[str, Any] = {}
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    try:
        words = shlex.split(joined)
    except ValueError as error:
        raise ConfigurationError(f": {error}", place=place, legal="flags and values") from None
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r"\\\s*$|'[^']*'|\"[^\"$`]*\"", "", line.partition("#")[0])
        if SHELL.search(bare):
            raise ConfigurationError(
                f"line {number} has what a shell would work on: {line.strip()[:80]!r}",
                place=place,
                legal="flags with their values: --tensor-model-parallel-size 4",
                way_out="write the flags as the program gets them (`echo` prints them)",
            )
    name = ""
    for word in words:
        flag, equals, value = word.partition("=")
        if FLAG.fullmatch(flag):
            name = flag[2:].replace("-", "_")
            found[name] = _plain(value) if equals else True
        elif name and not re.match(r"-(?![\d.])", word):
            known = found[name]
            found[name] = (
                _plain(word)
                if known is True
                else [*(known if isinstance(known, list) else [known]), _plain(word)]
            )
        else:
            where = f"has {shown(word)} behind --{name}" if name else f"begins with {word!r}"
            raise ConfigurationError(where, place=place, legal="flags: --name value")
    return found


def _plain(word: str) -> Any:
    """A whole number, a number, or the text."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"True": True, "False": False, "true": True, "false": False}.get(word, word)


def render_json(found: Found) -> str:
    return json.dumps(nested(found), indent=2) + "\n"


def render_yaml(found: Found) -> str:
    """The keys as YAML, which needs no library to write."""
    return "".join(f"{line}\n" for line in _lines(nested(found), ""))


def _lines(tree: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_lines(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}")
    return lines


def render_flags(found: Found) -> str:
    """A flag on each line; what is True stands alone."""
    lines = []
    for key, value in found.items():
        words = [] if value is True else value if isinstance(value, list) else [value]
        lines.append(
            " ".join([f"--{key.replace('_', '-')}", *(shlex.quote(str(w)) for w in words)])
        )
    return "".join(f"{line}\n" for line in lines)

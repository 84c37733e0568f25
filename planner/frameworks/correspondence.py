"""Correspondences between the keys of another software's configuration and decisions, read both
ways."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.profiles.inputs import MeshwrightError, read_json, shown

CALLED = ("_target_", "_call_", "_partial_")  # what Hydra would make of keys; nothing is made here
MOST_LETTERS = 100  # of a key whose neighbours are looked for
Values = Mapping[str, Any]  # by the name of a decision, or of `RUN`
Found = Mapping[str, Any]  # what a file says, by key

# values of a run beside its decisions: what a step takes, numbers, whose states and steps, whether
# blocks are compiled, the layers of each stage, one less of the input's or output's
RUN = (
    "global_batch_size", "precision", "optimizer", "compiled", "layers", "replicas", "shards",
    "layer_class", "devices", "instances",
)  # fmt: skip


class ConfigurationError(MeshwrightError):
    """A configuration of another software that says no plan."""

    CODE = "MW113"
    PLACE = "a configuration"
    LEGAL = "keys and values that the software's documentation has"
    WAY_OUT = "correct the file, or give flags in place of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A decision that a software can't say: its value, why, and what is written instead. Without
    one that `frees` memory a plan may not fit."""

    what: str
    value: str = ""
    why: str
    instead: str
    frees: bool = False

    def __str__(self) -> str:
        said = f"{self.what}={self.value}" if self.value else self.what
        return f"{said}: {self.why}; instead {self.instead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correspondence:
    """Keys of a format that say values of `names`: `read` takes what a file says of the keys, with
    what is `left_out` in it as the software takes that, and gives values; `write` gives keys."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    read: Callable[[Found], Values]
    write: Callable[[Values], Found]
    left_out: Found = field(default_factory=dict)


def switch(found: Found, key: str) -> bool:
    """A key that is on or off, as a boolean or its text; off where it is not there."""
    value = found.get(key, False)
    known = {True: True, False: False, "true": True, "false": False, "True": True, "False": False}
    if isinstance(value, list | dict) or value not in known:
        raise ConfigurationError.refused(key, value, legal="true, false")
    return known[value]


def states_away(values: Values) -> float:
    """The part of the optimizer's states that is in host memory."""
    part: float = (values.get("offload") or {}).get("optimizer") or 0.0
    return part


def said(key: str, name: str, *, left_out: Any = None) -> Correspondence:
    """A key that has a decision's own value."""
    return table(key, name, {}, left_out=left_out)


def table(
    key: str, name: str, values: Mapping[Any, Any], *, left_out: Any = None
) -> Correspondence:
    """A key whose `values` stand for a decision's; without any it has the decision's own. Of
    several for one of ours the first is written."""
    back: dict[Any, Any] = {}
    for theirs, ours in values.items():
        back.setdefault(ours, theirs)

    def read(found: Found) -> Values:
        value = found.get(key, left_out)
        if value is None:
            return {}
        if values and (isinstance(value, list | dict) or value not in values):
            raise ConfigurationError.refused(key, value, legal=values)
        return {name: values[value] if values else value}

    def write(ours: Values) -> Found:
        value = ours.get(name)
        if value is None or (values and value not in back):
            return {}
        return {key: back[value] if values else value}

    given = {} if left_out is None else {key: left_out}
    return Correspondence(keys=(key,), names=(name,), read=read, write=write, left_out=given)


def stepped(
    key: str,
    names: Mapping[Any, str],
    by: str,
    heavy: Mapping[str, Any],
    has: Callable[[Any], bool] = bool,
    *,
    left_out: str | None = None,
) -> Correspondence:
    """An optimizer by its name, of which that of SGD stands for two: what the key `by` has tells
    whether there is a momentum; `heavy` is written where there is."""
    plain = table(key, "optimizer", names, left_out=left_out)

    def read(found: Found) -> Values:
        values = plain.read(found)
        with_momentum = values.get("optimizer") == "sgd" and has(found.get(by))
        return {"optimizer": "momentum"} if with_momentum else values

    return replace(
        plain, keys=(key, by), read=read,
        write=lambda v: heavy if v.get("optimizer") == "momentum" else plain.write(v),
    )  # fmt: skip


def fixed(values: Found) -> Correspondence:
    """Keys that are written as they are, and say nothing when they are read."""
    return Correspondence(
        keys=tuple(values), names=(), read=lambda _: {}, write=lambda _: dict(values)
    )


@functools.cache
def idle_keys(name: str) -> frozenset[str]:
    """Names of a software's options, most of which have no bearing on a plan (`keys.json`)."""
    tree = read_json(Path(__file__).with_name("keys.json"))
    return frozenset(tree[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The configuration of a software: `version`, of whose keys the `table` is; `idle` are those
    without a bearing on a plan, and `idle_below` those of which nothing below has one. `parse`
    makes a file's text into keys with values, `render` text of them. `recognises` a file's keys.
    `target` gives the name of the software model for values; `file` is what such a file is called.

    `by_script`: decisions that no key says, but the user's script, with the way in which it does.
    `habits`: what the software does by itself, and `train_step` doesn't. `unplanned` are keys, or
    what they begin with, that change memory or numbers, and that no decision says. `lacks` gives
    the axes that it has, but not beside these values.
    """

    name: str
    version: str
    file: str
    table: tuple[Correspondence, ...]
    idle: Collection[str]
    idle_below: tuple[str, ...] = ()
    parse: Callable[[str, str], dict[str, Any]]
    render: Callable[[Found], str]
    recognises: Callable[[Found], bool]
    target: Callable[[Values], str]
    by_script: Found = field(default_factory=dict)
    habits: Callable[[Found], tuple[str, ...]] = lambda found: ()
    unplanned: Collection[str] = ()
    lacks: Callable[[Values], tuple[str, ...]] = lambda values: ()

    @property
    def names(self) -> set[str]:
        """Decisions and values of a run that it can say."""
        return {name for each in self.table for name in each.names}

    def is_idle(self, key: str) -> bool:
        below = tuple(f"{name}." for name in self.idle_below)
        if key.rpartition(".")[2] in CALLED:
            return True
        return key in (*self.idle, *self.idle_below) or key.startswith(below)

    def read(self, found: Found, left: Collection[str] = ()) -> dict[str, Any]:
        """The values that keys say, but for those with keys that are `left` open. Raises
        `ConfigurationError` for a key that is not known."""
        known = {key for each in self.table for key in each.keys}
        unknown = [
            key
            for key, value in found.items()
            if key not in known
            and not self.is_idle(key)
            and not (value == {} and any(name.startswith(f"{key}.") for name in known))
        ]
        if unknown:
            raise self.unknown(unknown, known)
        values: dict[str, Any] = {}
        for each in self.table:
            if not {*each.keys} & {*left}:
                own = {key: found[key] for key in each.keys if key in found}
                values |= each.read({**each.left_out, **own})
        return values

    def unknown(self, keys: list[str], known: Collection[str]) -> ConfigurationError:
        names = [*known, *self.idle]
        short = [key for key in keys if len(key) <= MOST_LETTERS]
        near = {key: difflib.get_close_matches(key, names, n=1) for key in short}
        meant = ", ".join(
            f"{shown(key)} may be {found[0]!r}" for key, found in near.items() if found
        )
        listed = ", ".join(map(shown, keys))
        return ConfigurationError(
            f"has {listed}, which {self.name} {self.version} has not",
            place=f"{self.name} configuration",
            legal=f"keys of {self.name} {self.version}",
            way_out=meant or "leave them out",
        )

    def write(self, values: Values) -> tuple[str, dict[str, Any]]:
        """A file's text, with its software's version where that takes one, and its keys."""
        found: dict[str, Any] = {}
        for each in self.table:
            found |= each.write(values)
        stamp = "" if self.file.endswith(".json") else f"# {self.name} {self.version}\n"
        return stamp + self.render(found), found

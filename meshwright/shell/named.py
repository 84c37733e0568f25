"""Clusters, models and files that the command line names."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from meshwright.profiles.inputs import MeshwrightError, read_json, shown
from meshwright.profiles.inputs.files import MAX_MEASURED_BYTES

if TYPE_CHECKING:
    from meshwright.profiles.cluster import Cluster

MISSING = "the following arguments are required: "  # argparse's words
MADE = "a tuple (model, example_inputs) or (model, example_inputs, loss_fn)"


class UserCodeError(MeshwrightError):
    """An error of the user's own code, which is the cause of this one."""


class Parser(argparse.ArgumentParser):
    """Raises `MeshwrightError` for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(MISSING):
            self._missing(message.removeprefix(MISSING).split(", "))
        name = message.removeprefix("argument ").partition(": ")[0]
        described = [_told(action) for action in self._actions if _name_of(action) == name]
        said, _, legal = message.partition("; legal: ")
        raise MeshwrightError(
            said,
            place=self.prog,
            legal=legal or (described or [f"what `{self.prog} --help` lists"])[0],
            way_out=f"see `{self.prog} --help`",
        )

    def _missing(self, names: list[str]) -> NoReturn:
        """Required arguments were not given: which, and what each is."""
        actions = {_name_of(action): action for action in self._actions}
        told = [_told(actions[name]) for name in names if name in actions]
        commands = any(action.nargs == argparse.PARSER for action in actions.values())
        what = "a command" if commands else " and ".join(names)
        raise MeshwrightError(
            f"{what} {'is' if commands or len(names) == 1 else 'are'} missing",
            place=self.prog,
            legal=", ".join(told),
            way_out=f"see `{self.prog} --help`",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown flags are an error of the command that they were given to."""
        namespace_read, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=3)
            raise MeshwrightError(
                f"unrecognized arguments: {' '.join(unknown)}",
                place=self.prog,
                legal=f"those of `{self.prog} --help`",
                way_out=f"nearest: {', '.join(near) or 'none'}",
            )
        return namespace_read, unknown


def _name_of(action: argparse.Action) -> str:
    """An argument as argparse's message names it."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def _told(action: argparse.Action) -> str:
    """An argument as one gives it, and what it is."""
    shown_name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    told = " ".join([*action.option_strings[-1:], str(shown_name)])
    return f"{told} ({action.help})" if action.help else told


def saved_json(path: str | Path) -> Any:
    """Data of the JSON file of a plan or a report; None where it can't be read, of which
    `Plan.load` says why."""
    try:
        return read_json(path, most=MAX_MEASURED_BYTES)
    except MeshwrightError:
        return None


@contextmanager
def no_report(*paths: str | Path) -> Iterator[None]:
    """Around what reads the data of reports: what is not there, or of another kind than
    `plan --json` prints, is an error of the file."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:  # a tree of any shape raises any of them
        raise MeshwrightError(
            f"is no report as it was printed ({type(error).__name__}: {error!s:.200})",
            place=f"report {', '.join(shown(str(path)) for path in paths)}",
            legal="what `meshwright plan --json` printed, unchanged",
            way_out="print it again",
        ) from error


def cluster_named(text: str) -> Cluster:
    """The cluster of `--cluster`. Raises `MeshwrightError`."""
    from meshwright.profiles.cluster import Cluster

    if text.endswith(".toml"):
        return Cluster.load(text)
    if text == "detect":
        return Cluster.detect()
    name, _, count = text.partition(":")
    if count and not re.fullmatch("[0-9]{1,9}", count):
        raise MeshwrightError(
            f" {shown(text)}: after the colon comes a number",
            place="--cluster",
            legal="nodes, e.g. h100-sxm:8, or processes, e.g. local:4",
        )
    number = int(count or 1)
    return (
        Cluster.local(number) if name == "local" else Cluster.from_catalog(name, num_nodes=number)
    )


def model_named(text: str) -> tuple[Any, ...]:
    """(model, example_inputs[, loss_fn]) from `module:function`. Raises `MeshwrightError`, and
    `UserCodeError` where the module or the function raises."""
    place = f"model {shown(text)}"
    module, colon, function = text.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not colon:
        legal = "module:function, e.g. my_models:gpt2"
        raise MeshwrightError("names no function", place=place, legal=legal)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise MeshwrightError(
                error,
                place=place,
                legal="a module that can be imported",
                way_out=f"it is looked for in {os.getcwd()} and on PYTHONPATH",
            ) from None
        raise _of_user(error, place, "a module that can be imported") from error
    make = getattr(target, function, None)
    if not callable(make):
        near = difflib.get_close_matches(function, [n for n in vars(target) if n[:1] != "_"], n=3)
        raise MeshwrightError(
            f"module {module!r} has no function {function!r}",
            place=place,
            legal="a function of the module",
            way_out=f"nearest: {', '.join(near) or 'none'}",
        )
    try:
        built = make()
    except Exception as error:
        raise _of_user(error, place, f"a function that returns {MADE}") from error
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        what = f"returned a {type(built).__name__}"
        raise MeshwrightError(what, place=place, legal=MADE)
    return built


def _of_user(error: Exception, place: str, legal: str) -> UserCodeError:
    return UserCodeError(
        f"raised {type(error).__name__}: {error}",
        place=place,
        legal=legal,
        way_out="correct it where its traceback says",
    )


def check_writable(flag: str, path: str | None) -> None:
    """Raise `MeshwrightError` for a file that could not be written at the end."""
    if path is None:
        return
    place = Path(path)
    try:
        right = bool(path) and place.absolute().parent.is_dir() and not place.is_dir()
    except (OSError, ValueError):  # a name that no file can have
        right = False
    if not right:
        raise MeshwrightError(
            f" {shown(path)}",
            place=flag,
            legal="a file in a folder that exists",
            way_out="make the folder, or name another file",
        )

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

from meshwright.profiles.inputs import (
    FileError,
    MeshwrightError,
    NotInstalledError,
    UnwritableError,
    read_json,
    shown,
)
from meshwright.profiles.inputs.files import MAX_MEASURED_BYTES

if TYPE_CHECKING:
    from torch import nn

    from meshwright.profiles.cluster import Cluster

HF, CONFIG = "hf:", "config.json"
EXAMPLE_ROWS, MOST_POSITIONS = 8, 4096
MISSING = "the following arguments are required: "  # argparse's words
RETURNED = "a tuple (model, example_inputs) or (model, example_inputs, loss_fn)"


class CommandError(MeshwrightError):
    """A command line that does not say what to do."""

    CODE = "MW102"
    PLACE = "the command line"
    LEGAL = "commands, arguments and flags that `meshwright COMMAND --help` lists"
    WAY_OUT = "see that help"


class UserCodeError(MeshwrightError):
    """An error in the user's code, which is the cause of this one."""

    CODE = "MW311"
    PLACE = "the module or the function of module:function"
    LEGAL = "one that runs"
    WAY_OUT = "correct it where its traceback says"


class Parser(argparse.ArgumentParser):
    """Raises `MeshwrightError` for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        usages = {_name_of(action): _usage(action) for action in self._actions}
        if message.startswith(MISSING):
            names = message.removeprefix(MISSING).split(", ")
            commands = any(action.nargs == argparse.PARSER for action in self._actions)
            verb = "is" if commands or len(names) == 1 else "are"
            what = f"{'a command' if commands else ' and '.join(names)} {verb} missing"
            legal = ", ".join(usages[name] for name in names if name in usages)
        else:
            name = message.removeprefix("argument ").partition(": ")[0]
            what, _, legal = message.partition("; legal: ")
            legal = legal or usages.get(name, f"what `{self.prog} --help` lists")
        raise CommandError(what, place=self.prog, legal=legal, way_out=f"see `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown flags are an error of the command that they were given to."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=3)
            raise CommandError(
                f"unrecognized arguments: {' '.join(unknown)}",
                place=self.prog,
                legal=f"those of `{self.prog} --help`",
                way_out=f"nearest: {', '.join(near) or 'none'}",
            )
        return parsed, unknown


def _name_of(action: argparse.Action) -> str:
    """An argument as argparse's message names it."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def _usage(action: argparse.Action) -> str:
    """An argument as one gives it, with its help."""
    name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    usage = " ".join([*action.option_strings[-1:], str(name)])
    return f"{usage} ({action.help})" if action.help else usage


def saved_json(path: str | Path) -> Any:
    """The JSON of a plan or a report; None where it can't be read, of which `Plan.load` says
    why."""
    try:
        return read_json(path, most=MAX_MEASURED_BYTES)
    except MeshwrightError:
        return None


@contextmanager
def no_report(*paths: str | Path) -> Iterator[None]:
    """Around reads of reports: an entry that is not there, or of another kind than `plan --json`
    prints, is an error of the file."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:  # a tree of any shape raises any of them
        raise FileError(
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
        raise CommandError(
            f" {shown(text)}: after the colon comes a number",
            place="--cluster",
            legal="nodes, e.g. h100-sxm:8, or processes, e.g. local:4",
        )
    number = int(count or 1)
    if name == "local":
        return Cluster.local(number)
    return Cluster.from_catalog(name, num_nodes=number)


def model_named(text: str) -> tuple[Any, ...]:
    """(model, example_inputs[, loss_fn]) from `module:function`, or from `hf:CONFIG[:POSITIONS]`.
    Raises `MeshwrightError`, and `UserCodeError` where the module or the function raises."""
    if text.startswith(HF):
        return _of_transformers(text.removeprefix(HF))
    place = f"model {shown(text)}"
    module, colon, function = text.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not colon:
        legal = "module:function, e.g. my_models:gpt2, or hf:CONFIG of transformers"
        raise CommandError("names no function", place=place, legal=legal)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importable = "a module that can be imported"
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise CommandError(
                error,
                place=place,
                legal=importable,
                way_out=f"it is looked for in {os.getcwd()} and on PYTHONPATH",
            ) from None
        raise _of_user(error, place, importable) from error
    make = getattr(imported, function, None)
    if not callable(make):
        public = [name for name in vars(imported) if name[:1] != "_"]
        near = difflib.get_close_matches(function, public, n=3)
        raise CommandError(
            f"module {module!r} has no function {function!r}",
            place=place,
            legal="a function of the module",
            way_out=f"nearest: {', '.join(near) or 'none'}",
        )
    try:
        returned = make()
    except Exception as error:
        raise _of_user(error, place, f"a function that returns {RETURNED}") from error
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        what = f"returned a {type(returned).__name__}"
        raise CommandError(what, place=place, legal=RETURNED)
    return returned


def model_of_config(config: Path, place: str) -> nn.Module:
    """The model that a config of transformers describes, a file or its folder, on meta. Raises
    `MeshwrightError` where there is none of its class."""
    import torch

    file = config / CONFIG if config.is_dir() else config
    entries = read_json(file)
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise NotInstalledError(
            error, place=place, legal="with transformers installed", way_out="give module:function"
        ) from error
    names = entries.get("architectures") if isinstance(entries, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CommandError(
            f"has architectures {shown(names)}",
            place=place,
            legal="the name of a class of transformers",
            way_out="give the model as module:function",
        )
    architecture: Any = kind
    try:
        with torch.device("meta"):
            model: nn.Module = architecture(architecture.config_class.from_json_file(str(file)))
    except Exception as error:  # of transformers, whatever a wrong value leads to
        raise CommandError(
            f"makes no {name}: {type(error).__name__}: {error!s:.200}",
            place=place,
            legal="a config that transformers makes a model of",
            way_out="correct the config",
        ) from error
    return model


def _of_transformers(text: str) -> tuple[Any, ...]:
    """A causal language model of a config that is here, and tokens of so many positions."""
    import torch

    name, _, length = text.partition(":")
    if length and not re.fullmatch("[1-9][0-9]{0,8}", length):
        legal = f"hf:CONFIG or hf:CONFIG:POSITIONS, e.g. hf:configs/qwen3:{MOST_POSITIONS}"
        raise CommandError(f" {shown(length)}", place=f"model hf:{name}", legal=legal)
    config = Path(name)
    if not config.exists():
        config = _cached(name) or config
    model: Any = model_of_config(config, f"model hf:{name}")
    positions = getattr(model.config, "max_position_embeddings", None) or MOST_POSITIONS
    if not type(model).__name__.endswith(("CausalLM", "LMHeadModel")):
        raise CommandError(
            f" is a {type(model).__name__}",
            place=f"model hf:{name}",
            legal="a causal language model, whose batch is tokens alone",
            way_out="give module:function, which returns the model and a batch",
        )
    shape = EXAMPLE_ROWS, int(length) if length else min(positions, MOST_POSITIONS)
    tokens = torch.zeros(shape, dtype=torch.long, device="meta")
    return model, {"input_ids": tokens, "labels": tokens}


def _cached(name: str) -> Path | None:
    """The config of a model that was downloaded before; nothing is downloaded."""
    try:
        hub = importlib.import_module("huggingface_hub")
        found = hub.try_to_load_from_cache(name, CONFIG)
    except (ImportError, ValueError):
        return None
    return Path(found) if isinstance(found, str) else None


def _of_user(error: Exception, place: str, legal: str) -> UserCodeError:
    what, way_out = f"raised {type(error).__name__}: {error}", UserCodeError.WAY_OUT
    return UserCodeError(what, place=place, legal=legal, way_out=way_out)


def check_writable(flag: str, path: str | None) -> None:
    """Raise `MeshwrightError` for a file that could not be written at the end."""
    if path is None:
        return
    file = Path(path)
    try:
        writable = bool(path) and file.absolute().parent.is_dir() and not file.is_dir()
    except (OSError, ValueError):  # a name that no file can have
        writable = False
    if not writable:
        raise UnwritableError(
            f" {shown(path)}",
            place=flag,
            legal="a file in a folder that exists",
            way_out="make the folder, or name another file",
        )

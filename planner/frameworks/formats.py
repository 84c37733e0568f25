"""The formats, and a file of one as a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.planner.frameworks.configuration import Configuration, whole
from meshwright.planner.frameworks.correspondence import ConfigurationError, Format, Values
from meshwright.planner.frameworks.deepspeed import DEEPSPEED
from meshwright.planner.frameworks.hugging_face import ACCELERATE, TRAINING_ARGUMENTS
from meshwright.planner.frameworks.megatron import ARGUMENTS, BRIDGE
from meshwright.planner.frameworks.torchtitan import TORCHTITAN
from meshwright.profiles.inputs import read_text, shown

MOST_BYTES = 2**16  # of a configuration
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        each.name: each
        for each in (DEEPSPEED, ACCELERATE, TRAINING_ARGUMENTS, TORCHTITAN, ARGUMENTS, BRIDGE)
    }
)
ENDINGS = {
    ".json": (DEEPSPEED, TRAINING_ARGUMENTS), ".yaml": (ACCELERATE, BRIDGE),
    ".yml": (ACCELERATE, BRIDGE), ".toml": (TORCHTITAN,), ".py": (TORCHTITAN,),
    ".args": (ARGUMENTS,), ".sh": (ARGUMENTS,), ".txt": (ARGUMENTS,),
}  # fmt: skip


def read_configuration(
    path: str | Path,
    devices: int,
    *,
    global_batch_size: int | None = None,
    script: Values | None = None,
) -> Configuration:
    """The configuration that a file is, for so many devices, with the rows of a step where it says
    none, and decisions of the user's `script`. `FILE.py:FUNCTION` names a function. Raises
    `ConfigurationError`."""
    text = str(path)
    file = text.rpartition(":")[0] if ".py:" in text else text
    place = shown(text)[1:-1]
    formats = ENDINGS.get(Path(file).suffix.lower())
    if formats is None:
        raise ConfigurationError(
            f"ends with {Path(file).suffix!r}", place=place, legal=ENDINGS,
            way_out="name the file as its software does",
        )  # fmt: skip
    content = read_text(file, error=ConfigurationError, most=MOST_BYTES)
    found = _parsed(formats[0], content, place)
    if formats[0] is DEEPSPEED and not DEEPSPEED.recognises(found):
        found = _parsed(TRAINING_ARGUMENTS, content, place)
    kind = next((each for each in formats if each.recognises(found)), None)
    if kind is None:
        raise ConfigurationError(
            "is of no software that is known by its keys",
            place=place,
            legal=", ".join(f"{each.name} {each.version}" for each in formats),
        )
    return configuration_of(kind, found, place, devices, global_batch_size, script)


def _target(kind: Format, values: Values) -> str:
    """The software model's name. Host memory is priced as `train_step` uses it, of which alone
    there are measurements."""
    return "eager" if values.get("offload") else kind.target(values)


def _parsed(kind: Format, content: str, place: str) -> dict[str, Any]:
    """The keys of a text, whatever its parser makes of what nobody writes."""
    try:
        return kind.parse(content, place)
    except ConfigurationError:
        raise
    except (ValueError, RecursionError) as error:
        said = f": {type(error).__name__}: {error!s:.100}"
        legal = "a file as people write it"
        raise ConfigurationError(said, place=place, legal=legal) from None


def configuration_of(
    kind: Format,
    found: Mapping[str, Any],
    place: str,
    devices: int,
    global_batch_size: int | None = None,
    script: Values | None = None,
) -> Configuration:
    """The configuration that a format's keys are."""
    for name, value in (script or {}).items():
        if name not in kind.by_script:
            raise ConfigurationError.refused(
                f"{place}: {name} beside it", value, legal=kind.by_script or "nothing",
                way_out="the file decides the rest: leave it out, or change the file",
            )  # fmt: skip
    found = {key: value for key, value in found.items() if value is not None}
    left = [key for key, value in found.items() if value == "auto"]  # taken from flags
    found = {key: value for key, value in found.items() if value != "auto"}
    try:
        values = kind.read(found, left)
        if global_batch_size is not None:
            stated = values.setdefault("global_batch_size", global_batch_size)
            if stated != global_batch_size:
                raise ConfigurationError(
                    f" is {stated}, and --batch says {global_batch_size}",
                    place="global_batch_size", legal="one of the two", way_out="leave --batch out",
                )  # fmt: skip
        values = whole({**values, **(script or {})}, devices, kind.name)
        target, habits = _target(kind, values), kind.habits(found)
    except ConfigurationError as error:
        raise ConfigurationError.of(error, place) from None
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ConfigurationError(
            f"has a value of another type ({error})", place=place, legal="the types of its software"
        ) from error
    known = {key for each in kind.table for key in each.keys}
    idle = [key for key in found if key not in known]
    unplanned = [key for key in idle if key.startswith(tuple(kind.unplanned))]
    return Configuration(
        place=place,
        format=kind.name,
        values=values,
        target=target,
        idle=tuple(key for key in idle if key not in unplanned),
        unplanned=tuple(unplanned),
        left=tuple(left),
        habits=habits,
        taken={n: how for n, how in kind.by_script.items() if n not in values},
    )

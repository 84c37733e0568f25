"""Parts of a model that Hugging Face's libraries save, and their names there.

A model of transformers is saved under its own names; where it is a submodule of the user's model,
without the prefix. Of tied weights the one name is kept that transformers keeps. Adapters have the
names that peft gives them. A model without any part of transformers is saved under its FQNs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.executor.errors import SavedError
from meshwright.profiles.inputs import shown

SHOWN = 5
PLACE = "the saved model"
ADAPTERS_INSIDE = "base_model.model."  # what peft puts before the names of the model it adapts


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The module that is saved, and the `prefix` of its names in the user's model. `pretrained`: it
    is transformers' or peft's, and has a config."""

    module: Any
    prefix: str
    pretrained: bool

    @property
    def adapters(self) -> Mapping[str, Any]:
        """The configs of peft's adapters on it, by name."""
        config = getattr(self.module, "peft_config", None)
        return config if isinstance(config, Mapping) else {}


def saved_part(model: nn.Module, submodule: str | None) -> Part:
    """The part of a model that is saved: the `submodule` that is named, else the model itself if it
    is transformers' or peft's, else the only such submodule. Raises ValueError where there are
    several, or none of that name."""
    inner = [name for name, module in model.named_modules() if _pretrained(module)]
    outermost = [name for name in inner if not any(_is_inside(name, other) for other in inner)]
    if submodule is None:
        if len(outermost) > 1:
            raise SavedError(
                f"the model has several of transformers: {outermost[:SHOWN]}",
                place=PLACE,
                way_out="name one of them by submodule=",
            )
        submodule = outermost[0] if outermost else ""
    try:
        module = model.get_submodule(submodule if isinstance(submodule, str) else "?")
    except AttributeError as error:
        raise SavedError(
            f"submodule={shown(submodule)}: the model has none of that name",
            place=PLACE,
            legal=f"{outermost[:SHOWN] or 'a name of named_modules()'}",
        ) from error
    prefix = f"{submodule}." if submodule else ""
    return Part(module=module, prefix=prefix, pretrained=_pretrained(module))


def _pretrained(module: nn.Module) -> bool:
    """Whether a module is transformers' or peft's: it saves itself and has a config that does."""
    config = getattr(module, "config", None)
    return callable(getattr(module, "save_pretrained", None)) and (
        callable(getattr(config, "save_pretrained", None)) or hasattr(module, "peft_config")
    )


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


# --- names ----------------------------------------------------------------------------------------


def saved_names(
    part: Part, names: Iterable[str], aliases: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """FQN -> the name it is saved under, of all of a part. `aliases`: the further names of tied
    tensors. Raises ValueError for a part that holds adapters, or of which there is nothing."""
    if part.adapters:
        raise SavedError(
            "the model holds peft's adapters, which are saved by trainable_only=True",
            place=PLACE,
            way_out="for merged weights load these on one device, "
            "PeftModel.from_pretrained(base, folder), and save its merge_and_unload()",
        )
    left_out = {*(getattr(part.module, "all_tied_weights_keys", None) or ())}
    never = {*(getattr(part.module, "_keys_to_ignore_on_save", None) or ())}
    chosen = {}
    for fqn in names:
        mine = (n for n in (fqn, *aliases.get(fqn, ())) if n.startswith(part.prefix))
        inside = [name.removeprefix(part.prefix) for name in mine]
        if inside and inside[0] not in never:
            chosen[fqn] = next((name for name in inside if name not in left_out), inside[0])
    if not chosen:
        raise SavedError(
            f"the model has no tensor under {part.prefix!r} to be saved",
            place=PLACE,
            way_out="name another submodule=",
        )
    return chosen


def adapter_names(
    part: Part, shapes: Mapping[str, tuple[int, ...]], trained: Collection[str]
) -> dict[str, str]:
    """FQN -> the name in peft's file of each tensor of the part's adapter, `shapes` being those of
    the model's tensors. Raises ValueError for several adapters, and for trained parameters that
    peft would not save."""
    if len(part.adapters) != 1:
        raise SavedError(
            f"the model has the adapters {list(part.adapters)}, and one is saved at a time",
            place=PLACE,
            way_out="delete the others by delete_adapter before planning",
        )
    (adapter,) = part.adapters
    inside = {
        name.removeprefix(part.prefix): torch.empty(shape, device="meta")
        for name, shape in shapes.items()
        if name.startswith(part.prefix)
    }
    adapter_state = import_module("peft").get_peft_model_state_dict(
        part.module, state_dict=dict(inside), adapter_name=adapter, save_embedding_layers=False
    )
    before = ADAPTERS_INSIDE if getattr(part.module, "_hf_peft_config_loaded", False) else ""
    name_of = {id(x): before + name for name, x in adapter_state.items()}
    names = {part.prefix + name: name_of[id(x)] for name, x in inside.items() if id(x) in name_of}
    if lost := [fqn for fqn in trained if fqn.startswith(part.prefix) and fqn not in names]:
        raise SavedError(
            f"{len(lost)} parameters train that peft doesn't save with the adapter, e.g. "
            f"{lost[:SHOWN]}",
            place=PLACE,
            way_out="freeze them, or name them in the adapter's modules_to_save",
        )
    if not names:
        raise SavedError(
            f"the adapter {adapter!r} has no tensor of its own to be saved",
            place=PLACE,
            legal="adapters with weights",
        )
    return names


# --- files beside the weights ---------------------------------------------------------------------


def write_config(part: Part, dtypes: Collection[torch.dtype], folder: Path) -> None:
    """Write the config of a model of transformers, with its class and the dtype of its weights,
    and what it generates by."""
    if not part.pretrained:
        return
    config = copy.deepcopy(part.module.config)
    config.architectures = [type(part.module).__name__]
    if len(dtypes) == 1:
        config.dtype = str(*dtypes).removeprefix("torch.")
    config.save_pretrained(folder)
    generation = getattr(part.module, "generation_config", None)
    if generation is not None and part.module.can_generate():
        generation.save_pretrained(folder)


def write_adapter_config(part: Part, folder: Path) -> None:
    """Write the adapter's config, for inference, as peft does."""
    (config,) = map(copy.deepcopy, part.adapters.values())
    config.inference_mode = True
    config.save_pretrained(folder)

"""`meshwright convert`: a checkpoint as files that transformers loads, or the reverse."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.profiles.inputs import NotInstalledError, read_json, shown
from meshwright.shell.named import CommandError, model_named
from meshwright.shell.terminal import Answer

if TYPE_CHECKING:
    from torch import nn

DTYPES = ("float32", "bfloat16", "float16")
CONFIG = "config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="checkpoint folder (`--to hf`), or weights")
    parser.add_argument("folder", help="folder to write; one that a save wrote is replaced")
    parser.add_argument("--to", choices=("hf", "checkpoint"), required=True)
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--config", help="config.json of the transformers model, or its folder")
    whose.add_argument(
        "--model", help="module:function returning (model, example_inputs[, loss_fn])"
    )
    parser.add_argument("--max-shard-size", default="5GB", help="of a file (default 5GB)")
    parser.add_argument("--dtype", choices=DTYPES, help="of floats (default: as they are stored)")
    parser.add_argument("--submodule", help="the model of transformers inside --model's")


def run(args: argparse.Namespace) -> Answer:
    import torch

    from meshwright.executor.export import from_pretrained_files, to_pretrained_files

    if args.to == "checkpoint" and (args.dtype or args.submodule):
        raise CommandError(
            "a checkpoint holds all of a model as it is stored",
            place="--dtype, --submodule",
            legal="with --to hf",
            way_out="leave them out",
        )
    model = model_named(args.model)[0] if args.model else _model_of(Path(args.config))
    if args.to == "hf":
        converted = to_pretrained_files(
            args.source,
            args.folder,
            model,
            max_shard_size=args.max_shard_size,
            dtype=getattr(torch, args.dtype) if args.dtype else None,
            submodule=args.submodule,
        )
    else:
        converted = from_pretrained_files(args.source, args.folder, model)
    files = f"{len(converted.files)} file{'s' * (len(converted.files) != 1)}"
    megabytes = f"{converted.bytes / 1e6:,.1f} MB"
    text = f"{converted.tensors} tensors, {megabytes} in {files}, written to {args.folder}"
    return Answer(data=lambda: asdict(converted), text=lambda: text)


def _model_of(config: Path) -> nn.Module:
    """The model that a config of transformers describes, on meta. Raises `MeshwrightError` where
    there is none of its class."""
    import torch

    file = config / CONFIG if config.is_dir() else config
    entries, place = read_json(file), f"--config {shown(str(config))}"
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise NotInstalledError(
            error, place=place, legal="with transformers installed", way_out="give --model"
        ) from error
    names = entries.get("architectures") if isinstance(entries, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CommandError(
            f"has architectures {shown(names)}",
            place=place,
            legal="the name of a class of transformers",
            way_out="give the model by --model module:function",
        )
    architecture: Any = kind
    with torch.device("meta"):
        model: nn.Module = architecture(architecture.config_class.from_json_file(str(file)))
    return model

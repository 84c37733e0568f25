"""`meshwright convert`: a checkpoint as files that transformers loads, or the reverse."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from meshwright.profiles.inputs import shown
from meshwright.shell.named import CommandError, model_named, model_of_config
from meshwright.shell.terminal import Answer

DTYPES = ("float32", "bfloat16", "float16")


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
    model = (
        model_named(args.model)[0]
        if args.model
        else model_of_config(Path(args.config), f"--config {shown(args.config)}")
    )
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

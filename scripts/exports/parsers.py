"""A file of another software, read by that software's own parser: prints its values as JSON.

    .venv-exports/bin/python -m scripts.exports.parsers FORMAT FILE RANKS

Needs nothing of ours. What a parser lets pass is looked at here: accelerate takes nested keys that
it does not know, DeepSpeed top-level ones, and one rank for all unless it is told.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def deepspeed(path: str, ranks: int) -> dict[str, Any]:
    """Batches, stage and where states are, of the data-parallel ranks."""
    from deepspeed import runtime
    from deepspeed.runtime.config import DeepSpeedConfig

    tree = json.loads(Path(path).read_text())
    dist = runtime.config.dist
    dist.get_world_size = lambda *_: ranks
    dist.get_rank = lambda *_: 0
    known = DeepSpeedConfig(path)
    zero = known.zero_config
    away = zero.offload_optimizer
    return {
        "global_batch_size": known.train_batch_size,
        "microbatch_size": known.train_micro_batch_size_per_gpu,
        "num_microbatches": known.gradient_accumulation_steps,
        "zero": int(zero.stage),
        "hpz": zero.zero_hpz_partition_size,
        "dp_shard": tree["zero_optimization"].get("mics_shard_size", -1),
        "weights": zero.zero_quantized_weights,
        "gradients": zero.zero_quantized_gradients,
        "bf16": known.bfloat16_config.enabled,
        "away": "none" if away is None else str(away.device.value),
    }


def accelerate(path: str, ranks: int) -> dict[str, Any]:
    """What a launch would tell its processes by their environment."""
    import yaml
    from accelerate.commands.config import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.launch import prepare_multi_gpu_env

    load_config_from_file(path)
    arguments = ["--config_file", path, "--num_processes", str(ranks), "script.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    env = prepare_multi_gpu_env(args)
    tree = yaml.safe_load(Path(path).read_text())
    for section in ("fsdp_config", "parallelism_config"):
        unknown = [key for key in tree.get(section, {}) if not hasattr(args, key)]
        assert not unknown, unknown
    os.environ.update(env)
    found = {key: env.get(f"FSDP_{key}", "") for key in ("VERSION", "RESHARD_AFTER_FORWARD")}
    parallel = ParallelismConfig()
    return {
        "fsdp": args.use_fsdp,
        "reshard": str(found["RESHARD_AFTER_FORWARD"]).lower(),
        "precision": args.mixed_precision,
        "recompute": str(env.get("FSDP_ACTIVATION_CHECKPOINTING", "false")).lower(),
        "replicas": parallel.dp_replicate_size,
        "shards": parallel.dp_shard_size,
        "tp": parallel.tp_size,
        "cp": max(parallel.cp_size, parallel.sp_size),
    }


def transformers(path: str, ranks: int) -> dict[str, Any]:
    """Fields of `TrainingArguments`."""
    from transformers import HfArgumentParser, TrainingArguments

    tree = json.loads(Path(path).read_text())
    tree.setdefault("output_dir", "out")
    tree["use_cpu"] = True
    (args,) = HfArgumentParser(TrainingArguments).parse_dict(tree)
    return {
        "microbatch_size": args.per_device_train_batch_size,
        "num_microbatches": args.gradient_accumulation_steps,
        "bf16": args.bf16,
        "fp16": args.fp16,
        "recompute": args.gradient_checkpointing,
        "fsdp": bool(args.fsdp),
        "reshard": bool((args.fsdp_config or {}).get("reshard_after_forward")),
    }


def torchtitan(path: str, ranks: int) -> dict[str, Any]:
    """Its dataclasses, and the degrees against the ranks. Its `Trainer.Config` asks for a GPU's
    compiler as it is imported: what that refuses is asked here."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.parallel_dims import ParallelDims

    sections = {
        "training": TrainingConfig(seq_len=4096),
        "parallelism": ParallelismConfig(),
        "compile": CompileConfig(),
    }
    base = SimpleNamespace(**sections, loss=SimpleNamespace())
    runpy.run_path(path)["planned"](base)
    for name, section in sections.items():
        assert getattr(base, name) is section, name  # what is not said stays
    axes, training = base.parallelism, base.training
    degrees = axes.pipeline_parallel_degree, axes.expert_parallel_degree
    assert training.disable_cuda_graphs or degrees == (1, 1)
    ParallelDims(
        dp_replicate=axes.data_parallel_replicate_degree,
        dp_shard=axes.data_parallel_shard_degree,
        cp=axes.context_parallel_degree,
        tp=axes.tensor_parallel_degree,
        pp=axes.pipeline_parallel_degree,
        ep=axes.expert_parallel_degree,
        world_size=ranks,
    )
    checkpoint = getattr(base, "activation_checkpoint", None)
    return {
        "axes": asdict(axes),
        "training": asdict(training),
        "checkpoint": type(checkpoint).__qualname__.split(".")[0],
    }


def megatron(path: str, ranks: int) -> dict[str, Any]:
    """Fields of megatron-core's dataclasses: no parser of flags is in its wheel."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    flags: dict[str, Any] = {}
    for line in Path(path).read_text().splitlines():
        if line.startswith("#"):
            continue
        name, *values = line.replace("'", "").split()
        value: Any = values[0] if values else True
        flags[name[2:].replace("-", "_")] = int(value) if str(value).isdecimal() else value
    names = {field.name for field in fields(TransformerConfig)}
    given = {key: value for key, value in flags.items() if key in names}
    made = TransformerConfig(
        num_layers=8, hidden_size=64, num_attention_heads=8, pipeline_dtype="bf16", **given
    )
    others = {field.name for field in fields(DistributedDataParallelConfig)}
    return {
        "tp": made.tensor_model_parallel_size,
        "pp": made.pipeline_model_parallel_size,
        "recompute": made.recompute_granularity,
        "elsewhere": sorted(set(flags) - names - others),
    }


PARSERS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    each.__name__: each for each in (deepspeed, accelerate, transformers, torchtitan, megatron)
}

if __name__ == "__main__":
    print(json.dumps(PARSERS[sys.argv[1]](sys.argv[2], int(sys.argv[3])), default=str))

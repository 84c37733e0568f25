"""accelerate's YAML (1.15.0: `commands/config/config_args.py`, `commands/launch.py`,
`parallelism_config.py`) and transformers' `TrainingArguments` as JSON (5.23)."""

from __future__ import annotations

from typing import Any

from meshwright.planner.frameworks.correspondence import (
    ConfigurationError,
    Correspondence,
    Format,
    Found,
    Values,
    fixed,
    idle_keys,
    said,
    states_away,
    stepped,
    switch,
    table,
)
from meshwright.planner.frameworks.deepspeed import parts_away
from meshwright.planner.frameworks.texts import parse_tree, parse_yaml, render_json, render_yaml

KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
STRATEGIES = {
    "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0,
}  # fmt: skip
WRAPPED = "TRANSFORMER_BASED_WRAP"
FSDP = "fsdp_config."
PARALLEL = "parallelism_config.parallelism_config_"
DEEPSPEED = "deepspeed_config."
PRECISIONS = {"no": "fp32", False: "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def _kind(found: Found) -> str:
    kind = found["distributed_type"] or "NO"  # as YAML reads a plain NO
    if kind not in KINDS:
        raise ConfigurationError.refused("distributed_type", kind, legal=KINDS)
    if kind == "MEGATRON_LM":
        raise ConfigurationError.refused(
            "distributed_type", kind, legal=KINDS[:-1],
            way_out="give the flags of Megatron-LM themselves (megatron.args)",
        )  # fmt: skip
    return str(kind)


def _zero(found: Found) -> Values:
    """ZeRO's stage: of `fully_shard`, by whether it reshards; of FSDP1, by its strategy."""
    kind = _kind(found)
    if kind == "DEEPSPEED":
        if file := found.get(f"{DEEPSPEED}deepspeed_config_file"):
            raise ConfigurationError.refused(
                f"{DEEPSPEED}deepspeed_config_file", file, legal="keys of its own",
                way_out="give that file itself",
            )  # fmt: skip
        return {"zero": found.get(f"{DEEPSPEED}zero_stage", 2), "engine": "deepspeed"}
    if kind != "FSDP":
        return {"zero": 0}
    wrap = found.get(f"{FSDP}fsdp_auto_wrap_policy", "NO_WRAP")
    if wrap != WRAPPED:
        raise ConfigurationError.refused(
            f"{FSDP}fsdp_auto_wrap_policy", wrap, legal=WRAPPED,
            way_out="without it all weights are gathered at once, which no plan here does",
        )  # fmt: skip
    if found.get(f"{FSDP}fsdp_version", 1) == 1:  # a launch gives the strategy, said or not
        name = str(found.get(f"{FSDP}fsdp_sharding_strategy", "FULL_SHARD"))
        if name not in STRATEGIES:
            raise ConfigurationError.refused(
                f"{FSDP}fsdp_sharding_strategy", name, legal=STRATEGIES
            )
        return {"zero": STRATEGIES[name]}
    again = found.get(f"{FSDP}fsdp_reshard_after_forward", True)
    if again not in (True, False, "true", "false"):
        raise ConfigurationError.refused(
            f"{FSDP}fsdp_reshard_after_forward", again, legal=(True, False)
        )
    return {"zero": 3 if again in (True, "true") else 2}


def _say_zero(values: Values) -> Found:
    zero = values.get("zero", 0)
    if not zero:
        return {"distributed_type": "MULTI_GPU"}
    return {
        "distributed_type": "FSDP",
        f"{FSDP}fsdp_version": 2,
        f"{FSDP}fsdp_reshard_after_forward": zero == 3,
        f"{FSDP}fsdp_auto_wrap_policy": WRAPPED,
        f"{FSDP}fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _axes(found: Found) -> Values:
    """Degrees, and how attention runs where the sequence is split: under DeepSpeed by Ulysses
    alone, over all ranks; else as FSDP2 has them."""
    kind = _kind(found)
    sizes = {
        name: found.get(f"{PARALLEL}{name}_size")
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    split = {name for name in ("tp", "cp", "sp") if (sizes[name] or 1) > 1}
    if kind == "DEEPSPEED":
        if split - {"sp"}:
            raise ConfigurationError.refused(
                f"{PARALLEL}tp_size, cp_size", True, legal="1 under DEEPSPEED"
            )
        return {"cp": sizes["sp"], "cp_kind": "ulysses"} if split else {"cp": 1}
    if "sp" in split:
        raise ConfigurationError.refused(
            f"{PARALLEL}sp_size", sizes["sp"], legal="1 but under DEEPSPEED, which alone runs it"
        )
    second = kind == "FSDP" and found.get(f"{FSDP}fsdp_version", 1) == 2
    replicated = (sizes["dp_replicate"] or 1) > 1
    if split and not second and (kind == "FSDP" or "cp" in split or replicated):
        raise ConfigurationError.refused(
            f"{PARALLEL}{min(split)}_size", sizes[min(split)], legal="1 but under FSDP, version 2"
        )
    if any(size is not None for size in sizes.values()):  # what is left out there is 1
        sizes = {name: 1 if size is None else size for name, size in sizes.items()}
    values: dict[str, Any] = {"tp": sizes["tp"] or 1}
    if "cp" in split:
        ring = str(found.get(f"{PARALLEL}cp_comm_strategy", "allgather")) == "alltoall"
        values |= {"cp": sizes["cp"], "cp_kind": "ring" if ring else "all_gather"}
    for name, key in (("replicas", "dp_replicate"), ("shards", "dp_shard")):
        if sizes[key] is not None:
            values[name] = sizes[key]
    return values


def _shards(values: Values) -> int:
    """Ranks of the data axis that states are divided among."""
    cp, dp = values.get("cp") or 1, values["dp"]
    shards: int = (values.get("dp_shard") or dp * cp) // cp if values.get("zero") else 1
    return shards


def _say_axes(values: Values) -> Found:
    tp, cp, shard = values.get("tp") or 1, values.get("cp") or 1, _shards(values)
    found: dict[str, Any] = {
        f"{PARALLEL}dp_replicate_size": values["dp"] // shard,
        f"{PARALLEL}dp_shard_size": shard,
        f"{PARALLEL}tp_size": tp,
    }
    if cp > 1:
        ring = values.get("cp_kind") == "ring"
        found |= {
            f"{PARALLEL}cp_size": cp,
            f"{PARALLEL}cp_comm_strategy": "alltoall" if ring else "allgather",
        }
    return found


def _lacks(values: Values) -> tuple[str, ...]:
    """Axes that FSDP does not have beside these values: all but dp without shards, and Ulysses."""
    replicated = values["dp"] > 1 and _shards(values) == 1
    if not values.get("zero") or replicated:
        return "tp", "cp"
    return ("cp",) if values.get("cp_kind") == "ulysses" else ()


AXES = ("replicas", "shards", "dp", "dp_shard", "tp", "cp", "cp_kind")
SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "cp_comm_strategy")


def _offload(found: Found) -> Values:
    """Host memory as FSDP or DeepSpeed uses it: options of the one that does not run do nothing."""
    kind = _kind(found)
    if kind == "DEEPSPEED":
        states, weights = (found.get(f"{DEEPSPEED}offload_{of}_device")
                           for of in ("optimizer", "param"))  # fmt: skip
        stage = found.get(f"{DEEPSPEED}zero_stage", 2)
        return parts_away(states, weights, stage, 1.0, f"{DEEPSPEED}offload device")
    away = kind == "FSDP" and switch(found, f"{FSDP}fsdp_offload_params")
    return {"offload": {"optimizer": 1.0}} if away else {}


def _checkpointing(found: Found) -> Values:
    again = switch(found, f"{FSDP}fsdp_activation_checkpointing")
    return {"recompute": "full" if again and _kind(found) == "FSDP" else "none"}


def _target(values: Values) -> str:
    """Tensor and context axes are torchtitan's."""
    if engine := values.get("engine"):
        return str(engine)
    if any((values.get(axis) or 1) > 1 for axis in ("tp", "cp", "pp", "ep")):
        return "torchtitan"
    return "fsdp-compiled" if values.get("compiled") else "fsdp"


ACCELERATE = Format(
    name="accelerate",
    version="1.15.0",
    file="accelerate.yaml",
    table=(
        Correspondence(
            keys=(
                "distributed_type",
                f"{FSDP}fsdp_version",
                f"{FSDP}fsdp_reshard_after_forward",
                f"{FSDP}fsdp_sharding_strategy",
                f"{DEEPSPEED}zero_stage",
                f"{DEEPSPEED}deepspeed_config_file",
                f"{FSDP}fsdp_auto_wrap_policy",
                f"{FSDP}fsdp_state_dict_type",
            ),
            names=("zero",),
            read=_zero,
            write=_say_zero,
            left_out={"distributed_type": "NO"},
        ),
        Correspondence(
            keys=(
                "distributed_type",
                f"{FSDP}fsdp_version",
                *(f"{PARALLEL}{name}" for name in (*SIZES, "sp_backend", "cp_backend")),
            ),
            names=AXES,
            read=_axes,
            write=_say_axes,
            left_out={"distributed_type": "NO"},
        ),
        said("num_processes", "devices"),
        table("mixed_precision", "precision", PRECISIONS, left_out="no"),
        Correspondence(
            keys=(f"{DEEPSPEED}gradient_accumulation_steps",),
            names=(),
            read=lambda found: {"num_microbatches": next(iter(found.values()))} if found else {},
            write=lambda values: {},  # of FSDP a script says it
        ),
        Correspondence(
            keys=("distributed_type", f"{FSDP}fsdp_activation_checkpointing"),
            names=("recompute",),
            read=_checkpointing,
            left_out={"distributed_type": "NO"},
            write=lambda v: (
                {"distributed_type": "FSDP", f"{FSDP}fsdp_activation_checkpointing": True}
                if v.get("recompute") == "full" and v.get("zero")
                else {}
            ),
        ),
        Correspondence(
            keys=(
                "distributed_type",
                f"{FSDP}fsdp_offload_params",
                f"{DEEPSPEED}zero_stage",
                f"{DEEPSPEED}offload_optimizer_device",
                f"{DEEPSPEED}offload_param_device",
            ),
            names=("offload",),
            read=_offload,
            write=lambda v: (
                {f"{FSDP}fsdp_offload_params": True} if states_away(v) else {}
            ),  # all of them
            left_out={"distributed_type": "NO"},
        ),
        said(f"{FSDP}fsdp_transformer_layer_cls_to_wrap", "layer_class"),
        Correspondence(
            keys=("dynamo_config.dynamo_backend",),
            names=("compiled",),
            read=lambda found: {
                "compiled": str(next(iter(found.values()), "no")).lower() not in ("no", "false")
            },
            write=lambda v: (
                {"dynamo_config.dynamo_backend": "INDUCTOR"} if v.get("compiled") else {}
            ),
        ),
        fixed({"compute_environment": "LOCAL_MACHINE"}),
    ),
    idle=frozenset(
        {
            "command_file",
            "commands",
            "debug",
            "downcast_bf16",
            "enable_cpu_affinity",
            "gpu_ids",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "num_machines",
            "rdzv_backend",
            "same_network",
            "tpu_env",
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "use_cpu",
            *(
                f"{FSDP}fsdp_{name}"
                for name in (
                    "activation_checkpointing_offload",
                    "backward_prefetch",
                    "backward_prefetch_policy",
                    "cpu_ram_efficient_loading",
                    "forward_prefetch",
                    "min_num_params",
                    "sync_module_states",
                    "use_orig_params",
                    "limit_all_gathers",
                )
            ),
            *(
                f"{DEEPSPEED}{name}"
                for name in (
                    "deepspeed_exclusion_filter",
                    "deepspeed_hostfile",
                    "deepspeed_inclusion_filter",
                    "deepspeed_moe_layer_cls_names",
                    "deepspeed_multinode_launcher",
                    "gradient_clipping",
                    "offload_optimizer_nvme_path",
                    "offload_param_nvme_path",
                    "zero3_init_flag",
                    "zero3_save_16bit_model",
                )
            ),
            *(
                f"{PARALLEL}sp_{name}"
                for name in ("attn_implementation", "seq_length", "seq_length_is_variable")
            ),
        }
    ),
    idle_below=("dynamo_config", "fp8_config", "mpirun_config", "megatron_lm_config"),
    parse=parse_yaml,
    render=render_yaml,
    recognises=lambda found: "distributed_type" in found or "compute_environment" in found,
    target=_target,
    by_script={
        "microbatch_size": "the DataLoader's batch_size",
        "num_microbatches": "Accelerator(gradient_accumulation_steps=)",
    },
    lacks=_lacks,
)

# --- TrainingArguments ---------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw_torch_fused": "adamw_fused", "adamw_torch": "adamw", "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "adamw8bit", "sgd": "sgd",
    "adagrad": "adagrad", "lion_32bit": "lion",
}  # fmt: skip


WORDS = ("full_shard", "shard_grad_op", "no_shard", "auto_wrap", "offload")


def _words(value: Any) -> list[str]:
    """`fsdp` as a list, or a text of words; True stands for its defaults."""
    if value is True:
        return ["full_shard"]
    words = value.split() if isinstance(value, str) else list(value or ())
    if unknown := [word for word in words if word not in WORDS]:
        raise ConfigurationError.refused(
            "fsdp", unknown, legal=WORDS,
            way_out="a hybrid is said by parallelism_config: dp_replicate_size, dp_shard_size",
        )  # fmt: skip
    return words


def _argument_zero(found: Found) -> Values:
    if deepspeed := found.get("deepspeed"):
        raise ConfigurationError.refused(
            "deepspeed", deepspeed, legal="none, or the file given by itself",
            way_out="give DeepSpeed's file in place of this one",
        )  # fmt: skip
    words, version = _words(found.get("fsdp")), found.get("fsdp_config.version", 2)
    if not words:
        return {"zero": 0}
    if "no_shard" in words and version == 2:
        raise ConfigurationError.refused("fsdp", words, legal="full_shard, shard_grad_op")
    said = {"fsdp_config.reshard_after_forward": "shard_grad_op" not in words,
            "fsdp_config.cpu_offload": "offload" in words, **found}  # fmt: skip
    away = switch(said, "fsdp_config.cpu_offload")
    again = version == 1 or switch(said, "fsdp_config.reshard_after_forward")
    return {"zero": 3 if again else 2, **({"offload": {"optimizer": 1.0}} if away else {})}


def _say_argument_zero(values: Values) -> Found:
    zero = values.get("zero", 0)
    if not zero:
        return {}
    words = ["full_shard", "auto_wrap", *(["offload"] if states_away(values) else [])]
    return {"fsdp": " ".join(words), "fsdp_config.version": 2,
            "fsdp_config.reshard_after_forward": zero == 3}  # fmt: skip


def _argument_precision(found: Found) -> Values:
    kinds = [kind for kind in ("bf16", "fp16") if switch(found, kind)]
    if len(kinds) > 1:
        raise ConfigurationError.refused("bf16 and fp16", True, legal="one of the two")
    return {"precision": kinds[0] if kinds else "fp32"}


AGAIN = (
    "gradient_checkpointing", "activation_checkpointing", "fsdp_config.activation_checkpointing",
)  # fmt: skip


def _argument_recompute(found: Found) -> Values:
    """Full recompute of all layers, or of every so many-th, from the first on."""
    of_fsdp = switch(found, AGAIN[2]) and bool(_words(found.get("fsdp")))
    if not (of_fsdp or any(switch(found, key) for key in AGAIN[:2])):
        return {"recompute": "none"}
    for kind in ("gradient", "activation"):
        if found.get(f"{kind}_checkpointing_kwargs.offload"):
            raise ConfigurationError.refused(
                f"{kind}_checkpointing_kwargs.offload", True, legal="false",
                way_out="what layers keep stays on the device, or is planned (offload)",
            )  # fmt: skip
        if (every := found.get(f"{kind}_checkpointing_kwargs.every_n_layers", 1)) != 1:
            return {"recompute": ("full", (0, every))}
    return {"recompute": "full"}


def _parse_arguments(text: str, place: str) -> dict[str, Any]:
    """Keys of `fsdp_config` without the prefix that transformers takes off, too."""
    at, found = "fsdp_config.", {}
    for key, value in parse_tree(text, place).items():
        if key == "fsdp_config" and isinstance(value, str):
            raise ConfigurationError.refused(
                f"{place}: fsdp_config", value, legal="its keys",
                way_out="write what the file says where its name stands",
            )  # fmt: skip
        inner = key.removeprefix(at)
        found[key if inner == key else at + inner.removeprefix("fsdp_")] = value
    return found


TRAINING_ARGUMENTS = Format(
    name="transformers",
    version="5.23.0",
    file="training_args.json",
    table=(
        said("per_device_train_batch_size", "microbatch_size", left_out=8),
        said("gradient_accumulation_steps", "num_microbatches", left_out=1),
        Correspondence(
            keys=(
                "fsdp",
                "fsdp_config.version",
                "fsdp_config.reshard_after_forward",
                "fsdp_config.cpu_offload",
                "deepspeed",
            ),
            names=("zero", "offload"),
            read=_argument_zero,
            write=_say_argument_zero,
        ),
        Correspondence(
            keys=("bf16", "fp16"),
            names=("precision",),
            read=_argument_precision,
            write=lambda v: (
                {v["precision"]: True} if v.get("precision") in ("bf16", "fp16") else {}
            ),
        ),
        Correspondence(
            keys=(
                *AGAIN,
                "fsdp",
                *(
                    f"{kind}_checkpointing_kwargs.{name}"
                    for kind in ("gradient", "activation")
                    for name in ("offload", "every_n_layers")
                ),
            ),
            names=("recompute",),
            read=_argument_recompute,
            write=lambda v: (
                {"gradient_checkpointing": True} if v.get("recompute") == "full" else {}
            ),
        ),
        stepped(
            "optim",
            OPTIMIZERS,
            "optim_args",
            {"optim": "sgd", "optim_args": "momentum=0.9"},
            lambda given: "momentum" in str(given),
            left_out="adamw_torch_fused",
        ),
        Correspondence(
            keys=("torch_compile", "torch_compile_backend", "torch_compile_mode"),
            names=("compiled",),
            read=lambda found: {"compiled": switch(found, "torch_compile") or len(found) > 1},
            write=lambda v: {"torch_compile": True} if v.get("compiled") else {},
            left_out={"torch_compile": False},
        ),
        said("fsdp_config.transformer_layer_cls_to_wrap", "layer_class"),
    ),
    idle=idle_keys("transformers"),
    idle_below=(
        "fsdp_config",
        "accelerator_config",
        "lr_scheduler_kwargs",
        "label_names",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
    ),
    parse=_parse_arguments,
    render=render_json,
    recognises=lambda found: "per_device_train_batch_size" in found or "output_dir" in found,
    target=_target,
    by_script={
        "tp": "parallelism_config=ParallelismConfig(tp_size=)",
        "cp": "parallelism_config=ParallelismConfig(cp_size=)",
        "cp_kind": "TorchContextParallelConfig(cp_comm_strategy=)",
        "dp_shard": "parallelism_config=ParallelismConfig(dp_replicate_size=, dp_shard_size=)",
    },
    lacks=_lacks,
)

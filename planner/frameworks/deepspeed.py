"""DeepSpeed's JSON (0.19.8): `runtime/config.py`, `runtime/zero/config.py`, `offload_config.py`,
`runtime/tensor_parallel/config.py`, `runtime/precision_config.py`."""

from __future__ import annotations

from typing import Any

from meshwright.planner.frameworks.correspondence import (
    ConfigurationError,
    Correspondence,
    Format,
    Found,
    Values,
    fixed,
    said,
    switch,
    table,
)
from meshwright.planner.frameworks.texts import parse_tree, render_json

VERSION = "0.19.8"
ZERO = "zero_optimization."
OPTIMIZERS = {
    "AdamW": "adamw_fused", "Adam": "adamw_fused", "FusedAdam": "adamw_fused", "Lion": "lion",
    "Adagrad": "adagrad", "SGD": "momentum", "adamw": "adamw_fused", "adam": "adamw_fused",
}  # fmt: skip
IDLE = frozenset({
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
    "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients",
    "gradient_allreduce_op", "communication_data_type", "seq_parallel_communication_data_type",
    "disable_allgather", "disable_python_gc", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "log_level", "vocabulary_size",
    "managed_gradient_accumulation", "use_data_before_expert_parallelism",
    "use_node_local_storage", "load_universal_checkpoint", "dist_init_required",
    "optimizer.legacy_fusion",
    *(ZERO + name for name in (
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm",
        "use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size",
        "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint", "sub_group_size",
        "stage3_prefetch_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
        "stage3_param_persistence_threshold", "model_persistence_threshold",
        "stage3_model_persistence_threshold", "max_live_parameters", "stage3_max_live_parameters",
        "max_reuse_distance", "stage3_max_reuse_distance", "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "module_granularity_threshold", "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential", "stage3_allgather_sequential", "ignore_unused_parameters",
        "legacy_stage1", "round_robin_gradients", "parameter_alignment", "memory_efficient_linear",
        "zero_quantized_nontrainable_weights", "pipeline_loading_checkpoint",
        "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",         "cpu_offload_use_pin_memory",
        *(f"offload_{what}.{name}" for what in ("optimizer", "param") for name in (
            "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read",
            "pipeline_write", "fast_init", "super_offload", "cpuadam_cores_perc",
        )),
    )),
    *(f"{kind}.{name}" for kind in ("bf16", "fp16") for name in (
        "immediate_grad_update", "check_grad_overflow", "auto_cast", "loss_scale",
        "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale", "fp16_master_weights_and_grads",
    )),
    *(f"tensor_parallel.{name}" for name in (
        "tp_overlap_comm", "vocab_parallel_lm_head", "vocab_parallel_ce_backend", "preset_model",
        "keep_module_on_host", "replace_with_kernel_inject", "tp_grain_size", "dtype",
    )),
})  # fmt: skip
IDLE_BELOW = (
    "scheduler", "optimizer.params", "tensorboard", "wandb", "csv_monitor", "comet",
    "flops_profiler", "comms_logger", "checkpoint", "data_types", "aio", "timers", "nebula",
    "data_efficiency", "weight_quantization", "autotuning", "zero_optimization.leaf_module",
    "tensor_parallel.partition_config", "tensor_parallel.tensor_parallel",
    "activation_checkpointing", "hybrid_engine", "amp", "compile",
)  # fmt: skip


def _precision(found: Found) -> Values:
    bf16, fp16 = (switch(found, f"{kind}.enabled") for kind in ("bf16", "fp16"))
    if bf16 and fp16:
        raise ConfigurationError.refused(
            "bf16.enabled and fp16.enabled", True, legal="one of the two"
        )
    pure = all(found.get(f"bf16.{name}") for name in _PURE)
    return {
        "precision": "bf16_pure"
        if bf16 and pure
        else "bf16"
        if bf16
        else "fp16"
        if fp16
        else "fp32"
    }


_PURE = ("bf16_master_weights_and_grads", "bf16_optimizer_states")


def _say_precision(values: Values) -> Found:
    precision = values.get("precision", "fp32")
    if precision == "bf16_pure":
        return {"bf16.enabled": True, **{f"bf16.{name}": True for name in _PURE}}
    return {f"{precision}.enabled": True} if precision in ("bf16", "fp16") else {}


def _offload(found: Found) -> Values:
    """Optimizer states, and below stage 3 weights, in host memory or files; at stage 3 the weights
    that are stepped are with their states."""
    steps = found.get(f"{ZERO}offload_optimizer.device")
    if found.get(f"{ZERO}cpu_offload"):
        steps = steps or "cpu"
    weights = found.get(f"{ZERO}offload_param.device") or (
        "cpu" if found.get(f"{ZERO}cpu_offload_param") else None
    )
    if steps in (None, "none") and weights in (None, "none"):
        return {}
    if steps in (None, "none"):
        raise ConfigurationError.refused(
            f"{ZERO}offload_param.device", weights, legal="beside offload_optimizer"
        )
    if steps not in ("cpu", "nvme"):
        raise ConfigurationError.refused(
            f"{ZERO}offload_optimizer.device", steps, legal="none, cpu, nvme"
        )
    part = float(found.get(f"{ZERO}offload_optimizer.ratio", 1.0))
    parts = {"optimizer": part}
    if steps == "nvme":
        parts["nvme"] = part
    if weights not in (None, "none") and found.get(f"{ZERO}stage") != 3:
        parts["weights"] = part
    return {"offload": parts}


def _say_offload(values: Values) -> Found:
    parts = values.get("offload") or {}
    if not parts.get("optimizer"):
        return {}
    device = "nvme" if parts.get("nvme") else "cpu"
    found: dict[str, Any] = {f"{ZERO}offload_optimizer.device": device}
    if parts["optimizer"] < 1:
        found[f"{ZERO}offload_optimizer.ratio"] = parts["optimizer"]
    if device == "nvme":
        found[f"{ZERO}offload_optimizer.nvme_path"] = "/local_nvme"
    if parts.get("weights"):
        found[f"{ZERO}offload_param.device"] = "cpu"
    return found


def _quantized(found: Found) -> Values:
    weights, gradients = (
        switch(found, f"{ZERO}zero_quantized_{kind}") for kind in ("weights", "gradients")
    )
    either = "weights" if weights else "gradients" if gradients else "none"
    return {"quantized": "both" if weights and gradients else either}


def _say_quantized(values: Values) -> Found:
    sent = values.get("quantized", "none")
    return {
        f"{ZERO}zero_quantized_{kind}": True
        for kind in ("weights", "gradients")
        if sent in (kind, "both")
    }


def _above_one(key: str, name: str) -> Correspondence:
    """A number of ranks, of which 1 or less is none."""
    return Correspondence(
        keys=(key,),
        names=(name,),
        read=lambda found: {name: found[key]} if found.get(key, 1) > 1 else {},
        write=lambda values: {key: values[name]} if (values.get(name) or 1) > 1 else {},
    )


def _ulysses(found: Found) -> Values:
    size = found.get("sequence_parallel_size", 1)
    return {"cp": size, "cp_kind": "ulysses"} if size > 1 else {"cp": 1}


def _habits(found: Found) -> tuple[str, ...]:
    if "gradient_clipping" in found:
        return ()
    return ("DeepSpeed clips gradients at norm 1.0 where nothing is said: train with it, too",)


def target_of(values: Values) -> str:
    """Host offload is priced as `train_step`'s, of which alone there are measurements."""
    return "eager" if values.get("offload") else "deepspeed"


DEEPSPEED = Format(
    name="deepspeed",
    version=VERSION,
    file="ds_config.json",
    table=(
        fixed({"_written_for": f"DeepSpeed {VERSION}"}),  # it takes what it does not know on top
        said("train_batch_size", "global_batch_size"),
        said("train_micro_batch_size_per_gpu", "microbatch_size"),
        said("gradient_accumulation_steps", "num_microbatches"),
        said(f"{ZERO}stage", "zero", left_out=0),
        _above_one(f"{ZERO}zero_hpz_partition_size", "hpz"),
        Correspondence(
            keys=tuple(f"{ZERO}zero_quantized_{kind}" for kind in ("weights", "gradients")),
            names=("quantized",), read=_quantized, write=_say_quantized,
        ),
        Correspondence(
            keys=(
                f"{ZERO}stage", f"{ZERO}offload_optimizer.device",
                f"{ZERO}offload_optimizer.ratio",
                f"{ZERO}offload_param.device", f"{ZERO}cpu_offload", f"{ZERO}cpu_offload_param",
            ),
            names=("offload",), read=_offload, write=_say_offload,
        ),
        Correspondence(
            keys=("bf16.enabled", "fp16.enabled", *(f"bf16.{name}" for name in _PURE)),
            names=("precision",), read=_precision, write=_say_precision,
        ),
        _above_one("tensor_parallel.autotp_size", "tp"),
        Correspondence(
            keys=("sequence_parallel_size",), names=("cp", "cp_kind"), read=_ulysses,
            write=lambda v: {"sequence_parallel_size": v["cp"]} if v.get("cp", 1) > 1 else {},
        ),
        table("optimizer.type", "optimizer", OPTIMIZERS),
        fixed({f"{ZERO}overlap_comm": True, f"{ZERO}contiguous_gradients": True}),
    ),
    idle=IDLE,
    idle_below=IDLE_BELOW,
    parse=parse_tree,
    render=render_json,
    recognises=lambda found: any(
        key.startswith("zero_optimization")
        or key in ("train_batch_size", "train_micro_batch_size_per_gpu")
        for key in found
    ),
    target=target_of,
    habits=_habits,
    unplanned=(
        "activation_checkpointing.", "amp.", "compile.", "hybrid_engine.", "weight_quantization.",
    ),
    by_script={"recompute": "model.gradient_checkpointing_enable() for full"},
)  # fmt: skip

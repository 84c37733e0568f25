"""DeepSpeed's JSON (0.19.8): `runtime/config.py`, `runtime/zero/config.py`, `offload_config.py`,
`runtime/tensor_parallel/config.py`, `runtime/precision_config.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.planner.frameworks.correspondence import (
    ConfigurationError,
    Correspondence,
    Format,
    Found,
    Values,
    fixed,
    said,
    states_away,
    stepped,
    switch,
    table,
)
from meshwright.planner.frameworks.texts import parse_tree, render_json

VERSION = "0.19.8"
ZERO = "zero_optimization."
OPTIMIZERS = {
    "AdamW": "adamw_fused", "Adam": "adamw_fused", "FusedAdam": "adamw_fused", "Lion": "lion",
    "Adagrad": "adagrad", "SGD": "sgd", "adamw": "adamw_fused", "adam": "adamw_fused",
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


def parts_away(states: Any, weights: Any, stage: int, ratio: float, place: str) -> Values:
    """Parts in host memory or files where optimizer states and weights are said to be on such
    devices. Below stage 3 only all states go away, to host memory, whatever else is said; at stage
    3 the weights that are stepped are with their states. Raises `ConfigurationError`."""
    states, weights = (None if each == "none" else each for each in (states, weights))
    if states is not None and stage == 0:
        raise ConfigurationError.refused(
            f"{place} of the optimizer", states, legal="none at stage 0, which divides no states",
            way_out="stage 1 moves them",
        )  # fmt: skip
    if states is None and (weights is None or stage < 3):
        return {}
    if states is None:
        raise ConfigurationError.refused(
            f"{place} of parameters", weights, legal="beside the optimizer's",
            way_out="send the optimizer's states there, too: weights alone are not planned",
        )  # fmt: skip
    if states not in ("cpu", "nvme"):
        raise ConfigurationError.refused(
            f"{place} of the optimizer", states, legal="none, cpu, nvme"
        )
    if stage == 3 and "nvme" in (states, weights):
        raise ConfigurationError.refused(
            f"{place} at stage 3", "nvme", legal="cpu",
            way_out="files under ZeRO-3 are not planned: price it with cpu",
        )  # fmt: skip
    if ratio != 1 and stage < 3:
        raise ConfigurationError.refused(
            f"{place}: ratio", ratio, legal="1.0 below stage 3, as DeepSpeed asks for"
        )
    return {"offload": {"optimizer": ratio}}


def _offload(found: Found) -> Values:
    states, weights = (found.get(f"{ZERO}offload_{of}.device") for of in ("optimizer", "param"))
    states = states or ("cpu" if switch(found, f"{ZERO}cpu_offload") else None)
    weights = weights or ("cpu" if switch(found, f"{ZERO}cpu_offload_param") else None)
    ratio = float(found.get(f"{ZERO}offload_optimizer.ratio", 1.0))
    stage = found.get(f"{ZERO}stage", 0)
    return parts_away(states, weights, stage, ratio, f"{ZERO}offload device")


def _say_offload(values: Values) -> Found:
    part = states_away(values)
    if not part or not values.get("zero"):
        return {}
    found: dict[str, Any] = {f"{ZERO}offload_optimizer.device": "cpu"}
    if values["zero"] == 3:
        found[f"{ZERO}offload_param.device"] = "cpu"  # as the weights are with their states
        if part < 1:
            found[f"{ZERO}offload_optimizer.ratio"] = part
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
    """Ulysses' degree. With both degrees DeepSpeed makes a mesh, whose data axis alone divides the
    states; with the one the script's mpu has groups of all ranks."""
    size, ranks = found.get("sequence_parallel_size", 1), found.get("data_parallel_size")
    if size <= 1:
        return {"cp": 1}
    values = {"cp": size, "cp_kind": "ulysses"}
    return values if ranks is None else {**values, "devices": ranks * size, "dp_shard": ranks}


def _rows(found: Found) -> Values:
    """Rows of a step: the batch counts those of each tensor-parallel rank, which are the same."""
    batch, tp = found.get("train_batch_size"), found.get("tensor_parallel.autotp_size", 1)
    if batch is None:
        return {}
    if batch % max(tp, 1):
        raise ConfigurationError.refused(
            "train_batch_size", batch, legal=f"multiples of autotp_size={tp}"
        )
    return {"global_batch_size": batch // max(tp, 1)}


def _habits(found: Found) -> tuple[str, ...]:
    notes = []
    if "gradient_clipping" not in found:
        clips = "DeepSpeed clips gradients at norm 1.0 where nothing is said: train with it, too"
        notes.append(clips)
    if (tp := found.get("tensor_parallel.autotp_size", 1)) > 1 and "train_batch_size" in found:
        notes.append(f"train_batch_size counts rows {tp} times, once for each tensor-parallel rank")
    if found.get("sequence_parallel_size", 1) > 1:
        notes.append(
            "with data_parallel_size no gradient is added up over the ranks of a sequence"
            if "data_parallel_size" in found
            else "sequence_parallel_size alone splits nothing: the script has to pass an mpu "
            "(UlyssesSPAttentionHF.register_with_transformers)"
        )
    return (*notes, *_habits_away(found))


def _habits_away(found: Found) -> Iterator[str]:
    states, weights = (f"{ZERO}offload_{of}.device" for of in ("optimizer", "param"))
    if found.get(f"{ZERO}stage", 0) < 3:
        if weights in found:
            yield "offload_param does nothing below stage 3"
        if found.get(states) == "nvme":
            yield "nvme below stage 3 is host memory there"
    elif found.get(states, "none") != "none" and found.get(weights, "none") == "none":
        yield (
            "without offload_param the weights' shards stay on the device, 2 bytes a parameter "
            "over the ranks, which are not counted here"
        )


DEEPSPEED = Format(
    name="deepspeed",
    version=VERSION,
    file="ds_config.json",
    table=(
        fixed({"_written_for": f"DeepSpeed {VERSION}"}),  # it takes what it does not know on top
        Correspondence(
            keys=("train_batch_size", "tensor_parallel.autotp_size"),
            names=("global_batch_size",), read=_rows,
            write=lambda v: {"train_batch_size": v["global_batch_size"] * (v.get("tp") or 1)},
        ),
        said("train_micro_batch_size_per_gpu", "microbatch_size"),
        said("gradient_accumulation_steps", "num_microbatches"),
        table(f"{ZERO}stage", "zero", {stage: stage for stage in range(4)}, left_out=0),
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
            keys=("sequence_parallel_size", "data_parallel_size"), names=("cp", "cp_kind"),
            read=_ulysses,
            write=lambda v: {"sequence_parallel_size": v["cp"]} if (v.get("cp") or 1) > 1 else {},
        ),
        stepped(
            "optimizer.type", OPTIMIZERS, "optimizer.params.momentum",
            {"optimizer.type": "SGD", "optimizer.params.momentum": 0.9},
        ),
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
    target=lambda values: "deepspeed",
    habits=_habits,
    unplanned=(
        "activation_checkpointing.", "amp.", "compile.", "hybrid_engine.", "weight_quantization.",
    ),
    lacks=lambda values: ("cp",) if (values.get("tp") or 1) > 1 else (),
    by_script={"recompute": "model.gradient_checkpointing_enable() for full"},
)  # fmt: skip

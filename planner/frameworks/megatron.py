"""Megatron-LM's flags (0.20, megatron-core 0.16.1: `training/arguments.py` and the dataclasses of
which flags are made) and Megatron-Bridge's YAML (0.7), whose fields have the same names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from meshwright.planner.frameworks.configuration import Shares
from meshwright.planner.frameworks.correspondence import (
    ConfigurationError,
    Correspondence,
    Format,
    Found,
    Values,
    idle_keys,
    switch,
    table,
)
from meshwright.planner.frameworks.texts import parse_flags, parse_yaml, render_flags, render_yaml

FSDP_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
COMMUNICATION = {
    "p2p": "ring",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "a2a": "ulysses",
}
SECTIONS = ("model", "train", "ddp", "optimizer", "dist")
OPTIMIZERS = {"adam": "adamw_fused", "sgd": "momentum", "lion": "lion"}
ENDS, PARTS_COUNTED = ("first", "last"), ("embedding", "loss")
PARTS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}  # of a layout, by name


# --- pipeline layouts ----------------------------------------------------------------------------


def layers_of_layout(layout: str | list[list[str]], place: str) -> list[int]:
    """Layers of each stage of a layout: E the embedding, t a layer, L the loss, | the next stage,
    (..)*n and x*n repeated, commas for the eye; or of lists of names, one a stage."""
    refused = partial(
        ConfigurationError.refused, place, layout, legal="E, t, L, |, ( )*n: 'E|(t|)*3L'"
    )
    if isinstance(layout, list):
        if not all(isinstance(stage, list) and {*stage} <= {*PARTS} for stage in layout):
            raise refused(way_out=f"lists of {', '.join(PARTS)}, one a stage")
        text = "|".join("".join(PARTS[name] for name in stage) for stage in layout)
    else:
        text = str(layout).replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
        if len(text) > MOST_LETTERS:
            raise refused()
    if re.search(r"[^EtL|]", text):
        raise refused(way_out="multi-token prediction (m) is not planned" if "m" in text else "")
    if text[:1] != "E" or text[-1:] != "L" or text.count("E") != 1 or text.count("L") != 1:
        raise refused(way_out="E once, first; L once, last")
    return [stage.count("t") for stage in text.split("|")]


MOST_LETTERS = 10_000


def layout_of(layers: list[int]) -> str:
    """A layout with so many layers on each stage."""
    stages = ["t" * min(count, 1) + (f"*{count}" if count > 1 else "") for count in layers]
    return "E" + "|".join(stages) + "L"


# --- groups of flags -----------------------------------------------------------------------------


def _pipeline(found: Found) -> Values:
    pp = found.get("pipeline_model_parallel_size", 1)
    values: dict[str, Any] = {"pp": pp}
    if "num_layers" in found:
        values["num_layers"] = found["num_layers"]
    if pp == 1:
        return values
    stages = found.get("num_virtual_stages_per_pipeline_rank") or found.get(
        "virtual_pipeline_model_parallel_size"
    )
    less = tuple(int(switch(found, f"account_for_{of}_in_pipeline_split")) for of in PARTS_COUNTED)
    each, layers = found.get("num_layers_per_virtual_pipeline_stage"), found.get("num_layers")
    if each is not None:
        if layers is None or (layers + sum(less)) % (pp * each):
            raise ConfigurationError.refused(
                "num_layers_per_virtual_pipeline_stage", each,
                legal="with num_layers, a multiple of pp × it with what is accounted for",
            )  # fmt: skip
        stages = (layers + sum(less)) // (pp * each)
    ends = [found.get(f"decoder_{end}_pipeline_num_layers") for end in ENDS]
    values["layers"] = Shares(first=ends[0], last=ends[1], less=less, chunks=stages or 1)
    if layout := found.get("pipeline_model_parallel_layout"):
        values["layers"] = layers_of_layout(layout, "pipeline_model_parallel_layout")
        if len(values["layers"]) % pp:
            raise ConfigurationError.refused(
                "pipeline_model_parallel_layout", layout, legal=f"stages of a multiple of pp={pp}"
            )
        stages = len(values["layers"]) // pp
    values["virtual_stages"] = stages or 1
    values["schedule"] = "interleaved_1f1b" if (stages or 1) > 1 else "1f1b"
    return values


def _say_pipeline(values: Values) -> Found:
    pp, stages = values.get("pp") or 1, values.get("virtual_stages") or 1
    found: dict[str, Any] = {"pipeline_model_parallel_size": pp}
    if pp == 1:
        return found
    layers = values["layers"]
    if len({*layers}) > 1:
        return found | {"pipeline_model_parallel_layout": layout_of(layers)}
    if stages > 1:
        found["num_virtual_stages_per_pipeline_rank"] = stages
    return found


def _zero(found: Found) -> Values:
    """ZeRO: 1 for the distributed optimizer, Megatron's FSDP by strategy, 3 for torch's FSDP2."""
    if switch(found, "use_torch_fsdp2"):
        return {"zero": 3}
    if found.get("use_megatron_fsdp") or found.get("use_custom_fsdp"):
        strategy = found.get("data_parallel_sharding_strategy", "no_shard")
        if strategy not in FSDP_STAGES:
            raise ConfigurationError.refused(
                "data_parallel_sharding_strategy", strategy, legal=FSDP_STAGES
            )
        return {"zero": FSDP_STAGES[strategy], **_instances(found)}
    if not switch(found, "use_distributed_optimizer"):
        return {"zero": 0}
    return {"zero": 1, **_instances(found)}


def _instances(found: Found) -> Values:
    """Groups of ranks that each divide the states among themselves."""
    copies = found.get("num_distributed_optimizer_instances", 1)
    return {"instances": copies} if copies > 1 else {}


def _say_zero(values: Values) -> Found:
    zero = values.get("zero") or 0
    if not zero:
        return {"overlap_grad_reduce": True} if values["dp"] > 1 else {}
    found: dict[str, Any] = {}
    if among := values.get("dp_shard"):
        ranks = values["dp"] * (values.get("cp") or 1)
        found["num_distributed_optimizer_instances"] = ranks // among
    if zero == 1:
        names = "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"
        return {**dict.fromkeys(names, True), **found}
    name = next(name for name, stage in FSDP_STAGES.items() if stage == zero)
    return {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": name,
            "ckpt_format": "fsdp_dtensor", **found}  # fmt: skip


def _recompute(found: Found) -> Values:
    kind = found.get("recompute_granularity")
    if switch(found, "recompute_activations"):
        kind = kind or "selective"
    if kind is None:
        return {"recompute": "none"}
    if kind == "selective":
        modules = found.get("recompute_modules") or ["core_attn"]
        modules = [modules] if isinstance(modules, str) else modules
        unknown = [name for name in modules if name != "core_attn"]
        if unknown:
            raise ConfigurationError.refused(
                "recompute_modules", unknown, legal="core_attn",
                way_out="other modules have no policy here: leave them out, or take full",
            )  # fmt: skip
        return {"recompute": "selective"}
    if kind != "full":
        raise ConfigurationError.refused("recompute_granularity", kind, legal="full, selective")
    method, count = found.get("recompute_method"), found.get("recompute_num_layers")
    if method == "uniform":
        return {"recompute": "full", "segments": count or 1}
    if method == "block":
        if not isinstance(count, int) or count < 1:
            raise ConfigurationError.refused("recompute_num_layers", count, legal="from 1")
        return {"recompute": ("full", count)}
    raise ConfigurationError.refused("recompute_method", method, legal="uniform, block")


def _say_recompute(values: Values) -> Found:
    policy = values.get("recompute") or "none"
    if policy == "none":
        return {}
    if policy == "selective":
        return {"recompute_granularity": "selective"}
    if isinstance(policy, tuple):
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": policy[1],
        }
    size = values.get("segments") or 1
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": size,
    }


RECIPES = {
    "tensorwise": "fp8", "delayed": "fp8", "mxfp8": "mxfp8", "blockwise": "fp8_rowwise",
}  # fmt: skip
MIXED = {  # of Bridge, by name
    "bf16_mixed": "bf16", "fp16_mixed": "fp16", "bf16_with_fp8_delayed_scaling_mixed": "fp8",
    "bf16_with_fp8_current_scaling_mixed": "fp8", "bf16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8_rowwise", "bf16_with_nvfp4_mixed": "nvfp4",
}  # fmt: skip


def _precision(found: Found) -> Values:
    """Bf16, fp16 or fp32, and products in 8 or 4 bits by whichever key says so."""
    if (name := found.get("mixed_precision")) is not None:
        if name not in MIXED:
            raise ConfigurationError.refused("mixed_precision", name, legal=MIXED)
        return {"precision": MIXED[name]}
    kinds = [kind for kind in ("bf16", "fp16") if switch(found, kind)]
    if len(kinds) > 1:
        raise ConfigurationError.refused("bf16 and fp16", True, legal="one of the two")
    if found.get("fp4") or found.get("fp4_format"):
        return {"precision": "nvfp4"}
    if found.get("fp8") or found.get("fp8_format"):
        recipe = found.get("fp8_recipe", "delayed")
        if recipe not in RECIPES:
            raise ConfigurationError.refused("fp8_recipe", recipe, legal=RECIPES)
        return {"precision": RECIPES[recipe]}
    return {"precision": kinds[0] if kinds else "fp32"}


def _say_precision(values: Values) -> Found:
    precision = values.get("precision", "fp32")
    recipes = {"fp8": "tensorwise", "mxfp8": "mxfp8", "fp8_rowwise": "blockwise"}
    if precision in recipes:
        return {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": recipes[precision]}
    if precision == "nvfp4":
        return {"bf16": True, "fp4_format": "e2m1"}
    return {precision: True} if precision in ("bf16", "fp16") else {}


def _mixed(found: Found) -> Values:
    """Precision in Bridge, whose recipes have bf16 where nothing is said."""
    plain = {} if "bf16" in found or found.get("fp16") else {"bf16": True}
    return _precision({**plain, **found})


def _say_mixed(values: Values) -> Found:
    names = {ours: theirs for theirs, ours in reversed(MIXED.items())}
    name = {**names, "fp8": "bf16_with_fp8_current_scaling_mixed"}.get(
        values.get("precision", "fp32")
    )
    return {"mixed_precision": name} if name else {}


def _cp(found: Found) -> Values:
    size = found.get("context_parallel_size", 1)
    if size == 1:
        return {"cp": 1}
    kind = found.get("cp_comm_type", "p2p")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind not in COMMUNICATION:
        raise ConfigurationError.refused("cp_comm_type", kind, legal=COMMUNICATION)
    return {"cp": size, "cp_kind": COMMUNICATION[kind]}


def _say_cp(values: Values) -> Found:
    if (values.get("cp") or 1) == 1:
        return {}
    back = {ours: theirs for theirs, ours in reversed(COMMUNICATION.items())}
    return {
        "context_parallel_size": values["cp"],
        "cp_comm_type": back[values.get("cp_kind") or "ring"],
    }


def _placement(found: Found) -> Values:
    return {"placement": "tp,pp,dp" if switch(found, "use_tp_pp_dp_mapping") else "tp,dp,pp"}


def _say_placement(values: Values) -> Found:
    return {"use_tp_pp_dp_mapping": True} if values.get("placement") == "tp,pp,dp" else {}


UNPLANNED = (
    "optimizer_cpu_offload", "cpu_offloading", "fine_grained_activation_offloading",
    "expert_tensor_parallel_size", "use_precision_aware_optimizer", "exp_avg_dtype",
    "exp_avg_sq_dtype", "main_params_dtype", "rampup_batch_size", "outer_dp_sharding_strategy",
    "mtp_num_layers", "grad_reduce_in_bf16",
)  # fmt: skip


def _habits(found: Found) -> tuple[str, ...]:
    keys = {key.rpartition(".")[2]: value for key, value in found.items()}
    if keys.get("tensor_model_parallel_size", 1) == 1 or keys.get("sequence_parallel"):
        return ()
    return ("sequence parallelism is not asked for; prices have it beside tp",)


def _target(values: Values) -> str:
    return "megatron-moe" if (values.get("ep") or 1) > 1 else "megatron"


DEGREES = (
    "tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "pipeline_model_parallel_size",
)  # fmt: skip
OF_PIPELINE = (
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "num_layers",
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)  # fmt: skip
OF_ZERO = (
    "use_distributed_optimizer", "num_distributed_optimizer_instances", "use_megatron_fsdp",
    "use_custom_fsdp", "use_torch_fsdp2", "data_parallel_sharding_strategy", "overlap_grad_reduce",
    "overlap_param_gather",
)  # fmt: skip
OF_RECOMPUTE = (
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
    "recompute_activations",
)  # fmt: skip
NAMES = {
    *DEGREES, *OF_PIPELINE, *OF_ZERO, *OF_RECOMPUTE, "cp_comm_type", "micro_batch_size",
    "global_batch_size", "bf16", "fp16", "fp8", "fp8_recipe", "optimizer", "use_tp_pp_dp_mapping",
    "sequence_parallel", "hidden_size", "seq_length",
}  # fmt: skip
PRECISION = ("bf16", "fp16", "fp8", "fp8_format", "fp8_recipe", "fp4", "fp4_format",
             "mixed_precision")  # fmt: skip
MIXED_IDLE = (  # fields of Bridge's section beside those
    "autocast_dtype", "autocast_enabled", "enable_autocast", "first_last_layers_bf16",
    "fp4_param", "fp4_param_gather", "fp4_recipe", "fp8_amax_compute_algo", "fp8_amax_history_len",
    "fp8_dot_product_attention", "fp8_margin", "fp8_multi_head_attention", "fp8_param",
    "fp8_param_gather", "fp8_wgrad", "grad_reduce_in_fp32", "hysteresis", "initial_loss_scale",
    "loss_scale", "loss_scale_window", "min_loss_scale", "num_layers_at_end_in_bf16",
    "num_layers_at_start_in_bf16", "params_dtype", "pipeline_dtype",
    "reuse_grad_buf_for_mxfp8_param_ag",
)  # fmt: skip
NOTHING: Found = {}
ReadWrite: TypeAlias = tuple[Callable[[Found], Values], Callable[[Values], Found]]


def _table(
    of: Callable[[str], Sequence[str]],
    precision: ReadWrite,
    recipe: Found = NOTHING,
    off: Found = NOTHING,
) -> tuple[Correspondence, ...]:
    """The correspondences, each key being where `of` says that it may be in a format, the first of
    which counts and is written. A `recipe` has values of keys that a file leaves out; `off` what is
    written of keys that say nothing, as the recipe may say more."""

    def group(
        keys: tuple[str, ...],
        names: tuple[str, ...],
        read: Callable[[Found], Values],
        write: Callable[[Values], Found],
    ) -> Correspondence:
        where = {key: of(key) for key in keys}
        taken = {key: value for key, value in recipe.items() if key in keys}

        def reads(found: Found) -> Values:
            said = {
                key: found[at]
                for key, places in where.items()
                for at in places[::-1]
                if at in found
            }
            return read({**taken, **said})

        def writes(values: Values) -> Found:
            said = {**{key: off[key] for key in keys if key in off}, **write(values)}
            return {of(key)[0]: value for key, value in said.items()}

        places = tuple(at for each in where.values() for at in each)
        return Correspondence(keys=places, names=names, read=reads, write=writes)

    def degree(key: str, name: str, left_out: int | None = 1) -> Correspondence:
        return table(of(key)[0], name, {}, left_out=left_out)

    return (
        degree("tensor_model_parallel_size", "tp"),
        degree("expert_model_parallel_size", "ep"),
        group(("context_parallel_size", "cp_comm_type"), ("cp", "cp_kind"), _cp, _say_cp),
        group(
            OF_PIPELINE, ("pp", "virtual_stages", "schedule", "layers"), _pipeline, _say_pipeline
        ),
        degree("micro_batch_size", "microbatch_size", None),
        degree("global_batch_size", "global_batch_size", None),
        group(OF_ZERO, ("zero", "instances", "dp_shard"), _zero, _say_zero),
        group(OF_RECOMPUTE, ("recompute", "segments"), _recompute, _say_recompute),
        group(PRECISION, ("precision",), *precision),
        table(of("optimizer")[0], "optimizer", OPTIMIZERS, left_out="adam"),
        group(("use_tp_pp_dp_mapping",), ("placement",), _placement, _say_placement),
        group(("hidden_size", "seq_length"), (), dict, lambda values: {}),
        group(
            ("sequence_parallel",),
            (),
            lambda found: {},
            lambda v: {"sequence_parallel": True} if (v.get("tp") or 1) > 1 else {},
        ),
    )


_IN_BRIDGE = {
    **dict.fromkeys(("micro_batch_size", "global_batch_size"), ("train.{}",)),
    **dict.fromkeys(OF_ZERO, ("ddp.{}",)),
    "use_distributed_optimizer": ("ddp.{}", "optimizer.{}"),
    "use_megatron_fsdp": ("ddp.{}", "dist.{}"),
    **dict.fromkeys(PRECISION, ("mixed_precision.{}", "model.{}")),
    "mixed_precision": ("mixed_precision",),
    "optimizer": ("optimizer.{}",), "use_tp_pp_dp_mapping": ("dist.{}",),
    "ckpt_format": ("checkpoint.{}",),
    "decoder_first_pipeline_num_layers": ("model.num_layers_in_first_pipeline_stage",),
    "decoder_last_pipeline_num_layers": ("model.num_layers_in_last_pipeline_stage",),
    "num_virtual_stages_per_pipeline_rank": ("model.virtual_pipeline_model_parallel_size",),
}  # fmt: skip


def _flag(key: str) -> tuple[str, ...]:
    return (key,)


def _bridge(key: str) -> tuple[str, ...]:
    """A flag as a field of sections of Bridge's, of which the first counts."""
    return tuple(place.format(key) for place in _IN_BRIDGE.get(key, ("model.{}",)))


RECIPE = {"use_distributed_optimizer": True}  # of Bridge's, which a file overrides


OFF: Found = {
    "use_distributed_optimizer": False, "num_distributed_optimizer_instances": 1,
    "use_megatron_fsdp": False, "context_parallel_size": 1, "cp_comm_type": None,
    "virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_layout": None,
    "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
    "sequence_parallel": False, "use_tp_pp_dp_mapping": False,
}  # fmt: skip


def _habits_of_bridge(found: Found) -> tuple[str, ...]:
    asked = {
        "bf16": PRECISION,
        **{name: (name,) for name in (*RECIPE, *DEGREES, "recompute_granularity")},
    }
    silent = [
        name
        for name, keys in asked.items()
        if not any(place in found for key in keys for place in _bridge(key))
    ]
    listed = ", ".join(silent)
    taken = (
        "the recipe may say more; taken here: bf16, the distributed optimizer, degrees of 1 and no "
        f"recompute, as the file is silent of {listed}",
    )
    return *_habits(found), *(taken if silent else ())


ARGUMENTS = Format(
    name="megatron",
    version="0.16.1",
    file="megatron.args",
    table=_table(_flag, (_precision, _say_precision)),
    idle=idle_keys("megatron"),
    parse=parse_flags,
    render=render_flags,
    unplanned=UNPLANNED,
    habits=_habits,
    recognises=lambda found: "micro_batch_size" in found or "tensor_model_parallel_size" in found,
    target=_target,
)
BRIDGE = Format(
    name="megatron-bridge",
    version="0.7.0",
    file="bridge.yaml",
    table=_table(_bridge, (_mixed, _say_mixed), RECIPE, OFF),
    idle=[
        *(f"{section}.{key}" for section in SECTIONS for key in idle_keys("megatron") - NAMES),
        *(f"mixed_precision.{key}" for key in MIXED_IDLE),
    ],
    idle_below=("logger", "checkpoint", "dataset", "tokenizer", "rng", "scheduler", "validation",
                "profiling", "comm_overlap", "rerun_state_machine", "ft", "straggler"),
    parse=parse_yaml,
    render=render_yaml,
    unplanned=[f"{section}.{key}" for section in SECTIONS for key in UNPLANNED],
    habits=_habits_of_bridge,
    recognises=lambda found: any(key.startswith("model.") for key in found),
    target=_target,
)  # fmt: skip

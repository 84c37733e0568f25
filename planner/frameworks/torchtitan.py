"""torchtitan's configurations: a Python function that returns a `Trainer.Config` (0.3.0:
`config/configs.py`), read as text, and the TOML of before."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from itertools import accumulate
from typing import Any

from meshwright.planner.frameworks.configuration import Shares
from meshwright.planner.frameworks.correspondence import (
    ConfigurationError,
    Correspondence,
    Format,
    Found,
    Values,
    said,
    states_away,
    table,
)
from meshwright.planner.frameworks.texts import parse_toml

AXES = "parallelism."
SCHEDULES = {
    "1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved_1f1b",
    "ZBVZeroBubble": "zb_v", "DualPipeV": "dualpipe_v",
}  # fmt: skip
LOOPED = {"interleaved_1f1b": 2}  # stages of a rank where no number is given
PLACED = {"zb_v": 2, "dualpipe_v": 2}
CHECKPOINTS = {"none": "none", "full": "full", "selective": "alternate"}
CHECKPOINT = "activation_checkpoint."
CLASSES = {"FullAC": "full", "SelectiveAC": "selective", None: "none"}
PLAIN_LINES = ast.Assign | ast.Return | ast.Expr | ast.Assert | ast.Import | ast.ImportFrom
LOCAL = "training.local_batch_size"
ENDS = ("first", "last")
SECTIONS = ("training", "parallelism", "compile", "activation_checkpoint", "loss")
CHANGES = ("converters",)  # of a model's operators


# --- Python --------------------------------------------------------------------------------------


def parse_python(text: str, place: str) -> dict[str, Any]:
    """The keys that a function of a file sets, and those that it begins with. The place may name
    it, FILE.py:FUNCTION; else it is the only one. Nothing is run: values are literals."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f": {error}", place=place, legal="Python") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    _, colon, name = place.rpartition(".py:")
    if not colon:
        names = [name for name in functions if not name.startswith("_")]
        if len(names) != 1:
            raise ConfigurationError(
                f"has the functions {', '.join(names) or 'none'}", place=place,
                legal="one, or FILE.py:FUNCTION", way_out="name the one that returns the Config",
            )  # fmt: skip
        name = names[0]
    return _set_by(name, functions, place, ())


def _set_by(
    name: str, functions: dict[str, ast.FunctionDef], place: str, before: tuple[str, ...]
) -> dict[str, Any]:
    """The keys that a function sets of what it returns, or of its parameters."""
    if name not in functions or name in before:
        raise ConfigurationError(
            f"has no function {name!r}", place=place, legal=functions, way_out="name one of these"
        )
    found: dict[str, Any] = {}
    lines, at = functions[name].body, f"{place}: {name}"
    returned = {
        node.value.id
        for node in lines
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    known = returned | {argument.arg for argument in functions[name].args.args}

    def made(call: ast.Call) -> dict[str, Any] | None:
        """Keys of a configuration that a call gives; None of what is none."""
        if isinstance(call.func, ast.Name) and call.func.id in functions:
            keys: dict[str, Any] = {}
            for given in (*call.args, *(keyword.value for keyword in call.keywords)):
                base = made(given) if isinstance(given, ast.Call) else None
                if base is None and ast.unparse(given) not in known:
                    raise _line_error(call, at, f"gives {ast.unparse(given)[:60]!r} to a function")
                keys |= base or {}
            return keys | _set_by(call.func.id, functions, place, (*before, name))
        if ast.unparse(call.func).split(".")[-1] != "Config":
            return None
        sections = (_section(k.arg or "", k.value, place) for k in call.keywords)
        return {key: value for section in sections for key, value in section.items()}

    for node in lines:
        _check_line(node, at, known)
        value = getattr(node, "value", None)
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and value is not None:
            path = ast.unparse(target).split(".", 1)[1]
            if path in SECTIONS:  # whole: nothing of what was there stays
                found = {k: each for k, each in found.items() if not k.startswith(f"{path}.")}
            found |= _section(path, value, place)
        elif isinstance(value, ast.Call):
            keys = made(value)
            if keys is None and (target is None or ast.unparse(target) in returned):
                raise _line_error(node, at, f"begins with {ast.unparse(value.func)[:60]}()")
            found |= keys or {}
    return found


def _check_line(node: ast.stmt, at: str, known: set[str]) -> None:
    """Raise for a line that may set what is not seen here."""
    calls = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    if calls or not isinstance(node, PLAIN_LINES):
        raise _line_error(node, at, "is no assignment")
    if not isinstance(node, ast.Assign):
        return
    if len(node.targets) > 1:
        raise _line_error(node, at, "sets several things at once")
    target, value = node.targets[0], node.value
    root = ast.unparse(target).split(".")[0]
    if isinstance(target, ast.Attribute) and root not in known:
        raise _line_error(node, at, f"sets an attribute of {root}, which is not returned")
    of = ast.unparse(value).split(".")[0]
    if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and of in known:
        raise _line_error(node, at, f"names a part of {of}")


def _line_error(node: ast.stmt | ast.expr, at: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f": line {node.lineno} {what}", place=at,
        legal="assignments to fields of what is returned, which Trainer.Config(...) or a function "
        "of the file makes", way_out="write out what it sets; nothing is run or imported",
    )  # fmt: skip


def _section(path: str, value: ast.expr, place: str) -> dict[str, Any]:
    """Keys of a section that a call makes, or the key that a literal is of."""
    if path == "model_spec" and isinstance(value, ast.Call):
        return {f"{path}.{k.arg}": ast.unparse(k.value) for k in value.keywords if k.arg in CHANGES}
    if path == "loss" and isinstance(value, ast.Call):
        chunked = "ChunkedLossWrapper" in ast.unparse(value.func)
        given = {k.arg: k.value for k in value.keywords}
        count = given.get("num_chunks", ast.Constant(8))
        return _section("loss.num_chunks", count, place) if chunked else {}
    if path.split(".")[0] not in SECTIONS:
        return {}
    if path == "activation_checkpoint":
        of = value.func if isinstance(value, ast.Call) else value
        name = ast.unparse(of).removesuffix(".Config").split(".")[-1]
        known = None if name == "None" else name
        if known not in CLASSES:
            raise ConfigurationError.refused(f"{place}: {path}", name, legal=CLASSES)
        return {"activation_checkpoint.mode": CLASSES[known]}
    if isinstance(value, ast.Call) and "." not in path:
        if value.args or any(keyword.arg is None for keyword in value.keywords):
            raise ConfigurationError(
                " is called with what is no keyword", place=f"{place}: {path}", legal="keywords"
            )
        parts = [_section(f"{path}.{k.arg}", k.value, place) for k in value.keywords]
        return {key: at for part in parts for key, at in part.items()}
    try:
        return {path: ast.literal_eval(value)}
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise ConfigurationError(
            f" = {ast.unparse(value)[:60]}", place=f"{place}: {path}", legal="a literal",
            way_out="write the value; nothing of the file is run",
        ) from None  # fmt: skip


def render_python(found: Found) -> str:
    """A function for `--module` and `--config`, which leaves the rest of its argument as it is."""
    rest = {**found}
    mode = rest.pop("activation_checkpoint.mode", "none")
    made = {"full": "FullAC", "selective": "SelectiveAC"}.get(mode)
    lines = []
    if made:
        lines = [f"from torchtitan.distributed.activation_checkpoint import {made}", "", ""]
    lines += ["def planned(base):", '    """A `Trainer.Config` of a model, as planned."""']
    for key, value in rest.items():
        if isinstance(value, list):  # of lists of names
            rows = (f"        {json.dumps(row)}," for row in value)
            lines += [f"    base.{key} = [", *rows, "    ]"]
        else:
            lines.append(f"    base.{key} = {_literal(value)}")
    lines.append(f"    base.activation_checkpoint = {f'{made}.Config()' if made else None}")
    return "\n".join([*lines, "    return base"]) + "\n"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def parse(text: str, place: str) -> dict[str, Any]:
    """The keys of Python, or of TOML, of which selective checkpoints are of layers by default."""
    if not place.endswith(".toml"):
        return parse_python(text, place)
    return {f"{CHECKPOINT}selective_ac_option": "2", **parse_toml(text, place)}


# --- the table -----------------------------------------------------------------------------------


def _pipeline(found: Found) -> Values:
    """Groups, stages and micro-batches: `local_batch_size` rows of a rank are one pass through the
    pipeline, in micro-batches of so many, or of so many passes a step without one."""
    pp = found.get(f"{AXES}pipeline_parallel_degree", 1)
    if pp == 1:
        return {"pp": 1, "microbatch_size": found["training.local_batch_size"]}
    name = found.get(f"{AXES}pipeline_parallel_schedule", "1F1B")
    if name not in SCHEDULES:
        raise ConfigurationError.refused(f"{AXES}pipeline_parallel_schedule", name, legal=SCHEDULES)
    if csv := found.get(f"{AXES}pipeline_parallel_schedule_csv"):
        raise ConfigurationError.refused(
            f"{AXES}pipeline_parallel_schedule_csv", csv, legal="a schedule by name"
        )
    schedule = SCHEDULES[name]
    values: dict[str, Any] = {"pp": pp, "schedule": schedule}
    values["virtual_stages"] = LOOPED.get(schedule) or PLACED.get(schedule) or 1
    if each := found.get(f"{AXES}pipeline_parallel_layers_per_stage"):
        raise ConfigurationError.refused(
            f"{AXES}pipeline_parallel_layers_per_stage", each, legal=None,
            way_out="name the stages' modules: module_fqns_per_model_part",
        )  # fmt: skip
    ends = (found.get(f"{AXES}pipeline_parallel_{end}_stage_less_layers", 1) for end in ENDS)
    values["layers"] = Shares(less=tuple(ends))
    if parts := found.get(f"{AXES}module_fqns_per_model_part"):
        values["layers"] = [sum(".layers." in f".{n}" for n in part) for part in parts]
        values["virtual_stages"] = len(parts) // pp
    rows, local = found.get(f"{AXES}pipeline_parallel_microbatch_size", 1), found[LOCAL]
    if local % rows:
        raise ConfigurationError.refused(
            f"{AXES}pipeline_parallel_microbatch_size", rows, legal=f"divisors of {LOCAL}={local}"
        )
    values["microbatch_size"] = rows
    return values


def _say_pipeline(values: Values) -> Found:
    pp, rows = values.get("pp") or 1, values["microbatch_size"]
    if pp == 1:
        return {"training.local_batch_size": rows}
    back = {ours: theirs for theirs, ours in SCHEDULES.items()}
    found: dict[str, Any] = {
        "training.local_batch_size": rows * values["num_microbatches"],
        f"{AXES}pipeline_parallel_degree": pp,
        f"{AXES}pipeline_parallel_microbatch_size": rows,
        f"{AXES}pipeline_parallel_schedule_csv": "",
        f"{AXES}pipeline_parallel_layers_per_stage": None,
    }
    if values.get("schedule") in back:
        found[f"{AXES}pipeline_parallel_schedule"] = back[values["schedule"]]
    ends, parts = list(accumulate(values["layers"])), []
    for count, end in zip(values["layers"], ends, strict=True):
        parts.append([f"layers.{k}" for k in range(end - count, end)])
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return found | {f"{AXES}module_fqns_per_model_part": parts}


def _batch(found: Found) -> Values:
    size = found.get("training.global_batch_size", -1)
    if size > 0:
        return {"global_batch_size": size}
    pipeline = found.get(f"{AXES}pipeline_parallel_degree", 1) > 1
    each = found.get(f"{AXES}pipeline_parallel_microbatch_size", 1)
    return {"num_microbatches": found["training.local_batch_size"] // each if pipeline else 1}


def _shards(found: Found) -> Values:
    replicas = found.get(f"{AXES}data_parallel_replicate_degree", 1)
    shards = found.get(f"{AXES}data_parallel_shard_degree", -1)
    again = found.get(f"{AXES}fsdp_reshard_after_forward", "default")
    if shards != -1 and shards < 1:
        key = f"{AXES}data_parallel_shard_degree"
        raise ConfigurationError.refused(key, shards, legal="-1, or from 1")
    legal = ("default", "always", "never")
    if again not in legal:
        raise ConfigurationError.refused(f"{AXES}fsdp_reshard_after_forward", again, legal=legal)
    pipeline = found.get(f"{AXES}pipeline_parallel_degree", 1) > 1
    kept = again == "never" or (again == "default" and pipeline)
    cp = found.get(f"{AXES}context_parallel_degree", 1)
    zero = 0 if shards * cp == 1 else 2 if kept else 3
    values: dict[str, Any] = {"zero": zero, "replicas": replicas}
    return values | ({"shards": shards} if shards > 0 else {})


def _say_shards(values: Values) -> Found:
    dp, cp, zero = values["dp"], values.get("cp") or 1, values.get("zero") or 0
    shard = (values.get("dp_shard") or dp * cp) // cp if zero else 1
    found = {
        f"{AXES}data_parallel_replicate_degree": dp // shard,
        f"{AXES}data_parallel_shard_degree": shard,
    }
    if zero:
        found[f"{AXES}fsdp_reshard_after_forward"] = "always" if zero == 3 else "never"
    return found


def _precision(found: Found) -> Values:
    kept, used = (
        found.get("training.dtype", "float32"),
        found.get("training.mixed_precision_param", "bfloat16"),
    )
    known = {"bfloat16": "bf16", "float32": "fp32"}
    for key, value in (("dtype", kept), ("mixed_precision_param", used)):
        if value not in known:
            raise ConfigurationError.refused(f"training.{key}", value, legal=known)
    return {"precision": "bf16_pure" if kept == "bfloat16" else known[used]}


def _say_precision(values: Values) -> Found:
    precision = values.get("precision")
    kept = "bfloat16" if precision == "bf16_pure" else "float32"
    used = "float32" if precision == "fp32" else "bfloat16"
    return {"training.dtype": kept, "training.mixed_precision_param": used}


_CHECKPOINTS = table(f"{CHECKPOINT}mode", "recompute", CHECKPOINTS, left_out="selective")


def _checkpoints(found: Found) -> Values:
    """Recompute: selective is of operators, or of every so many-th layer, whole."""
    option = str(found.get(f"{CHECKPOINT}selective_ac_option", "op"))
    if found.get(f"{CHECKPOINT}mode", "selective") != "selective" or option == "op":
        return _CHECKPOINTS.read(found)
    if not option.isdecimal() or not int(option):
        raise ConfigurationError.refused(
            f"{CHECKPOINT}selective_ac_option", option, legal="op, or a number from 1"
        )
    every = int(option)
    return {"recompute": ("full", (every - 1, every)) if every > 1 else "full"}


def _habits(found: Found) -> tuple[str, ...]:
    batch = found.get("training.global_batch_size", -1)
    if found.get(f"{AXES}pipeline_parallel_degree", 1) == 1 or batch <= 0:
        return ()
    return ("passes through the pipeline follow each other there; here they are one, without gaps",)


def _degree(key: str, name: str) -> Correspondence:
    return table(f"{AXES}{key}", name, {}, left_out=1)


TORCHTITAN = Format(
    name="torchtitan",
    version="0.3.0",
    file="torchtitan_config.py",
    table=(
        Correspondence(
            keys=("training.global_batch_size", "training.local_batch_size",
                  f"{AXES}pipeline_parallel_microbatch_size", f"{AXES}pipeline_parallel_degree"),
            names=("global_batch_size", "num_microbatches"), read=_batch,
            write=lambda v: {"training.global_batch_size": v["global_batch_size"]},
            left_out={"training.local_batch_size": 8},
        ),
        Correspondence(
            keys=(
                "training.local_batch_size",
                *(f"{AXES}pipeline_parallel_{name}" for name in (
                    "degree", "schedule", "schedule_csv", "microbatch_size",
                    "first_stage_less_layers", "last_stage_less_layers", "layers_per_stage",
                )),
                f"{AXES}module_fqns_per_model_part",
            ),
            names=("pp", "schedule", "virtual_stages", "microbatch_size", "layers"),
            read=_pipeline, write=_say_pipeline, left_out={"training.local_batch_size": 8},
        ),
        Correspondence(
            keys=tuple(AXES + name for name in (
                "data_parallel_replicate_degree", "data_parallel_shard_degree",
                "fsdp_reshard_after_forward", "pipeline_parallel_degree", "context_parallel_degree",
            )),
            names=("zero", "replicas", "shards", "dp", "dp_shard"), read=_shards, write=_say_shards,
        ),
        said("training.seq_len", "seq_length"),
        _degree("tensor_parallel_degree", "tp"),
        _degree("context_parallel_degree", "cp"),
        _degree("expert_parallel_degree", "ep"),
        Correspondence(
            keys=("training.dtype", "training.mixed_precision_param"), names=("precision",),
            read=_precision, write=_say_precision,
        ),
        Correspondence(
            keys=(f"{CHECKPOINT}mode", f"{CHECKPOINT}selective_ac_option"),
            names=("recompute",), read=_checkpoints, write=_CHECKPOINTS.write,
        ),
        replace(
            said("loss.num_chunks", "chunked_loss"),
            write=lambda v: (
                {"loss.num_chunks": v["chunked_loss"]} if (v.get("chunked_loss") or 1) > 1 else {}
            ),
        ),
        Correspondence(
            keys=("training.enable_cpu_offload",), names=("offload",),
            read=lambda found: {"offload": {"optimizer": 1.0}} if any(found.values()) else {},
            # off, too, as what it is set on may have it on
            write=lambda v: {"training.enable_cpu_offload": states_away(v) > 0},
        ),
        Correspondence(  # which it refuses beside these
            keys=("training.disable_cuda_graphs",), names=(), read=lambda found: {},
            write=lambda v: (
                {"training.disable_cuda_graphs": True}
                if max(v.get("pp") or 1, v.get("ep") or 1) > 1 else {}
            ),
        ),
        replace(
            said("compile.enable", "compiled", left_out=False),
            write=lambda v: {"compile.enable": bool(v.get("compiled"))},
        ),
    ),
    idle=frozenset({
        "training.steps", "training.max_norm", "training.gc_freq",
        "training.gc_debug", "training.mixed_precision_reduce",
        "training.dataset", "training.warmup_steps", "training.seed", "training.deterministic",
        "training.data_parallel_replicate_degree",
        f"{AXES}enable_sequence_parallel", f"{AXES}enable_fsdp_symm_mem", f"{AXES}spmd_backend",
        f"{AXES}context_parallel_load_balancer", f"{AXES}context_parallel_ptrr_mask_key",
        f"{AXES}enable_async_tensor_parallel", f"{AXES}context_parallel_rotate_method",
        f"{AXES}disable_loss_parallel",
        "compile.backend", "compile.components", "compile.enable_async_tensor_parallel",
    }),
    idle_below=(
        "job", "model_spec", "profiling", "metrics", "model", "optimizer", "lr_scheduler",
        "checkpoint", "float8", "quantize", "comm", "debug", "validation", "experimental",
        "fault_tolerance", "memory_estimation", "mx",
    ),
    parse=parse,
    render=render_python,
    recognises=lambda found: any(key.startswith(("parallelism.", "training.")) for key in found),
    target=lambda values: "torchtitan",
    unplanned=(
        f"{AXES}enable_sequence_parallel", "model_spec.", "float8.", "quantize.", "mx.",
        "model.converters",
        "optimizer.early_step_in_backward",
    ),
    habits=_habits,
)  # fmt: skip

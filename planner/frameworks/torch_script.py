"""A plan as one Python script of plain PyTorch that imports torch and the user's model alone.

A script is made of the parts that its plan needs, top to bottom: the batch, the stages of a
pipeline, the parallel model (tensor parallelism, recompute, then the data axis), a step, `main`.

    plan                            script
    tp                              parallelize_module, loss_parallel (`tensor_styles.py`)
    full recompute of a block       checkpoint_wrapper
    pp                              PipelineStage and a schedule; what torch has no class for is
                                    written as its order of computes, a line for each device
    dp, ZeRO-0, alone               DistributedDataParallel
    dp, ZeRO-1, alone               the same, and ZeroRedundancyOptimizer
    dp with ZeRO-2, 3, tp or pp     fully_shard per block: of a shard of one rank (ZeRO-0), gathered
                                    from the forward to the backward (ZeRO-1, 2) or not (ZeRO-3)
    dp_shard                        a mesh of replicas and shards
    micro-batches without pp        gradient accumulation

A stage of a pipeline is the whole model with the modules of others replaced by one that passes its
input on, so that names stay the user's.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import jinja2
import torch

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules import Action, Pipeline, compute_orders
from meshwright.planner.decisions import DECISIONS
from meshwright.planner.frameworks.correspondence import Lost
from meshwright.planner.frameworks.tensor_styles import (
    Styles,
    by_glob,
    is_layer,
    modules_of,
    roots,
    tensor_styles,
)
from meshwright.planner.plan import Plan, StagePlan, compress_names, crossings, describe
from meshwright.profiles.inputs import MeshwrightError

# torch's classes by our schedules; the others are written as orders of computes
CLASSES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
OF_ONE_STAGE = ("gpipe", "1f1b")  # whose classes take a stage, not a list of them
LETTERS = {
    Action.FORWARD: "F",
    Action.BACKWARD: "B",
    Action.BACKWARD_INPUT: "I",
    Action.BACKWARD_WEIGHT: "W",
}
# decisions that a script says, and those that it refuses or leaves out, which is said
SAID = (
    "dp", "tp", "pp", "virtual_stages", "microbatch_size", "num_microbatches", "schedule",
    "placement", "zero", "dp_shard", "recompute",
)  # fmt: skip
REFUSED = {
    "cp": "attention on a part of the tokens is no style of parallelize_module",
    "ep": "experts on other ranks are no style of parallelize_module",
    "servers": "torch's optimizers step what a rank computes with",
    "replicas": "torch has no outer loop of replicas that train apart",
    "branches": "stages of torch follow each other",
}
LEFT_OUT = {
    "hpz": ("fully_shard keeps no secondary shards", "weights are gathered from all shards"),
    "quantized": ("fully_shard sends whole numbers", "weights and gradients as they are"),
    "compressed": ("its hooks are of DistributedDataParallel", "gradients as they are"),
    "staleness": ("torch's schedules flush the pipeline", "gradients of the step's own batch"),
    "slices": ("torch's schedules take micro-batches whole", "micro-batches of whole rows"),
    "segments": ("blocks are wrapped one by one", "each block of a segment is recomputed alone"),
    "offload": ("it would lie on devices for a part", "everything stays on devices"),
    "chunked_loss": ("the loss is the model's or the user's", "the loss in one part"),
    "post_validation": ("torch's optimizers step together", "a step after all gradients"),
    "optimizer_in_backward": ("torch's optimizers step together", "a step after all gradients"),
}
NAMES = {  # what a script may import, by module
    "argparse": ("",),
    "contextlib": ("",),
    "copy": ("",),
    "os": ("",),
    "tempfile": ("",),
    "torch": ("", "nn"),
    "torch.distributed": ("dist",),
    "torch.distributed.checkpoint": ("dcp",),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ("checkpoint_wrapper",),
    "torch.distributed.checkpoint.state_dict": (
        "StateDictOptions", "get_model_state_dict", "get_state_dict", "set_state_dict",
    ),
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.fsdp": ("MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.optim": ("ZeroRedundancyOptimizer",),
    "torch.distributed.pipelining": ("PipelineStage", *CLASSES.values()),
    "torch.distributed.pipelining.schedules": ("_PipelineScheduleRuntime",),
    "torch.distributed.tensor": ("DTensor", "Replicate", "Shard"),
    "torch.distributed.tensor.parallel": (
        "ColwiseParallel", "PrepareModuleInput", "PrepareModuleOutput", "RowwiseParallel",
        "SequenceParallel", "loss_parallel", "parallelize_module",
    ),
    "torch.nn.parallel": ("DistributedDataParallel",),
}  # fmt: skip
ALIASES = {"dist": "torch.distributed as dist", "dcp": "torch.distributed.checkpoint as dcp"}
SHAPES_ALONE = ("view", "reshape", "flatten", "transpose", "contiguous", "dropout")
WIDTH = 100
IMPORT_WIDTH = 88  # ruff's, where nothing is configured
A_ROW = 3  # layers from which they are written as a range
A_NODE = 8  # ranks of a node in the command


class ScriptError(MeshwrightError):
    """A plan, or a model, that no script of plain PyTorch is written for."""

    CODE = "MW114"
    PLACE = "export to torch"
    LEGAL = "stages of one mesh, without cp and ep; with a pipeline, modules in a row"
    WAY_OUT = "plan again with such overrides, or run the plan with train_step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The text of a script, and what of its plan it does otherwise."""

    text: str
    cannot_express: tuple[Lost, ...]


def torch_script(plan: Plan, graph: Graph, *, module: str) -> Script:
    """The training of `module:function`'s model by a plan, as a script for torchrun.

    The function is that of the command line: it returns (model, example_inputs[, loss_fn]), with
    weights. The script takes --steps, --lr, --seed and --checkpoint, trains with AdamW on the
    example's rows, prints the loss of each step from rank 0, and saves with torch's distributed
    checkpoint. Losses and gradients are means over ranks and micro-batches: those of `train_step`
    where all have as many targets. Raises `ScriptError` for what can't be written at all.
    """
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", module):
        raise ScriptError.refused("module", module, legal="module:function, e.g. my_models:gpt2")
    _check(plan, graph)
    facts = _Facts(plan=_one_copy(plan), asked=plan, graph=graph, module=module)
    if facts.pp > 1:
        _check_pipeline(facts)
    lost, body = (*facts.lost, *_lost_decisions(plan)), _body(facts)
    text = f"{_head(facts, lost)}\n\n{_imports(body, module)}\n\n{body}"
    return Script(text=text, cannot_express=lost)


# --- legality -------------------------------------------------------------------------------------


def _check(plan: Plan, graph: Graph) -> None:
    """Raise `ScriptError` for what no script says."""
    for name, why in REFUSED.items():
        off = DECISIONS[name].off
        for k, holder in enumerate(plan.having(name)):
            if DECISIONS[name].uses(value := getattr(holder, name)):
                place = f"plan: {name}" if holder is plan else f"stage {k}: {name}"
                value = list(value) if isinstance(value, tuple) else value
                without = off if isinstance(off, int) else 1
                raise ScriptError(
                    f"={value}: {why}", place=place, legal=str(off) if off != () else "none",
                    way_out=f"plan again with {name}={without}, or run the plan with train_step",
                )  # fmt: skip
    for k, stage in enumerate(plan.stages):
        if (stage.dp, stage.tp) != (plan.stages[0].dp, plan.stages[0].tp):
            raise ScriptError(
                f": dp{stage.dp}×tp{stage.tp} after dp{plan.stages[0].dp}×tp{plan.stages[0].tp}; "
                "torch's stages send tensors between equal meshes",
                place=f"stage {k}: mesh",
                legal="the mesh of stage 0",
                way_out="plan again with dp and tp, which are for all stages",
            )
    nested = [path for path in graph.inputs.values() if not path.isidentifier() ^ path.isdigit()]
    apart = [path for value, path in graph.inputs.items() if value not in graph.batched]
    if nested or apart or graph.fixed:
        raise ScriptError(
            f": {', '.join([*nested, *apart, *graph.fixed])} can't be cut into rows",
            place="example_inputs",
            legal="a dict or a tuple of tensors with the batch dim first",
            way_out="make the others inside the model",
        )


def _check_pipeline(facts: _Facts) -> None:
    """Raise `ScriptError` unless stages are modules in a row of the model's forward."""
    graph, around = facts.graph, roots(facts.graph)
    place = "a pipeline"

    def refuse(what: str, legal: str) -> ScriptError:
        return ScriptError(
            f": {what}", place=place, legal=legal,
            way_out="plan again with pp=1, or run the plan with train_step",
        )  # fmt: skip

    for (source, target), values in crossings(facts.plan, graph).items():
        if target != source + 1 or len(values) != 1:
            raise refuse(
                f"stage {source} sends {len(values)} tensors to stage {target}",
                "one tensor from each stage to the next",
            )
    one_input = facts.loss_path is None and not facts.named_batch and len(graph.inputs) == 2
    if not (one_input or (facts.of_transformers and len(graph.inputs) == 2)):
        raise refuse(
            f"the model takes {', '.join(graph.inputs.values())}",
            "input_ids and labels of a model of transformers, or (input, targets) and a loss_fn",
        )
    outputs = graph.outputs.known if graph.outputs else {}
    value = outputs.get("logits") or next(iter(outputs.values()), None)
    forward = graph.behind([value]) if value else set()
    for block in graph.blocks:
        for op in block.ops:
            inside = op.module not in around or not forward.intersection(op.results)
            added = op.short == "add" and facts.of_transformers and block is graph.blocks[0]
            if not (inside or added or op.short in SHAPES_ALONE or is_layer(block)):
                raise refuse(
                    f"{op.key} is of the model itself, and would run on every stage"
                    + (f" ({op.source})" if op.source else ""),
                    "operators in modules that lie in a row",
                )


def _one_copy(plan: Plan) -> Plan:
    """The plan with the first of a schedule's copies of the model alone."""
    if plan.record.copies == 1:
        return plan
    stages = plan.stages[: len(plan.stages) // plan.record.copies]
    return replace(plan, stages=stages, schedule="1f1b")


def _lost_decisions(plan: Plan) -> Iterator[Lost]:
    """Decisions that the script leaves out."""
    for name, (why, instead) in LEFT_OUT.items():
        decision = DECISIONS[name]
        used = [value for of in plan.having(name) if decision.uses(value := getattr(of, name))]
        if used:
            line = decision.line(used) if decision.line else ""
            yield Lost(
                what=line.strip() or f"{name}={used[0]}", why=why, instead=instead, frees=True
            )


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """A plan (`asked`, or one copy of it) and a graph, as the parts of a script read them."""

    plan: Plan
    asked: Plan
    graph: Graph
    module: str

    @property
    def stage(self) -> StagePlan:
        """The stage whose ZeRO all follow: that which divides most."""
        return max(self.plan.stages, key=lambda stage: stage.zero)

    @property
    def dp(self) -> int:
        return self.stage.dp

    @property
    def tp(self) -> int:
        return self.stage.tp

    @property
    def pp(self) -> int:
        return len(self.plan.devices)

    @property
    def each(self) -> int:
        """Stages on each device group."""
        return len(self.plan.stages) // self.pp

    @property
    def microbatches(self) -> int:
        return self.plan.num_microbatches

    @property
    def zero(self) -> int:
        """The ZeRO stage that has an effect."""
        return self.stage.zero if self.stage.shards > 1 else 0

    @property
    def replicas(self) -> int:
        """Groups of the data axis that hold the same shards; 1: there is one."""
        return self.dp // self.stage.shards if self.zero else 1

    @property
    def by_ddp(self) -> bool:
        """Whether DistributedDataParallel averages the gradients."""
        return self.dp > 1 and self.tp == self.pp == 1 and self.zero < 2

    @property
    def by_fsdp(self) -> bool:
        return self.dp > 1 and not self.by_ddp

    @property
    def data_axes(self) -> dict[str, int]:
        """Names and sizes of the mesh's axes for data parallelism."""
        if self.dp == 1:
            return {}
        if self.by_fsdp and not self.zero:
            return {"replicate": self.dp, "shard": 1}
        if self.replicas > 1:
            return {"replicate": self.replicas, "shard": self.stage.shards}
        return {"dp": self.dp}

    @cached_property
    def axes(self) -> dict[str, int]:
        """The mesh: its axes from the outermost on, as the plan lays them on ranks."""
        pp = {"pp": self.pp} if self.pp > 1 else {}
        tp = {"tp": self.tp} if self.tp > 1 else {}
        outer = {**self.data_axes, **pp} if self._pipeline_inside else {**pp, **self.data_axes}
        return {**outer, **tp} or {"dp": 1}

    @property
    def _pipeline_inside(self) -> bool:
        """Whether neighbours on the data axis lie pp·tp ranks apart."""
        return self.pp > 1 and self.dp > 1 and self.plan.stages[0].ranks[self.tp] == (
            self.pp * self.tp
        )  # fmt: skip

    @property
    def in_place(self) -> bool:
        """Whether the mesh's ranks are the plan's."""
        groups = []
        for k in range(self.pp):
            step = self.pp * self.tp if self._pipeline_inside else self.tp
            start = k * self.tp if self._pipeline_inside else k * self.dp * self.tp
            groups.append(
                tuple(start + d * step + t for d in range(self.dp) for t in range(self.tp))
            )
        return tuple(groups) == self.plan.devices

    @cached_property
    def styles(self) -> Styles:
        return tensor_styles(self.asked, self.graph) if self.tp > 1 else Styles()

    # --- the model ---

    @cached_property
    def held(self) -> list[list[str]]:
        """The modules of each stage."""
        blocks = {block.name: block for block in self.graph.blocks}
        return [
            [name for b in stage.blocks for name in modules_of(self.graph, blocks[b])]
            for stage in self.plan.stages
        ]

    @cached_property
    def layers(self) -> list[str]:
        return [block.name for block in self.graph.blocks if is_layer(block)]

    @cached_property
    def outside(self) -> list[list[str]]:
        """For each block that is no layer its modules with parameters, but for those with tied
        ones, which stay in the root's group."""
        tied = {*self.graph.aliases, *self.graph.aliases.values()}
        owners = {fqn.rpartition(".")[0] for fqn in self.graph.parameters.values()}
        apart = {fqn.rpartition(".")[0] for fqn in tied}
        found = []
        for block in self.graph.blocks:
            names = [] if is_layer(block) else modules_of(self.graph, block)
            kept = [
                n
                for n in names
                if any(f"{owner}.".startswith(f"{n}.") for owner in owners)
                and not any(f"{owner}.".startswith(f"{n}.") for owner in apart)
            ]
            found += [kept] if kept else []
        return found

    @property
    def named_batch(self) -> bool:
        """Whether the example is a dict."""
        return not any(path.isdigit() for path in self.graph.inputs.values())

    @cached_property
    def loss_path(self) -> str | None:
        """The loss in what the model returns, as Python reads it; None for a loss_fn."""
        outputs = self.graph.outputs
        if outputs is None:
            return None
        for path, value in outputs.known.items():
            if value == self.graph.loss:
                if not path:
                    return ""
                if path.isdigit() or outputs.spec.type is dict:
                    return f"[{path if path.isdigit() else repr(path)}]"
                return f".{path}"
        return None

    @property
    def of_transformers(self) -> bool:
        """Whether the model takes `input_ids` and `labels` and returns a loss and logits."""
        outputs = self.graph.outputs
        taken = {"input_ids", "labels"} <= {*self.graph.inputs.values()}
        return bool(taken and outputs and {"loss", "logits"} <= {*outputs.paths})

    @property
    def takes_loss_fn(self) -> bool:
        return self.loss_path is None

    @property
    def wrapped(self) -> bool:
        """Whether the model is more than itself on a rank."""
        return self.tp > 1 or self.dp > 1 or bool(self.recomputed)

    @property
    def tied_here(self) -> list[tuple[str, str]]:
        """Tied parameters, as (name, name that it is kept by), that one stage has."""
        tied = self.graph.aliases.items()
        return [t for t in tied if self._stage_with(t[0]) == self._stage_with(t[1])]

    @property
    def tied_apart(self) -> list[tuple[str, int, int, tuple[str, int] | None]]:
        """Tied parameters of two stages: a name, the stage that has it, the other's device; where
        that is the same, the other's name and stage."""
        found: list[tuple[str, int, int, tuple[str, int] | None]] = []
        for a, b in self.graph.aliases.items():
            stages = [self._stage_with(name) for name in (a, b)]
            devices = [self.plan.devices.index(self.plan.stages[k].ranks) for k in stages]
            if stages[0] != stages[1] and devices[0] == devices[1]:
                found.append((a, stages[0], devices[0], (b, stages[1])))
            elif stages[0] != stages[1]:
                found += [(a, stages[0], devices[1], None), (b, stages[1], devices[0], None)]
        return found

    @property
    def sent_apart(self) -> bool:
        """Whether gradients of tied parameters go to another device."""
        return any(others is None for *_, others in self.tied_apart)

    @property
    def added_embeddings(self) -> list[str]:
        """Embeddings of a model of transformers that are added to that of `input_ids`."""
        if not self.of_transformers:
            return []
        ids = next(v for v, path in self.graph.inputs.items() if path == "input_ids")
        return [
            op.module
            for op in self.graph.blocks[0].ops
            if op.short == "embedding" and ids not in self.graph.behind(op.operands[1:])
        ]

    def _stage_with(self, fqn: str) -> int:
        return next(
            k
            for k, names in enumerate(self.held)
            if any(fqn.startswith(f"{name}.") for name in names)
        )

    # --- policies ---

    @cached_property
    def recomputed(self) -> list[str]:
        """Layers that are recomputed whole: by the plan, or in place of a part of them."""
        policies = self._policies
        return [n for n in self.layers if policies[n].partition("+")[0] not in ("none", "regather")]

    @property
    def _policies(self) -> dict[str, str]:
        return {
            name: policy
            for stage in self.plan.stages
            for name, policy in zip(stage.blocks, stage.policies, strict=True)
        }

    @property
    def precision(self) -> str:
        """The precision that is written: the plan's, or that of the same width."""
        name = self.plan.precision
        return name if name in ("fp32", "bf16", "bf16_pure") else "bf16"

    @property
    def autocast(self) -> bool:
        return self.precision == "bf16"

    @property
    def schedule_class(self) -> str:
        """Torch's class, "" for an order of computes."""
        schedule, p = self.plan.schedule, self.pp
        if schedule == "interleaved_1f1b" and self.microbatches % p:
            return ""
        return CLASSES.get(schedule, "")

    @property
    def placed(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device group."""
        return self._pipeline.placed

    @property
    def orders(self) -> list[str]:
        """The computes of each device group, as torch reads them."""
        return [
            ",".join(f"{c.stage}{LETTERS[c.action]}{c.microbatch}" for c in computes)
            for computes in compute_orders(self._pipeline)
        ]

    @property
    def _pipeline(self) -> Pipeline:
        plan = self.plan
        return Pipeline(plan.schedule, len(plan.stages), plan.num_microbatches, self.pp)

    # --- words ---

    @property
    def axes_words(self) -> str:
        names = {"pp": "device groups", "dp": "data parallel", "tp": "tensor parallel"}
        words = [f"{size} {names.get(name, f'to {name}')}" for name, size in self.axes.items()]
        return ", ".join(words)

    @property
    def fsdp_words(self) -> str:
        among = f" among {self.stage.shards}" if self.replicas > 1 else ""
        return f"ZeRO-{self.zero}{among}" if self.zero else "ZeRO-0: shards of one rank"

    @property
    def data_rank(self) -> str:
        """This rank's index on the data axis, as an expression."""
        ranks = {name: f'mesh["{name}"].get_local_rank()' for name in self.data_axes}
        if len(ranks) < 2 or self.data_axes["shard"] == 1:
            return next(iter(ranks.values()), "0")
        return f"{ranks['replicate']} * {self.data_axes['shard']} + {ranks['shard']}"

    # --- what is lost ---

    @property
    def lost(self) -> Iterator[Lost]:
        yield from self._lost_meshes()
        yield from self._lost_numbers()
        by_how: dict[tuple[str, str, str], list[str]] = {}
        for name, how in self.styles.otherwise.items():
            by_how.setdefault(how, []).append(name)
        for (what, why, instead), names in by_how.items():
            yield Lost(what=f"{what} of {', '.join(by_glob(names))}", why=why, instead=instead)
        by_policy: dict[str, list[str]] = {}
        for name, policy in self._policies.items():
            if policy != "none" and (policy != "full" or name not in self.layers):
                by_policy.setdefault(policy, []).append(name)
        for policy, names in by_policy.items():
            whole = [n for n in names if n in self.recomputed]
            kept = [n for n in names if n not in self.recomputed]
            if whole:
                yield Lost(
                    what=f"{policy} recompute of {', '.join(compress_names(whole))}",
                    why="checkpoint_wrapper knows modules, not operators",
                    instead="they are recomputed whole",
                )
            if kept:
                yield Lost(
                    what=f"{policy} recompute of {', '.join(compress_names(kept))}",
                    why="no module is all of it" if policy == "full" else "gathers are no modules",
                    instead="they keep their activations",
                )

    def _lost_meshes(self) -> Iterator[Lost]:
        if self.asked.record.copies > 1:
            yield Lost(
                what=f"schedule {self.asked.schedule}",
                why="torch's pipelines hold one copy of the model",
                instead="1f1b of the first copy",
            )
        if len({(stage.zero, stage.shards) for stage in self.plan.stages}) > 1:
            yield Lost(
                what="ZeRO by stage",
                why="one data axis is written for all stages",
                instead=f"ZeRO-{self.stage.zero} among {self.stage.shards} on all of them",
            )
        if not self.in_place:
            yield Lost(
                what="ranks of the stages",
                why="init_device_mesh numbers them by axes",
                instead=f"the axes {', '.join(self.axes)} from the outermost on",
            )

    def _lost_numbers(self) -> Iterator[Lost]:
        """Differences of the numbers of a step."""
        if self.precision != self.plan.precision:
            yield Lost(
                what=f"precision {self.plan.precision}",
                why="torch has no autocast of such products, or scales its loss by hand",
                instead="bf16 autocast",
            )
        names = {op.short for op in self.graph.ops}
        if "dropout" in names:
            yield Lost(
                what="dropout",
                why="masks are of torch's generator on each rank",
                instead="other masks than train_step's, by --seed",
            )
        if "batch_norm" in names and self.dp * self.microbatches > 1:
            yield Lost(
                what="batch norm over all rows of the batch",
                why="a module sees its own rows",
                instead="statistics of each rank's rows of a micro-batch",
            )


# --- the text -------------------------------------------------------------------------------------


def _body(facts: _Facts) -> str:
    """All of a script after its imports."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    names = [name for name, kind in vars(_Facts).items() if isinstance(kind, _SHOWN)]
    context = {name: getattr(facts, name) for name in (*names, "plan") if name[0] != "_"}
    text = environment.get_template("torch_script.py.j2").render(
        **context,
        **_loss_call(facts, "part" if facts.microbatches > 1 else "batch"),
        step_arguments=_step_arguments(facts),
        sizes=_tuple(map(str, facts.axes.values())),
        axis_names=_tuple(f'"{name}"' for name in facts.axes),
        data_axis_names=", ".join(f'"{name}"' for name in facts.data_axes),
        style_text=partial(_style_text, facts),
        of_stage=partial(_of_stage, facts),
        submodules=_submodules,
        attribute=_attribute,
        tuple_of=lambda given: ", ".join(_numbered(given)) + "," * (len(given) == 1),
        list_of=_listed,
        of_one_stage=facts.plan.schedule in OF_ONE_STAGE,
        among=f" among {facts.stage.shards}" if facts.replicas > 1 else "",
    )
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


_SHOWN = (property, cached_property)


def _step_arguments(facts: _Facts) -> str:
    """The parameters of a step, and what `main` gives for them."""
    if facts.pp == 1:
        loss = ["loss_fn"] * facts.takes_loss_fn
        return ", ".join(["model", *loss, "optimizer", "batch", "device"])
    several = "s" * (facts.each > 1)
    names = ["schedule", "indices", f"optimizer{several}", "batch", "device"]
    return ", ".join([*names, *[f"model{several}", "mesh"] * bool(facts.tied_apart)])


def _loss_call(facts: _Facts, part: str) -> dict[str, str]:
    """The loss of a part of the batch as an expression, and how its `targets` are told apart."""
    stars = "**" if facts.named_batch else "*"
    paths, targets = [*facts.graph.inputs.values()], ""
    if facts.loss_path is not None:
        loss = f"model({stars}{part}){facts.loss_path}"
    elif facts.named_batch and "targets" in paths:
        targets, loss = "named", f'loss_fn(model(**inputs), {part}["targets"])'
    elif not facts.named_batch and len(paths) > 1:
        targets, loss = "last", "loss_fn(model(*inputs), targets)"
    else:
        loss = f"loss_fn(model({stars}{part}))"
    return {"part": part, "loss": loss, "targets": targets}


def _head(facts: _Facts, lost: Sequence[Lost]) -> str:
    """The docstring."""
    module, ranks = facts.module.partition(":")[0], facts.plan.num_ranks
    nodes = f"--nproc-per-node {min(ranks, A_NODE)}"
    if ranks > A_NODE:
        nodes = f"--nnodes {-(-ranks // A_NODE)} {nodes}"
    version = ".".join(torch.__version__.split(".")[:2])
    lines = [
        f"Trains the model of {facts.module} with PyTorch {version}.",
        "",
        f"plan: {describe(facts.asked)}",
        *(f"  otherwise: {one}" for one in lost),
        "",
        f"    torchrun {nodes} SCRIPT --steps 100",
        "",
        f"{module} lies beside this file, or on PYTHONPATH.",
    ]
    wrapped = (textwrap.wrap(line, WIDTH, subsequent_indent="    ") or [""] for line in lines)
    return '"""' + "\n".join(line for part in wrapped for line in part) + '\n"""'


def _imports(body: str, module: str) -> str:
    """The imports of what a script names."""
    plain, of = [], []
    for source, names in NAMES.items():
        called = [n for n in names if n and n not in ALIASES and re.search(rf"\b{n}\b", body)]
        plain += [f"import {ALIASES[n]}" for n in names if n in ALIASES and f"{n}." in body]
        if "" in names and re.search(rf"(?<![.\w]){source}\.", body):
            plain.append(f"import {source}")
        if called:
            line = f"from {source} import {', '.join(sorted(called))}"
            rows = "".join(f"    {name},\n" for name in sorted(called))
            of.append(line if len(line) <= IMPORT_WIDTH else f"from {source} import (\n{rows})")
    standard = sorted(line for line in plain if "torch" not in line)
    others = sorted((line for line in plain if "torch" in line), key=lambda line: line.split()[1])
    name, _, function = module.partition(":")
    own = f"from {name} import {function} as build"
    return "\n".join([*standard, "", *others, *of, "", own])


def _tuple(texts: Iterable[str]) -> str:
    """Expressions as a tuple."""
    listed = list(texts)
    return f"({', '.join(listed)}{',' * (len(listed) == 1)})"


def _numbered(names: Sequence[str]) -> list[str]:
    """Names as Python's expressions, rows of layers as comprehensions."""
    texts, k = list[str](), 0
    while k < len(names):
        stem, _, number = names[k].rpartition(".")
        first, end = int(number) if number.isdigit() else 0, k + 1
        while number.isdigit() and names[end : end + 1] == [f"{stem}.{first + end - k}"]:
            end += 1
        if end - k >= A_ROW:
            bounds = f"{first}, {first + end - k}" if first else f"{end - k}"
            texts.append(f'*(f"{stem}.{{k}}" for k in range({bounds}))')
        else:
            texts += [f'"{name}"' for name in names[k:end]]
        k = end
    return texts


def _listed(names: Sequence[str]) -> str:
    """Names as a list."""
    texts = _numbered(names)
    alone = len(texts) == 1 and texts[0].startswith("*(")
    return f"[{texts[0][2:-1] if alone else ', '.join(texts)}]"


def _of_stage(facts: _Facts, names: Sequence[str]) -> str:
    """Names that a stage holds, of these, as an expression."""
    if facts.pp == 1:
        return _listed(names)
    stem = names[0].rpartition(".")[0] + "."
    alike = {name for held in facts.held for name in held if name.startswith(stem)}
    if alike == {*names}:
        return f'[name for name in held if name.startswith("{stem}")]'
    return f"[name for name in {_listed(names)} if name in held]"


def _submodules(names: Sequence[str]) -> str:
    texts = [f'model.get_submodule("{name}")' for name in names]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _attribute(fqn: str) -> str:
    """A name as Python reads it: `layers[0].weight`."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", fqn)


def _style_text(facts: _Facts, variable: str, styles: Mapping[str, Mapping[str, str]]) -> str:
    """A dict of styles by module; before it, once, what several layers share."""
    shared = [styles[name] for name in facts.layers if name in styles]
    common = max(shared, key=shared.count, default={})
    alike = [n for n in facts.layers if styles.get(n) == common]
    lines = [f"of_layer = {_dict_text(common)}"] if len(alike) > 1 else []
    lines.append(f"{variable} = {{")
    for name, paths in styles.items():
        if len(alike) > 1 and name in alike:
            if name == alike[0]:
                lines.append(f"    **dict.fromkeys({_listed(alike)}, of_layer),")
        elif list(paths) == [""]:
            lines.append(f'    "{name}": {paths[""]},')
        else:
            lines.append(f'    "{name}": {textwrap.indent(_dict_text(paths), "    ").strip()},')
    return "\n".join([*lines, "}"])


def _dict_text(paths: Mapping[str, str]) -> str:
    rows = "".join(f'    "{path}": {style},\n' for path, style in paths.items())
    return f"{{\n{rows}}}"

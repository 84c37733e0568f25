"""Configurations of other software: the plan that one means, and a plan written as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api import Arguments, Asked, asked, decided
from meshwright.arguments import check_types
from meshwright.model import ParallelModel
from meshwright.planner.decisions import DECISIONS
from meshwright.planner.frameworks import (
    FORMATS,
    Configuration,
    Exported,
    exported,
    read_configuration,
)
from meshwright.planner.frameworks.torch_script import Script, torch_script
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import Plan, check_plan, graph_for
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import ArgumentError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A configuration, and its plan for a model."""

    configuration: Configuration
    result: ParallelModel

    @property
    def notes(self) -> list[str]:
        """Notes on what the file leaves open, and on what has no bearing."""
        return notes_of(self.configuration)


def notes_of(said: Configuration) -> list[str]:
    """Notes on what a configuration leaves open, what of it is not planned, and what has no
    bearing."""
    values = said.values
    notes = [
        f"{said.format}: {values['global_batch_size']} rows a step = microbatch_size="
        f"{values['microbatch_size']} × num_microbatches={values['num_microbatches']} × "
        f"dp={values['dp']}; prices of target {said.target!r}"
    ]
    notes += said.habits
    if said.left:
        notes.append(f"left to be filled in, taken from the rest: {', '.join(said.left)}")
    for name, how in said.taken.items():
        if name not in values:
            notes.append(f"{name} is said by scripts ({how}): taken as not")
    if said.unplanned:
        unplanned = ", ".join(said.unplanned)
        notes.append(f"changes memory or numbers, and is not planned: {unplanned}")
    if said.idle:
        notes.append(f"without a bearing on the plan: {', '.join(said.idle)}")
    if any(DECISIONS[n].of_train_step for n in values.keys() & DECISIONS.keys()):
        notes.append("host memory is priced as train_step uses it: no other was measured")
    return notes


def configured(
    path: str | Path | Configuration,
    model: nn.Module,
    cluster: Cluster,
    *,
    global_batch_size: int | None = None,
    script: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Configured:
    """The plan that a configuration of another software means for a model on a cluster, with its
    report under that software's target: DeepSpeed's JSON, accelerate's YAML, transformers'
    `TrainingArguments` as JSON, torchtitan's Python or TOML, Megatron-LM's flags, Megatron-Bridge's
    YAML. What it leaves open, shardings of operators, is searched.

    `global_batch_size`: rows of a step, where the file says none; `script`: decisions that no file
    of the format says, but a script ({"recompute": "full"} beside DeepSpeed's); `arguments` are
    those of `auto_parallelize`, `example_inputs` among them. Raises `ConfigurationError`, and as
    `auto_parallelize` does.
    """
    said, question = question_of(
        path, model, cluster, script, global_batch_size=global_batch_size, **arguments
    )
    return Configured(configuration=said, result=decided(question))


def without_pins(question: Asked) -> Asked:
    """The question of the best plan of the same software, whatever the configuration says."""
    return replace(question, request=replace(question.request, overrides=Overrides()))


def question_of(
    path: str | Path | Configuration,
    model: nn.Module,
    cluster: Cluster,
    script: Mapping[str, Any] | None = None,
    *,
    global_batch_size: int | None = None,
    **arguments: Any,
) -> tuple[Configuration, Asked]:
    """The configuration, and the question of the plan that it means."""
    check_types(model=model, cluster=cluster, overrides=None, plan=None)
    said = path
    if not isinstance(said, Configuration):
        said = read_configuration(
            said, cluster.num_devices, global_batch_size=global_batch_size, script=script
        )
    question = asked(model, cluster, Arguments(**{**arguments_of(said), **arguments}))
    overrides = said.overrides(question.problem.graph)
    return said, replace(question, request=replace(question.request, overrides=overrides))


def arguments_of(said: Configuration) -> dict[str, Any]:
    """Arguments of `auto_parallelize` that a configuration says."""
    values = said.values
    given = {
        "global_batch_size": values["global_batch_size"],
        "precision": values.get("precision"),
        "target": said.target,
    }
    if optimizer := values.get("optimizer"):
        given["optimizer"] = optimizer
    named = ((name, DECISIONS[name]) for name in values.keys() & DECISIONS.keys())
    given["allow"] = [d.word for n, d in named if d.allowed == "numbers" and d.uses(values[n])]
    return given


def plan_from(path: str | Path, model: nn.Module, cluster: Cluster, **arguments: Any) -> Plan:
    """The plan of `configured`: `Plan.from_config`."""
    return configured(path, model, cluster, **arguments).result.plan


def as_configuration(plan: Plan, software: str, *, optimizer: str | None = None) -> Exported:
    """A plan as a configuration of another software, one of `FORMATS`, with what is lost in it and
    the configuration that it is (`Exported.configuration`, which `configured` prices). Raises
    `ConfigurationError`."""
    kind = FORMATS.get(software)
    if kind is None:
        raise ArgumentError.refused("software", software, legal=FORMATS)
    return exported(plan, kind, optimizer=optimizer)


def as_script(
    plan: Plan, model: nn.Module, cluster: Cluster, *, module: str, **arguments: Any
) -> Script:
    """A plan as one script of plain PyTorch, which takes the model from `module`, as
    `"my_models:llama"`; `arguments` are those of `auto_parallelize`. Raises `ScriptError` for what
    no script says, and as `auto_parallelize` does for a plan of another model."""
    given = {"global_batch_size": plan.global_batch_size, "precision": plan.precision}
    return script_of(asked(model, cluster, Arguments(**{**given, **arguments})), plan, module)


def script_of(question: Asked, plan: Plan, module: str) -> Script:
    """The script of `as_script` for the model of a question."""
    graph, factors = graph_for(plan, question.problem.graph, question.problem.factors)
    check_plan(plan, graph, factors)
    return torch_script(plan, graph, module=module)

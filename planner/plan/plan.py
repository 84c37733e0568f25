"""The Plan: decisions keyed by names and globs, as a value and as JSON to be read and edited."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.costmodel.graph import Block
from meshwright.costmodel.mesh import (
    ALL_GATHER,
    Batch,
    ContextKind,
    HostParts,
    Mesh,
    Parts,
    Stepping,
)
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.rules import recomputable
from meshwright.costmodel.schedules import SCHEDULES, Pipeline, Schedule
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.planner.decisions import DECISIONS, OFFLOADS, OUTER_BITS, STEPPINGS
from meshwright.planner.plan.ranges import (
    PlanError,
    compress_names,
    compress_ranks,
    expand_names,
    expand_ranks,
)
from meshwright.profiles.inputs import parse_json, read_json, shown, write_text
from meshwright.profiles.inputs.limits import MAX_ROWS, MAX_TEXT

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan(Sharing):
    """One pipeline stage, whose states are shared out as `Sharing` says. `ranks` are global, laid
    out (dp, cp, tp) with tp innermost; cp splits the sequence of every activation, with attention
    of a kind (`CONTEXT_KINDS`), and `ep` neighbours share the experts out. Schedules with several
    stages per device list the device's ranks in each of them.

    `recompute` is one policy for all blocks, or policy -> blocks (the others keep everything).
    `segments` neighbours keep their inputs alone and run again together, the policies being for the
    time after that (`segments_of`); 1 is none.

    `shardings` maps globs over modules (`transformer.h.*.mlp.c_fc`), operator keys
    (`transformer.h.*.mlp.c_fc:addmm`) or parameter FQNs to decisions (`colwise`, `S(0)@tp`), of
    which others follow.

    `offload` says what lies in host memory, and which part of it, over 0 to 1: "optimizer" (states,
    the weights that the optimizer reads, and its step), and no more "weights" (that are computed
    with, but while their block runs; ZeRO-3 has them there with the states), by whole blocks from
    the last one on, as many as make that part of the stage's trained parameters or more;
    "activations" (what is saved for the backward), of so many of the stage's blocks, or more, from
    the first one on. "nvme", no more than "optimizer", is the part of the states that lies in files
    in place of host memory (`in_files`).
    """

    blocks: tuple[str, ...]
    ranks: tuple[int, ...]
    dp: int
    tp: int
    cp: int = 1
    cp_kind: ContextKind = ALL_GATHER
    ep: int = 1
    recompute: str | Mapping[str, tuple[str, ...]] = "none"
    shardings: Mapping[str, str] = field(default_factory=dict)
    segments: int = 1
    offload: Mapping[str, float] = field(default_factory=dict)

    @property
    def holders(self) -> int:
        """Ranks that hold the same parameters, of other rows or of other tokens."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO divides."""
        return self.among(self.holders)

    @property
    def spread(self) -> int:
        """The distance between neighbours on its data axis, in units of that in a contiguous mesh;
        1 where they have no one distance."""
        rows = np.array(self.ranks).reshape(-1, self.tp)
        steps = np.diff(rows[:, 0])
        regular = (np.diff(rows) == 1).all() and len(steps) and (steps == steps[0]).all()
        return max(1, int(steps[0]) // self.tp) if regular and steps[0] % self.tp == 0 else 1

    @property
    def mesh(self) -> Mesh:
        """The mesh that prices are for."""
        mesh = Mesh(dp=self.dp, tp=self.tp, cp=self.cp, ep=self.ep, spread=self.spread)
        return mesh.of_kind(self.cp_kind)

    @property
    def sharing(self) -> Sharing:
        """The fields of `Sharing` alone."""
        return Sharing(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Sharing)})

    @property
    def host(self) -> HostParts:
        """The parts that lie off devices."""
        states, weights, activations, files = (self.offload.get(name, 0.0) for name in OFFLOADS)
        return HostParts(states=states, weights=weights, activations=activations, files=files)

    @property
    def segmented(self) -> bool:
        """Whether neighbours run again together."""
        return self.segments > 1

    def with_host(self, host: HostParts) -> StagePlan:
        """The stage with so much off its devices."""
        parts = host.states, host.weights, host.activations, host.files
        offload = {name: part for name, part in zip(OFFLOADS, parts, strict=True) if part}
        return dataclasses.replace(self, offload=offload)

    def repeating(self, policies: Sequence[str], size: int = 1) -> StagePlan:
        """The stage under these policies of its blocks, in segments of so many."""
        recompute = recompute_of(self.blocks, policies)
        return dataclasses.replace(self, recompute=recompute, segments=size)

    @property
    def by_policy(self) -> Mapping[str, tuple[str, ...]]:
        """The recompute policies, each with its blocks, where it names them."""
        policies = self.recompute
        return {policies: self.blocks} if isinstance(policies, str) else policies

    @property
    def policies(self) -> tuple[str, ...]:
        """The recompute policy of each block."""
        by_block = {name: policy for policy, names in self.by_policy.items() for name in names}
        return tuple(by_block.get(name, "none") for name in self.blocks)

    def values(self, name: str) -> Sequence[Any]:
        """The values of a decision: one for each block, where it acts on blocks."""
        return self.policies if DECISIONS[name].acts == "block" else (getattr(self, name),)

    @property
    def as_copy(self) -> StagePlan:
        """The stage without what copies may differ in: ranks and recompute."""
        return dataclasses.replace(self, ranks=(), recompute="none", segments=1)


def stage_on(
    mesh: Mesh, blocks: tuple[str, ...], ranks: tuple[int, ...], sharing: Sharing = UNSHARED
) -> StagePlan:
    return StagePlan(
        blocks=blocks,
        ranks=ranks,
        dp=mesh.dp,
        tp=mesh.tp,
        cp=mesh.cp,
        cp_kind=mesh.kind,
        ep=mesh.ep,
        **dataclasses.asdict(sharing),
    )


def recompute_of(blocks: Sequence[str], policies: Sequence[str]) -> Any:
    """Policies of blocks as a stage's `recompute`: the inverse of `StagePlan.policies`."""
    if len(set(policies)) == 1:
        return policies[0]
    return {
        policy: tuple(name for name, p in zip(blocks, policies, strict=True) if p == policy)
        for policy in RECOMPUTE
        if policy != "none" and policy in policies
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterLoop:
    """The outer loop of `replicas` that train apart (DiLoCo, arXiv 2311.08105): after every
    `sync_every` steps they take an outer step with momentum on the mean of what each has changed,
    sent in `outer_bits` (32: fp32, 8: blocks with a scale), the weights in as many `fragments`,
    each at steps of its own (Streaming DiLoCo, 2501.18512)."""

    replicas: int
    sync_every: int
    outer_bits: int = 32
    fragments: int = 1

    def due(self, steps: int) -> tuple[int, ...]:
        """The fragments that meet after so many steps."""
        every, apart = self.sync_every, self.sync_every // self.fragments
        return tuple(j for j in range(self.fragments) if steps and (steps - j * apart) % every == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The training of one model: `num_microbatches` equal parts of a batch go through `stages`.

    `model` is the fingerprint of the model it was made for. With `post_validation`, steps that
    `train_step` makes together with the optimizer's (`optimizer=`) are validated afterwards, so
    that a device group begins the next one as soon as it is done with its own part; with
    `optimizer_in_backward` they step each parameter as its gradient is whole, and let that go. The
    rows of the loss run in `chunked_loss` parts. Micro-batches go through the pipeline in `slices`
    of so many tokens each; whole where there are none. `branches`, where some of the model's lie
    apart, are the device groups from each stage to the end (`planner/plan/flow.py`). Gradients come
    `staleness` steps late, at most. The first `servers` ranks keep and step the weights for all
    others. With an `outer_loop` the stages are those of the first of its
    replicas, which all have as many ranks and rows. `made` are the model's name, the date and the
    versions that a plan file carries; they decide nothing.
    """

    model: str
    global_batch_size: int
    num_microbatches: int
    schedule: str
    precision: str
    stages: tuple[StagePlan, ...]
    chunked_loss: int = 1
    slices: tuple[int, ...] = ()
    branches: tuple[int, ...] = ()
    staleness: int = 0
    servers: int = 0
    post_validation: bool = False
    optimizer_in_backward: bool = False
    outer_loop: OuterLoop | None = None
    made: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def stepping(self) -> Stepping:
        """Way in which the optimizer steps."""
        if not self.record.flushes:
            return "stale"
        return next((way for name, way in STEPPINGS.items() if getattr(self, name)), "at_end")

    def stepped(self, stepping: Stepping) -> Plan:
        """The plan with an optimizer that steps so."""
        chosen: dict[str, Any] = {name: way == stepping for name, way in STEPPINGS.items()}
        return dataclasses.replace(self, **chosen)

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas together, that compute, and servers."""
        return self.servers + self.replicas * sum(len(ranks) for ranks in self.devices)

    @property
    def replicas(self) -> int:
        """Replicas that train apart; 1 without an outer loop."""
        return 1 if self.outer_loop is None else self.outer_loop.replicas

    @property
    def sync_every(self) -> int | None:
        """Steps between their meetings."""
        return None if self.outer_loop is None else self.outer_loop.sync_every

    @property
    def outer_bits(self) -> int:
        """Bits of a weight's change that is sent."""
        return OUTER_BITS[0] if self.outer_loop is None else self.outer_loop.outer_bits

    @property
    def fragments(self) -> int:
        """Parts of the weights that meet at steps of their own."""
        return 1 if self.outer_loop is None else self.outer_loop.fragments

    @property
    def of_one_replica(self) -> Plan:
        """The plan of each replica: its ranks from 0, its rows of the batch; itself without an
        outer loop."""
        if self.outer_loop is None:
            return self
        rows = self.global_batch_size // self.replicas
        return dataclasses.replace(self, outer_loop=None, global_batch_size=rows)

    def repeated(self, outer_loop: OuterLoop) -> Plan:
        """The plan of so many replicas, each of which runs this one."""
        rows = self.global_batch_size * outer_loop.replicas
        return dataclasses.replace(self, outer_loop=outer_loop, global_batch_size=rows)

    @property
    def is_served(self) -> bool:
        """Whether parameter servers keep and step its weights."""
        return self.servers > 0

    @property
    def first_worker(self) -> int:
        """The first rank that computes."""
        return self.servers

    @property
    def of_worker(self) -> Plan:
        """The plan of one worker beside parameter servers: its own rows, on one device."""
        stage = dataclasses.replace(self.stages[0], ranks=(0,), dp=1)
        rows = self.global_batch_size // self.stages[0].dp
        return dataclasses.replace(
            self, global_batch_size=rows, stages=(stage,), servers=0, staleness=0
        )

    def served_by(self, servers: int, workers: int, staleness: int) -> Plan:
        """The plan of so many workers, each of which runs this one of one device."""
        ranks = tuple(range(servers, servers + workers))
        stage = dataclasses.replace(self.stages[0], ranks=ranks, dp=workers)
        rows = self.global_batch_size * workers
        return dataclasses.replace(
            self, global_batch_size=rows, stages=(stage,), servers=servers, staleness=staleness
        )

    def group_of(self, rank: int) -> int:
        """The device group of a rank; of a server the first, which are the workers."""
        return next((k for k, ranks in enumerate(self.devices) if rank in ranks), 0)

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Device groups of the pipeline: the distinct ranks of the stages, in order."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.stages))

    @property
    def microbatch_rows(self) -> int:
        """Rows of one micro-batch over all data-parallel ranks of a stage."""
        return self.global_batch_size // self.num_microbatches

    @property
    def pass_rows(self) -> float:
        """Rows that have as many tokens as go through a stage at a time, over all its ranks."""
        return self.microbatch_rows / self.slice_count

    def having(self, name: str) -> tuple[StagePlan | Plan, ...]:
        """The stages, the plan itself or nothing: where the plan has a decision."""
        if DECISIONS[name].written == "outer_loop" and self.outer_loop is None:
            return ()
        if all(hasattr(stage, name) for stage in self.stages):
            return self.stages
        return (self,) if hasattr(self, name) else ()

    @property
    def record(self) -> Schedule:
        """The record of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def passes(self) -> int:
        """Micro-batches, or slices of them, that each stage runs in a step: its copy's share."""
        return self.num_microbatches * self.slice_count // self.record.copies

    @property
    def slice_count(self) -> int:
        """Slices of a micro-batch, of which a whole one counts as one."""
        return max(1, len(self.slices))

    @property
    def pipeline(self) -> Pipeline:
        """Micro-batches, or slices of them, through the stages on the device groups."""
        counts = len(self.stages), self.num_microbatches * self.slice_count, len(self.devices)
        groups = tuple(self.devices.index(s.ranks) for s in self.stages if self.branches)
        return Pipeline(
            self.schedule, *counts, slices=self.slice_count, depths=self.branches, groups=groups
        )

    def parts(self, k: int) -> Parts:
        """Everything that the price of stage k depends on, beside the problem."""
        stage = self.stages[k]
        rows = self.pass_rows / stage.dp
        batch = Batch(rows=rows, microbatches=self.passes, slices=self.slice_count)
        return Parts(stage.mesh, batch, stage.sharing, stage.host, self.stepping)

    @property
    def data_ranks(self) -> int:
        """The least number by which every stage's data-parallel ranks share out rows evenly."""
        return math.lcm(*(stage.dp for stage in self.stages))

    def microbatches_of(self, rows: int) -> int:
        """Micro-batches of a global batch of fewer rows: the most that divide it, up to
        `num_microbatches`."""
        rank_rows = rows // self.data_ranks
        return max(m for m in range(1, self.num_microbatches + 1) if rank_rows % m == 0)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, with what it was `made` by; an existing file is replaced. Raises
        ValueError for what is no path, or can't be written."""
        write_text(path, self._text({"made": dict(self.made)} if self.made else {}), "plan file")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises `PlanError` for a missing or malformed file or a newer format."""
        try:
            data = read_json(path, error=PlanError)
        except PlanError as error:
            raise PlanError.of(error, "plan file") from None
        return _plan(data, str(path))

    @staticmethod
    def from_config(path: str | Path, model: Any, cluster: Any, **arguments: Any) -> Plan:
        """The plan that a configuration of another software means for a model on a cluster, as
        `meshwright.configurations.configured` finds it, whose arguments these are."""
        from meshwright.configurations import plan_from  # the front, which traces and searches

        return plan_from(path, model, cluster, **arguments)

    def to_json(self) -> str:
        """The plan as text: blocks and ranks as ranges, shardings sorted, one mesh a line."""
        return self._text({})

    def _text(self, first: Mapping[str, Any]) -> str:
        """`to_json`, with more entries after the format."""
        stages = [
            {
                "blocks": compress_names(stage.blocks),
                "ranks": compress_ranks(stage.ranks),
                "mesh": _written(stage, "mesh"),
                **_written(stage, "stage"),
                "recompute": stage.recompute
                if isinstance(stage.recompute, str)
                else {policy: compress_names(names) for policy, names in stage.recompute.items()},
                "shardings": dict(sorted(stage.shardings.items())),
            }
            for stage in self.stages
        ]
        top = {
            "format": FORMAT,
            **first,
            "model": self.model,
            "global_batch_size": self.global_batch_size,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "precision": self.precision,
            **_written(self, "plan"),
            **({"outer_loop": _written(self.outer_loop, "outer_loop")} if self.outer_loop else {}),
            "stages": stages,
        }
        mesh = re.compile(r'\{\s+"dp": \d+,[^{}\[\]]*\}')
        text = json.dumps(top, indent=2)
        return mesh.sub(lambda match: json.dumps(json.loads(match[0])), text) + "\n"

    @staticmethod
    def from_json(text: str, *, name: str = "plan") -> Plan:
        """The plan that `to_json` wrote; errors name it `name`. Raises `PlanError` for keys and
        types; `check_plan` checks values against each other and the model."""
        return _plan(parse_json(text, place=name, error=PlanError), name)


def _written(of: Plan | StagePlan | OuterLoop, where: str) -> dict[str, Any]:
    """Decisions that a plan file has there."""
    written: dict[str, Any] = {}
    for name, decision in DECISIONS.items():
        if decision.written != where:
            continue
        value, beside = getattr(of, name), decision.beside
        if beside in written if beside else decision.always or value != decision.off:
            written[name] = dict(sorted(value.items())) if decision.parts else value
    return written


def _read(data: Mapping[str, Any], names: set[str], place: str) -> dict[str, Any]:
    """Decisions of these names that a plan file has. Raises `PlanError`."""
    values = {}
    for name in names & data.keys():
        decision, value = DECISIONS[name], data[name]
        if decision.sizes and not isinstance(value, list):
            raise PlanError.refused(f"{place}: {name}", value, legal=f"a list of {decision.sizes}")
        if not decision.accepts(value):
            raise PlanError.refused(f"{place}: {name}", value, legal=decision.values)
        values[name] = {part: float(n) for part, n in value.items()} if decision.parts else value
        if decision.sizes:
            values[name] = tuple(value) if len(value) > 1 else ()
    return values


def _keys(where: str, *, always: bool) -> set[str]:
    """Keys of decisions that a plan file has there always, or where they are used."""
    return {d.name for d in DECISIONS.values() if d.written == where and d.always == always}


def _plan(data: Any, name: str) -> Plan:
    if not isinstance(data, dict) or "format" not in data:
        raise PlanError(
            "is no Meshwright plan: no key 'format'",
            place=name,
            legal="an object as `meshwright plan -o FILE` writes it",
            way_out="name another file",
        )
    version = _integer(data["format"], f"{name}: format")
    if version > FORMAT:
        raise PlanError(
            f"={shown(version)} is newer than this version reads",
            place=f"{name}: format",
            legal=f"1 to {FORMAT}",
            way_out="upgrade meshwright, or plan again",
        )
    optional = _keys("plan", always=False)
    keys = {f.name for f in dataclasses.fields(Plan)} | {"format"}
    _same_keys(data, keys, name, optional | {"made", "outer_loop"})
    stages = data["stages"]
    if not isinstance(stages, list) or not stages:
        raise PlanError.refused(f"{name}: stages", stages, legal="a list of one object per stage")
    return Plan(
        model=_text(data["model"], f"{name}: model"),
        global_batch_size=_integer(data["global_batch_size"], f"{name}: global_batch_size"),
        num_microbatches=_integer(data["num_microbatches"], f"{name}: num_microbatches"),
        schedule=_text(data["schedule"], f"{name}: schedule"),
        precision=_text(data["precision"], f"{name}: precision"),
        stages=tuple(_stage(s, f"{name}: stage {k}") for k, s in enumerate(stages)),
        outer_loop=_outer_loop(data.get("outer_loop"), f"{name}: outer_loop"),
        made=_made(data.get("made", {}), f"{name}: made"),
        **_read(data, optional, name),
    )


def _outer_loop(data: Any, place: str) -> OuterLoop | None:
    if data is None:
        return None
    always, optional = _keys("outer_loop", always=True), _keys("outer_loop", always=False)
    if not isinstance(data, dict):
        raise PlanError.refused(place, data, legal="an object, or nothing")
    _same_keys(data, always | optional, place, optional)
    return OuterLoop(**_read(data, always | optional, place))


def _made(data: Any, place: str) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(v, str) for v in data.values()):
        raise PlanError.refused(place, data, legal="an object of texts, or nothing")
    return data


def _stage(data: Any, place: str) -> StagePlan:
    if not isinstance(data, dict):
        raise PlanError.refused(place, data, legal="an object")
    always, optional = _keys("stage", always=True), _keys("stage", always=False)
    keys = {"blocks", "ranks", "mesh", "recompute", "shardings"}
    _same_keys(data, keys | always | optional, place, optional)
    blocks, mesh, shardings = data["blocks"], data["mesh"], data["shardings"]
    if not isinstance(blocks, list) or not blocks or not all(isinstance(b, str) for b in blocks):
        raise PlanError.refused(
            f"{place}: blocks", blocks, legal='a list of names, e.g. ["embed", "h.0-11"]'
        )
    degrees, more = _keys("mesh", always=True), _keys("mesh", always=False)
    if not isinstance(mesh, dict) or set(mesh) - more != degrees:
        used = (f'"{name}" ({DECISIONS[name].what})' for name in DECISIONS if name in more)
        raise PlanError.refused(
            f"{place}: mesh",
            mesh,
            legal=f'{{"dp": n, "tp": n}}, and where they are used {", ".join(used)}',
        )
    if not isinstance(shardings, dict) or not all(isinstance(v, str) for v in shardings.values()):
        raise PlanError.refused(
            f"{place}: shardings",
            shardings,
            legal='an object of glob: decision, e.g. {"h.*.mlp.c_fc": "colwise"}',
        )
    return StagePlan(
        blocks=expand_names(blocks, f"{place}: blocks"),
        ranks=expand_ranks(data["ranks"], place),
        recompute=_recompute(data["recompute"], f"{place}: recompute"),
        shardings=shardings,
        **_read(mesh, degrees | more, place),
        **_read(data, always | optional, place),
    )


def _recompute(value: Any, place: str) -> str | dict[str, tuple[str, ...]]:
    """One policy, or policy -> blocks. Raises `PlanError` for anything else."""
    if not isinstance(value, dict):
        return _text(value, place)
    for policy, names in value.items():
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise PlanError.refused(
                f"{place}: {policy}", names, legal='a list of block names, e.g. {"full": ["h.0-5"]}'
            )
    return {policy: expand_names(names, place) for policy, names in value.items()}


def _integer(value: Any, place: str) -> int:
    """An integer from 1; JSON's true is none. Raises `PlanError`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ROWS:
        raise PlanError.refused(place, value, legal=f"an integer from 1 to {MAX_ROWS}")
    return value


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise PlanError.refused(place, value, legal=f"a text of up to {MAX_TEXT}")
    return value


def _same_keys(data: Mapping[str, Any], legal: set[str], place: str, optional: set[str]) -> None:
    missing, unknown = sorted(legal - optional - set(data)), sorted(set(data) - legal)
    if missing or unknown:
        parts = [f"missing {missing}"] * bool(missing) + [f"unknown {unknown}"] * bool(unknown)
        raise PlanError(
            f"{', '.join(parts):.300}", place=place, legal=f"the keys {', '.join(sorted(legal))}"
        )


# --- segments -------------------------------------------------------------------------------------

# Segments of a stage: neighbours that keep only their inputs; their forward runs again in the
# backward, which then goes through them as each block's own recompute policy says.
#
# With n blocks in segments of k a stage keeps the inputs of n/k blocks of each micro-batch in
# flight, and of one segment at a time what its k blocks keep: least for k near √n, where those
# keep their inputs, too (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).


def segments_of(blocks: Sequence[Block], size: int, loss: str | None) -> list[range]:
    """Positions of the blocks in each segment of a stage: as many as `size` neighbours, two at
    least, none of which has the loss, whose backward follows at once, or can't run twice."""
    once = [k for k, b in enumerate(blocks) if loss in b.outputs or not recomputable(b)]
    runs = [range(a + 1, b) for a, b in pairwise([-1, *once, len(blocks)])]
    spans = [run[k : k + size] for run in runs for k in range(0, len(run), size)]
    return [span for span in spans if len(span) > 1]

"""What autograd keeps: counted by torch's saved-tensor hooks while the lowered blocks of a model
run forward as the executor runs them, and predicted for the same blocks.

Neither counts what is stored with the model (parameters, buffers, constants) nor what is made from
the batch alone (ids, labels, masks, positions).
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from meshwright.costmodel.blocks.block_memory import BlockMemory, block_memory
from meshwright.costmodel.blocks.repeated import repeated_ops
from meshwright.costmodel.graph import Block
from meshwright.costmodel.memory.storage import Held, Storage
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.recompute import parts_of
from meshwright.costmodel.rules import recomputable
from meshwright.costmodel.sharding.data_axis import data_layout
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts
from meshwright.costmodel.sharding.moves import buffer_state, moves
from meshwright.costmodel.sharding.strategies import Placement
from meshwright.executor.backward.repeated import _Pass
from meshwright.executor.lowering.context import Context, State
from meshwright.executor.lowering.lower import Lowering
from meshwright.executor.resharding.reshard import Axis, local_part
from meshwright.executor.stages.rank_parameters import parameter_states
from meshwright.executor.stages.stage import BlockModule, StageGraphs, StageProgram
from meshwright.planner.batch import input_leaves
from meshwright.planner.plan.check import check_plan
from meshwright.profiles.cluster import Cluster
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.planning import setting_on
from tests.helpers.threaded_ranks import Mesh
from tests.models.models import GLOBAL_BATCH, Traced


@dataclass(slots=True)
class Ledger:
    """Allocations that autograd keeps, by address; their tensors are held, so that no address is
    used twice."""

    tensors: list[torch.Tensor] = field(default_factory=list)

    def nbytes(self, without: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of the distinct allocations, except those that given tensors lie in."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors}
        for tensor in without:
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        return sum(storage.nbytes() for storage in storages.values())


_CURRENT = threading.local()  # ranks are threads: each has its own ledger
_NOTED, _RUN = _Pass._noted, _Pass.run


def _note(own: _Pass, tensor: torch.Tensor) -> Any:
    held = _NOTED(own, tensor)
    if isinstance(held, torch.Tensor) and (kept := getattr(_CURRENT, "ledger", None)):
        kept.tensors.append(held)
    return held


def _repeat(own: _Pass, *args: Any) -> Any:
    result = _RUN(own, *args)
    if kept := getattr(_CURRENT, "ledger", None):
        operands = tree_leaves([*own.operands.values(), *own.parts.values()])
        kept.tensors += [held for held in operands if isinstance(held, torch.Tensor)]
    return result


_Pass._noted, _Pass.run = _note, _repeat  # for as long as the process lives, idle without a ledger


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Counts what autograd saves, and what is held to run operators again."""
    kept = _CURRENT.ledger = Ledger()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.tensors.append(tensor)
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept
    finally:
        _CURRENT.ledger = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A traced model with a choice for every block on a (data, tensor) mesh; `rows` per rank."""

    of: Traced
    mesh: Mesh
    rows: float
    microbatches: int
    layouts: Mapping[str, BlockLayouts]
    assignments: Mapping[str, Assignment]
    recompute: Mapping[str, str]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.of.graph.blocks

    def inputs(self, block: Block) -> dict[str, Placement]:
        """States of a block's inputs, as their makers leave them."""
        return {
            name: self.assignments[other.name].states[name]
            for other in self.blocks
            for name in block.inputs
            if name in other.outputs
        }


def setup(
    of: Traced, shardings: Mapping[str, str] | None = None, *, mesh: Mesh = (1, 1),
    microbatches: int = 1, recompute: str = "none",
) -> Setup:  # fmt: skip
    """The choices of a plan with these shardings. One micro-batch divides losses by nothing."""
    knobs = Knobs(
        meshes=(mesh,), rows=GLOBAL_BATCH, num_microbatches=microbatches, shardings=shardings or {}
    )
    plan = build_plan(of.graph, knobs)
    assignments = check_plan(plan, of.graph, of.table)[0]
    return chosen(of, assignments, mesh=mesh, microbatches=microbatches, recompute=recompute)


def chosen(
    of: Traced, assignments: Mapping[str, Assignment], *, mesh: Mesh, microbatches: int = 1,
    recompute: str = "none",
) -> Setup:  # fmt: skip
    blocks = of.graph.blocks
    return Setup(
        of=of, mesh=mesh, rows=of.graph.batch_size / mesh[0], microbatches=microbatches,
        layouts={b.name: BlockLayouts(of.graph, of.table, b, mesh[1]) for b in blocks},
        assignments=assignments,
        recompute={b.name: recompute for b in blocks if recomputable(b)},
    )  # fmt: skip


def pricer(of: Setup) -> Pricer:
    dp, tp = of.mesh
    given = {"dp": dp, "tp": tp, "rows": of.rows, "microbatches": of.microbatches}
    setting = setting_on(Cluster.local(dp * tp), **given)
    return Pricer(graph=of.of.graph, table=of.of.table, setting=setting)


def memories(of: Setup) -> dict[str, BlockMemory]:
    """Every block run in mind, values passed on from block to block."""
    prices, passed = pricer(of), dict[str, Held]()
    found = {}
    for block in of.blocks:
        layouts, assignment = of.layouts[block.name], of.assignments[block.name]
        steps = moves(layouts, assignment, of.inputs(block))
        found[block.name] = block_memory(prices, steps, passed)
        passed |= found[block.name].leaving
    return found


def predicted(of: Setup) -> float:
    kept: set[Storage] = set()
    passed: dict[str, Held] = {}
    for block, memory in zip(of.blocks, memories(of).values(), strict=True):
        kept |= _kept(of, block, memory)
        passed |= memory.leaving
    return math.fsum(s.nbytes for s in kept if s.origin in ("made", "input"))


def _kept(of: Setup, block: Block, memory: BlockMemory) -> frozenset[Storage]:
    policy, regather = parts_of(of.recompute.get(block.name, "none"))
    if policy == "none":
        return memory.kept_repeating((), regather=regather)
    if policy != "full":
        again = repeated_ops(block, of.of.graph, of.of.table, "cpu")[policy]
        return memory.kept_repeating({block.ops[k].name for k in again}, regather=regather)
    needed, between = memory.needed()
    read = {storage for name in needed for storage in memory.reads[name]}
    read |= {source for _, source in memory.moved.values()} if between else set()
    return frozenset(s for s in memory.kept | read if s in memory.outside)


def counted(of: Setup, batch: Any, data: Axis | None = None, tensor: Axis | None = None) -> int:
    graph, table = of.of.graph, of.of.table
    data, tensor = data or Axis("data", 1, 0), tensor or Axis("tensor", 1, 0)
    layout = data_layout(graph, table, data.size)
    context = Context(
        graph=graph, table=table, data=layout, data_axis=data, tensor_axis=tensor,
        device=torch.device("cpu"), microbatches=of.microbatches,
    )  # fmt: skip
    lowering = Lowering(context=context, policies=of.recompute)
    stored = parameter_states(graph, of.blocks, of.assignments, (layout,), (data.size,))
    lowered = []
    for block in of.blocks:
        own = of.layouts[block.name], of.assignments[block.name], of.inputs(block)
        lowered.append(lowering.block(block, *own, stored, _buffer_states(of, block)))
    held = _stored(of, lowering, stored)
    given = dict(input_leaves(batch)[0])
    raw = {}
    for name, path in graph.inputs.items():
        mine, state = given[path], layout.states[name]
        if state.sharded:
            mine = local_part(mine, state, data.size, data.rank)
        raw[name] = mine.to(graph.values[name].dtype)
    wanted = tuple(dict.fromkeys(name for block in of.blocks for name in block.derived))
    graphs = StageGraphs(
        prologue=lowering.prologue(graph.derived, wanted), blocks=tuple(lowered), constants={},
        sends=(), loss=graph.loss, updates={},
        differentiable=frozenset(n for n, meta in graph.values.items() if meta.requires_grad),
    )  # fmt: skip
    modules = [BlockModule(block, {}) for block in lowered]
    program = StageProgram(graphs, modules, tensors=held, shared={}, device=torch.device("cpu"))
    apart = [*held.values(), *raw.values()]
    graphs.prologue.module.register_forward_hook(lambda _, args, made: apart.extend(made))
    for block in lowered:
        if block.random:  # the last argument of a block that draws is its random state
            block.module.register_forward_pre_hook(lambda _, args: apart.append(args[-1]))
    counts = {name: torch.tensor(7) for block in lowered for name in block.losses}
    with ledger() as kept:
        done = program.run(raw, {}, counts, (0, 0))
    assert done.produced[graph.loss].requires_grad
    return kept.nbytes([*apart, *counts.values()])


def _stored(of: Setup, lowering: Lowering, states: Mapping[str, State]) -> dict[str, torch.Tensor]:
    graph = of.of.graph
    held = {name: tensor.clone() for name, tensor in graph.constants.items()}
    for name, state in states.items():
        meta = graph.values[name]
        weight = torch.randn(lowering.context.local_shape(name, state), dtype=meta.dtype)
        held[name] = weight.requires_grad_(meta.requires_grad)
    for block in of.blocks:
        for name, state in _buffer_states(of, block).items():
            shape = lowering.context.local_shape(name, (lowering.context.data.states[name], state))
            held[name] = torch.ones(shape, dtype=graph.values[name].dtype)
    for name in graph.buffers:
        if name not in held:
            held[name] = torch.ones(graph.values[name].shape, dtype=graph.values[name].dtype)
    return held


def _buffer_states(of: Setup, block: Block) -> dict[str, Placement]:
    layouts, assignment = of.layouts[block.name], of.assignments[block.name]
    return {name: buffer_state(layouts, name, assignment) for name in block.buffers}

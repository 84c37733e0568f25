"""Tensor parallelism of a plan as styles of torch's `parallelize_module`.

A style belongs to a module: `ColwiseParallel` and `RowwiseParallel` split the weight of an
`nn.Linear` or an `nn.Embedding`, `SequenceParallel` runs a module on a part of the sequence, and
`PrepareModuleInput` and `PrepareModuleOutput` move a tensor between layouts where it enters or
leaves a module. All other operators run on the local tensors that they meet. So each block is
followed operator by operator: a state (R, S(dim)) for each value as the script holds it, which
differs from the plan's where no style can make the plan's. An operator that no strategy has for the
states that it meets makes its block whole again, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.sharding import RP, BlockLayouts, Placement, R
from meshwright.planner.plan import Plan, pipelines, plan_assignments

STYLED = ("linear", "embedding")
LOCAL = "use_local_output=False"
WHOLE = ("no styles of parallelize_module say it", "whole on every rank")


def roots(graph: Graph) -> frozenset[str]:
    """Modules around layers: the model itself, and those that hold the rows of layers."""
    names = [block.name.split(".") for block in graph.blocks if is_layer(block)]
    return frozenset(".".join(parts[:k]) for parts in names for k in range(len(parts))) | {""}


def is_layer(block: Block) -> bool:
    """Whether a block is an instance of a module container, and its name that module's."""
    inside = any(f"{op.module}.".startswith(f"{block.name}.") for op in block.ops)
    return inside and block.name.rpartition(".")[2].isdigit()


def modules_of(graph: Graph, block: Block) -> tuple[str, ...]:
    """Modules that are a block's alone: the layer, or all that its operators are of."""
    if is_layer(block):
        return (block.name,)
    around = roots(graph)
    names = dict.fromkeys(op.module for op in block.ops if op.module not in around)
    return tuple(n for n in names if not any(n.startswith(f"{other}.") for other in names))


@dataclass(slots=True, kw_only=True)
class Styles:
    """Styles by module and path below it ("" is the module itself): those that split weights and
    what enters modules, and `leaving`, applied afterwards. `split_logits`: the loss takes logits
    that are split over the vocabulary. `otherwise`: modules that the script runs otherwise than the
    plan, each with what the plan says, why not and what instead."""

    entering: dict[str, dict[str, str]] = field(default_factory=dict)
    leaving: dict[str, dict[str, str]] = field(default_factory=dict)
    split_logits: bool = False
    otherwise: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    def add(self, other: Styles) -> None:
        """The styles of another block, too."""
        for own, more in ((self.entering, other.entering), (self.leaving, other.leaving)):
            for name, paths in more.items():
                own.setdefault(name, {}).update(paths)
        self.split_logits |= other.split_logits
        self.otherwise |= other.otherwise


def tensor_styles(plan: Plan, graph: Graph) -> Styles:
    """The styles of all blocks. Raises `PlanError` for shardings that are none."""
    try:
        return _styles(plan, graph, whole=False)
    except _NoStyles:
        return _styles(plan, graph, whole=True)


class _NoStyles(Exception):
    """A block that can't run whole on what other blocks leave in parts."""


def _styles(plan: Plan, graph: Graph, *, whole: bool) -> Styles:
    """The styles of all blocks; with `whole` none, and all that the plan splits is otherwise.
    Raises `_NoStyles`."""
    table = sharding.analyse(graph)
    assignments = plan_assignments(plan, graph, table, {})
    blocks = {block.name: block for block in graph.blocks}
    styles = Styles()
    for k in pipelines(plan)[0]:
        at: dict[str, Placement] = {}
        names = plan.stages[k].blocks
        for name in names:
            layouts = BlockLayouts(graph, table, blocks[name], plan.stages[k].tp)
            ends = name == names[-1]
            planned = _Follower(layouts, assignments[k][name], at, leaves_stage=ends)
            follower = planned
            if whole or not follower.followed():
                follower = _other(planned, at, whole=whole)
            styles.add(follower.styles)
            styles.otherwise |= follower.differences(assignments[k][name])
            at |= {value: follower.at[value] for value in blocks[name].outputs}
    return styles


def _other(planned: _Follower, at: Mapping[str, Placement], *, whole: bool) -> _Follower:
    """A block followed in another way than the plan's: as Megatron splits layers, or whole. Raises
    `_NoStyles`."""
    ends = planned.leaves_stage
    if is_layer(planned.block) and not whole:
        follower = _Follower(
            planned.layouts, planned.assignment, at, leaves_stage=ends, as_megatron=True
        )
        if follower.followed():
            return follower
    follower = _Follower(planned.layouts, _whole(planned.block), at, leaves_stage=ends)
    if not follower.followed():
        raise _NoStyles
    return follower


def _whole(block: Block) -> sharding.Assignment:
    """The assignment of a block that runs whole on every rank."""
    values = (*(r for op in block.ops for r in op.results), *block.parameters)
    strategies = {op.name: sharding.replicated(op) for op in block.ops}
    return sharding.Assignment(strategies=strategies, states=dict.fromkeys(values, R))


class _Follower:
    """A block, followed from the states `at` which its inputs come; `as_megatron`: its products are
    split by columns where their input is whole, and by rows where that is split so."""

    def __init__(
        self,
        layouts: BlockLayouts,
        assignment: sharding.Assignment,
        at: Mapping[str, Placement],
        *,
        leaves_stage: bool,
        as_megatron: bool = False,
    ) -> None:
        self.layouts, self.assignment = layouts, assignment
        self.graph, self.block = layouts.graph, layouts.block
        self.at = {value: at.get(value, R) for value in self.block.inputs}
        self.leaves_stage, self.as_megatron = leaves_stage, as_megatron
        self.styles = Styles()
        self.weights: dict[str, Placement] = {}  # as the styles split them
        self.in_parts: dict[str, int] = {}  # modules that run on a part of a dim
        self.own = modules_of(self.graph, self.block)

    # --- styles ---

    def _put(self, module: str, style: str, *, leaving: bool = False) -> None:
        owner = next(o for o in self.own if f"{module}.".startswith(f"{o}."))
        styles = self.styles.leaving if leaving else self.styles.entering
        styles.setdefault(owner, {})[module.removeprefix(owner).removeprefix(".")] = style

    def followed(self) -> bool:
        """Follow the block; whether there are styles for all of it."""
        self._enter()
        done = all(map(self._styled_or_local, self.block.ops))
        return done and self._leave()

    def _enter(self) -> None:
        """Split what enters a layer, or gather it, where all that read it want that."""
        if not is_layer(self.block) or len(self.block.inputs) != 1:
            return
        (value,) = self.block.inputs
        targets = set(self._targets(value))
        if len(targets) == 1 and (target := targets.pop()) != self.at[value]:
            self._put(self.block.name, _moved("Input", self.at[value], target))
            self.at[value] = target

    def _leave(self) -> bool:
        """Gather what leaves a stage, and what the operators between layers take."""
        for value in self.block.outputs:
            if not self.at[value].sharded or value == self.graph.loss:
                continue
            if not self.leaves_stage and is_layer(self.block):
                continue
            if not is_layer(self.block) or len(self.block.outputs) > 1:
                return False
            style = _moved("Output", self.at[value], R)
            self._put(self.block.name, style, leaving=True)
            self.at[value] = R
        return True

    # --- operators ---

    def _styled_or_local(self, op: Op) -> bool:
        strategy = self._strategy(op)
        if op.short in STYLED and self._splits_weight(op, strategy):
            return self._styled(op, strategy)
        return self._local(op, strategy)

    def _strategy(self, op: Op) -> sharding.Strategy:
        """The plan's strategy of an operator, or Megatron's."""
        planned = self.assignment.strategies[op.name]
        if not (self.as_megatron and op.short == "linear"):
            return planned
        x = self._at(op.operands[0])
        last = len(self.graph.values[op.operands[0]].shape) - 1
        split = Placement("S", 1 if x == Placement("S", last) else 0)
        options = (o for o in self.layouts.options(op) if o.operands[1] == split)
        return next(options, planned)

    def _targets(self, value: str) -> list[Placement]:
        """States in which the block's operators want a value."""
        wanted = (
            R
            if self.as_megatron and op.short == "linear" and i == 0
            else _plain(self.assignment.strategies[op.name].operands[i])
            for op, i in self.layouts.readers.get(value, [])
        )
        return list(dict.fromkeys(wanted))

    def _splits_weight(self, op: Op, strategy: sharding.Strategy) -> bool:
        """Whether an operator is all of a module with a weight that a style can split."""
        k = 1 if op.short == "linear" else 0
        fqn = self.graph.parameters.get(op.operands[k])
        state = strategy.operands[k]
        alone = sum(other.module == op.module for other in self.block.ops) == 1
        names = {fqn, *(alias for alias, kept in self.graph.aliases.items() if kept == fqn)}
        return alone and state.sharded and state.split == 1 and f"{op.module}.weight" in names

    def _styled(self, op: Op, strategy: sharding.Strategy) -> bool:
        linear = op.short == "linear"
        x, weight = op.operands[:2] if linear else op.operands[1::-1]
        state = strategy.operands[1 if linear else 0]
        self.weights[weight] = state
        by_columns = state.dim == (0 if linear else 1)
        style = "ColwiseParallel" if by_columns else "RowwiseParallel"
        last = Placement("S", len(self.graph.values[x].shape) - 1)
        usual = last if linear and not by_columns else R
        given = [] if self._at(x) == usual else [f"input_layouts={_layout(self._at(x))}"]
        if not by_columns and not linear:
            given = ["input_layouts=Replicate()"]
        self._put(op.module, f"{style}({', '.join([*given, *self._result(op, by_columns)])})")
        return True

    def _result(self, op: Op, by_columns: bool) -> list[str]:
        """The arguments about a split operator's result, whose state is noted."""
        (value,) = op.results
        state = self.assignment.states[value]
        if not by_columns:  # partial, then summed
            split = state.sharded and state.split == 1 and is_layer(self.block)
            self.at[value] = state if split else R
            if state.sharded and not split:
                self._noted_whole(op, state)
            return [f"output_layouts={_layout(state)}"] if split else []
        last = Placement("S", len(self.graph.values[value].shape) - 1)
        inside = value not in self.block.outputs and (
            self.as_megatron or (state == last and R not in self._targets(value))
        )
        self.at[value] = last if inside else R
        if inside and self._reaches_split_loss(value):
            self.styles.split_logits = True
            return [LOCAL]
        if state.sharded and not self.at[value].sharded and not self.as_megatron:
            self._noted_whole(op, state)
        return [] if self.at[value] == last else [f"output_layouts={_layout(self.at[value])}"]

    def _noted_whole(self, op: Op, state: Placement) -> None:
        """Note that a result is whole where the plan leaves it in parts."""
        if is_layer(self.block) or op.results[0] not in self.block.outputs:
            return
        why, instead = "what follows may read its shape", "whole, and split where layers begin"
        self.styles.otherwise[op.module] = (f"a result in parts {state}", why, instead)

    def _reaches_split_loss(self, value: str) -> bool:
        """Whether a loss over split classes is made of the value."""
        split = (
            op
            for op in self.block.ops
            if self.assignment.strategies[op.name].implementation == "cross_entropy"
        )
        return any(value in self.graph.behind(op.operands) for op in split)

    def _local(self, op: Op, strategy: sharding.Strategy) -> bool:
        """Run an operator on local tensors, by the plan's strategy or another."""
        meets = tuple(map(self._at, op.operands))
        options = [strategy, *self.layouts.options(op)]
        for option in options:
            if tuple(map(_plain, option.operands)) == meets and self._in_parts(op, option):
                for value, state in zip(op.results, option.results, strict=True):
                    self.at[value] = state
                    self._leave_part(op, value)
                return True
        return False

    def _in_parts(self, op: Op, option: sharding.Strategy) -> bool:
        """Note the module of an operator that sums its weight's gradient over parts of a dim.
        Whether a style can say the strategy."""
        if any(state.kind in ("P", "Rp") for state in option.results):
            return False
        summed = [
            v
            for v, state in zip(op.operands, option.operands, strict=True)
            if v in self.graph.parameters and state == RP
        ]
        if not summed:
            return True
        dims = {s.dim for s in option.operands if s.sharded and s.split == 1}
        of_module = all(self.graph.parameters[v].startswith(f"{op.module}.") for v in summed)
        if len(dims) != 1 or not of_module or op.module in roots(self.graph):
            return False
        self.in_parts[op.module] = dims.pop()
        self._put(op.module, self._sequence_style(op.module, "use_local_output=True"))
        return True

    def _sequence_style(self, module: str, *given: str) -> str:
        dim = self.in_parts[module]
        return f"SequenceParallel({', '.join([*given, *[f'sequence_dim={dim}'] * (dim != 1)])})"

    def _leave_part(self, op: Op, value: str) -> None:
        """Gather what leaves a module that runs on a part of the sequence, where all that read it
        want it whole: once for all of them, as is their gradient's sum."""
        readers = self.layouts.readers.get(value, [])
        inside = any(f"{r.module}.".startswith(f"{op.module}.") for r, _ in readers)
        if op.module not in self.in_parts or inside or not self.at[value].sharded:
            return
        targets = self._targets(value)
        if targets and all(not target.sharded for target in targets):
            whole = _Follower(self.layouts, self.assignment, {value: R}, leaves_stage=False)
            whole.as_megatron = self.as_megatron
            styled = all(
                r.short == "linear" and self._splits_weight(r, whole._strategy(r))
                for r, _ in readers
            )
            style = _moved("Output", self.at[value], R, LOCAL if styled else "")
            self._put(op.module, self._sequence_style(op.module))
            self._put(op.module, style, leaving=True)
            self.at[value] = R

    def _at(self, value: str) -> Placement:
        return self.at.get(value, R)

    # --- differences ---

    def differences(self, planned: sharding.Assignment) -> dict[str, tuple[str, str, str]]:
        """Modules that the plan splits otherwise: by their weights, as used and as stored, or else
        by what their operators split."""
        if self.as_megatron:
            instead = "columns and rows of its products, as Megatron splits them"
            return {self.block.name: ("the split", WHOLE[0], instead)}
        found = {**self.styles.otherwise}
        for op in self.block.ops:
            strategy = planned.strategies[op.name]
            for value, state in zip(op.operands, strategy.operands, strict=True):
                stored = planned.states.get(value, R) if value in self.graph.parameters else R
                if state.sharded and value in self.graph.parameters:
                    stored = state
                if stored.sharded and self.weights.get(value) != stored:
                    name = strategy.name if state.sharded else f"a part {stored} of the weight"
                    found[op.module or op.key] = (name, *WHOLE)
        split = [op for op in self.block.ops if planned.strategies[op.name].split_factor]
        if found or planned is self.assignment:
            return found
        return {op.module or op.key: ("a split", *WHOLE) for op in split}


def _plain(state: Placement) -> Placement:
    """A state as a forward has it, whether or not its gradient is partial."""
    return R if state == RP else state


def _layout(state: Placement) -> str:
    return f"Shard({state.dim})" if state.sharded else "Replicate()"


def _moved(end: str, source: Placement, target: Placement, more: str = "") -> str:
    """A `PrepareModuleInput` or `PrepareModuleOutput` from one layout to another."""
    name = end.lower()
    texts = [_layout(source), _layout(target)]
    if end == "Input":  # of the first argument
        texts, more = [f"({text},)" for text in texts], "use_local_output=True"
    given = [f"{name}_layouts={texts[0]}", f"desired_{name}_layouts={texts[1]}", more]
    return f"PrepareModule{end}({', '.join(filter(None, given))})"


def by_glob(names: Iterable[str]) -> list[str]:
    """Names with the numbers of layers as `*`, each once."""
    parts = (name.split(".") for name in names)
    return list(dict.fromkeys(".".join("*" if p.isdigit() else p for p in n) for n in parts))

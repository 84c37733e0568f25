"""Seconds of a forward over given tokens under a tensor axis, block by block.

Products of many tokens take what those of training take; of few tokens what reading the weights
takes, at `STREAMED` of the memory's bandwidth, and computing at `COMPUTED` of the device's peak:
whichever kernel is faster. What lies between products and attention is fused into them, as
engines do; each of these kernels is launched once. Attention of a new token reads what is kept of
the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.kernels import attention_seconds
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import FORWARD_S, Entry, Pricer, Problem, Setting
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.rules import EXPERT_FACTOR, traits_of
from meshwright.costmodel.sharding import Assignment, Move, Placement, R, Run, Step
from meshwright.planner.pricing import StageCoster
from meshwright.planner.serving.cache import Attention
from meshwright.planner.stages import BlockPrograms, Chain

STREAMED = 0.78  # of the memory's bandwidth (scripts/validate_serving.py)
COMPUTED = 0.7  # of the peak of products
CHUNK = 8192  # tokens of prompts in one forward
SHARDED_FOR = 64  # tokens of a forward whose shardings all have


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of a block's forward: of what every token goes through, and of what only tokens
    whose logits are wanted do (`head_s`); kernels that it launches."""

    body_s: float
    head_s: float
    kernels: int


class Forwards:
    """Prices of forwards of one problem under each tensor-parallel degree."""

    def __init__(self, problem: Problem, attention: Sequence[Attention], logits: str) -> None:
        self.problem = problem = replace(problem, graph=_without_gradients(problem.graph))
        self.attention = {layer.op.name: layer for layer in attention}
        self.coster = StageCoster(problem)
        self.programs = BlockPrograms(self.coster)
        self.needed = _operators_behind(problem.graph, logits)
        self.head = _head(problem.graph, self.needed)
        self._chains = Memo[int, Chain]()
        self._blocks = Memo[tuple[int, float], list[BlockSeconds]]()
        self._weights = Memo[tuple[int, int, int], float]()
        self._kept = Memo[tuple[int, int], list[float]]()
        self._passing = Memo[tuple[int, float], float]()

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @property
    def dtype(self) -> str:
        """The dtype of products."""
        return PRECISIONS[self.problem.precision].wide

    @cached_property
    def tokens(self) -> int:
        """Tokens of a row, as the model was traced."""
        layer = next(iter(self.attention.values()))
        return self.graph.values[layer.op.operands[0]].shape[2]

    def chain(self, tp: int) -> Chain:
        """The blocks' shardings on a tensor axis, with matrices in parts wherever they can be."""
        setting = self.setting(tp, SHARDED_FOR)
        return self._chains.of(tp, lambda: self.programs.chain(setting, mode="lean"))

    def legal(self, tp: int) -> bool:
        """Whether ranks have equally many heads, and all blocks a sharding."""
        if not all(layer.splits(tp) for layer in self.attention.values()):
            return False
        return all(table is not None for table in self.chain(tp).tables)

    def setting(self, tp: int, tokens: float) -> Setting:
        """A stage of a tensor axis with so many tokens."""
        return self.coster.setting(Mesh(dp=1, tp=tp), Batch(rows=tokens / self.tokens))

    def weight_bytes(self, tp: int, start: int, stop: int) -> float:
        """Bytes of the weights of a stage's blocks on a rank, each once."""

        def nbytes() -> float:
            pricer, assignments = self.coster.pricer(self.setting(tp, 1.0)), self._assignments(tp)
            held = {
                value: pricer.numel(value, assignments[block.name].states[value])
                for block in self.graph.blocks[start:stop]
                for value in block.parameters
            }
            return self.problem.weight_bytes * sum(held.values())

        return self._weights.of((tp, start, stop), nbytes)

    def kept_bytes(self, tp: int, length: int) -> list[float]:
        """Bytes that each block keeps of a row of so many tokens on a rank."""
        itemsize = self.problem.weight_bytes

        def nbytes() -> list[float]:
            return [
                sum(itemsize * layer.kept_by(tp) * layer.tokens(length) for layer in layers)
                for layers in self.layers
            ]

        return self._kept.of((tp, length), nbytes)

    @cached_property
    def layers(self) -> list[list[Attention]]:
        """The attention of each block."""
        found = (map(self.attention.get, (op.name for op in b.ops)) for b in self.graph.blocks)
        return [[*filter(None, of_block)] for of_block in found]

    def blocks(self, tp: int, tokens: float) -> list[BlockSeconds]:
        """Seconds of each block for so many tokens, attention apart."""
        return self._blocks.of((tp, tokens), lambda: self._priced(tp, tokens))

    def attention_s(self, tp: int, rows: float, length: int, new: int) -> list[float]:
        """Seconds of each block's attention of `new` tokens of each row, the last of `length`."""
        device, itemsize = self.problem.cluster.device, self.problem.weight_bytes
        found = []
        for layers in self.layers:
            seconds = 0.0
            for layer in layers:
                seen, heads = layer.tokens(length), layer.heads / tp
                widths = layer.width + layer.value_width
                pairs = rows * (seen if new == 1 else seen * new - seen**2 / 2)
                if layer.latent and new == 1:  # of what is kept itself
                    widths = 2 * layer.kept
                flops = 2 * pairs * heads * widths
                kept = itemsize * rows * layer.kept_by(tp) * seen
                read_s = kept / (STREAMED * device.memory_bandwidth)
                if new == 1:
                    seconds += max(read_s, flops / (COMPUTED * device.flops(self.dtype)))
                else:
                    seconds += attention_seconds(device, self.dtype, flops, float(new), kept)
            found.append(seconds)
        return found

    def send_s(self, tp: int, cut: int, tokens: float) -> float:
        """Seconds to send the activations of so many tokens at a boundary of blocks."""
        chain = self.chain(tp)
        states = zip(chain.cuts, chain.states, strict=True)
        split = [of_cut[s].sharded for of_cut, s in states]
        return float(self.coster.send_seconds(self.setting(tp, tokens), split)[cut])

    def passing_bytes(self, tp: int, tokens: float) -> float:
        """Bytes of the values that the largest operator reads and makes of so many tokens, twice:
        of it and of the one before."""
        graph, pricer = self.graph, self.coster.pricer(self.setting(tp, tokens))

        def most() -> float:
            alike = {block.class_id: block for block in graph.blocks}.values()
            ops = [op for b in alike for op in b.ops if op.name in self.needed - self.head]
            names = ({*op.operands, *op.results} - graph.parameters.keys() for op in ops)
            return max((sum(map(pricer.nbytes, of_op)) for of_op in names), default=0.0)

        return 2 * self._passing.of((tp, tokens), most)

    def _assignments(self, tp: int) -> Mapping[str, Assignment]:
        return self.chain(tp).assignments(0, len(self.graph.blocks))

    def _priced(self, tp: int, tokens: float) -> list[BlockSeconds]:
        pricer = self.coster.pricer(self.setting(tp, tokens))
        assignments, states = self._assignments(tp), dict[str, Placement]()
        known = Memo[tuple[str, str, tuple[Placement, ...]], BlockSeconds]()
        found = []
        for block in self.graph.blocks:
            assignment = assignments[block.name]
            inputs = {value: states.get(value, R) for value in block.inputs}
            steps = partial(self.coster.steps, block, assignment, inputs, tp)
            key = block.class_id, assignment.choices, (*inputs.values(),)
            price = partial(self._block, pricer, steps, tokens)
            if self.head.isdisjoint(op.name for op in block.ops):
                found.append(known.of(key, price))
            else:
                found.append(price())
            states |= {value: assignment.states[value] for value in block.outputs}
        return found

    def _block(
        self, pricer: Pricer, steps: Callable[[], Sequence[Step]], tokens: float
    ) -> BlockSeconds:
        body_s = head_s = 0.0
        kernels = 0
        for step in steps():
            if not isinstance(step, Run | Move):
                continue
            name = step.op.name if isinstance(step, Run) else step.op
            if name and name not in self.needed:
                continue
            if isinstance(step, Run) and name in self.attention:
                kernels += 1  # whose seconds depend on earlier tokens
                continue
            entries = [e for e in pricer.step_entries(step) if e.column == FORWARD_S]
            kernels += sum(entry.kind == "product" for entry in entries)
            read = self._read_part(step, tokens)
            seconds = sum(self._seconds(entry, read) for entry in entries)
            head_s += seconds * (name in self.head)
            body_s += seconds * (name not in self.head)
        return BlockSeconds(body_s=body_s, head_s=head_s, kernels=kernels)

    def _read_part(self, step: Run | Move, tokens: float) -> float:
        """Part of a product's weights that is read: of experts, those that have a token."""
        if not isinstance(step, Run) or traits_of(step.op).experts != "product":
            return 1.0
        experts = self.problem.factors.ops[step.op.name].sizes[EXPERT_FACTOR]
        copies = self.graph.values[step.op.operands[0]]
        each = copies.numel / copies.shape[-1] / (self.graph.batch_size * self.tokens)
        return 1.0 - float((1 - 1 / experts) ** max(tokens * each, 1.0))

    def _seconds(self, entry: Entry, read: float) -> float:
        """Seconds of an entry in an engine's kernels, which read such a part of the weights."""
        device = self.problem.cluster.device
        if entry.axis is not None:
            return entry.seconds
        read_s = read * entry.moved_bytes / (STREAMED * device.memory_bandwidth)
        if entry.kind == "product":
            few_s = read_s + entry.flops / (COMPUTED * device.flops(self.dtype))
            return min(entry.seconds, few_s)
        return min(entry.seconds, read_s)


def _without_gradients(graph: Graph) -> Graph:
    values = {name: replace(x, requires_grad=False) for name, x in graph.values.items()}
    return replace(graph, values=values)


def _operators_behind(graph: Graph, value: str) -> frozenset[str]:
    behind = graph.behind([value])
    return frozenset(op.name for op in graph.ops if not behind.isdisjoint(op.results))


def _head(graph: Graph, needed: frozenset[str]) -> frozenset[str]:
    """The last product on the way to the logits, and what follows it."""
    products = [
        k for k, op in enumerate(graph.ops)
        if op.name in needed and traits_of(op).main and traits_of(op).kernel == ""
        and not graph.parameters.keys().isdisjoint(op.operands)
    ]  # fmt: skip
    first = products[-1] if products else len(graph.ops)
    return frozenset(op.name for op in graph.ops[first:])

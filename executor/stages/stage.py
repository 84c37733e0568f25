"""One stage on one rank: its lowered blocks, run forward and backward one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.costmodel.memo import Memo
from meshwright.executor.backward import Away
from meshwright.executor.context_attention import Kept
from meshwright.executor.devices import to_device
from meshwright.executor.host_memory import Aside
from meshwright.executor.lowering import Lowered, block_salt
from meshwright.executor.parameters import BlockWeights

_Values: TypeAlias = Mapping[str, torch.Tensor]
_More: TypeAlias = dict[str, tuple[Any, ...]]
KeptByBlock: TypeAlias = dict[str, Kept]


@dataclass(slots=True, kw_only=True)
class Pass:
    """Ends of a micro-batch's autograd graph: received inputs, and the values sent or the loss."""

    received: dict[str, torch.Tensor]
    produced: dict[str, torch.Tensor]


class BlockModule(nn.Module):
    """A lowered block with the parameters that it alone reads; called with the rest, in order.

    The graph may be shared with other blocks, so it is no submodule: what wraps this module (ZeRO-3
    gathers around its forward and backward) sees its own parameters only.
    """

    def __init__(self, lowered: Lowered, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.own = frozenset(parameters).intersection(lowered.arguments)
        self._called = Memo[tuple[str, ...], Any]()  # by arguments: slices take turns
        for name in lowered.arguments:
            if name in parameters:
                self.register_parameter(_attribute(name), parameters[name])
        self.take(lowered)

    def take(self, lowered: Lowered) -> None:
        """Run this graph from now on; it reads the same parameters."""
        self.lowered = lowered
        self.given, self.sources = self._called.of(lowered.arguments, lambda: self._call(lowered))

    def _call(self, lowered: Lowered) -> tuple[tuple[str, ...], tuple[int | str, ...]]:
        """Names that a graph is given; of each argument the place there, or an attribute."""
        given = tuple(n for n in lowered.arguments if n not in self.own)
        at = {n: k for k, n in enumerate(given)}
        return given, tuple(at[n] if n in at else _attribute(n) for n in lowered.arguments)

    def forward(self, *operands: torch.Tensor) -> Any:
        args = [
            operands[source] if isinstance(source, int) else getattr(self, source)
            for source in self.sources
        ]
        args += operands[len(self.given) :]  # loss counts, random state
        return self.lowered.module(*args)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraphs:
    """Graphs of a stage for batches of one shape.

    `prologue` makes what the `blocks` read of raw inputs; `constants` are by value name. `sends`
    are read by other stages; `loss` is set on the last stage; `updates` maps buffers to the values
    that replace them after each micro-batch, those of `once` after the step; `differentiable` have
    a gradient. `outputs` are kept for the caller of an evaluation. `segments` are positions of
    blocks that run again together. What the first `away` blocks save goes to host memory until
    their backward.
    """

    prologue: Lowered
    blocks: tuple[Lowered, ...]
    constants: Mapping[str, torch.Tensor]
    sends: tuple[str, ...]
    loss: str | None
    updates: Mapping[str, str]
    differentiable: frozenset[str]
    once: frozenset[str] = frozenset()
    outputs: tuple[str, ...] = ()
    segments: tuple[range, ...] = ()
    away: int = 0

    @property
    def kept(self) -> tuple[str, ...]:
        """Values that a forward hands on."""
        loss = () if self.loss is None else (self.loss,)
        return tuple(dict.fromkeys([*self.sends, *loss, *self.outputs]))

    @property
    def spans(self) -> list[range]:
        """The segments, and between them each block by itself."""
        inside = {k for segment in self.segments for k in segment}
        alone = [range(k, k + 1) for k in range(len(self.blocks)) if k not in inside]
        return sorted([*self.segments, *alone], key=lambda span: span.start)


class StageProgram(nn.Module):
    """The stage's graphs and tensors.

    `tensors` are buffers, constants and parameters that stages of one rank share, by value name;
    `shared` parameters that several blocks read; `ready` is called with a block's name before each
    of its forwards.
    """

    def __init__(
        self,
        graphs: StageGraphs,
        blocks: Sequence[BlockModule],
        *,
        tensors: Mapping[str, torch.Tensor],
        shared: Mapping[str, nn.Parameter],
        device: torch.device,
    ) -> None:
        """`blocks` are those of the graphs, with parameters; `tensors` come without constants."""
        super().__init__()
        self.blocks = tuple(blocks)
        self.submodules = nn.ModuleList(blocks)  # for what looks for modules
        self.tensors = {**tensors, **graphs.constants}
        self.written = dict[str, torch.Tensor]()  # what the step makes of buffers of `once`
        self.shared = {name: _attribute(name) for name in shared}
        for name, leaf in shared.items():
            self.register_parameter(_attribute(name), leaf)
        self.graphs = graphs
        self.device = device
        self.ready: Callable[[str], None] | None = None
        self.aside = Aside(device)  # what is saved goes to the host there, and comes back
        self.away: BlockWeights | None = None  # weights that are there for a block's run alone

    def take(self, graphs: StageGraphs) -> None:
        """Run these graphs from now on, on the same parameters and buffers."""
        if graphs is self.graphs:
            return
        for name in self.graphs.constants:
            del self.tensors[name]
        self.tensors.update(graphs.constants)
        for block, lowered in zip(self.blocks, graphs.blocks, strict=True):
            block.take(lowered)
        self.graphs = graphs

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        received: dict[str, torch.Tensor],
        counts: Mapping[str, torch.Tensor],
        rng: tuple[int, int],
        kept: KeptByBlock | None = None,
    ) -> Pass:
        """Run one micro-batch, or a slice of it. `inputs` are its raw inputs on this rank, `counts`
        the loss denominators, `kept` what blocks keep of its earlier slices."""
        for name, tensor in received.items():
            if name in self.graphs.differentiable:
                tensor.requires_grad_()
        return Pass(received=received, produced=self(inputs, received, counts, rng, kept))

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        received: Mapping[str, torch.Tensor],
        counts: Mapping[str, torch.Tensor],
        rng: tuple[int, int],
        kept: KeptByBlock | None = None,
    ) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {**self.tensors, **inputs, **received}
        values |= {name: getattr(self, attribute) for name, attribute in self.shared.items()}
        prologue = self.graphs.prologue
        with torch.no_grad():
            outputs = prologue.module(*[values[n] for n in prologue.arguments])
        values |= dict(zip(prologue.outputs, outputs, strict=True))
        random = self._random_states(rng)
        staying = (*values.values(), *counts.values(), *random.values())
        more: _More = {name: (state,) for name, state in random.items()}
        kept = {} if kept is None else kept
        for name in (block.lowered.name for block in self.blocks if block.lowered.keeps):
            more[name] = *more.get(name, ()), kept.setdefault(name, {})
        saved = Away(self.aside, self.device, staying) if self._sends else None
        for span in self.graphs.spans:
            with self._saving(saved, span):
                self._span(span, values, counts, more)
            if saved is not None:
                self._let_go(values, span.stop)
        if saved is not None:
            saved.settle()
        if self.training:
            self._update(values)
        return {n: values[n] for n in self.graphs.kept}

    @torch.no_grad()
    def _update(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take the new values of buffers, in tensors of their own: a backward may need the old."""
        for buffer, update in self.graphs.updates.items():
            new = torch.empty_like(self.tensors[buffer])
            assert values[update].shape == new.shape, f"a part of the update of {buffer}"
            of = self.written if buffer in self.graphs.once else self.tensors
            of[buffer] = new.copy_(values[update])

    @property
    def _sends(self) -> bool:
        """Whether a forward sends what it saves to host memory."""
        return self.graphs.away > 0 and torch.is_grad_enabled()

    def _saving(self, saved: Away | None, span: range) -> AbstractContextManager[None]:
        """Context of a span's forward: what it saves goes to the host, or what the one before it
        sent comes back beside its backward."""
        sends = span.start < self.graphs.away
        if saved is None or not (sends or saved.before):
            return nullcontext()
        blocks = self.blocks[span.start : span.stop]

        def own() -> Iterator[torch.Tensor]:
            return chain.from_iterable(block.parameters() for block in blocks)

        return saved.saving(own, sends=sends)

    def _let_go(self, values: dict[str, torch.Tensor], stop: int) -> None:
        """Forget what the first blocks made and no later one reads."""
        later = {n for block in self.blocks[stop:] for n in block.given}
        later.update(self.graphs.kept, self.graphs.updates.values())
        for block in self.blocks[:stop]:
            for name in block.lowered.outputs:
                if name not in later:
                    values.pop(name, None)

    def _span(
        self, span: range, values: dict[str, torch.Tensor], counts: _Values, more: _More
    ) -> None:
        """Run a span of blocks, and add to the values what it makes."""
        if len(span) > 1 and torch.is_grad_enabled():
            values |= self._segment(span, values, counts, more)
            return
        for block in self.blocks[span.start : span.stop]:
            self._announce(block)
            outputs = _run(block, values, counts, more)
            if self.away is not None and block.lowered.name in self.away.away:
                self._return(block.lowered.name, outputs.values())
            values |= outputs

    def _announce(self, block: BlockModule) -> None:
        if self.ready is not None:
            self.ready(block.lowered.name)

    def _return(self, block: str, names: Iterable[torch.Tensor]) -> None:
        """Have a block's weights come back before its backward, which the first gradient of what
        it made begins."""
        assert self.away is not None
        again = self.away.backward
        for x in names:
            if x.requires_grad:
                x.register_hook(lambda _: again(block))

    def _segment(
        self, span: range, values: _Values, counts: _Values, more: _More
    ) -> dict[str, torch.Tensor]:
        """Values of a segment that later blocks read, or the stage hands on; in its backward it
        runs again."""
        blocks, later = self.blocks[span.start : span.stop], self.blocks[span.stop :]
        outputs = dict.fromkeys(n for block in blocks for n in block.lowered.outputs)
        read = dict.fromkeys(n for block in blocks for n in block.given if n not in outputs)
        wanted = {*self.graphs.kept, *self.graphs.updates.values()}
        wanted.update(n for block in later for n in block.given)
        leaving = [n for n in outputs if n in wanted]
        differentiable = self.graphs.differentiable
        # parameters that other blocks read too are among them: their gradients are summed outside
        names = [n for n in read if n in differentiable]
        rest = {n: values[n] for n in read if n not in names}

        def run(operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            local_values = rest | dict(zip(names, operands, strict=True))
            again = torch.is_grad_enabled()
            for block in blocks:
                if not again:
                    self._announce(block)
                local_values |= _run(block, local_values, counts, more)
                if again and block is not blocks[-1] and isinstance(block, FSDPModule):
                    block.reshard()  # which it leaves to the backward, if it runs in one
            return tuple(local_values[n] for n in leaving)

        flags = [n in differentiable for n in leaving]
        results = run_segment(run, flags, [values[n] for n in names])
        return dict(zip(leaving, results, strict=True))

    def train(self, mode: bool = True) -> StageProgram:
        """`Module.train` without the graphs, which blocks share and which are no submodules."""
        super().train(mode)
        for block in self.blocks:
            block.lowered.module.train(mode)
        return self

    def _random_states(self, rng: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Seed and first row of each block that draws, moved to the device at once."""
        names = [block.lowered.name for block in self.blocks if block.lowered.random]
        if not names:
            return {}
        seed, row = rng
        states = torch.tensor([[(seed ^ block_salt(n)) & 0x7FFFFFFF, row] for n in names])
        return dict(zip(names, to_device(states, self.device), strict=True))

    def backward(
        self, done: Pass, gradients: Mapping[str, torch.Tensor], scale: float, *, last: bool
    ) -> dict[str, torch.Tensor]:
        """Backpropagate one micro-batch, its loss times `scale`; returns gradients of what was
        received. ZeRO-3 reduces among replicas of its shards in the `last` of the step."""
        if isinstance(self, FSDPModule):
            self.set_requires_all_reduce(last)
        roots, seeds = [], []
        for name, tensor in done.produced.items():
            if not tensor.requires_grad:
                continue
            if name == self.graphs.loss:
                roots.append(tensor)
                seeds.append(torch.full_like(tensor, scale))
            elif name in gradients:
                roots.append(tensor)
                seeds.append(gradients[name])
        if self.away is not None:
            self.away.begin_backward()
        if roots:
            torch.autograd.backward(roots, seeds)
        if self.away is not None:
            self.away.let_go()
        return {
            name: tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for name, tensor in self.differentiable(done).items()
        }

    def differentiable(self, done: Pass) -> dict[str, torch.Tensor]:
        """Received values that get a gradient."""
        return {n: x for n, x in done.received.items() if n in self.graphs.differentiable}


def _run(
    block: BlockModule, values: _Values, counts: _Values, more: _More
) -> dict[str, torch.Tensor]:
    """One block's outputs; `more` is what it takes beside values, by its name."""
    lowered = block.lowered
    args = [values[n] for n in block.given] + [counts[n] for n in lowered.losses]
    args += more.get(lowered.name, ())
    return dict(zip(lowered.outputs, block(*args), strict=True))


def _attribute(value: str) -> str:
    return f"value_{value}"


# --- segments -------------------------------------------------------------------------------------

# Segments of a stage's blocks: forwards that keep what enters, and run again in the backward.
#
# The forward of a segment builds no graph. Its backward runs it once more with one, on the same
# values and random states, and goes back through that at once. Gradients of parameters that one
# block alone reads arrive at their leaves; others are among what enters, so that autograd adds up
# what all their readers make before it is a leaf's. What the blocks keep then is their own
# policies' matter.


Run: TypeAlias = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, differentiable: Sequence[bool], _: torch.Tensor, *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        outputs = run(operands)
        plain = [x for x, flows in zip(outputs, differentiable, strict=True) if not flows]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        operands = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.run(operands)
        pairs = [(x, g) for x, g in zip(outputs, grads, strict=True) if g is not None]
        roots, seeds = [x for x, _ in pairs], [g for _, g in pairs]
        del outputs, pairs
        torch.autograd.backward(roots, seeds)
        return None, None, None, *(x.grad for x in operands)


def run_segment(
    run: Run, differentiable: Sequence[bool], operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The results of `run(given)`, of which those have a gradient that are `differentiable`, and
    whose backward runs it again. Parameters are read by `run` itself."""
    # parameters may have gradients where no input has
    anchor = torch.empty(0, requires_grad=True)
    outputs: tuple[torch.Tensor, ...] = _Again.apply(run, differentiable, anchor, *operands)  # type: ignore[no-untyped-call]
    return outputs

"""Meetings of replicas that train apart: the outer step of DiLoCo (arXiv 2311.08105).

After H steps of its own optimizer, replica r has weights w_r, and all of them have, from the last
meeting, the outer weights v and the outer momentum m. With β the outer momentum's factor and α the
outer learning rate

    Δ = mean over replicas of (v - w_r)
    m ← β m + Δ
    v ← v - α (Δ + β m)                 Nesterov's step, as torch's SGD makes it

and all replicas go on from v. With α = 1 and β = 0 the weights are averaged: Local SGD. Of P
fragments (Streaming DiLoCo, 2501.18512) the j-th meets at steps that are j H/P more than a multiple
of H. When they meet follows from the number of steps alone, be they skipped or not. A meeting that
is due is at the start of the next step, as only then the optimizer has surely made its own: what is
called in between (clipping, a checkpoint, an evaluation) finds the weights unmet.

The fragments cut the model's trained parameters, in the order of its state dict, where their global
sizes come nearest to equal parts: all ranks cut alike. Of what several ranks of a replica hold
alike (the data ranks that ZeRO does not divide among) each has a share: it keeps v and m of that in
fp32 in host memory, exchanges it with the same rank of the other replicas, and gathers the rest.
What stages hold together (tied weights) is sent in fp32 whatever the bits: the blocks of 8-bit
changes would lie otherwise in each of them, and the copies part.

Buffers that steps write are averaged when the first fragment meets, those of integers taken from
the first replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.executor.errors import StateError
from meshwright.executor.parameters import StageParameter, packed, unpacked
from meshwright.executor.ranks import ReplicaWorld, progress
from meshwright.executor.ranks.replicas import digest
from meshwright.executor.resharding import Axis, all_gather_flat
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.plan import OuterLoop

LEARNING_RATE, MOMENTUM = 0.7, 0.9  # of DiLoCo's outer step


@dataclass(slots=True, kw_only=True, eq=False)
class Share:
    """This rank's share of the parameters of a fragment that the same ranks hold, along an `axis`:
    outer `weights` and `momentum`, flat, in fp32 in host memory; sent as they are where `exact`."""

    parameters: Sequence[StageParameter]
    axis: Axis
    exact: bool
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    momentum: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which its parameters are kept."""
        return self.parameters[0].stored.dtype

    def read(self) -> torch.Tensor:
        """The share of the parameters as they are."""
        flat = torch.cat([p.stored.detach().flatten().cpu().float() for p in self.parameters])
        return self._padded(flat)[self.axis.rank].clone()

    def write(self, share: torch.Tensor) -> None:
        """Give the parameters what every rank of the axis has as its share. Collective."""
        device, flat = _device_of(self.axis, self.parameters), share.to(self.dtype)
        if self.axis.size > 1:
            flat, work = all_gather_flat(flat.to(device), self.axis)
            work.wait()
            flat = flat.flatten()
        with torch.no_grad():
            at = 0
            for p in self.parameters:
                part = flat[at : at + p.stored.numel()]
                p.stored.copy_(part.view(p.stored.shape))
                at += p.stored.numel()

    def _padded(self, flat: torch.Tensor) -> torch.Tensor:
        """[ranks, share] of a flat tensor, with zeros behind it."""
        share = -(-flat.numel() // self.axis.size)
        return torch.nn.functional.pad(flat, (0, share * self.axis.size - flat.numel())).view(
            self.axis.size, share
        )


def _device_of(axis: Axis, parameters: Sequence[StageParameter]) -> torch.device:
    """Device on which the axis' group gathers."""
    return parameters[0].leaf.device if axis.size > 1 else torch.device("cpu")


class Meetings:
    """When and how the replica of a runtime meets the others. `lr` and `momentum` are of the outer
    step, the same on all ranks, and may change between meetings: 1 and 0 average the weights (Local
    SGD). `world` waits and exchanges; `compare` says that replicas are compared when they begin, in
    place of being made equal."""

    def __init__(
        self, runtime: Runtime, loop: OuterLoop, world: ReplicaWorld, *, compare: bool
    ) -> None:
        self.runtime, self.loop, self.world, self.compare = runtime, loop, world, compare
        self.lr, self.momentum = LEARNING_RATE, MOMENTUM
        self.met_at = [0] * loop.fragments  # steps done when each fragment met last
        self.begun_at: int | None = None  # loads of the runtime that its outer weights are of
        self.fragments = [_shares(runtime, names) for names in _cut(runtime, loop.fragments)]

    @property
    def shares(self) -> Iterator[Share]:
        """The shares of all fragments."""
        for fragment in self.fragments:
            yield from fragment

    def meet_if_due(self) -> None:
        """Begin, or meet as the number of steps says. Collective."""
        steps = self.runtime.steps
        self.begin()
        self._meet([j for j in self.loop.due(steps) if self.met_at[j] != steps])

    def meet(self) -> None:
        """Meet now, all fragments that have made a step since they did. Collective, after as many
        steps on every replica."""
        self.begin()
        self._meet([j for j, at in enumerate(self.met_at) if at != self.runtime.steps])

    def _meet(self, fragments: Sequence[int]) -> None:
        if not fragments:
            return
        self.arrive_alike("meeting", f"step {self.runtime.steps}, fragments {[*fragments]}")
        with progress.during("meeting other replicas", waits=True), torch.no_grad():
            for j in fragments:
                for share in self.fragments[j]:
                    self._step(share)
                self.met_at[j] = self.runtime.steps
            if 0 in fragments:
                self._average_buffers()

    def arrive_alike(self, place: str, what: str) -> None:
        """Wait for the other replicas. Raises StateError, on all, for those that come with
        something else."""
        texts = self.world.arrive(place, what)
        if len(set(texts)) > 1:
            said = "; ".join(f"replica {k}: {text}" for k, text in enumerate(texts))
            raise StateError(
                f" of replicas that don't fit each other: {said}",
                place=place,
                legal="the same number of train_step on every replica",
                way_out="give every replica as many batches (data_loader does), and call meet() "
                "and evaluate() after as many steps on all of them",
            )

    def _step(self, share: Share) -> None:
        written = share.weights.to(share.dtype).float()  # as it was written
        mean = self._mean(written - share.read(), exact=share.exact)
        share.momentum.mul_(self.momentum).add_(mean)
        share.weights.sub_(mean.add_(share.momentum, alpha=self.momentum), alpha=self.lr)
        share.write(share.weights)

    def _mean(self, change: torch.Tensor, *, exact: bool) -> torch.Tensor:
        """The mean of the replicas' changes, the same bits on all of them."""
        if exact or self.loop.outer_bits == 32:
            return self.world.total(change).div_(self.loop.replicas)
        bits, summed = self.loop.outer_bits, torch.zeros_like(change)
        for rows in self.world.gathered(packed(change.view(1, -1), bits)):
            summed += unpacked(rows, change.numel(), bits).view(-1)
        return summed.div_(self.loop.replicas)

    def _average_buffers(self) -> None:
        for buffer in self._written_buffers():
            x = buffer.detach().cpu()
            if x.is_floating_point():
                x = self.world.total(x.flatten().float()).div_(self.loop.replicas).view(x.shape)
            else:
                x = x.clone()
                self.world.from_first(x)
            buffer.copy_(x)

    def _written_buffers(self) -> list[torch.Tensor]:
        self.runtime.follow_buffers()
        held = self.runtime.held_buffers
        return [held[name].whole for name in sorted(held) if held[name].updated]

    # --- begin ---

    def begin(self) -> None:
        """Make replicas equal to the first, or compare them, where they have not begun, or have
        been given other weights; the outer momentum begins at 0. Collective."""
        if self.begun_at == self.runtime.loads or not self.runtime.loaded:
            return
        self.arrive_alike("beginning", f"step {self.runtime.steps}")
        tensors = self._all_tensors()
        with progress.during("making replicas equal", waits=True), torch.no_grad():
            if self.compare:
                self._compare(tensors)
            else:
                for x in tensors.values():
                    sent = x.detach().to("cpu", copy=True).contiguous()
                    self.world.from_first(sent)
                    x.copy_(sent)
            for share in self.shares:
                share.weights = share.read()
                share.momentum = torch.zeros_like(share.weights)
        self.begun_at = self.runtime.loads
        self.met_at = [self.runtime.steps] * self.loop.fragments

    def _all_tensors(self) -> dict[str, torch.Tensor]:
        """Trained and frozen parameters, buffers, and what the graph does not read."""
        runtime = self.runtime
        runtime.follow_buffers()
        tensors = {p.fqn: p.stored for p in runtime.stage_parameters}
        tensors |= {name: b.whole for name, b in runtime.held_buffers.items()}
        tensors |= runtime.unused
        return {name: x for name, x in sorted(tensors.items()) if x.numel() and not x.is_meta}

    def _compare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        digests = torch.tensor([digest(x) for x in tensors.values()], dtype=torch.int64)
        others = self.world.gathered(digests)
        unlike = [n for k, n in enumerate(tensors) if len({int(d[k]) for d in others}) > 1]
        anywhere = self.world.sums(float(len(unlike)))[0]
        if anywhere:
            raise StateError(
                f"{len(unlike)} of {len(tensors)} tensors differ between replicas, e.g. "
                f"{unlike[:3]}",
                place="check_replicas",
                way_out="load the same weights on every rank, or leave check_replicas out: the "
                "first replica's are taken then",
            )

    # --- state ---

    @contextmanager
    def holding(self, name: str = "weights") -> Iterator[None]:
        """Context in which the parameters have the values of the outer `weights`, or `momentum`.
        Raises StateError before there are any. Collective within the replica."""
        if self.begun_at is None:
            raise StateError(
                ": the model is on the meta device, and replicas have no weights in common",
                place="replicas",
                way_out="call load_weights, load_state_dict or init_weights first",
            )
        before = [(p, p.stored.detach().to("cpu", copy=True)) for p in self._parameters()]
        for share in self.shares:
            share.write(getattr(share, name))
        try:
            yield
        finally:
            with torch.no_grad():
                for p, x in before:
                    p.stored.copy_(x)

    def went_on(self, met_at: Sequence[int]) -> None:
        """Take note that weights and outer state were loaded together; fragments met at these
        steps, or now."""
        fits = len(met_at) == self.loop.fragments
        self.met_at = [*met_at] if fits else [self.runtime.steps] * self.loop.fragments
        self.begun_at = self.runtime.loads

    def take(self, name: str) -> None:
        """Take the parameters as they are as the outer `weights`, or `momentum`."""
        for share in self.shares:
            setattr(share, name, share.read())

    def _parameters(self) -> Iterator[StageParameter]:
        for share in self.shares:
            yield from share.parameters


def _cut(runtime: Runtime, fragments: int) -> list[frozenset[str]]:
    """The names of the trained parameters of each fragment: of the whole model, in the order of its
    state, cut by their sizes."""
    graph, order = runtime.graph, {name: k for k, name in enumerate(runtime.model.state_dict())}
    trained = [v for v in graph.parameters if graph.values[v].requires_grad]
    sizes = {graph.parameters[v]: math.prod(graph.values[v].shape) for v in trained}
    total, done = sum(sizes.values()), 0
    cut: list[set[str]] = [set() for _ in range(fragments)]
    for fqn in sorted(sizes, key=lambda name: order.get(name, -1)):
        middle = done + sizes[fqn] / 2
        cut[int(fragments * middle / total)].add(fqn)
        done += sizes[fqn]
    return [frozenset(names) for names in cut]


def _shares(runtime: Runtime, names: frozenset[str]) -> list[Share]:
    """This rank's shares of a fragment, one for each axis, dtype and way of sending. Ranks that
    hold the same parameters have them in the same share, at the same places of its blocks."""
    place = runtime.place
    by_holders: dict[tuple[Any, ...], list[StageParameter]] = {}
    for p in sorted(runtime.stage_parameters, key=lambda p: p.fqn):
        if p.trainable and p.fqn in names and p.stored.numel():
            tied = len(p.shared_stages) > 1
            divided = p.shard_placement.sharded
            split = p.placement.sharded  # others are alike on tensor ranks, as must be their blocks
            key = p.experts, divided, tied, split, str(p.stored.dtype)
            by_holders.setdefault(key, []).append(p)
    shares = []
    for (experts, divided, tied, *_), parameters in sorted(by_holders.items(), key=lambda x: x[0]):
        holders = place.holders(experts=experts)
        axis = holders.replicate if divided else holders.data
        shares.append(Share(parameters=parameters, axis=axis, exact=tied))
    return shares

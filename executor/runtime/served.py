"""One idea: parameter servers (Li et al., OSDI 2014), of ranks that keep weights or compute.

The first ranks of such a plan are servers. Each keeps some of the tensors, whole, with their
optimizer states. The others are workers: each runs a plan of its own, on its rows alone, and meets
nobody but the servers, one after the other in each step:

    worker                                    server
    pull    weights, one message          <-  a reply, when it may go on
    forward, backward
    push    header, gradients, one message -> step, or (synchronous) wait for all workers

A push is answered by the weights for the next step, so that nothing asks for them. A worker of
clock c (steps that it pushed) is answered as soon as c - staleness steps of the slowest worker
have come (Ho et al., NIPS 2013). Without staleness gradients are added up, and stepped together:
the mean over workers, as by a ring. With it each is stepped as it comes, as its part of that mean.

A header is a few float64 on the host: what it is, the loss, whether gradients are finite, of which
tensors there are some, and the number of rows. It goes through a gloo group of these two ranks
alone, on which a thread of the server waits: a peer that dies ends that wait, and no other's.
Gradients and weights go through it, too, under gloo, else through NCCL's groups of one direction
each. Where losses count targets, a synchronous worker first asks the first server for the mean
count over workers, and divides by that: then the mean of their losses is that over all targets.

`settle` (drain) is for whatever reads or writes state: each worker asks, and is answered with
weights that all steps so far are in; servers send each other theirs. So every rank has all of
them, and reads or writes state alone. Optimizer states stay; those of other servers come to
rank 0 for a checkpoint.
"""

from __future__ import annotations

import atexit
import logging
import math
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from meshwright.executor import ranks
from meshwright.executor.devices import has_streams
from meshwright.executor.errors import BatchError, StateError
from meshwright.executor.parameters import StageParameter
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import AtShape, RunOptions, Runtime, Validation
from meshwright.executor.runtime.step import Step, unobserved, with_backward_done
from meshwright.executor.stages import (
    BatchShape,
    CheckedPlan,
    Given,
    Observer,
    Phase,
    RunStage,
    follow,
)
from meshwright.planner.batch import batch_rows, with_rows
from meshwright.planner.plan import Plan, server_of

T = TypeVar("T")
log = logging.getLogger(__name__)

PUSH, DRAIN, TELL, BYE, COUNT = range(5)  # what a header says
HEADER, ANSWER, GRADIENTS, WEIGHTS = range(1, 5)  # tags
SAID = 4  # numbers of a header before those of tensors: what, loss, finite, rows
UNBOUNDED = timedelta(days=365)  # the watchdog's limit, and the peer's end, are the bounds
POLL_S, CLOSING_POLL_S = 1.0, 0.02
OF_TELL = -1  # the key of rows beside the clocks


class Push(NamedTuple):
    """A push as a server took it: of a `worker` (from 0), its `clock`, the pushes before it; its
    gradients are by weights after so many steps of this server (`version`)."""

    worker: int
    clock: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Messages between this rank and a peer: headers through a `pair` of gloo, gradients `up` to a
    server and weights `down` from it, each a flat tensor."""

    peer: int
    pair: Any
    up: Any
    down: Any
    length: int  # of a header

    def tell(self, numbers: Sequence[float], tag: int = HEADER) -> dist.Work:
        """Send a header."""
        padded = [*numbers, *[0.0] * (self.length - len(numbers))]
        header = torch.tensor(padded, dtype=torch.float64)
        work = dist.isend(header, dst=self.peer, group=self.pair, tag=tag)
        assert work is not None
        return work

    def hear(self, tag: int = HEADER) -> list[float]:
        """Wait for a header."""
        header = torch.empty(self.length, dtype=torch.float64)
        work = dist.irecv(header, src=self.peer, group=self.pair, tag=tag)
        assert work is not None
        work.wait(UNBOUNDED)
        numbers: list[float] = header.tolist()
        return numbers

    def send(self, x: torch.Tensor, tag: int) -> dist.Work:
        """Send gradients or weights."""
        group = self.up if tag == GRADIENTS else self.down
        work = dist.isend(x, dst=self.peer, group=group, tag=tag)
        assert work is not None
        return work

    def receive(self, x: torch.Tensor, tag: int) -> dist.Work:
        """Begin to receive gradients or weights."""
        group = self.up if tag == GRADIENTS else self.down
        work = dist.irecv(x, src=self.peer, group=group, tag=tag)
        assert work is not None
        return work


class Part:
    """The parameters that one server keeps, as one flat tensor of what is sent."""

    def __init__(self, parameters: Sequence[StageParameter]) -> None:
        self.parameters = parameters
        self.numels = [p.stored.numel() for p in parameters]

    def empty(self) -> torch.Tensor:
        """A flat tensor for all of it."""
        like = self.parameters[0].stored
        return torch.empty(sum(self.numels), dtype=like.dtype, device=like.device)

    def views(self, flat: torch.Tensor) -> Iterator[tuple[StageParameter, torch.Tensor]]:
        """Each parameter with its part of a flat tensor, in its shape."""
        for p, part in zip(self.parameters, flat.split(self.numels), strict=True):
            yield p, part.view(p.stored.shape)

    def weights(self) -> torch.Tensor:
        """A copy of the weights."""
        return torch.cat([p.stored.detach().reshape(-1) for p in self.parameters])

    def gradients(self) -> torch.Tensor:
        """A copy of the gradients, 0 where there is none."""
        return torch.cat([
            torch.zeros_like(p.stored).view(-1) if p.api.grad is None else p.api.grad.reshape(-1)
            for p in self.parameters
        ])  # fmt: skip

    def write(self, flat: torch.Tensor) -> None:
        """Write the weights."""
        with torch.no_grad():
            for p, weights in self.views(flat):
                p.stored.copy_(weights)


# --- a worker -------------------------------------------------------------------------------------


class WorkerEnd:
    """A worker's end of its links, one to each server and its part."""

    def __init__(self, links: Sequence[Link], parts: Sequence[Part]) -> None:
        self.links = links
        self.parts = parts
        self.arriving: list[tuple[list[dist.Work], torch.Tensor]] = []  # by server, while pushed
        self.sending: list[torch.Tensor] = []  # gradients on their way

    @property
    def to_first(self) -> Link:
        """The link to rank 0."""
        return self.links[0]

    def push(self, loss: float, *, rows: int, finite: bool) -> None:
        """Send the gradients of a step, which are let go, and begin to receive the reply."""
        for link, part in zip(self.links, self.parts, strict=True):
            reply = part.empty()
            present = [float(p.api.grad is not None) for p in part.parameters]
            with self._needed(link):
                works = [link.receive(reply, WEIGHTS)]
                works.append(link.tell([PUSH, loss, finite, rows, *present]))
                if finite:
                    self.sending.append(gradients := part.gradients())
                    works.append(link.send(gradients, GRADIENTS))
            for p in part.parameters:
                p.api.grad = None
            self.arriving.append((works, reply))

    def pull(self) -> None:
        """Wait for the replies to the last push, and write the weights."""
        for link, part, (works, weights) in zip(
            self.links, self.parts, self.arriving, strict=False
        ):
            with self._needed(link):
                for work in works:
                    work.wait()
            part.write(weights)
        self.arriving, self.sending = [], []

    def drain(self) -> None:
        """Take the weights that all steps are in."""
        self.pull()
        for link, part in zip(self.links, self.parts, strict=True):
            weights = part.empty()
            with self._needed(link):
                arriving, told = link.receive(weights, WEIGHTS), link.tell([DRAIN])
                told.wait()
                arriving.wait()
            part.write(weights)

    def mean(self, loss: float, rows: int = 0) -> float:
        """The mean over workers, of as many rows each."""
        with self._needed(self.to_first) as link:
            link.tell([TELL, loss, True, rows]).wait()
            return link.hear(ANSWER)[1]

    def mean_counts(self, counts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The mean over workers of each count."""
        with self._needed(self.to_first) as link:
            link.tell([COUNT, *map(float, counts.values())]).wait()
            means = link.hear(ANSWER)[1:]
        return {
            name: torch.tensor(mean, dtype=torch.float64, device=x.device)
            for (name, x), mean in zip(counts.items(), means, strict=False)
        }

    @contextmanager
    def _needed(self, link: Link) -> Iterator[Link]:
        """Context of messages with a server, without which nobody goes on."""
        try:
            yield link
        except RuntimeError as error:  # of the process group
            ranks.progress.dispensable = frozenset()  # this is no end of its own
            raise StateError(
                f"rank {link.peer}, a server, has ended: {(str(error).splitlines() or [''])[0]}",
                place="servers",
                legal="all of them: each keeps weights that no other rank has",
                way_out="its own output says why; start from a checkpoint",
            ) from error

    def close(self) -> None:
        """Say that nothing more comes."""
        with suppress(RuntimeError):
            self.pull()
            for link in self.links:
                link.tell([BYE]).wait()


# --- a server -------------------------------------------------------------------------------------


class ServerEnd:
    """A server's end: links to its workers, and to the other servers, by rank; its part, and those
    of the others. `steps` are those of its optimizer; `record`, where it is a list, takes what was
    pushed in the order in which it was stepped."""

    def __init__(
        self,
        links: Mapping[int, Link],
        others: Mapping[int, Link],
        parts: Sequence[Part],
        staleness: int,
    ) -> None:
        self.links, self.others = links, others
        self.parts, self.rank = parts, launch.rank()
        self.part = parts[self.rank]
        self.staleness = staleness
        self.alive = set(links)
        self.clocks = dict.fromkeys(links, 0)
        self.versions = dict.fromkeys(links, 0)  # of the weights that a worker has
        self.owed = set[int]()  # workers whose push is not answered
        self.asked = dict[int, set[int]]()  # workers that drain, or tell, and wait
        self.told = dict[int, float]()  # by worker, of this `TELL`
        self.counts = dict[int, list[float]]()  # by worker, of this `COUNT`
        self.rows = dict[int, float]()  # of a push, by clock, while a worker may still push there
        self.loss = float("nan")  # of the last round in which losses were told
        self.rounds = self.steps = self.skipped = 0
        self.sum: torch.Tensor | None = None  # of a synchronous step
        self.present, self.finite = [0.0] * len(self.part.parameters), True
        self.record: list[Push] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.heard: queue.Queue[tuple[int, list[float] | Exception]] = queue.Queue()
        self.heard_s = dict.fromkeys(links, time.monotonic())  # when a worker last said something
        self.listeners = {
            w: threading.Thread(
                target=self._listen, args=(w,), name="meshwright-server", daemon=True
            )
            for w in links
        }
        for listener in self.listeners.values():
            listener.start()

    @property
    def to_first(self) -> Link:
        """The link to rank 0, which itself has none."""
        return self.others[0]

    def serve(self, optimizer: torch.optim.Optimizer) -> float:
        """Serve one round, a push of each worker on average; the mean of the losses told in it, or,
        where all of its pushes came before, in the last one that had some."""
        self.optimizer, self.rounds = optimizer, self.rounds + 1
        losses: list[float] = []
        while sum(self.clocks[w] for w in self.alive) < self.rounds * len(self.alive):
            told = self._take("waiting for pushes")
            losses += [] if told is None else [told]
        self._check_alive("train_step")
        self.loss = sum(losses) / len(losses) if losses else self.loss
        return self.loss

    def _check_alive(self, place: str) -> None:
        if not self.alive:
            raise StateError("all workers have ended", place=place, way_out="start anew")

    def drain(self) -> None:
        """Give all ranks the weights that all steps are in. Collective."""
        self._await(DRAIN)
        weights, works = self.part.weights(), list[dist.Work]()
        replies = [self.parts[rank].empty() for rank in sorted(self.others)]
        arriving = [
            self.others[r].receive(x, WEIGHTS)
            for r, x in zip(sorted(self.others), replies, strict=True)
        ]
        works = [link.send(weights, WEIGHTS) for link in self.others.values()]
        for worker in sorted(self.alive):
            self.guarded(worker, lambda link: link.send(weights, WEIGHTS).wait(self._bound))
            self.versions[worker] = self.steps
        for work in (*works, *arriving):
            work.wait()
        for rank, reply in zip(sorted(self.others), replies, strict=True):
            self.parts[rank].write(reply)

    def mean(self, *, failed: bool = False) -> float:
        """The mean over workers of what each tells; NaN where rank 0 has `failed`. Collective."""
        if self.rank:
            return self.to_first.hear(ANSWER)[1]
        self._await(TELL)
        self._check_alive("eval_step")
        mean = float("nan") if failed else sum(self.told.values()) / len(self.told)
        self.told.clear()
        self.rows.pop(OF_TELL, None)
        self._answer_all([TELL, mean])
        for link in self.others.values():
            link.tell([TELL, mean], ANSWER).wait()
        return mean

    def close(self) -> None:
        """Wait until all workers that are not lost have said goodbye."""
        until_s = time.monotonic() + launch.timeout_s()
        while time.monotonic() < until_s and any(
            self.listeners[w].is_alive() for w in self.alive - ranks.progress.lost
        ):
            time.sleep(CLOSING_POLL_S)

    # --- one message ---

    def _listen(self, worker: int) -> None:
        """Hand on what a worker says, until it says goodbye or ends."""
        try:
            while True:
                header = self.links[worker].hear()
                self.heard_s[worker] = time.monotonic()
                self.heard.put((worker, header))
                if header[0] == BYE:
                    return
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self.heard.put((worker, error))

    def _await(self, what: int) -> None:
        """Take messages until all workers have said this."""
        self.asked.setdefault(what, set())
        while not self.alive <= self.asked[what]:
            self._take("waiting for workers")
        self.asked[what].clear()

    def _take(self, phase: str) -> float | None:
        """Take one message of a worker; the loss of a push."""
        ranks.progress.enter(phase, waits=True)
        while True:
            for worker in self.alive & ranks.progress.lost:
                self._lose(worker, "it has ended")
                return None
            try:
                worker, header = self.heard.get(timeout=POLL_S)
            except queue.Empty:
                if self._gave_up():
                    return None
                continue
            if worker in self.alive:
                break
        ranks.progress.enter("taking a push", waits=True)
        if isinstance(header, Exception):
            self._lose(worker, str(header))
        elif header[0] == BYE:
            steps = self.clocks[worker]
            self._lose(worker, f"it left after {steps} steps", in_time=steps >= self.rounds)
        elif header[0] == PUSH:
            return header[1] if self._pushed(worker, header) else None
        elif header[0] == COUNT:
            self.counts[worker] = header[1:]
            self._answer_counts()
        else:
            self.asked.setdefault(int(header[0]), set()).add(worker)
            if header[0] == TELL:
                self._check_rows(worker, OF_TELL, header[3])
                self.told[worker] = header[1]
        return None

    def _answer_counts(self) -> None:
        """Tell all workers their mean counts, when all have told theirs."""
        if not self.counts or not self.alive <= self.counts.keys():
            return
        told = [self.counts[w] for w in sorted(self.alive)]
        self.counts.clear()
        means = [sum(of) / len(told) for of in zip(*told, strict=True)]
        self._answer_all([COUNT, *means])

    def _answer_all(self, numbers: Sequence[float]) -> None:
        for worker in sorted(self.alive):
            self.guarded(worker, lambda link: link.tell(numbers, ANSWER).wait())

    def _check_rows(self, worker: int, key: int, rows: float) -> None:
        """Raise `BatchError` where workers have different numbers of rows in a step."""
        if (others := self.rows.setdefault(key, rows)) != rows:
            raise BatchError(
                f": rank {worker}, a worker, has {rows:.0f} rows where another has {others:.0f}",
                place="batch",
                legal="as many rows on all workers in a step",
                way_out="pad or drop rows (drop_last=True of a DataLoader)",
            )

    @property
    def _bound(self) -> timedelta:
        """Time that a message with a worker may take: less than the watchdog gives workers that
        wait, whose first step is done, if not the server's."""
        return timedelta(seconds=launch.timeout_s())

    def _gave_up(self) -> bool:
        """Give workers up that have been silent for the timeout while others waited for them;
        whether there were any."""
        waiting = self.alive & self.owed.union(self.counts, *self.asked.values())
        if not self.staleness or not waiting:
            return False
        now_s = time.monotonic()
        others_s = min(self.heard_s[w] for w in waiting)  # since when one of them waits
        limit_s = ranks.progress.allowed_s(launch.timeout_s())
        waited_s = {w: now_s - max(self.heard_s[w], others_s) for w in self.alive - waiting}
        silent = {w: s for w, s in waited_s.items() if s >= limit_s}
        for worker, s in sorted(silent.items()):
            self._lose(worker, f"silent for {s:.0f} s")
        return bool(silent)

    def _pushed(self, worker: int, header: Sequence[float]) -> bool:
        """Take the gradients of a push, and step with them; whether they came."""
        finite, present = bool(header[2]), header[SAID : SAID + len(self.part.parameters)]
        self._check_rows(worker, self.clocks[worker], header[3])
        gradients = self.part.empty() if finite else None
        if gradients is not None:
            arrived = self.guarded(
                worker, lambda link: link.receive(gradients, GRADIENTS).wait(self._bound)
            )
            if not arrived:
                return False
            gradients /= len(self.links)
        if self.record is not None:
            self.record.append(
                Push(worker - min(self.links), self.clocks[worker], self.versions[worker])
            )
        self.clocks[worker] += 1
        slowest = min(self.clocks[w] for w in self.alive)
        self.rows = {c: rows for c, rows in self.rows.items() if c >= slowest or c == OF_TELL}
        self.owed.add(worker)
        if self.staleness:
            self._step(gradients, present)
            self._answer()
            return True
        self.finite &= finite
        if gradients is not None:
            self.sum = gradients if self.sum is None else self.sum.add_(gradients)
            self.present = [a + b for a, b in zip(self.present, present, strict=True)]
        if self.owed == self.alive:
            self._step(self.sum if self.finite else None, self.present)
            self.sum, self.finite = None, True
            self.present = [0.0] * len(self.present)
            self._answer()
        return True

    @torch.no_grad()
    def _step(self, gradients: torch.Tensor | None, present: Sequence[float]) -> None:
        """Step with gradients, or without any that are finite not at all."""
        if gradients is None:
            self.skipped += 1
            return
        for (p, gradient), there in zip(self.part.views(gradients), present, strict=True):
            p.api.grad = gradient if there else None
        assert self.optimizer is not None
        with torch.enable_grad():
            self.optimizer.step()
        for p in self.part.parameters:
            p.api.grad = None
        self.steps += 1

    def _answer(self) -> None:
        """Send the weights to those workers that may go on."""
        slowest = min((self.clocks[w] for w in self.alive), default=0)
        ready = [w for w in sorted(self.owed) if self.clocks[w] - slowest <= self.staleness]
        weights = self.part.weights() if ready else None
        for worker in ready:
            if worker not in self.owed:  # answered as another was lost
                continue
            self.owed.discard(worker)
            assert weights is not None
            self.versions[worker] = self.steps
            self.guarded(worker, lambda link: link.send(weights, WEIGHTS).wait(self._bound))

    def guarded(self, worker: int, run: Callable[[Link], Any]) -> bool:
        """Run what needs a worker; whether it is there."""
        try:
            run(self.links[worker])
        except RuntimeError as error:  # of the process group
            self._lose(worker, str(error))
            return False
        return True

    def _lose(self, worker: int, why: str, *, in_time: bool = False) -> None:
        """Go on without a worker, of which nothing is said if it left `in_time`. Raises
        `StateError` where all have to wait for it."""
        reason = (why.splitlines() or [""])[0]
        if not self.staleness:
            raise StateError(
                f"rank {worker}, a worker, has ended: {reason}",
                place="train_step",
                legal="all workers, without staleness",
                way_out="its own output says why; plan with staleness from 1 to go on without it",
            )
        if worker in self.alive:
            if not in_time:
                log.warning("rank %d, a worker, has ended (%s): the others go on", worker, reason)
            ranks.progress.lost |= {worker}
            self.alive.discard(worker)
            self.owed.discard(worker)
            self.told.pop(worker, None)
            self.counts.pop(worker, None)
            for asked in self.asked.values():
                asked.discard(worker)
            self._answer()
            self._answer_counts()


# --- the running plan -----------------------------------------------------------------------------


class _Drained(Validation):
    """The steps that a drain ends."""

    def __init__(self, runtime: ServedRuntime) -> None:
        super().__init__(runtime)
        self.served = runtime

    def settle(self) -> None:
        """Give all ranks the same weights, after steps. Collective."""
        if self.served.dirty:
            self.served.dirty = False
            with ranks.progress.during("draining the servers", waits=True):
                self.served.end.drain()


class _Unchecked(ranks.BatchCheck):
    """Batches of workers, which compare nothing."""

    def check(self, *_: Any, **__: Any) -> None:
        return


class ServedRuntime(Runtime):
    """One rank of a plan with parameter servers. A worker runs the plan of its own rows; a server
    holds the same model, and no rows. `of_all` is the plan of all ranks."""

    def __init__(
        self,
        checked: CheckedPlan,
        model: nn.Module,
        *,
        of_all: Plan,
        options: RunOptions | None = None,
        at_shape: AtShape | None = None,
    ) -> None:
        """`checked` is the plan of a worker. Collective."""
        self.of_all, self.here = of_all, launch.rank()
        running = ranks.world_size()
        if running != of_all.num_ranks:
            raise StateError(
                f"made for {of_all.num_ranks} ranks, but {running} are running",
                place="plan",
                way_out=f"launch {of_all.num_ranks} ranks",
            )
        workers = of_all.num_ranks - of_all.servers

        def at_other(shape: BatchShape, batch: Any) -> CheckedPlan:
            assert at_shape is not None
            return replace(at_shape(shape, batch), workers=workers)

        super().__init__(
            replace(checked, workers=workers),
            model,
            options=options,
            at_shape=None if at_shape is None else at_other,
        )
        self.serves = self.here < of_all.servers
        self.share = (max(0, self.here - of_all.servers), workers)
        seed = torch.tensor(self.seed, device=self.place.device)
        dist.broadcast(seed, src=0)
        self.seed = int(seed)
        self.batch_check = _Unchecked()
        self.dirty, self.rows = False, 0  # of this worker's last batch
        self.counts_together = not of_all.staleness  # targets, over workers
        if any(stage.totals for stage in self.planned.stages.values()):
            raise StateError(
                ": this one reads totals of the batch (the sum of a mask), and a worker has those "
                "of its own rows alone",
                place="a model beside parameter servers",
                legal="losses that count targets by ignore_index, or means over rows",
                way_out="plan without servers, or give the loss ignored targets",
            )
        self.end = self._connected()
        self.validation = _Drained(self)
        launch.before_leaving.append(self.part)
        atexit.register(self.part)  # a script may just end
        ranks.progress.stages = {r: [0] for r in range(of_all.servers, of_all.num_ranks)}
        ranks.progress.replica_size = of_all.num_ranks
        if of_all.staleness:
            ranks.progress.dispensable = frozenset(range(of_all.servers, of_all.num_ranks))

    def _joined(self, checked: CheckedPlan, device: torch.device) -> ranks.Place:
        meshes = ranks.stage_meshes(
            checked.plan, checked.graph, checked.factors, checked.assignments
        )
        return ranks.single_process(device, meshes)

    def _connected(self) -> WorkerEnd | ServerEnd:
        """This rank's links. Collective."""
        servers, held = self.of_all.servers, {p.value: p for p in self.stage_parameters}
        of = server_of(self.graph, servers)
        parts = [Part([held[v] for v, j in of.items() if j == k]) for k in range(servers)]
        losses = max(len(stage.losses) for stage in self.planned.stages.values())
        length = max(SAID + max(len(part.parameters) for part in parts), 1 + losses)
        pairs = ranks.pair_groups(servers, "served")
        by_order = has_streams(self.place.device)
        ways = ranks.one_way_groups("gradients", "weights") if by_order else (None, None)

        def link(peer: int) -> Link:
            pair = pairs[min(peer, self.here), max(peer, self.here)]
            up, down = (way or pair for way in ways)
            return Link(peer=peer, pair=pair, up=up, down=down, length=length)

        if not self.serves:
            return WorkerEnd([link(k) for k in range(servers)], parts)
        workers = range(servers, self.of_all.num_ranks)
        return ServerEnd(
            {w: link(w) for w in workers},
            {k: link(k) for k in range(servers) if k != self.here},
            parts,
            self.of_all.staleness,
        )

    def part(self) -> None:
        """Part in order: nothing more is said. Collective."""
        if self.part in launch.before_leaving:
            launch.before_leaving.remove(self.part)
        atexit.unregister(self.part)
        self.end.close()

    @ranks.progress.on_its_own()
    @ranks.progress.during(ranks.PREPARING, waits=True, is_step=True)
    def train_step(
        self,
        batch: Any,
        observe: Observer | None = None,
        *,
        local: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> torch.Tensor:
        """A worker's step: pull, compute, push; its own loss. A server serves one round, and
        returns the mean of the losses that it was told."""
        assert optimizer is not None, "servers step it"
        self._check_served(batch, local)
        self.dirty = True
        if isinstance(self.end, ServerEnd):
            follow(optimizer)
            told = self.end.serve(optimizer)
            self.guard.skipped_steps = self.end.skipped
            self.steps += 1
            loss = torch.tensor(told, dtype=torch.float32, device=self.place.device)
            return with_backward_done(loss)
        ranks.progress.enter("waiting for weights", waits=True)
        self.end.pull()
        skipped = self.guard.skipped_steps
        step, losses = self.passes(batch, observe, local=local)
        with torch.no_grad():
            (observe or unobserved)(Phase.DELIVER, lambda: self._accumulate_grads(step))
            self.settle_buffers()
            loss = step.mean_loss(losses)
            self.end.push(float(loss), rows=self.rows, finite=self.guard.skipped_steps == skipped)
        self.steps += 1
        return with_backward_done(loss)

    @ranks.progress.on_its_own()
    def evaluate(self, batch: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, Step]:
        """The mean loss of a global batch, each worker's of its rows."""
        asked = [*args, options.get("keep"), options.get("lower"), options.get("values")]
        if any(asked):
            raise StateError(
                ": workers have their rows alone, and servers none",
                place="forward, generate and evaluate",
                legal="eval_step, of a plan with servers",
                way_out="load full_state_dict() into a model of its own, and run that",
            )
        self.validation.settle()
        self._check_served(batch, options.get("local", False))
        if isinstance(self.end, ServerEnd):
            with ranks.progress.during("waiting for workers", waits=True):
                return torch.tensor(self.end.mean()), self.planned
        counts_together, self.counts_together = self.counts_together, True
        try:
            loss, step = super().evaluate(batch, **options)
        finally:
            self.counts_together = counts_together
        mean = self.end.mean(float(loss), self.rows)
        return torch.tensor(mean).to(loss), step

    def run_stage(self, step: Step, k: int, inputs: Given) -> RunStage:
        """Losses are divided by the mean count of targets over workers, where all wait for all."""
        run = super().run_stage(step, k, inputs)
        if not run.counts or not self.counts_together or isinstance(self.end, ServerEnd):
            return run
        ranks.progress.enter("counting targets", waits=True)
        return replace(run, counts=self.end.mean_counts(run.counts))

    def _check_served(self, batch: Any, local: bool) -> None:
        """Raise on a server, which reads no batch, what its workers raise for this one."""
        if self.serves and not local:
            self.planned.batches.shape(Given(self._checked(self.own_rows(batch), local), local))

    def _prepared(self, batch: Any, local: bool) -> tuple[Step, Given]:
        share = batch if local else self.own_rows(batch)
        self.rows = 0 if share is None else batch_rows(share)
        return super()._prepared(share, False)

    def own_rows(self, batch: Any) -> Any:
        """This worker's rows of a global batch: those that it would have on a data axis."""
        rows, (_, shares) = batch_rows(batch), self.share
        if rows % shares:
            raise BatchError(
                f": {shares} workers don't share {rows} rows out",
                place="batch",
                legal=f"a multiple of {shares} rows",
                way_out="pad or drop rows (drop_last=True of a DataLoader)",
            )
        batched = {self.graph.inputs[name] for name in self.graph.batched}
        return with_rows(batch, batched, [*self.rows_of(rows)])

    def rows_of(self, rows: int) -> tuple[int, ...]:
        """The numbers of this worker's rows in a global batch of so many."""
        numbers = torch.arange(rows).view(self.plan.microbatches_of(rows // self.share[1]), -1)
        own: list[int] = numbers.tensor_split(self.share[1], 1)[self.share[0]].flatten().tolist()
        return tuple(own)

    # --- state ---

    def on_first(self, run: Callable[[], T]) -> T | None:
        """`run()` on rank 0, for which the others wait; None on them. Collective; raises on all
        ranks what it does."""
        self.validation.settle()
        result, error = None, None
        try:
            result = run() if self.here == 0 else None
        except Exception as raised:  # noqa: BLE001 - the others wait for this rank
            error = raised
        with ranks.progress.during("waiting for rank 0", waits=True):
            if isinstance(self.end, ServerEnd):
                told = self.end.mean(failed=error is not None)
            else:
                told = self.end.mean(0.0)
            if error is not None:
                self._tell_all(error)
                raise error
            if math.isnan(told):
                raise self._told_by_first()
        return result

    def _tell_all(self, error: Exception) -> None:
        """Send an error of rank 0 to the others."""
        assert isinstance(self.end, ServerEnd)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - an error of any library
            error = StateError(f"{type(error).__name__}: {error}", place="rank 0")
        for link in self.end.others.values():
            _send(error, link)
        for worker in sorted(self.end.alive):
            self.end.guarded(worker, lambda link: _send(error, link))

    def _told_by_first(self) -> Exception:
        """The error that rank 0 sends."""
        error: Exception = _receive(self.end.to_first)
        return error

    def gathered(self, mine: T) -> list[T]:
        """Objects of all ranks that are not lost, on rank 0; nothing on others. Collective,
        after a drain."""
        end = self.end
        if self.here:
            _send(mine, end.to_first)
            return []
        assert isinstance(end, ServerEnd)
        every = [mine, *(_receive(link) for link in end.others.values())]
        for worker in sorted(end.alive):
            end.guarded(worker, lambda link: every.append(_receive(link)))
        return every

    @contextmanager
    def all_states(self, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Context in which rank 0's optimizer has the states of all servers. Collective."""
        if optimizer is None or not isinstance(self.end, ServerEnd):
            yield
            return
        if self.here:
            for p in self.end.part.parameters:
                self._send_state(optimizer.state.get(p.api, {}))
        for rank, link in self.end.others.items() if not self.here else ():
            for p in self.end.parts[rank].parameters:
                optimizer.state[p.api] = self._received_state(link)
        try:
            yield
        finally:
            self.keep_own(optimizer)

    def _send_state(self, state: Mapping[str, Any]) -> None:
        """Send the states of a tensor to rank 0, one after the other through the host."""
        assert isinstance(self.end, ServerEnd)
        link = self.end.to_first
        tensors = {k: x for k, x in state.items() if isinstance(x, torch.Tensor)}
        shapes = {k: (x.shape, x.dtype) for k, x in tensors.items()}
        _send((shapes, {k: x for k, x in state.items() if k not in tensors}), link)
        for x in tensors.values():
            dist.send(x.detach().cpu().contiguous(), dst=link.peer, group=link.pair)

    @staticmethod
    def _received_state(link: Link) -> dict[str, Any]:
        """The states of a tensor that a server sends, on the host."""
        shapes, state = _receive(link)
        for name, (shape, dtype) in shapes.items():
            state[name] = torch.empty(shape, dtype=dtype)
            dist.recv(state[name], src=link.peer, group=link.pair)
        return dict(state)

    def keep_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Let go of the states of tensors that others keep."""
        parameters = self.end.part.parameters if isinstance(self.end, ServerEnd) else ()
        mine = {id(p.api) for p in parameters}
        for p in [p for p in optimizer.state if id(p) not in mine]:
            del optimizer.state[p]


def _send(value: Any, link: Link) -> None:
    dist.send_object_list([value], dst=link.peer, group=link.pair)


def _receive(link: Link) -> Any:
    box: list[Any] = [None]
    dist.recv_object_list(box, src=link.peer, group=link.pair)
    return box[0]

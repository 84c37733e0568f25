"""Parameter servers train as the pushes that they record, replayed on one device in plain torch;
synchronous ones as a ring does; with staleness they go on without a worker that sleeps or dies.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import ParallelModel, auto_parallelize
from meshwright.executor.errors import StateError
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.served import Push, ServedRuntime, ServerEnd
from meshwright.planner.plan.check import fingerprint
from meshwright.planner.plan.plan import Plan, StagePlan
from meshwright.planner.plan.servers import server_of
from tests.helpers import launching, tiny
from tests.helpers.launching import Launch
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered

STEPS, ROWS = 4, 4  # rows of a worker
SLEEP_S = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run with parameter servers; `sleeps` are seconds that each worker takes for a batch."""

    servers: int = 1
    workers: int = 2
    staleness: int = 0
    optimizer: str = "sgd"
    microbatches: int = 1
    steps: int = STEPS
    tied: bool = False
    sleeps: tuple[float, ...] = ()
    loss: Callable[..., torch.Tensor] = tiny.loss

    @property
    def name(self) -> str:
        return f"{self.servers} servers {self.optimizer} staleness {self.staleness}" + " tied" * (
            self.tied
        )

    @property
    def ranks(self) -> int:
        return self.servers + self.workers

    def plan(self) -> Plan:
        graph, _ = tiny.cut(tiny.net(tied=self.tied), loss_fn=self.loss)
        stage = StagePlan(
            blocks=tuple(block.name for block in graph.blocks),
            ranks=tuple(range(self.servers, self.ranks)),
            dp=self.workers,
            tp=1,
        )
        return Plan(
            model=fingerprint(graph),
            global_batch_size=ROWS * self.workers,
            num_microbatches=self.microbatches,
            schedule="1f1b",
            precision="fp32",
            stages=(stage,),
            servers=self.servers,
            staleness=self.staleness,
        )

    def made(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)

    def start(self) -> tuple[ParallelModel, torch.optim.Optimizer]:
        result = auto_parallelize(
            tiny.net(tied=self.tied),
            tiny.host(self.ranks),
            example_inputs=tiny.batch(4),
            global_batch_size=ROWS * self.workers,
            loss_fn=self.loss,
            plan=self.plan(),
            profile=False,
            allow=["stale"],
        )
        return result, self.made(result.parameters())

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tiny.batch(ROWS * self.workers, step)


def runtime_of(result: ParallelModel) -> ServedRuntime:
    runtime = result._going_on
    assert isinstance(runtime, ServedRuntime)
    return runtime


def trained(run: Run) -> tuple[dict[str, torch.Tensor], list[list[float]], list[list[Push]]]:
    """Weights, losses of all ranks and the pushes of all servers."""
    result, optimizer = run.start()
    end, losses = runtime_of(result).end, list[float]()
    if isinstance(end, ServerEnd):
        end.record = []
    worker = launch.rank() - run.servers
    for step in range(run.steps):
        if worker >= 0 and run.sleeps:
            time.sleep(run.sleeps[worker])
        losses.append(float(result.train_step(run.batch(step), optimizer=optimizer)))
    state = result.full_state_dict()
    runtime_of(result).part()
    everything: list[Any] = [None] * run.ranks
    record = end.record if isinstance(end, ServerEnd) else None
    torch.distributed.all_gather_object(everything, (losses, record, state))
    for _, _, theirs in everything:  # after a drain all ranks have the same weights
        assert all(torch.equal(theirs[name], x) for name, x in state.items())
    kept = end.part.parameters if isinstance(end, ServerEnd) else []
    assert {id(p) for p in optimizer.state} == {id(p.api) for p in kept}
    return state, [x[0] for x in everything], [x[1] for x in everything[: run.servers]]


# --- the oracle -----------------------------------------------------------------------------------


class Replay:
    """The pushes of each server, one after the other on one device, in plain torch."""

    def __init__(self, run: Run, records: Sequence[Sequence[Push]]) -> None:
        self.run, self.records = run, records
        self.model = tiny.net(tied=run.tied)
        graph, _ = tiny.cut(tiny.net(tied=run.tied))
        owner = {graph.parameters[v]: k for v, k in server_of(graph, run.servers).items()}
        named = dict(self.model.named_parameters())
        self.names = [[n for n in named if owner[n] == k] for k in range(run.servers)]
        self.kept = [nn.ParameterDict() for _ in range(run.servers)]
        self.weights: list[list[dict[str, torch.Tensor]]] = []
        self.optimizers = []
        self.tensors = [
            {n: nn.Parameter(named[n].detach().clone()) for n in names} for names in self.names
        ]
        for tensors in self.tensors:
            self.weights.append([{n: x.detach().clone() for n, x in tensors.items()}])
            self.optimizers.append(run.made([*tensors.values()]))
        self.gradients: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def version(self, server: int, version: int) -> Mapping[str, torch.Tensor]:
        """Weights of a server after so many steps."""
        while len(self.weights[server]) <= version:
            self._step(server)
        return self.weights[server][version]

    def _step(self, server: int) -> None:
        done, tensors = len(self.weights[server]) - 1, self.tensors[server]
        n, pushes = self.run.workers, self.records[server]
        taken = pushes[done : done + 1] if self.run.staleness else pushes[n * done : n * (done + 1)]
        sums = {name: torch.zeros_like(x) for name, x in tensors.items()}
        for push in taken:
            of = self.gradient(push.worker, push.clock)
            for name in tensors:
                sums[name] += of[name] / n
        for name, x in tensors.items():
            x.grad = sums[name]
        self.optimizers[server].step()
        self.weights[server].append({name: x.detach().clone() for name, x in tensors.items()})

    def gradient(self, worker: int, clock: int) -> Mapping[str, torch.Tensor]:
        """Of a worker's rows of a step, at the weights that it had of each server."""
        if (worker, clock) not in self.gradients:
            weights = dict[str, torch.Tensor]()
            for server, pushes in enumerate(self.records):
                versions = [p.version for p in pushes if (p.worker, p.clock) == (worker, clock)]
                assert len(versions) == 1
                weights |= self.version(server, versions[0])
            self.model.load_state_dict(weights, strict=False)
            self.model.zero_grad()
            ids, targets = self.run.batch(clock)
            m, rows = self.run.microbatches, ROWS // self.run.microbatches
            for k in range(m):
                first = k * rows * self.run.workers + worker * rows
                part = slice(first, first + rows)
                (tiny.loss(self.model(ids[part]), targets[part]) / m).backward()
            self.gradients[worker, clock] = {
                n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None
            }
        return self.gradients[worker, clock]

    def all(self) -> dict[str, torch.Tensor]:
        """Weights that all pushes are in."""
        state = dict[str, torch.Tensor]()
        for server, pushes in enumerate(self.records):
            steps = len(pushes) if self.run.staleness else len(pushes) // self.run.workers
            state |= self.version(server, steps)
        return state


def assert_near(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, atol=1e-5, rtol=1e-5)


RUNS = (
    Run(),
    Run(staleness=2, optimizer="adamw", sleeps=(0.0, 0.03)),
    Run(servers=2, staleness=1, optimizer="sgd", microbatches=2, sleeps=(0.02, 0.0)),
    Run(servers=2, optimizer="adamw", microbatches=2, tied=True),
    Run(staleness=2**31, optimizer="sgd", sleeps=(0.0, 0.03)),
    Run(servers=2, staleness=3, optimizer="adamw", sleeps=(0.0, 0.02)),
)


@pytest.mark.parametrize(
    "run",
    tiered(
        RUNS, RUNS[1:4].__contains__, "one server and two, with staleness and without, stay",
        lambda run: run.name,
    ),
)  # fmt: skip
def test_training_is_the_recorded_pushes_on_one_device(run: Run) -> None:
    state, losses, records = on_ranks(run.ranks, trained, run)
    if not run.staleness:
        told, of_workers = losses[: run.servers], torch.tensor(losses[run.servers :])
        for mean in told:
            assert mean == pytest.approx(of_workers.mean(0).tolist(), rel=1e-6)
    for record in records:
        assert sorted((p.worker, p.clock) for p in record) == [
            (w, c) for w in range(run.workers) for c in range(run.steps)
        ]
        check_clocks(record, run)
    assert_near(state, Replay(run, records).all())


def check_clocks(record: Sequence[Push], run: Run) -> None:
    """No worker began a step more than `staleness` ahead of the slowest: when its weights were
    sent, so many steps of each had come."""
    for k, push in enumerate(record):
        sent = push.version if run.staleness else push.version * run.workers
        assert sent <= k
        before = record[:sent]
        slowest = min(sum(p.worker == w for p in before) for w in range(run.workers))
        assert push.clock == 0 or push.clock - slowest <= run.staleness
        assert sum(p.worker == push.worker for p in before) == push.clock or not push.clock


def plain(run: Run) -> dict[str, torch.Tensor]:
    """The steps of one device, on whole batches."""
    model = tiny.net(tied=run.tied)
    optimizer = run.made(model.parameters())
    for step in range(run.steps):
        ids, targets = run.batch(step)
        optimizer.zero_grad()
        tiny.loss(model(ids), targets).backward()
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


# --- a ring ---------------------------------------------------------------------------------------


class Dropping(tiny.Net):
    """With dropout, whose masks follow from the numbers of rows in the global batch."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.head(nn.functional.dropout(self.embed(ids), 0.5))


def ringed(plan: Plan, precision: str, local: bool) -> dict[str, torch.Tensor]:
    """Weights of steps with dropout under a plan, each rank with its own rows or with all."""
    torch.manual_seed(0)
    model = Dropping()
    torch.manual_seed(launch.rank() + 5)  # all draw as rank 0 does
    result = auto_parallelize(
        model,
        tiny.host(plan.num_ranks),
        example_inputs=tiny.batch(4),
        global_batch_size=plan.global_batch_size,
        loss_fn=tiny.loss,
        plan=plan,
        profile=False,
        precision=precision,
    )
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    share = result.data_parallel
    assert (share.size, len(share.rows)) == (2, plan.global_batch_size // 2 * share.reads)
    for step in range(4):
        rows = plan.global_batch_size // (2 if local and step == 1 else 1)
        batch: Any = tuple(x[:, : 4 if step == 2 else 6] for x in tiny.batch(rows, step))
        if local:
            mine = list(share.rows_of(rows))
            batch = tuple(x[mine] for x in batch) if share.reads else None
        result.train_step(batch, optimizer=optimizer, local=local)
        assert result.metrics()["step"] == step + 1
    state = result.full_state_dict()
    if isinstance(result._going_on, ServedRuntime):
        result._going_on.part()
    return state


@pytest.mark.parametrize(
    ("precision", "local"),
    [("fp32", True), pytest.param("bf16", False, marks=second_tier("fp32 and own rows stay"))],
)
def test_synchronous_servers_train_as_a_ring_does(precision: str, local: bool) -> None:
    torch.manual_seed(0)
    graph, _ = tiny.cut(Dropping(), precision=precision)
    one = tiny.plan_for(graph, dp=1, tp=1, global_batch_size=8, precision=precision)
    found = on_ranks(3, ringed, one.served_by(1, 2, 0), precision, local)
    wanted = on_ranks(2, ringed, one.served_by(0, 2, 0), precision, local)
    assert_near(found, wanted)


# --- state ----------------------------------------------------------------------------------------


def resumed(run: Run, folder: Path) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """Weights of steps of which a checkpoint was made in the midst, and read by another run; losses
    of an evaluation on all ranks, and the files of the checkpoint's folder that each wrote."""
    result, optimizer = run.start()
    for step in range(2):
        result.train_step(run.batch(step), optimizer=optimizer)
    result.save_checkpoint(folder / "checkpoint", optimizer)
    loss = float(result.eval_step(run.batch(9)))
    result.train_step(run.batch(7), optimizer=optimizer)  # of which the other run knows nothing
    runtime_of(result).part()
    again, other = run.start()
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    again.load_checkpoint(folder / "checkpoint", other)
    losses = [loss, float(again.eval_step(run.batch(9)))]
    for step in range(2, run.steps):
        again.train_step(run.batch(step), optimizer=other)
    state = again.full_state_dict()
    runtime_of(again).part()
    every: list[Any] = [None] * run.ranks
    torch.distributed.all_gather_object(every, losses)
    assert len({tuple(x) for x in every}) == 1
    return state, losses, len(other.state)


@pytest.mark.parametrize("servers", tiered((1, 2), (2).__eq__, "states of several servers stay"))
def test_a_checkpoint_has_the_states_of_all_servers(tmp_path: Path, servers: int) -> None:
    run = Run(servers=servers, optimizer="adamw")
    state, losses, _ = on_ranks(run.ranks, resumed, run, tmp_path)
    assert_near(state, plain(run))  # synchronous servers train as one device does
    model = tiny.net()
    model.load_state_dict(plain(replace(run, steps=2)))
    ids, targets = run.batch(9)
    wanted = float(tiny.loss(model(ids), targets).detach())
    assert losses == pytest.approx([wanted, wanted], rel=1e-5)


# --- targets, mistakes ----------------------------------------------------------------------------


def summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that is no mean, and grows with the batch."""
    return 0.01 * nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


def masked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over flags, whose number is a total of the batch."""
    kept = (targets >= 0).float()
    of_tokens = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    return (of_tokens * kept.flatten()).sum() / kept.sum()


def uneven(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch with ignored targets, most of them of the last worker."""
    ids, targets = run.batch(0)
    targets = targets.clone()
    targets[: run.workers * ROWS // 2, 4:] = -100
    targets[run.workers * ROWS // 2 :, 1:] = -100
    return ids, targets


def ignoring(run: Run) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Weights after a step, each rank's loss of it and of an evaluation before."""
    result, optimizer = run.start()
    found = [float(result.eval_step(uneven(run)))]
    found.append(float(result.train_step(uneven(run), optimizer=optimizer)))
    state = result.full_state_dict()
    runtime_of(result).part()
    every: list[Any] = [None] * run.ranks
    torch.distributed.all_gather_object(every, found)
    return state, [x[0] for x in every], [x[1] for x in every]


LOSSES = (
    Run(steps=1), Run(steps=1, servers=2, microbatches=2), Run(steps=1, loss=summed),
)  # fmt: skip


@pytest.mark.parametrize("run", LOSSES, ids=["one", "two servers", "summed"])
def test_ignored_targets_weigh_as_on_one_device(run: Run) -> None:
    state, evaluated, losses = on_ranks(run.ranks, ignoring, run)
    model = tiny.net()
    optimizer = run.made(model.parameters())
    ids, targets = uneven(run)
    loss = run.loss(model(ids), targets)
    loss.backward()
    optimizer.step()
    assert_near(state, {n: x.detach() for n, x in model.named_parameters()})
    wanted = float(loss.detach())
    assert evaluated == pytest.approx([wanted] * run.ranks, rel=1e-5)
    workers = losses[run.servers :]
    assert [*losses[: run.servers], sum(workers) / len(workers)] == pytest.approx(
        [wanted] * (run.servers + 1), rel=1e-5
    )


def refused(run: Run) -> str:
    try:
        run.start()[0].state_dict()
    except StateError as error:
        return str(error)
    return ""


def test_a_loss_over_totals_of_the_batch_is_refused() -> None:
    said = on_ranks(3, refused, Run(loss=masked))
    assert "reads totals of the batch" in said


@dataclass
class Kept:
    """An object with a state."""

    value: int

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.value = state["value"]


def mistaken(run: Run, folder: Path) -> list[list[str]]:
    """What each rank raises for mistakes, one after the other, with a step between."""
    result, optimizer = run.start()
    said = list[str]()

    def attempt(call: Any) -> None:
        try:
            call()
            said.append("")
        except Exception as error:  # noqa: BLE001 - compared by the test
            said.append(f"{type(error).__name__}: {error}")
        result.train_step(run.batch(0), optimizer=optimizer)

    bad = tiny.batch(ROWS * run.workers - 1)
    attempt(lambda: result.train_step(bad, optimizer=optimizer))
    attempt(lambda: result.eval_step(bad))
    attempt(lambda: result.save_checkpoint("/proc/none/here", optimizer))
    own = Kept(launch.rank())
    attempt(lambda: result.save_checkpoint(folder / "own", optimizer, extra={"own": own}))
    same = Kept(7)
    attempt(lambda: result.save_checkpoint(folder / "same", optimizer, extra={"same": same}))
    same.value = 0
    result.load_checkpoint(folder / "same", optimizer, extra={"same": same})
    if launch.rank() == 0:
        said.append(str(result.skipped_steps + same.value))  # asked for by one rank alone
    result.train_step(run.batch(0), optimizer=optimizer)
    runtime_of(result).part()
    every: list[Any] = [None] * run.ranks
    torch.distributed.all_gather_object(every, said)
    return every


def test_mistakes_are_raised_on_all_ranks_which_go_on(tmp_path: Path) -> None:
    run = Run(servers=2, optimizer="adamw")
    first, *others = on_ranks(run.ranks, mistaken, run, tmp_path)
    assert first.pop() == "7"
    assert others == [first] * 3
    train, evaluate, written, own, same = first
    assert train == evaluate
    assert "BatchError: batch: 2 workers don't share 7 rows out" in train
    assert "/proc/none" in written
    assert "extra=['own'] differs between ranks" in own
    assert not same


# --- a worker that fails --------------------------------------------------------------------------

WORKER = Path(__file__).with_name("served_worker.py")


def failing(
    fault: str, staleness: int, folder: Path, timeout_s: float = 60
) -> tuple[Launch, dict[int, Any]]:
    run = launching.launch(
        WORKER, fault, str(staleness), str(folder), ranks=4, timeout_s=timeout_s, grace_s=20
    )
    return run, {k: json.loads((folder / f"{k}.json").read_text()) for k in range(4)
                 if (folder / f"{k}.json").exists()}  # fmt: skip


@pytest.mark.parametrize(
    "fault", tiered(["kill", "raise"], "kill".__eq__, "one that is killed is kept")
)
def test_a_dead_worker_does_not_stop_the_others(tmp_path: Path, fault: str) -> None:
    run, found = failing(fault, 1, tmp_path)
    assert [rank.returncode for rank in run.ranks] == [0, 0, -9 if fault == "kill" else 1, 0]
    assert "rank 2 (stage 0) ended" in run.ranks[0].stderr + run.ranks[2].stderr
    assert "the others go on" in run.ranks[0].stderr
    assert not any(rank.killed or rank.children_left for rank in run.ranks)
    record = [Push(*push) for push in found[0]["record"]]
    counts = [sum(push.worker == w for push in record) for w in range(3)]
    assert counts in ([6, 2, 6], [6, 1, 6])  # its last push may die with it
    wanted = Replay(Run(workers=3, staleness=1), [record]).all()
    for k in (0, 1, 3):
        assert_near({n: torch.tensor(x) for n, x in found[k]["state"].items()}, wanted)
    assert found[0]["loss"] == found[1]["loss"] == found[3]["loss"]


@second_tier("one that is killed is kept")
def test_a_frozen_worker_is_given_up_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", "4")
    run, found = failing("freeze", 1, tmp_path, timeout_s=40)
    assert [rank.returncode for k, rank in enumerate(run.ranks) if k != 2] == [0, 0, 0], run.tail()
    assert run.ranks[2].killed
    said = run.ranks[0].stderr  # it freezes between messages, or within one
    assert re.search(r"rank 2, a worker, has ended \((silent for|.*Timed out waiting)", said)
    record = [Push(*push) for push in found[0]["record"]]
    assert [sum(push.worker == w for push in record) for w in range(3)][::2] == [6, 6]


@second_tier("a dead worker that others go on without is kept")
def test_a_dead_worker_ends_all_that_wait_for_it(tmp_path: Path) -> None:
    run, found = failing("kill", 0, tmp_path)
    assert [bool(rank.returncode) for rank in run.ranks] == [True] * 4
    assert not found
    said = "".join(rank.stderr for rank in run.ranks)
    assert "rank 2, a worker, has ended" in said
    assert "plan with staleness from 1 to go on without it" in said


def ends(run: Run) -> list[float]:
    """Seconds until each rank's steps have ended, of which one worker sleeps in its third."""
    result, optimizer = run.start()
    result.train_step(run.batch(0), optimizer=optimizer)
    torch.distributed.barrier()
    began, every = time.monotonic(), [0.0] * run.ranks
    for step in range(1, run.steps):
        if launch.rank() == 2 and step == 2:
            time.sleep(SLEEP_S)
        result.train_step(run.batch(step), optimizer=optimizer)
    took = time.monotonic() - began
    result.settle()
    runtime_of(result).part()
    torch.distributed.all_gather_object(every, took)
    return every


def test_a_straggler_stops_others_at_the_bound_alone() -> None:
    for staleness, waits in ((1, True), (100, False)):
        server_s, fast_s, slow_s = on_ranks(3, ends, Run(staleness=staleness, steps=6))
        assert min(server_s, slow_s) >= SLEEP_S
        assert (fast_s >= SLEEP_S) is waits, fast_s


@second_tier("the others of a worker that is killed end in order")
def test_a_script_that_just_ends_ends_in_order(tmp_path: Path) -> None:
    run, found = failing("unstopped", 1, tmp_path)
    assert run.ok, run.tail()
    assert sorted(found) == [0, 1, 2, 3]


@second_tier("an error of a worker's end is kept")
def test_a_dead_server_ends_all_which_say_so(tmp_path: Path) -> None:
    run, found = failing("server", 1, tmp_path)
    assert [bool(rank.returncode) for rank in run.ranks] == [True] * 4
    assert not found
    said = "".join(rank.stderr for rank in run.ranks)
    assert "rank 1, a server, has ended" in said
    assert "go on without it" not in said

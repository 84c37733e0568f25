"""Ranks in one process: threads that form a process group, or a loop where nothing is exchanged."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch._C._distributed_c10d as dist_c10d
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from meshwright.executor.resharding.reshard import Axis

Mesh = tuple[int, int]  # (ranks on the data axis, on the tensor axis)
Rank = tuple[int, int]


class Ranks:
    """Four threads as the ranks of one process group, with the groups of every mesh they form."""

    SIZE = 4

    def __init__(self) -> None:
        self.tasks: list[queue.Queue[Any]] = [queue.Queue() for _ in range(self.SIZE)]
        self.done: queue.Queue[Any] = queue.Queue()
        dist_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        store = dist.HashStore()
        self.threads = [
            threading.Thread(target=self._serve, args=(rank, store), daemon=True)
            for rank in range(self.SIZE)
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, rank: int, store: dist.Store) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=self.SIZE, store=store)
        groups = {
            members: dist.new_group(list(members))
            for members in ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3))
        }
        for work, mesh in iter(self.tasks[rank].get, None):
            try:
                self.done.put((rank, work(*self._axes(rank, mesh, groups)), None))
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                threaded.ProcessLocalGroup.exception_handle(error)
                self.done.put((rank, None, error))
        dist.destroy_process_group()

    def _axes(self, rank: int, mesh: Mesh, groups: Mapping[Any, Any]) -> tuple[Axis, Axis]:
        dp, tp = mesh
        d, t = divmod(rank, tp)
        rows = tuple(d * tp + k for k in range(tp))
        columns = tuple(k * tp + t for k in range(dp))
        return (Axis("data", dp, d, groups.get(columns)), Axis("tensor", tp, t, groups.get(rows)))

    def run(self, mesh: Mesh, work: Callable[[Axis, Axis], Any]) -> dict[Rank, Any]:
        """`work(data axis, tensor axis)` on every rank of a mesh; an error is raised here."""
        dp, tp = mesh
        for rank in range(dp * tp):
            self.tasks[rank].put((work, mesh))
        results, errors = {}, []
        for _ in range(dp * tp):
            rank, result, error = self.done.get(timeout=60)
            results[divmod(rank, tp)] = result
            errors += [error] if error is not None else []
        if errors:
            threaded.ProcessLocalGroup.reset()
            raise next((e for e in errors if not isinstance(e, SystemExit)), errors[0])
        return dict(sorted(results.items()))

    def close(self) -> None:
        for tasks in self.tasks:
            tasks.put(None)
        for thread in self.threads:
            thread.join(timeout=10)
        threaded._uninstall_threaded_pg()
        dist_c10d._set_thread_isolation_mode(False)


@contextmanager
def talking_ranks() -> Iterator[Ranks]:
    """Ranks for the duration; operators use one core each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.close()
        torch.set_num_threads(before)


def alone(mesh: Mesh, work: Callable[[Axis, Axis], Any]) -> dict[Rank, Any]:
    """The same for work that exchanges nothing: one rank after the other."""
    dp, tp = mesh
    return {
        (d, t): work(Axis("data", dp, d), Axis("tensor", tp, t))
        for d in range(dp)
        for t in range(tp)
    }

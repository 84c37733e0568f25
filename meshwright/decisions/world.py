"""Check of the ranks that are running against cluster and plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.executor.errors import StateError
from meshwright.executor.ranks import launch
from meshwright.planner.plan import Plan, PlanError, check_runs
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import ClusterError

_PLANNING = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Context of one plan at a time: a trace changes state of the process. Raises RuntimeError if
    ranks are running and another thread plans: planning is collective, and threads take turns in
    another order on each rank."""
    if not _PLANNING.acquire(blocking=False):
        if launch.world_size() > 1:
            raise StateError(
                " plans while another one does, on ranks that must plan together",
                place=f"thread {threading.current_thread().name!r}",
                legal="one thread of a rank that plans at a time",
                way_out="Way out: plan in one thread, or join each before the next",
            )
        _PLANNING.acquire()
    try:
        yield
    finally:
        _PLANNING.release()


def check_world(cluster: Cluster, world: int | None) -> None:
    """Raise unless the running ranks (None: no process group) are the cluster's devices."""
    if world is not None and world != cluster.num_devices:
        raise ClusterError(
            f" {cluster.name!r} has {cluster.num_devices} devices, but {world} ranks are running",
            place="cluster",
            legal=f"{world} devices",
            way_out=(
                f"launch with `{_torchrun(cluster.num_devices, cluster)} ...`, or describe what "
                f"is running: Cluster.detect(), or a cluster of {world} devices"
            ),
        )


def why_not_here(plan: Plan, cluster: Cluster) -> str | None:
    """The reason why the plan can't run in this process, with the way out; None if it can."""
    try:
        check_runs(plan)
    except PlanError as error:
        return f"{error}; plan again for one that runs"
    if launch.running() or plan.num_ranks == 1:
        return None
    return (
        f"the plan needs {plan.num_ranks} ranks and this is a single process; launch your script "
        f"with `{_torchrun(plan.num_ranks, cluster)} your_script.py`, a command with "
        f"`{_torchrun(plan.num_ranks, cluster)} -m meshwright run ...`"
    )


def _torchrun(ranks: int, cluster: Cluster) -> str:
    per_node = min(ranks, cluster.devices_per_node)
    nodes = -(-ranks // per_node)
    how = "--standalone"
    if nodes > 1:
        how = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    return f"torchrun {how} --nproc-per-node {per_node}"

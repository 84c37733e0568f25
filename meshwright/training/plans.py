"""The plans of a run, kept beside its checkpoints: for the hosts there are, and those there may be.

A run that lost a host, or got one, goes on by the plan that is there for as many, without a search.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.api import auto_parallelize
from meshwright.executor.ranks import launch
from meshwright.model import ParallelModel
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import InfeasibleError, Plan, PlanError
from meshwright.profiles.cluster import Cluster

log = logging.getLogger(__name__)

_PLAIN = (str, int, float, Overrides)  # arguments of auto_parallelize that a plan's name tells


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlans:
    """Plans in a `folder`, which all ranks see, by cluster and by what was `asked` of
    `auto_parallelize`. That they are of the same model is checked when one is taken."""

    folder: Path
    asked: Mapping[str, Any]

    def path(self, cluster: Cluster) -> Path:
        told = {name: repr(x) for name, x in self.asked.items() if isinstance(x, _PLAIN)}
        text = json.dumps([cluster.to_dict(), told], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return self.folder / f"{cluster.num_nodes}x{cluster.devices_per_node}-{digest}.json"

    def has(self, cluster: Cluster) -> bool:
        """The same on all ranks. Collective."""
        path = self.path(cluster)
        return launch.agree_on(path.is_file)

    def planned(self, model: nn.Module, cluster: Cluster) -> ParallelModel:
        """By the plan that is there, else by one that is searched, and kept. Collective; raises as
        `auto_parallelize` does."""
        launch.start(cluster.backend)
        if self.has(cluster):
            path = self.path(cluster)
            try:
                decided = {"plan": path, "overrides": None}
                return auto_parallelize(model, cluster, **{**self.asked, **decided})
            except (PlanError, InfeasibleError) as error:  # the same on all ranks
                log.warning("the plan kept in %s is not taken, and made again: %s", path, error)
        result = auto_parallelize(model, cluster, **self.asked)
        self._keep(result.plan, cluster)
        return result

    def plan_ahead(self, result: ParallelModel, cluster: Cluster, hosts: Iterable[int]) -> None:
        """Have a plan for each of these numbers of hosts; those on which the run can't go on are
        named in a warning. Collective."""
        for count in sorted(set(hosts) - {cluster.num_nodes}):
            other = replace(cluster, num_nodes=count)
            if self.has(other):
                continue
            try:
                self._keep(result.plan_for(other), other)
            except (InfeasibleError, OverrideError) as error:
                log.warning("with %d hosts this run can't go on: %s", count, error)

    def _keep(self, plan: Plan, cluster: Cluster) -> None:
        def write() -> None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                plan.save(self.path(cluster))
            except OSError as error:
                log.warning("a plan is not kept, and will be searched again: %s", error)

        launch.agree_on(write)

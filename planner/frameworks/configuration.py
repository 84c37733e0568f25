"""A run as another software's configuration says it: its values made whole for a cluster, and as
overrides of a search for the plan that it means."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from meshwright.costmodel.graph import Graph
from meshwright.planner.decisions import DECISIONS, SHARING
from meshwright.planner.frameworks.correspondence import ConfigurationError
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.profiles.inputs.limits import MAX_ROWS

AXES = ("dp", "cp", "tp", "pp")
COUNTS = (
    *AXES, "ep", "replicas", "shards", "instances", "virtual_stages", "microbatch_size",
    "num_microbatches", "global_batch_size",
)  # fmt: skip
MOST_SIZES = 8  # of which all are listed
LAYER = re.compile(r"(?P<of>.+)\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A file of a `format`, for so many devices: its `values` of decisions and of a run, whole;
    the name of the software's `target`; keys that are `idle`, without a bearing on a plan,
    and those that are `left` to be filled in ("auto"); decisions of the user's script that are
    `taken` as not made, with the way in which it says them; `habits` of the software, which change
    numbers; keys that are `unplanned`, which change memory or numbers."""

    place: str
    format: str
    values: Mapping[str, Any]
    target: str
    idle: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    taken: Mapping[str, str] = field(default_factory=dict)
    habits: tuple[str, ...] = ()
    unplanned: tuple[str, ...] = ()

    def overrides(self, graph: Graph) -> Overrides:
        """Overrides that pin what the configuration says, and rule out what it says nothing of.
        Raises `ConfigurationError` where the model has not the layers that it shares out."""
        names = [block.name for block in graph.blocks]
        layers = layers_of(names)
        self._check_sizes(graph, len(layers))
        stages = self._stages(names, layers)
        given: dict[str, Any] = {}
        for name, decision in DECISIONS.items():
            value = self.values.get(name)
            if decision.acts == "block":
                given[name] = _by_block(names, stages, value or decision.off)
            elif value is not None:
                given[name] = value
            elif decision.off is not None and not (decision.beside or decision.parts):
                given[name] = decision.off
        if len(stages) == 1:
            given.pop("schedule", None)
        else:
            given["stages"] = stages
        silent = tuple(n for n, d in DECISIONS.items() if d.forbidden and n not in given)
        try:
            return Overrides(**given, forbid=silent)
        except OverrideError as error:
            raise ConfigurationError.of(error, self.place) from None

    def _check_sizes(self, graph: Graph, layers: int) -> None:
        """Layers, width and tokens that the file says are the model's and its batch's. Raises
        `ConfigurationError`."""
        widths = {n for value in graph.parameters for n in graph.values[value].shape}
        tokens = {n for value in graph.inputs for n in graph.values[value].shape[1:]}
        has = {"num_layers": {layers}, "hidden_size": widths, "seq_length": tokens}
        ways_out = dict.fromkeys(has, "give the model that the file is for, or mend the file")
        ways_out["seq_length"] = "give a batch of as many tokens (hf:CONFIG:TOKENS), or mend it"
        for name, sizes in has.items():
            if (said := self.values.get(name)) is not None and said not in sizes:
                listed = ", ".join(map(str, sorted(sizes)))
                raise ConfigurationError(
                    f" is {said}, and the model has not", place=f"{self.place}: {name}",
                    legal=listed if len(sizes) <= MOST_SIZES else "a size of its weights",
                    way_out=ways_out[name],
                )  # fmt: skip

    def _stages(self, names: Sequence[str], layers: Sequence[str]) -> list[list[str]]:
        """Runs of layers, what is before the first with it, what is behind the last with that."""
        stages = self.values.get("pp", 1) * self.values.get("virtual_stages", 1)
        if stages == 1:
            return [list(names)]
        counts = self.values.get("layers") or Shares()
        if isinstance(counts, Shares):
            counts = counts.counts(len(layers), stages)
        if sum(counts) != len(layers) or len(counts) != stages:
            raise ConfigurationError(
                f" shares out {sum(counts)} layers among {len(counts)} stages; the model has "
                f"{len(layers)} layers, pp and virtual stages make {stages}",
                place=self.place,
                legal=f"{stages} counts of layers, {len(layers)} in all",
                way_out="mend the file's layout, or give the model that it is for",
            )
        cuts, position = [0], names.index(layers[0])
        for count in counts[:-1]:
            position += count
            cuts.append(position)
        cuts.append(len(names))
        return [list(names[a:b]) for a, b in pairwise(cuts)]


def layers_of(names: Sequence[str]) -> list[str]:
    """The blocks of the longest run that is numbered alike; all, where none is."""
    runs: dict[str, list[str]] = {}
    for name in names:
        if found := LAYER.fullmatch(name):
            runs.setdefault(found["of"], []).append(name)
    return max(runs.values(), key=len, default=[*names])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """A rule that shares layers out among device groups, each group's equally among its `chunks`:
    so many on the `first` and the `last` group, the same on the others, those at the front one more
    where they don't divide. So many `less` are on the first and the last stage, without a number
    for their groups."""

    first: int | None = None
    last: int | None = None
    less: tuple[int, ...] = (0, 0)
    chunks: int = 1

    def counts(self, layers: int, stages: int) -> list[int]:
        """Layers of each stage."""
        groups = stages // self.chunks
        given = {0: self.first, groups - 1: self.last}
        of_group = {k: n for k, n in given.items() if n is not None}
        less = [n * (end is None) for n, end in zip(self.less, given.values(), strict=True)]
        if free := [k for k in range(groups) if k not in of_group]:
            base, extra = divmod(layers + sum(less) - sum(of_group.values()), len(free))
            of_group |= {k: base + (n < extra) for n, k in enumerate(free)}
        each = [divmod(of_group[k], self.chunks) for k in range(groups)]
        rounds = range(self.chunks)
        counts = [of + (chunk < more) for chunk in rounds for of, more in each]
        counts[0] -= less[0]
        counts[-1] -= less[1]
        return counts


def _by_block(names: Sequence[str], stages: Sequence[Sequence[str]], value: Any) -> Any:
    """A policy of all layers, or (policy, count) of the first ones of each stage, or (policy,
    (first, n)) of each n-th from the first on; what is no layer keeps everything: frameworks wrap
    these alone."""
    policy, which = value if isinstance(value, tuple) else (value, len(names))
    wrapped = {*layers_of(names)}
    part = slice(which[0], None, which[1]) if isinstance(which, tuple) else slice(which)
    chosen = {
        name for stage in stages for name in [name for name in stage if name in wrapped][part]
    }
    return {name: policy if name in chosen else "none" for name in names}


# --- made whole -----------------------------------------------------------------------------------


def whole(values: Mapping[str, Any], devices: int, place: str) -> dict[str, Any]:
    """Values with the degrees and batches that follow from the others. Raises `ConfigurationError`
    with the equation where they contradict each other."""
    values = {**values}
    if (said := values.pop("devices", devices)) != devices:
        raise ConfigurationError(
            f" is for {said} processes, and the cluster has {devices} devices",
            place=place, legal=f"a cluster of {said} devices",
        )  # fmt: skip
    for name in COUNTS:
        value = values.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_ROWS):
            raise ConfigurationError.refused(f"{place}: {name}", value, legal="an integer from 1")
    _axes(values, devices, place)
    _batch(values, place)
    return values


def _axes(values: dict[str, Any], devices: int, place: str) -> None:
    """Degrees that multiply to the devices; `dp` follows where it is not said, or one of the
    replicas and shards that make it."""
    others = math.prod(values.get(axis) or 1 for axis in AXES if axis != "dp")
    replicas, shards = values.pop("replicas", None), values.pop("shards", None)
    if replicas is not None or shards is not None:
        cp = values.get("cp") or 1
        if shards is None:
            shards = max(1, devices // (others // cp * cp * (replicas or 1)))
        values["dp"] = (replicas or 1) * shards
        if values.get("zero") and (replicas or 1) > 1:
            values["dp_shard"] = shards * cp
    dp = values.get("dp")
    if dp is None:
        values["dp"] = dp = max(1, devices // others)
    if dp * others != devices:
        said = " × ".join(f"{axis}={values.get(axis) or 1}" for axis in AXES)
        raise ConfigurationError(
            f": {said} = {dp * others}, and the cluster has {devices} devices",
            place=place,
            legal="degrees that multiply to the devices",
            way_out=f"give a cluster of {dp * others} devices, or mend a degree",
        )
    if copies := values.pop("instances", None):
        values["dp_shard"] = dp * (values.get("cp") or 1) // copies
    if dp * (values.get("cp") or 1) == 1:
        for decision in SHARING:
            values.pop(decision.name, None)


def _batch(values: dict[str, Any], place: str) -> None:
    """global_batch_size = microbatch_size × num_microbatches × dp, of which one may be left out."""
    rows, counts = values.get("microbatch_size"), values.get("num_microbatches")
    batch, dp = values.get("global_batch_size"), values["dp"]
    if batch is None and rows is None:
        raise ConfigurationError(
            " says no batch",
            place=place,
            legal="global_batch_size = microbatch_size × num_microbatches × dp",
            way_out="give the rows of a step by --batch",
        )
    if rows is None:
        rows = batch // ((counts or 1) * dp)
    counts = counts or (1 if batch is None else batch // (rows * dp))
    batch = rows * counts * dp if batch is None else batch
    if rows * counts * dp != batch:
        raise ConfigurationError(
            f": microbatch_size={rows} × num_microbatches={counts} × dp={dp} = "
            f"{rows * counts * dp}, not global_batch_size={batch}",
            place=place,
            legal="values of which this equation holds",
            way_out="mend one of them, or give a cluster of other degrees",
        )
    values.update(microbatch_size=rows, num_microbatches=counts, global_batch_size=batch)

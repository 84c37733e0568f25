"""Measured operator and collective times, with a label for the origin of each answer.

    measured        this call was timed
    interpolated    the same call was timed with one of its sizes smaller, and with it larger:
                    seconds are affine in that size between the two
    (None)          nothing is known: the caller's roofline answers

A size may stand in several dims at once (rows in all operands of an addition); it is one size if
all of them differ by the same ratio. A collective is timed at a ladder of message
sizes; between two steps seconds are affine in bytes, below the first they are its own, above the
last they grow by the bandwidth of the last two. Curves that others published for such a node count
as measured where the device's own are missing; each says its source.
"""

from __future__ import annotations

import bisect
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.catalog_reader import catalog_names, device_of_driver, read_entry
from meshwright.profiles.op_signature import OpSignature
from meshwright.profiles.steps import NO_CORRECTIONS, Corrections, RunKind, StepTiming, fitted
from meshwright.profiles.store import DeviceId, Measurements, Store
from meshwright.profiles.timings import OF_HOST, CollectiveTiming, Timing

log = logging.getLogger(__name__)

MAX_FAMILY = 1_000  # calls to interpolate between: each question looks at all of them
MEASURED, INTERPOLATED = "measured", "interpolated"

Point = tuple[int, float]  # bytes, seconds
Answer = tuple[float, float, str]  # seconds of the forward, of the backward, label


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """Measurements of one device, indexed for lookup; equal to itself alone.

    `ranks` and `backend` are the cluster's; `slowdown` is its ranks per core where there are more
    ranks than cores: each then has a fraction of the core on which the operators were timed.
    """

    measurements: Measurements
    ranks: int
    backend: str
    slowdown: float = 1.0
    corrections: Corrections = NO_CORRECTIONS
    _answers: dict[str, Answer | None] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _families(self) -> Mapping[str, list[tuple[tuple[int, ...], Timing]]]:
        """Call without its operands' sizes -> the sizes and time of each call that was timed."""
        families: dict[str, list[tuple[tuple[int, ...], Timing]]] = defaultdict(list)
        for text, timing in self.measurements.operators.items():
            family, sizes = _family(text)
            if len(families[family]) < MAX_FAMILY:
                families[family].append((sizes, timing))
        return dict(families)

    @cached_property
    def _curves(self) -> Mapping[tuple[str, int, int], list[Point]]:
        """(collective, group size, ranks per node) -> its points in increasing order of bytes."""
        curves: dict[tuple[str, int, int], list[Point]] = defaultdict(list)
        for c in self.measurements.collectives:
            of_ranks = (c.ranks, c.backend) == (self.ranks, self.backend)
            if of_ranks and c.kind not in OF_HOST:
                curves[c.kind, c.size, c.per_node].append((c.nbytes, c.seconds))
        return {key: sorted(points) for key, points in curves.items()}

    @property
    def basis(self) -> str:
        """Basis of prices: steps say nothing of prices that rest on another."""
        shared = f", {self.slowdown:g} ranks a core" if self.slowdown > 1 else ""
        operators = "measured" if self.measurements.operators else "modelled"
        collectives = "measured" if self._curves else "modelled"
        return f"operators {operators}, collectives {collectives}{shared}"

    def correction(self, component: str) -> float:
        """Factor of the seconds of a component of a step."""
        return self.corrections.factor(component)

    def corrected_by(self) -> list[str]:
        """The corrections in words."""
        return self.corrections.lines()

    def corrected(self, steps: Iterable[StepTiming], run: RunKind) -> Profile:
        """The same with the corrections that those of the steps ask for that were priced on the
        same basis, of runs of this kind."""
        alike = (self.backend, run.precision, run.target, self.basis)
        return replace(self, corrections=fitted(s for s in steps if s.key[:4] == alike))

    def op(self, signature_text: str) -> Answer | None:
        """Seconds of an operator's forward and backward, and the label; None where it was neither
        timed nor lies between timed calls."""
        if signature_text not in self._answers:
            self._answers[signature_text] = self._answer(signature_text)
        return self._answers[signature_text]

    def _answer(self, text: str) -> Answer | None:
        timing = self.measurements.operators.get(text)
        if timing is not None:
            forward_s, backward_s, label = timing.forward_s, timing.backward_s, MEASURED
        else:
            family, sizes = _family(text)
            between = _interpolated(sizes, self._families.get(family, ()))
            if between is None:
                return None
            (forward_s, backward_s), label = between, INTERPOLATED
        return forward_s * self.slowdown, backward_s * self.slowdown, label

    def collective(
        self, kind: str, nbytes: float, size: int, per_node: int
    ) -> tuple[float, str] | None:
        """Seconds of a collective over a tensor of `nbytes` in full (of one message for "p2p") in
        groups of `size` ranks, `per_node` of them on a node, and the label; None where no such
        group was timed."""
        return _on_curve(self._curves.get((kind, size, per_node)), nbytes)

    def host_bandwidth(self, kind: str, ranks: int = 1) -> float | None:
        """Bytes per second of a kind of `timings.OF_HOST`, which so many ranks did at once, of the
        most that were timed; None where none was."""
        return self._of_host.get((kind, ranks))

    @cached_property
    def _of_host(self) -> Mapping[tuple[str, int], float]:
        timed = sorted(self.measurements.collectives, key=lambda c: c.nbytes)
        return {(c.kind, c.size): c.nbytes / c.seconds for c in timed if c.kind in OF_HOST}


def load_profile(
    cluster: Cluster, store: Store | None = None, run: RunKind | None = None
) -> Profile | None:
    """The profile of a cluster's device from the cache, with the corrections for a kind of run, if
    one is given; None where it has none.

    A CPU's measurements hold for this machine, driver and torch alone; a GPU's for that GPU: where
    several drivers or torch versions were measured, this machine's, else the latest. Curves that
    others measured on such nodes stand in for those that were not measured here. Steps count where
    the device's name is the same, and torch's version but for its last number. A cache that can't
    be had (locked, another user's, a full disk) is as good as none, with a warning.
    """
    store = store or Store()
    if not store.path.exists():
        return None
    try:
        return _loaded(cluster, store, run)
    except OSError as error:
        log.warning("left alone, and nothing in it is used: %s", error)
        return None


def _loaded(cluster: Cluster, store: Store, run: RunKind | None) -> Profile | None:
    import torch

    devices = [d for d in store.devices() if is_device_of(cluster, d.name)]
    stored = {device: store.read(device) for device in devices}
    timed = [d for d, known in stored.items() if known.operators or known.collectives]
    here = device_here(cluster)
    chosen = here if here in timed else None
    if chosen is None and cluster.device.kind == "cuda" and timed:
        chosen = max(timed, key=lambda d: (d.torch, d.driver))
    measurements = published = store.read(published_id(cluster))
    if chosen is not None:
        measurements = _completed(stored[chosen], published.collectives)
    profile = profile_of(cluster, measurements)
    if run is not None:
        version = _minor(torch.__version__)
        alike = [known for device, known in stored.items() if _minor(device.torch) == version]
        profile = profile.corrected((step for known in alike for step in known.steps), run)
    known = measurements.operators or measurements.collectives or profile.corrections
    return profile if known else None


def _minor(version: str) -> list[str]:
    """A version without its last number, e.g. of "2.13.0+cpu"."""
    return version.split("+")[0].split(".")[:2]


def _completed(measurements: Measurements, published: Iterable[CollectiveTiming]) -> Measurements:
    """Measurements, with published curves for the groups that were not measured here."""
    measured = {c.key[:-1] for c in measurements.collectives}
    added = tuple(c for c in published if c.key[:-1] not in measured)
    return replace(measurements, collectives=measurements.collectives + added)


def no_profile(cluster: Cluster) -> Profile:
    """The profile of a device of which nothing was measured."""
    return profile_of(cluster, Measurements(device=published_id(cluster)))


def profile_of(cluster: Cluster, measurements: Measurements) -> Profile:
    """The profile of measurements taken for a cluster's device."""
    slowdown = 1.0
    if cluster.device.kind == "cpu":
        slowdown = max(1.0, cluster.devices_per_node / (os.cpu_count() or 1))
    return Profile(
        measurements=measurements,
        ranks=cluster.num_devices,
        backend=cluster.backend,
        slowdown=slowdown,
    )


def is_device_of(cluster: Cluster, name: str) -> bool:
    """Whether `name`, as a driver gives it, is the cluster's device."""
    driven = device_of_driver(name) if cluster.device.kind == "cuda" else name
    return driven == device_name(cluster)


def published_id(cluster: Cluster) -> DeviceId:
    """The cache key of published collectives: the device in its node, as two nodes with the same
    GPUs have different networks; driver and torch are unknown."""
    name, device = cluster.name, cluster.device.name
    if name in catalog_names():  # a device's name stands for its usual node
        name = read_entry(name).texts.get("usual_node", name)
    return DeviceId(name=f"{device} in {name}", driver="", torch="")


def device_name(cluster: Cluster) -> str:
    """The name of the cluster's device, to compare with a profile's."""
    if cluster.device.kind == "cuda":
        return cluster.device.name
    return DeviceId.here("cpu", cores_busy(cluster)).name


def cores_busy(cluster: Cluster) -> int:
    """The number of this machine's cores that the cluster's ranks occupy."""
    return min(cluster.devices_per_node, os.cpu_count() or 1)


def device_here(cluster: Cluster) -> DeviceId | None:
    """The cache key of this machine's device of the cluster's kind; None where it has none."""
    import torch

    if cluster.device.kind == "cuda" and not torch.cuda.is_available():
        return None
    return DeviceId.here(cluster.device.kind, cores_busy(cluster))


# --- interpolation --------------------------------------------------------------------------------


def _on_curve(curve: Sequence[Point] | None, nbytes: float) -> tuple[float, str] | None:
    """Seconds at so many bytes, and the label; None without a curve."""
    if not curve:
        return None
    steps = [step for step, _ in curve]
    at = bisect.bisect_left(steps, nbytes)
    if at < len(curve) and steps[at] == nbytes:
        return curve[at][1], MEASURED
    if at == 0 or len(curve) == 1:
        return curve[0][1] * max(1.0, nbytes / steps[0]), INTERPOLATED
    upper = min(at, len(curve) - 1)
    (a, before_s), (b, after_s) = curve[upper - 1], curve[upper]
    per_byte = max(0.0, after_s - before_s) / (b - a)
    if at == len(curve):
        return after_s + (nbytes - b) * per_byte, INTERPOLATED
    return before_s + (nbytes - a) * (after_s - before_s) / (b - a), INTERPOLATED


def _family(text: str) -> tuple[str, tuple[int, ...]]:
    """A call without its operands' sizes, and the sizes."""
    signature = OpSignature.parse(text)
    sizes = tuple(size for _, shape, _ in signature.operands for size in shape)
    ranks = [(dtype, len(shape), grad) for dtype, shape, grad in signature.operands]
    return f"{signature.target} {ranks} {signature.arguments}", sizes


def _interpolated(
    wanted: tuple[int, ...], known: Iterable[tuple[tuple[int, ...], Timing]]
) -> tuple[float, float] | None:
    """Forward and backward seconds, linear between the nearest smaller and the nearest larger call
    that differ from `wanted` in one size; None where one of them is missing."""
    by_dims: dict[tuple[int, ...], list[tuple[Fraction, Timing]]] = defaultdict(list)
    for sizes, timing in known:
        pairs = zip(wanted, sizes, strict=True)
        scaled = tuple(dim for dim, (size, other) in enumerate(pairs) if size != other)
        ratios = {Fraction(sizes[d], wanted[d]) for d in scaled if wanted[d]}
        if len(ratios) == 1:
            by_dims[scaled].append((ratios.pop(), timing))
    brackets = []
    for points in by_dims.values():
        below = max((p for p in points if p[0] < 1), key=lambda p: p[0], default=None)
        above = min((p for p in points if p[0] > 1), key=lambda p: p[0], default=None)
        if below is not None and above is not None:
            brackets.append((above[0] / below[0], below, above))
    if not brackets:
        return None
    _, (low, before), (high, after) = min(brackets, key=lambda b: b[0])
    fraction = float((1 - low) / (high - low))
    return (
        before.forward_s + fraction * (after.forward_s - before.forward_s),
        before.backward_s + fraction * (after.backward_s - before.backward_s),
    )

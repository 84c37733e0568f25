"""Prices of any plan: the search's, a user's, a file's; `Evaluator` prices many of one problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from meshwright.costmodel.intervals import Quantiles, verdict
from meshwright.costmodel.kernels import collective_time, crosses_node, group_for
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import Entry, Problem
from meshwright.costmodel.schedules import (
    StageTimes,
    Timeline,
    build_schedule,
    in_flight,
    simulate_step,
)
from meshwright.costmodel.sharding import Assignment
from meshwright.costmodel.stages import OuterExchange, Peak, StageCosts, device_peaks
from meshwright.costmodel.target import Target
from meshwright.planner.plan import (
    Known,
    OuterLoop,
    Plan,
    PlanError,
    StagePlan,
    arriving_states,
    check_plan,
    crossings,
    problem_in,
    shared_apart,
)
from meshwright.planner.pricing.copies import exchanges, with_exchanges
from meshwright.planner.pricing.course import placed, walked_stages
from meshwright.planner.pricing.outer_loop import (
    PLACE,
    cluster_of_replica,
    outer_exchange,
    state_bytes,
)
from meshwright.planner.pricing.priced_stage import PricedStage, priced_stage
from meshwright.planner.pricing.served import Served, served
from meshwright.planner.pricing.slice_work import SliceWork, held_more, works_of_slices
from meshwright.planner.pricing.stage_costs import StageBlocks, StageCoster, stage_setting
from meshwright.profiles.cluster import Cluster

STATELESS = "sgd"  # the optimizer that takes what a worker beside servers has: no states


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedMemory:
    """Bytes of a device of each device group in a rehearsal: of tensors at their peak, and
    `beside_bytes`, which no rehearsal has (the driver's context, communicators' buffers)."""

    tensor_bytes: Sequence[int]
    beside_bytes: Sequence[int]

    @property
    def peak_bytes(self) -> list[int]:
        """Both together."""
        return [t + b for t, b in zip(self.tensor_bytes, self.beside_bytes, strict=True)]

    def probability(self, cluster: Cluster, error: Quantiles) -> float:
        """Probability that the memory of the fullest device is enough."""
        room = [cluster.device.memory_bytes - beside for beside in self.beside_bytes]
        ratios = (free / max(1, t) for free, t in zip(room, self.tensor_bytes, strict=True))
        return error.below(min(ratios))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Price of a plan: seconds per step, peak bytes of a device of each device group, share of the
    pipeline's time that devices wait, model FLOPs of a step and their utilisation of the whole
    cluster; how far step times and memory were off for models like it; `assumptions` about a
    configuration that leaves something open. `peaks` say when the most is held, and of what. Where
    the plan was `rehearsed`, the verdict on memory rests on that; the other numbers are prices
    still. `host_memory_bytes` lie in the host's memory of each node, where anything does,
    `flash_bytes` in files on its flash, `server_bytes` on the fullest parameter server."""

    step_time_s: float
    peak_memory_bytes: list[int]
    bubble_fraction: float
    model_flops: float
    mfu: float
    step_error: Quantiles
    memory_error: Quantiles
    assumptions: tuple[str, ...] = ()
    peaks: tuple[Peak, ...] = ()
    rehearsed: RehearsedMemory | None = None
    host_memory_bytes: tuple[int, ...] = ()
    flash_bytes: tuple[int, ...] = ()
    server_bytes: int = 0

    def host_shortfall(self, cluster: Cluster) -> int:
        """Bytes that the fullest host's memory lacks beside its margin; 0 where all fit."""
        room = cluster.host.room_bytes if cluster.host is not None else 0
        return max(0, max(self.host_memory_bytes, default=0) - room)

    def flash_shortfall(self, cluster: Cluster) -> int:
        """Bytes that the fullest flash of a node lacks, likewise; 0 where all fit."""
        room = cluster.host.flash_room_bytes if cluster.host is not None else 0
        return max(0, max(self.flash_bytes, default=0) - room)

    @property
    def step_interval_s(self) -> tuple[float, float]:
        """80 % interval of a step, in seconds."""
        return self.step_error.around(self.step_time_s)

    @property
    def fullest_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(*self.peak_memory_bytes, self.server_bytes)

    @property
    def memory_interval_bytes(self) -> tuple[float, float]:
        """80 % interval of the fullest device's peak."""
        return self.memory_error.around(self.fullest_bytes)

    def memory_probability(self, cluster: Cluster) -> float:
        """Probability that memory is enough: a device's, by the rehearsal where there was one, the
        hosts' and their flash."""
        if self.host_shortfall(cluster) or self.flash_shortfall(cluster):
            return 0.0
        if self.rehearsed is not None:
            return self.rehearsed.probability(cluster, self.memory_error)
        return self.memory_error.below(cluster.device.memory_bytes / self.fullest_bytes)

    def memory_verdict(self, cluster: Cluster) -> str:
        """The words "fits", "tight" or "does not fit", by that probability."""
        return verdict(self.memory_probability(cluster))

    def shortfall_bytes(self, cluster: Cluster) -> list[int]:
        """Bytes by which each stage exceeds its devices' memory; 0 where it fits."""
        return [max(0, peak - cluster.device.memory_bytes) for peak in self.peak_memory_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A priced plan: prediction, costs and micro-batches in flight per stage, the simulated step,
    the messages of a micro-batch between stages, and once a step between copies of the model, of
    which each stage's `reduce_s` has its part; the activations that are sent `split` over the
    tensor axis; what replicas exchange at a `meeting`, and its seconds, where there are several, of
    the first of which all but the prediction is; the stages as they were walked, where their
    shardings were asked; the exchange through parameter servers, where there are any; and the
    `works` of each token slice on each stage."""

    plan: Plan
    prediction: Prediction
    stages: tuple[StageCosts[float], ...]
    in_flight: tuple[int, ...]
    timeline: Timeline
    target: Target
    transfers: Mapping[tuple[int, int], Entry]
    exchanges: Mapping[int, Entry]
    split: frozenset[str] = frozenset()
    meeting: OuterExchange | None = None
    meeting_s: float = 0.0
    priced: tuple[PricedStage, ...] = field(default=(), repr=False)
    served: Served | None = None
    works: Sequence[Sequence[SliceWork]] = ()

    @property
    def meetings_s(self) -> float:
        """Seconds of a meeting of replicas that fall on a step, in the mean."""
        return self.meeting_s / self.plan.sync_every if self.plan.sync_every else 0.0

    def rests_on(self) -> dict[str, float]:
        """Fractions of the operators' seconds that were measured on the device, interpolated
        between measurements, and modelled from the catalog's curves."""
        total = sum(
            s.forward_s + s.backward_s - s.forward_comm_s - s.backward_comm_s for s in self.stages
        )
        measured, interpolated = (
            min(1.0, sum(getattr(s, name) for s in self.stages) / total) if total else 0.0
            for name in ("measured_s", "interpolated_s")
        )
        return {
            "measured": measured,
            "interpolated": interpolated,
            "modelled": max(0.0, 1.0 - measured - interpolated),
        }


@dataclass(slots=True)
class Evaluator:
    """Prices plans of one problem, each in its own precision and with its loss in as many parts;
    `price` is a pure function of the plan. Checked shardings and block prices are remembered."""

    problem: Problem
    _checked: dict[int, Known] = field(default_factory=dict)  # by parts of the loss
    _costers: Memo[tuple[str, int], StageCoster] = field(default_factory=Memo, init=False)

    def price(self, plan: Plan) -> Evaluation:
        """Check a plan and price it; raises `PlanError` as `check_plan` does."""
        if plan.outer_loop is not None:
            return self._priced_apart(plan, plan.outer_loop)
        coster = self._costers.of(
            (plan.precision, plan.chunked_loss),
            lambda: StageCoster(_problem_of(plan, self.problem)),
        )
        problem, checked = coster.problem, self._checked.setdefault(plan.chunked_loss, {})
        assignments = check_plan(plan, problem.graph, problem.factors, checked)
        if plan.is_served:
            stateless = replace(self.problem, optimizer=STATELESS)
            return with_servers(Evaluator(stateless).price(plan.of_worker), plan, problem)
        return evaluate(plan, problem, assignments, coster)

    def _priced_apart(self, plan: Plan, loop: OuterLoop) -> Evaluation:
        """The price of replicas: one of them by itself, and a part of each meeting in a step."""
        check_plan(plan, self.problem.graph, self.problem.factors, {})
        cluster = self.problem.cluster
        here = cluster_of_replica(cluster, loop.replicas, PLACE)
        inner = self.on(here).price(plan.of_one_replica)
        meeting = outer_exchange(plan, loop, inner.priced)
        alone, states = inner.prediction, math.ceil(state_bytes(meeting))
        meeting_s = meeting.seconds(cluster)
        step_s = alone.step_time_s + meeting_s / loop.sync_every
        on_host = cluster.device.kind != "cpu"
        nodes = alone.host_memory_bytes or (0,) * here.num_nodes
        beside = states * here.devices_per_node if on_host and cluster.host is not None else 0
        prediction = replace(
            alone,
            step_time_s=step_s,
            peak_memory_bytes=[n + states * (not on_host) for n in alone.peak_memory_bytes],
            model_flops=alone.model_flops * loop.replicas,
            mfu=alone.mfu * alone.step_time_s / step_s,
            host_memory_bytes=tuple(n + beside for n in nodes) * loop.replicas if beside else (),
            flash_bytes=alone.flash_bytes * loop.replicas,
        )
        return replace(
            inner, plan=plan, prediction=prediction, meeting=meeting, meeting_s=meeting_s
        )

    def on(self, cluster: Cluster) -> Evaluator:
        """The same on another cluster."""
        return Evaluator(replace(self.problem, cluster=cluster), self._checked)


def _problem_of(plan: Plan, problem: Problem) -> Problem:
    """The problem that a plan solves. Raises `PlanError` where its loss can't be in parts."""
    return replace(problem_in(problem, plan.chunked_loss), precision=plan.precision)


def with_servers(alone: Evaluation, plan: Plan, problem: Problem) -> Evaluation:
    """The price of a plan with parameter servers: its worker's `alone`, which has no optimizer
    states, with what it waits for servers."""
    coster, (costs,) = StageCoster(problem), alone.stages
    price = served(plan, coster, costs, problem)
    costs = replace(costs, reduce_s=price.sent.seconds, optimizer_s=price.waited_s[1])
    timeline, step_s, bubble = simulated(alone.plan, problem, [costs], {})
    flops = coster.model_flops.of(plan.global_batch_size)
    most = coster.model_flops.peak(problem.cluster.device, plan.precision) * plan.num_ranks
    prediction = replace(
        alone.prediction,
        step_time_s=step_s,
        bubble_fraction=bubble,
        model_flops=flops,
        mfu=flops / (step_s * most),
        peak_memory_bytes=[
            max(peak, math.ceil(price.worker_bytes)) for peak in alone.prediction.peak_memory_bytes
        ],
        server_bytes=math.ceil(price.server_bytes),
    )
    return replace(
        alone, plan=plan, prediction=prediction, stages=(costs,), timeline=timeline,
        exchanges={0: price.sent}, served=price,
    )  # fmt: skip


def evaluate(
    plan: Plan,
    problem: Problem,
    assignments: Sequence[Mapping[str, Assignment]],
    coster: StageCoster | None = None,
) -> Evaluation:
    """Price a checked plan in its own precision. `assignments` are what `check_plan` returns; the
    problem's graph may have any batch size."""
    check_host(plan, problem.cluster)
    coster = coster or StageCoster(replace(problem, precision=plan.precision))
    arriving = arriving_states(plan, coster.graph, assignments)
    stages = tuple(
        priced_stage(plan, k, coster, *of_stage)
        for k, of_stage in enumerate(zip(assignments, arriving, strict=True))
    )
    costs = [stage.costs for stage in stages]
    return replace(price_blocks(plan, coster, costs, stages, arriving), priced=stages)


def check_host(plan: Plan, cluster: Cluster) -> None:
    """Raise `PlanError` where a host's memory or flash is planned with that the cluster lacks."""
    for k, stage in enumerate(plan.stages):
        if stage.host and cluster.host is None:
            raise PlanError(
                f"cluster {cluster.name!r} says nothing of its hosts' memory",
                place=f"plan: stage {k}",
                legal="a cluster with a host",
                way_out="give it one, in TOML as [host], or drop it from the plan",
            )
        if stage.host.files and not (cluster.host and cluster.host.has_flash):
            raise PlanError(
                f"cluster {cluster.name!r} says nothing of its hosts' flash",
                place=f"plan: stage {k}",
                legal="a cluster with nvme_bytes, nvme_read_bandwidth and nvme_write_bandwidth",
                way_out="give it these, in TOML in [host], or drop nvme from the plan",
            )


def price_blocks(
    plan: Plan,
    coster: StageCoster,
    costs: Sequence[StageCosts[float]],
    stages: Iterable[StageBlocks],
    arriving: Iterable[Iterable[str]],
) -> Evaluation:
    """Price a plan whose stages' costs are known, their memory from their blocks (`stages`, which
    are asked for only then) where the target's steps are followed. `arriving` are the activations
    that are sent in parts, by stage."""
    split = frozenset(chain.from_iterable(arriving))
    if not coster.problem.target.gradients_come:
        return price_stages(plan, coster, costs, split)
    walks = walked_stages(plan, coster, [*stages])
    costs = [replace(cost, **walk.memory) for cost, walk in zip(costs, walks, strict=True)]
    evaluation = price_stages(plan, coster, costs, split)
    prediction = evaluation.prediction
    peaks = tuple(placed(peak, walks[peak.stage]) for peak in prediction.peaks)
    return replace(evaluation, prediction=replace(prediction, peaks=peaks))


def price_stages(
    plan: Plan,
    coster: StageCoster,
    stages: Sequence[StageCosts[float]],
    split: frozenset[str] = frozenset(),
    send_scale: float = 1.0,
) -> Evaluation:
    """Price a plan whose stages' costs are known, without the sum of gradients over copies of the
    model; of its shardings it asks which activations are sent `split` over the tensor axis.
    `send_scale` multiplies the seconds of sends."""
    cluster = coster.cluster
    exchanged = exchanges(plan, coster, stages)
    stages = with_exchanges(stages, exchanged)
    works = works_of_slices(plan, coster, stages)
    crossed = crossings(plan, coster.graph)
    transfers = {e: transfer(plan, coster, e, values, split) for e, values in crossed.items()}
    sends = {edge: send_scale * entry.seconds for edge, entry in transfers.items()}
    timeline, step_s, bubble = simulated(plan, coster.problem, stages, sends, works)
    peak = coster.model_flops.peak(cluster.device, plan.precision) * plan.num_ranks
    flops = coster.model_flops.of(plan.global_batch_size)
    pipeline = plan.pipeline
    active = tuple(in_flight(pipeline, k) for k in range(pipeline.num_stages))
    in_memory = [s.in_host_bytes(n) for s, n in zip(stages, active, strict=True)]
    followed = coster.problem.target.gradients_come
    peaks = device_peaks(
        held_more(plan, stages, active),
        pipeline,
        messages=_message_bytes(plan, coster, crossed, split) if followed else None,
        reserved=cluster.device.reserved_bytes + _batch_bytes(plan, coster),
    )
    prediction = Prediction(
        step_time_s=step_s,
        peak_memory_bytes=[math.ceil(peak.nbytes) for peak in peaks],
        peaks=tuple(peaks),
        bubble_fraction=bubble,
        model_flops=flops,
        mfu=flops / (step_s * peak),
        step_error=coster.errors[0],
        memory_error=coster.errors[1],
        host_memory_bytes=by_node(plan, in_memory, cluster),
        flash_bytes=by_node(plan, [costs.flash_bytes for costs in stages], cluster),
    )
    return Evaluation(
        plan=plan,
        prediction=prediction,
        stages=tuple(stages),
        in_flight=active,
        timeline=timeline,
        target=coster.problem.target,
        transfers=transfers,
        exchanges=exchanged,
        split=split,
        works=works,
    )


def by_node(plan: Plan, rank_bytes: Sequence[float], cluster: Cluster) -> tuple[int, ...]:
    """Bytes on each node, of those that each stage's ranks hold; none where nobody holds any."""
    nodes = [0.0] * cluster.num_nodes
    for stage, nbytes in zip(plan.stages, rank_bytes, strict=True):
        for rank in stage.ranks if nbytes else ():
            nodes[rank // cluster.devices_per_node] += nbytes
    return tuple(map(math.ceil, nodes)) if any(nodes) else ()


def simulated(
    plan: Plan,
    problem: Problem,
    stages: Sequence[StageCosts[float]],
    sends: dict[tuple[int, int], float],
    works: Sequence[Sequence[SliceWork]] = (),
) -> tuple[Timeline, float, float]:
    """The simulated step of a plan whose `sends` between stages take so many seconds, its seconds,
    and the share of them that devices wait; `works` are those of each slice on each stage."""
    target, edges = problem.target, frozenset(sends)
    blocked = [0.0] * len(stages), [0.0] * len(stages)
    # of a forward and a backward together, one computes while the other exchanges tokens
    paired = (target.overlap_passes and stage.ep > 1 for stage in plan.stages)
    if not target.overlap_sends:
        for (source, destination), seconds in sends.items():
            blocked[0][source] += seconds
            blocked[1][destination] += seconds
        sends = dict.fromkeys(sends, 0.0)
    times = [
        StageTimes(
            forward_s=s.forward_s + sending,
            backward_s=s.backward_s + returning,
            weight_s=s.weight_s,
            overlap_s=hides * min(s.forward_comm_s + s.backward_comm_s, s.forward_s),
            reduce_s=s.reduce_s,
            optimizer_s=s.optimizer_s,
        )
        for s, sending, returning, hides in zip(stages, *blocked, paired, strict=True)
    ]
    streams = build_schedule(plan.pipeline, edges, paired=target.overlap_passes)
    slices = [
        ([work.of(time) for work, time in zip(on_stages, times, strict=True)], of_slice)
        for on_stages in works
        for of_slice in [{edge: s * on_stages[0].tokens for edge, s in sends.items()}]
    ]
    timeline = simulate_step(plan.pipeline, streams, times, sends, slices)
    step_s, bubble = timeline.step_time_s, timeline.bubble_fraction
    if plan.post_validation and not shared_apart(plan, problem.graph):
        all_ranks = group_for(problem.cluster, size=plan.num_ranks, stride=1)
        verdict_s = collective_time("all_reduce", 24, all_ranks, problem.cluster)
        # where it takes too long, no more than a common end does, whose own sums have no price
        step_s = min(step_s, timeline.validated_s(streams, verdict_s))
        bubble = min(bubble, timeline.validated_bubble(step_s))
    return timeline, step_s, bubble


def _message_bytes(
    plan: Plan,
    coster: StageCoster,
    crossed: Mapping[tuple[int, int], Sequence[str]],
    split: frozenset[str],
) -> dict[tuple[int, int], tuple[float, float]]:
    """Bytes of a micro-batch from one stage to another, on a rank of each."""
    stages = {k for edge in crossed for k in edge}
    pricers = {k: coster.pricer(stage_setting(plan, k, coster)) for k in stages}

    def nbytes(k: int, values: Sequence[str]) -> float:
        tp = plan.stages[k].tp
        return sum(pricers[k].nbytes(v) / (tp if v in split else 1) for v in values)

    return {edge: (nbytes(edge[0], v), nbytes(edge[1], v)) for edge, v in crossed.items()}


def _batch_bytes(plan: Plan, coster: StageCoster) -> float:
    """Bytes of the global batch that the caller holds: on a CPU they lie where the tensors do."""
    graph = coster.graph
    if coster.cluster.device.kind != "cpu":
        return 0.0
    total, factors = 0.0, coster.problem.factors
    for value in graph.inputs:
        meta = graph.values[value]
        rows = plan.global_batch_size / graph.batch_size if factors.has_batch(value) else 1.0
        total += rows * math.prod(meta.shape) * meta.dtype.itemsize
    return total


def _busiest(source: StagePlan, target: StagePlan) -> float:
    """The part of a micro-batch that the busiest rank sends or receives: every target rank takes
    its rows, which the ranks that hold them send in turn."""
    return max(1 / target.dp, target.tp / (source.dp * source.tp))


def transfer(
    plan: Plan,
    coster: StageCoster,
    edge: tuple[int, int],
    values: Sequence[str],
    split: frozenset[str] = frozenset(),
) -> Entry:
    """Moving `values` of one micro-batch between two stages, those that are `split` over the tensor
    axis in parts, the mean of both ways; the busiest rank's share counts. Stages on the same ranks
    hand over what they hold."""
    ends = [plan.stages[k] for k in edge]
    rows = plan.pass_rows * (_busiest(*ends) + _busiest(*reversed(ends))) / 2
    cp = min(stage.cp for stage in ends)
    rank = Mesh(dp=1, tp=1, cp=cp).of_kind(ends[0].cp_kind)
    setting = coster.setting(rank, Batch(rows=rows))
    pricer, sizes = coster.pricer(setting), [len(stage.ranks) for stage in ends]
    # a value without rows goes in full to every rank, from as many as there are
    copies = (1 + max(sizes) / min(sizes)) / 2
    problem, (source, destination) = coster.problem, (stage.ranks for stage in ends)
    tp = min(stage.tp for stage in ends)
    # of a split value each rank sends its part, of its rows
    share = plan.pass_rows / min(stage.dp for stage in ends) / rows / tp

    def of_rank(value: str) -> float:
        rows_alone = problem.factors.has_batch(value)
        return pricer.nbytes(value) * (share if value in split else 1 if rows_alone else copies)

    in_parts = sum(of_rank(v) for v in values if v in split)
    nbytes = sum(map(of_rank, values))
    seconds = coster.message_s(nbytes - in_parts, source, destination, tp=tp)
    seconds += coster.message_s(in_parts, source, destination, tp=1)
    return Entry(
        column="send_s",
        kind="collective",
        seconds=seconds,
        axis="pipeline",
        collective="send",
        calls=1,
        sent_bytes=nbytes if seconds else 0.0,
        crosses=crosses_node(source, destination, problem.cluster.devices_per_node),
    )

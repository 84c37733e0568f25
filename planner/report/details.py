"""Details of a priced plan, each found when it is asked for: memory by what holds it, communication
by axis and link, time by component of each device group, throughput, distinct blocks, the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from meshwright.costmodel.intervals import LEVEL
from meshwright.costmodel.operators import PASS_COLUMNS, Pricer, Problem
from meshwright.costmodel.schedules import Event, Timeline
from meshwright.costmodel.sharding import Enter, Leave, Move, Run, Step
from meshwright.planner.plan import compress_names, compress_ranks, folds
from meshwright.planner.pricing import Evaluation, Ledger, PricedStage, Work
from meshwright.planner.report.components import Components, device_groups
from meshwright.profiles.cluster import Cluster, catalog_names
from meshwright.profiles.inputs import ArgumentError
from meshwright.profiles.inputs.limits import is_number

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Details:
    """Rows of data about a priced plan: seconds of a step, bytes of a device or of a rank."""

    evaluation: Evaluation
    problem: Problem

    @cached_property
    def memory(self) -> list[Row]:
        """The peak of each device group (`priced_bytes`), the `parts` that add up to it, and the
        moment, stage and block in which it comes (None where no backward is followed block by
        block)."""
        plan, prediction = self.evaluation.plan, self.evaluation.prediction
        rows: list[Row] = []
        peaks = zip(prediction.peaks, prediction.peak_memory_bytes, strict=True)
        for ranks, (peak, priced) in zip(plan.devices, peaks, strict=True):
            blocks = plan.stages[peak.stage].blocks
            rows.append(
                {
                    "ranks": compress_ranks(ranks),
                    "stages": [n for n, stage in enumerate(plan.stages) if stage.ranks == ranks],
                    "parts": peak.by_part,
                    "priced_bytes": priced,
                    "interval_bytes": list(prediction.memory_error.around(priced)),
                    "moment": peak.action.name.lower() if peak.action else "optimizer",
                    "stage": peak.stage,
                    "block": None if peak.block is None else blocks[peak.block],
                }
            )
        return rows

    @cached_property
    def components(self) -> list[Components]:
        """Seconds of a step by component, on each device group."""
        return device_groups(self.evaluation)

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger.of(self.evaluation)

    @cached_property
    def _works(self) -> list[Work]:
        return self._ledger.work()

    @cached_property
    def communication(self) -> list[Row]:
        """A rank's calls, bytes that it sends, seconds by themselves and exposed, per stage, axis,
        collective and link."""
        return [asdict(row) for row in self._ledger.traffic(self.problem)]

    @cached_property
    def device_groups(self) -> list[Row]:
        """Ranks of each device group, laid out (dp, cp, tp) with tp innermost, its stages and
        degrees, and its seconds by component (`components_s`), which add up to the step. The `ep`
        neighbours that share experts out are `ep_stride` ranks apart in that order. A rank's work
        in a step, as the price counts it: `flops`, `repeated_flops` of which are recompute,
        `moved_bytes` of its memory, and `sent_bytes` by kind."""
        plan, rows = self.evaluation.plan, list[Row]()
        both = zip(self._works, self.components, strict=True)
        for ranks, (work, parts) in zip(plan.devices, both, strict=True):
            numbers = [k for k, stage in enumerate(plan.stages) if stage.ranks == ranks]
            stage = plan.stages[numbers[0]]
            blocks = chain(*(self.evaluation.priced[k].blocks for k in numbers))
            assignments = {entered.block.name: entered.assignment for entered in blocks}
            folded = folds(stage, self.problem.graph, assignments)
            rows.append(
                {
                    "ranks": compress_ranks(ranks),
                    "stages": numbers,
                    **{axis: getattr(stage, axis) for axis in ("dp", "cp", "ep", "tp")},
                    "ep_stride": 1 if folded else stage.tp,
                    "components_s": parts.as_dict(),
                    "flops": work.flops,
                    "repeated_flops": work.repeated_flops,
                    "moved_bytes": work.moved_bytes,
                    "sent_bytes": dict(work.sent_bytes),
                }
            )
        return rows

    @cached_property
    def blocks(self) -> list[Row]:
        """Steps of a rank in each distinct block."""
        return block_diagrams(self.evaluation.priced)

    @cached_property
    def timeline(self) -> Row:
        """The simulated step, event by event; by stage, the communication of its passes."""
        passes = self._ledger.beside_passes()
        return timeline_data(self.evaluation.timeline) | {"communication_s": passes}

    @property
    def cluster(self) -> Row:
        """The devices, how many there are, and the name that `--cluster` takes, if there is one."""
        cluster = self.problem.cluster
        return {
            "device": cluster.device.name,
            "flag": _flag(cluster),
            "num_nodes": cluster.num_nodes,
            "devices_per_node": cluster.devices_per_node,
        }

    @cached_property
    def rates(self) -> Row:
        """Rows a second; tokens of a row and a second, where rows have any."""
        plan, length = self.evaluation.plan, sequence_length(self.problem)
        rows_per_s = plan.global_batch_size / self.evaluation.prediction.step_time_s
        return {
            "rows_per_s": rows_per_s,
            "sequence_length": length,
            "tokens_per_s": length and rows_per_s * length,
        }

    @cached_property
    def throughput(self) -> Row:
        """`rates`; model FLOPs utilisation and, with recompute, hardware's (Korthikanti et al.,
        2022); device-hours of a step. Intervals are those of the step."""
        plan, prediction = self.evaluation.plan, self.evaluation.prediction
        step_s, ranks = prediction.step_time_s, plan.num_ranks
        computed, repeated = (
            sum(getattr(w, name) * len(r) for w, r in zip(self._works, plan.devices, strict=True))
            for name in ("flops", "repeated_flops")
        )
        rows_per_s, tokens_per_s = self.rates["rows_per_s"], self.rates["tokens_per_s"]
        fastest_s, slowest_s = prediction.step_interval_s

        def interval(value: float) -> list[float]:
            return [value * step_s / slowest_s, value * step_s / fastest_s]

        return {
            **self.rates,
            "rows_per_s_interval": interval(rows_per_s),
            "tokens_per_s_interval": tokens_per_s and interval(tokens_per_s),
            "tokens_per_s_per_device": tokens_per_s and tokens_per_s / ranks,
            "mfu": prediction.mfu,
            "mfu_interval": interval(prediction.mfu),
            "hfu": prediction.mfu * (computed / (computed - repeated) if computed else 1.0),
            "model_flops_per_s_per_device": prediction.model_flops / step_s / ranks,
            "device_hours_per_step": step_s * ranks / 3600,
            "device_hours_interval": [s * ranks / 3600 for s in (fastest_s, slowest_s)],
        }

    @property
    def training(self) -> Row:
        """Batch, precision and optimizer; `sequence_length` is None where rows have none."""
        plan = self.evaluation.plan
        return {
            "global_batch_size": plan.global_batch_size,
            "sequence_length": self.rates["sequence_length"],
            "precision": plan.precision,
            "optimizer": self.problem.optimizer,
        }

    @property
    def uncertainty(self) -> Row:
        """Quantiles of measured over predicted for plans like this one, the rows that they are of,
        and how many."""
        prediction = self.evaluation.prediction
        return {
            "level": LEVEL,
            "step": asdict(prediction.step_error),
            "memory": asdict(prediction.memory_error),
        }

    def to_dict(self) -> dict[str, Any]:
        names = (
            "cluster", "training", "throughput", "uncertainty", "memory", "communication",
            "device_groups", "blocks", "timeline",
        )  # fmt: skip
        return {name: deepcopy(getattr(self, name)) for name in names}


def _flag(cluster: Cluster) -> str | None:
    """The `--cluster` of a cluster; None for one that no name gives."""
    if cluster.name.startswith("local-"):
        return f"local:{cluster.devices_per_node}"
    if cluster.name not in catalog_names():
        return None
    same = Cluster.from_catalog(cluster.name, num_nodes=cluster.num_nodes) == cluster
    return f"{cluster.name}:{cluster.num_nodes}" if same else None


def sequence_length(problem: Problem) -> int | None:
    """Tokens of a row: of the sequence, where values have features of each token, else of the
    batch's integers (rows, tokens)."""
    graph, factors = problem.graph, problem.factors
    dims = (factors.dims[value] for op in graph.ops for value in op.results)
    if (s := factors.sequence) is not None and any(len(d) > 2 and d[1] == (s,) for d in dims):
        return factors.sizes[s]
    metas = [graph.values[v] for v in graph.inputs if factors.has_batch(v)]
    lengths = [
        meta.shape[1]
        for meta in metas
        if len(meta.shape) == 2 and not meta.dtype.is_floating_point and meta.shape[1] > 1
    ]
    return max(lengths, default=None)


def cost_of(
    details: Details,
    *,
    tokens: float | None = None,
    price_per_hour: float | None = None,
    power_watts: float | None = None,
) -> Row:
    """The cost of a run: device-hours, days, money at a price per device and hour, and energy at a
    power per device, which the user gives. Raises ValueError for a model without a sequence, and
    for numbers that are not above 0."""
    numbers = {"tokens": tokens, "price_per_hour": price_per_hour, "power_watts": power_watts}
    for name, number in numbers.items():
        if number is not None and not (is_number(number) and number > 0):
            raise ArgumentError.refused(name, number, legal="a number above 0, or None")
    throughput, prediction = details.throughput, details.evaluation.prediction
    row: dict[str, Any] = {"device_hours_per_step": throughput["device_hours_per_step"]}
    hourly: dict[str, float] = {}  # of a device
    if price_per_hour is not None:
        hourly["price"] = price_per_hour
    if power_watts is not None:
        row["power_watts"], hourly["energy_kwh"] = power_watts, power_watts / 1000
    for name, rate in hourly.items():
        row[f"{name}_per_step"] = rate * row["device_hours_per_step"]
    if tokens is None:
        return row
    if not throughput["tokens_per_s"]:
        raise ArgumentError(
            f"={tokens:g}: the model has no sequence that a cost could be counted in",
            place="tokens",
            legal="None",
            way_out="take price_per_step times your number of steps",
        )
    seconds = tokens / throughput["tokens_per_s"]
    steps = seconds / prediction.step_time_s
    row |= {"tokens": tokens, "steps": steps, "days": seconds / 86400}
    row["days_interval"] = [step_s * steps / 86400 for step_s in prediction.step_interval_s]
    row["device_hours"] = steps * row["device_hours_per_step"]
    for name, rate in hourly.items():
        row[name] = rate * row["device_hours"]
        row[f"{name}_per_million_tokens"] = row[name] / tokens * 1e6
    return row


# --- diagram --------------------------------------------------------------------------------------

# Data of a plan's drawings: its distinct blocks, operator by operator with their shardings and the
# collectives in between; the simulated step, all its events, or three windows of too many.


MAX_EVENTS = 10_000  # that are shown in full
MAX_OF_WINDOW = 2_000
WINDOWS = ("first", "steady", "last")
COLUMNS = ("group", "stage", "lane", "kind", "microbatch", "start_s", "end_s")
KINDS = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


def block_diagrams(stages: Sequence[PricedStage]) -> list[Row]:
    """A row for each distinct block: the `blocks` and `stages` that it stands for, its degrees and
    its `steps`, in seconds of one micro-batch on a rank."""
    diagrams: dict[Any, dict[str, Any]] = {}
    for k, priced in enumerate(stages):
        mesh = {axis: getattr(priced.stage, axis) for axis in ("dp", "cp", "ep", "tp")}
        for entered in priced.blocks:
            inputs, choices = entered.inputs.values(), entered.assignment.choices
            key = (entered.block.class_id, *mesh.values(), choices, *inputs)
            if key not in diagrams:
                steps = [row for step in entered.steps for row in _rows(priced.pricer, step)]
                diagrams[key] = {"blocks": [], "stages": [], **mesh, "steps": steps}
            diagrams[key]["blocks"].append(entered.block.name)
            diagrams[key]["stages"] += [k] * (k not in diagrams[key]["stages"])
    return [row | {"blocks": compress_names(row["blocks"])} for row in diagrams.values()]


def _rows(pricer: Pricer, step: Step) -> Iterator[dict[str, Any]]:
    """A step as data, then its collectives, a row each."""
    match step:
        case Enter(value, state, role):
            yield {"kind": "enter", "role": role} | _value(pricer, value) | {"state": str(state)}
        case Leave(value, state, _):
            yield {"kind": "leave"} | _value(pricer, value) | {"state": str(state)}
        case Run(op, strategy):
            cost = pricer.op_cost(op, strategy)
            yield {
                "kind": "run",
                "operator": op.short,
                "key": op.key,
                "source": op.source,
                "strategy": strategy.name,
                "operands": list(map(str, strategy.operands)),
                "results": list(map(str, strategy.results)),
                "forward_s": float(cost.forward_s - cost.forward_comm_s),
                "backward_s": float(cost.backward_s - cost.backward_comm_s),
            }
        case Move(value, source, target, _, _, known) if not known:
            yield {"kind": "move"} | _value(pricer, value) | {
                "from": str(source), "to": str(target),
            }  # fmt: skip
    entries = pricer.step_entries(step) if isinstance(step, (Run, Move)) else ()
    for column in PASS_COLUMNS:
        for entry in entries:
            if entry.column == column and entry.axis and entry.seconds + entry.hidden_s:
                yield {
                    "kind": "collective",
                    "pass": column.removesuffix("_s"),
                    "axis": entry.axis,
                    "collective": entry.collective,
                    "seconds": entry.seconds + entry.hidden_s,
                    "exposed_s": entry.seconds,
                }


def _value(pricer: Pricer, value: str) -> dict[str, Any]:
    meta = pricer.graph.values[value]
    names = {**pricer.graph.parameters, **pricer.graph.buffers}
    return {"value": names.get(value, value), "shape": list(meta.shape)}


# --- the simulated step --------------------------------------------------------------------------


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """The number of events, and windows of them: from and to which second, and a line of
    comma-separated `COLUMNS` for each event. `complete` says whether all are there."""
    events = timeline.events
    complete = len(events) <= MAX_EVENTS
    stages_of = enumerate(timeline.stages_of)
    group_of: dict[int | None, int] = {stage: g for g, stages in stages_of for stage in stages}
    windows = [("whole", events)] if complete else zip(WINDOWS, _windows(events), strict=True)
    return {
        "events": len(events),
        "complete": complete,
        "windows": [
            {
                "window": name,
                "start_s": min((event.start_s for event in window), default=0.0),
                "end_s": max((event.end_s for event in window), default=0.0),
                "events_csv": "\n".join([",".join(COLUMNS), *_lines(window, group_of)]),
            }
            for name, window in windows
        ],
    }


def _windows(events: Sequence[Event]) -> list[Sequence[Event]]:
    """Events that fit a window at the beginning, around the middle and at the end."""
    half = (len(events) - MAX_OF_WINDOW) // 2
    starts = (0, half, len(events) - MAX_OF_WINDOW)
    return [events[k : k + MAX_OF_WINDOW] for k in starts]


def _lines(events: Sequence[Event], group_of: dict[int | None, int]) -> Iterator[str]:
    for event in events:
        kind = _kind(event)
        lane = "compute" if event.track == "compute" else "communication"
        microbatch = "" if event.microbatch is None else event.microbatch
        times = f"{event.start_s:.7g},{event.end_s:.7g}"
        yield f"{group_of[event.stage]},{event.stage},{lane},{kind},{microbatch},{times}"


def _kind(event: Event) -> str:
    if event.track == "reduce":
        return "gradient reduction"
    if event.track != "compute":
        return "send"
    return KINDS.get(event.name.rstrip("0123456789"), event.name)

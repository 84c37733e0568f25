"""Serving plans: tensor axes, pipelines and replicas of a causal language model, and the rows that
each serves at once. Rows come together and go together: prompts, then token after token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.stages import communicator_bytes
from meshwright.planner.document import table
from meshwright.planner.errors import ServingError
from meshwright.planner.plan import seconds, sized
from meshwright.planner.serving.price import CHUNK, Forwards

MOST_ROWS = 1 << 20  # of a replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Tokens of a prompt and after it, and bounds on the seconds to a first token and between
    tokens (None: any); `rows` at once on each replica, None: as many as pay; new tokens a second
    that are wanted of as few devices as may be, None: as many as may be of all; a tensor axis and
    stages that are decided (`tp`, `pp`)."""

    prompt: int
    new: int
    token_s: float | None = None
    first_s: float | None = None
    rows: int | None = None
    tokens_per_s: float | None = None
    tp: int | None = None
    pp: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """A way to serve, and its price.

    `replicas` of `pp` stages of `tp` devices each, and `rows` at once on each replica, in `pp`
    groups where there are stages. Seconds from a prompt to its first token (`first_s`), from token
    to token at the full length (`token_s`); new `tokens_per_s` of the cluster, prompts included in
    the time; bytes of weights and of what is kept of tokens on the fullest device, and of all that
    it holds (`peak_bytes`).
    """

    tp: int
    pp: int
    replicas: int
    rows: int
    first_s: float
    token_s: float
    tokens_per_s: float
    weight_bytes: float
    kept_bytes: float
    peak_bytes: float

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.tp * self.pp * self.replicas

    @property
    def tokens_per_device_s(self) -> float:
        """New tokens a second and device."""
        return self.tokens_per_s / self.devices

    def with_replicas(self, replicas: int) -> ServingPlan:
        """The plan on so many replicas, which know nothing of each other."""
        rate = self.tokens_per_s / self.replicas
        return replace(self, replicas=replicas, tokens_per_s=rate * replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The best way to serve, and of each tensor axis and number of stages the best (`plans`, best
    first), and the one with most rows at once (`fits`); numbers that are kept of a token in bytes
    on all devices, those of a plain cache where heads share none (`plain_bytes`), and the memory of
    a device."""

    asked: Asked
    plans: tuple[ServingPlan, ...]
    fits: tuple[ServingPlan, ...]
    token_bytes: float
    plain_bytes: float
    memory_bytes: float

    @property
    def best(self) -> ServingPlan:
        return self.plans[0]

    @property
    def kept_line(self) -> str:
        """A line of what is kept of a token."""
        part = self.token_bytes / self.plain_bytes
        return (
            f"  kept of a token: {sized(self.token_bytes)}, {part:.0%} of the keys and values of "
            "all heads"
        )

    def price_per_million(self, price_per_hour: float) -> float:
        """Money for a million new tokens of the best plan, at a price per device and hour."""
        return 1e6 * price_per_hour / 3600 / self.best.tokens_per_device_s

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "asked": asdict(self.asked),
            "token_bytes": self.token_bytes,
            "plain_bytes": self.plain_bytes,
            **{
                name: [
                    {
                        **asdict(plan),
                        "devices": plan.devices,
                        "tokens_per_device_s": plan.tokens_per_device_s,
                    }
                    for plan in plans
                ]
                for name, plans in (("plans", self.plans), ("fits", self.fits))
            },
        }

    def __str__(self) -> str:
        asked, best = self.asked, self.best
        cells = [
            (
                str(plan.tp), str(plan.pp), str(plan.replicas), str(plan.rows),
                seconds(plan.first_s), seconds(plan.token_s), f"{plan.tokens_per_s:,.0f}",
                f"{plan.tokens_per_device_s:,.0f}", sized(plan.weight_bytes),
                sized(plan.kept_bytes), sized(plan.peak_bytes),
            )
            for plan in self.plans
        ]  # fmt: skip
        return "\n".join([
            f"Serving {asked.prompt:,} tokens of prompt and {asked.new:,} new ones: tp={best.tp}, "
            f"pp={best.pp}, replicas: {best.replicas}, rows of each: {best.rows}, devices: "
            f"{best.devices}",
            f"  {best.tokens_per_s:,.0f} new tokens/s; {seconds(best.first_s)} to the first token, "
            f"then {seconds(best.token_s)} each",
            self.kept_line,
            f"  a device holds {sized(best.peak_bytes)} of its {sized(self.memory_bytes)}",
            "",
            "The best of each tensor axis and number of stages",
            *table([_HEAD, *cells]),
        ])  # fmt: skip


_HEAD = (
    "tp", "pp", "replicas", "rows", "first token", "per token", "tokens/s", "a device", "weights",
    "kept", "peak",
)  # fmt: skip


class Servings:
    """Serving plans on a cluster."""

    def __init__(self, forwards: Forwards, asked: Asked, margin: float = 0.05) -> None:
        self.forwards = forwards
        self.asked = asked
        self.cluster = forwards.problem.cluster
        self._cuts = Memo[tuple[int, int], list[tuple[int, int]]]()
        self.room_bytes = (1 - margin) * self.cluster.device.memory_bytes

    def served(self) -> Serving:
        """The best plans. Raises `ServingError` where none fits, or keeps the bounds."""
        found = [*self.every()]
        kept = [plan for plan in found if self._holds(plan)]
        if not found:
            raise self._too_large()
        if not kept:
            raise self._too_slow(found)
        wanted = self.asked.tokens_per_s
        if wanted:
            largest = max(kept, key=lambda plan: plan.tokens_per_s)
            if largest.tokens_per_s < wanted:
                raise ServingError(
                    f"={wanted:g}: the most that keeps the bounds is {largest.tokens_per_s:,.0f} "
                    f"tokens/s on {largest.devices} devices (tp={largest.tp}, pp={largest.pp})",
                    place="tokens_per_s",
                    legal=f"at most {largest.tokens_per_s:,.0f}",
                    way_out="more devices, or looser bounds",
                )
            kept = [
                plan.with_replicas(math.ceil(wanted / (plan.tokens_per_s / plan.replicas)))
                for plan in kept
                if plan.tokens_per_s >= wanted
            ]

        def worth(plan: ServingPlan) -> tuple[float, ...]:
            if wanted:
                return plan.devices, plan.token_s, plan.first_s
            return -plan.tokens_per_s, plan.devices, plan.token_s

        best, most = dict[tuple[int, int], ServingPlan](), dict[tuple[int, int], ServingPlan]()
        for plan in sorted(kept, key=worth):
            best.setdefault((plan.tp, plan.pp), plan)
        for plan in sorted((p for p in found if self._holds(p)), key=lambda plan: plan.rows):
            most[plan.tp, plan.pp] = plan
        attention, itemsize = self.forwards.attention.values(), self.forwards.problem.weight_bytes
        return Serving(
            asked=self.asked,
            plans=tuple(best.values()),
            fits=tuple(most.values()),
            token_bytes=float(sum(itemsize * layer.kept for layer in attention)),
            plain_bytes=float(sum(itemsize * 2 * x.heads * x.width for x in attention)),
            memory_bytes=self.cluster.device.memory_bytes,
        )

    def _too_large(self) -> ServingError:
        length = self.asked.prompt + self.asked.new
        needs = [
            (
                max(
                    self._fixed(tp, *cut) + sum(self.forwards.kept_bytes(tp, length)[slice(*cut)])
                    for cut in self.cuts(tp, pp)
                ),
                f"tp={tp}, pp={pp}",
            )
            for tp in self._degrees()
            for pp in self._stages(tp)
        ]
        if not needs:
            raise ServingError(
                f"={self.asked.pp}", place="serving: pp", way_out="take fewer",
                legal=f"at most {len(self.forwards.attention)} layers, and the devices over tp",
            )  # fmt: skip
        nbytes, where = min(needs)
        rows = self.asked.rows or 1
        return ServingError(
            f"rows={rows} of {length:,} tokens do not fit: one needs {sized(nbytes)} of the "
            f"{sized(self.room_bytes)} that a device has for it, with {where}",
            place=f"{self.cluster.name}: rows, prompt and new tokens",
            legal="what fits beside the weights",
            way_out="more devices, fewer rows, or fewer tokens",
        )

    def _too_slow(self, found: list[ServingPlan]) -> ServingError:
        lines = []
        for name, label in (("token_s", "between tokens"), ("first_s", "to a first token")):
            if getattr(self.asked, name) is not None:
                least = min(found, key=lambda plan: float(getattr(plan, name)))
                lines.append(
                    f"the least {label} is {seconds(getattr(least, name))} (tp={least.tp}, "
                    f"pp={least.pp}, {least.rows} rows)"
                )
        given = {name: getattr(self.asked, name) for name in ("token_s", "first_s")}
        return ServingError(
            f": no plan keeps {given}; {'; '.join(lines)}",
            place="token_s, first_s",
            legal="bounds from these on, not both at once where different plans have them",
            way_out="looser bounds, a shorter prompt, or faster devices",
        )

    def every(self) -> Iterator[ServingPlan]:
        """Plans that fit, with each number of rows that is a power of two, the most, and the most
        that keep the bounds."""
        for tp in self._degrees():
            for pp in self._stages(tp):
                most = self.most_rows(tp, pp)
                counts = {pp << k for k in range((most // pp).bit_length())}
                counts |= {most, self._most_held(tp, pp, most)}
                if self.asked.rows:
                    counts = {self.asked.rows} if self.asked.rows <= most else set()
                for rows in sorted(counts - {0}):
                    yield self.priced(tp, pp, rows)

    def _most_held(self, tp: int, pp: int, most: int) -> int:
        """The most rows that keep the bounds, which more rows keep less."""
        low, high = 0, most // pp
        while low < high:
            middle = (low + high + 1) // 2
            if self._holds(self.priced(tp, pp, middle * pp)):
                low = middle
            else:
                high = middle - 1
        return low * pp

    def _holds(self, plan: ServingPlan) -> bool:
        bounds = (plan.token_s, self.asked.token_s), (plan.first_s, self.asked.first_s)
        return all(bound is None or seconds <= bound for seconds, bound in bounds)

    def _degrees(self) -> list[int]:
        node = self.cluster.devices_per_node
        legal = [tp for tp in range(1, node + 1) if node % tp == 0 and self.forwards.legal(tp)]
        return _decided("tp", self.asked.tp, legal)

    def _stages(self, tp: int) -> list[int]:
        """Numbers of stages that use all devices, and powers of two; or what is decided."""
        left = self.cluster.num_devices // tp
        most = min(len(self.forwards.attention), left)
        if self.asked.pp is not None:
            return [self.asked.pp] if self.asked.pp <= most else []
        counts = {1 << k for k in range(left.bit_length())}
        counts |= {pp for pp in range(1, most + 1) if left % pp == 0}
        return sorted(pp for pp in counts if pp <= most)

    def most_rows(self, tp: int, pp: int) -> int:
        """The most rows that a replica keeps at once, 0 where its weights don't fit: a multiple of
        `pp`, which go in as many groups, or fewer."""
        length = self.asked.prompt + self.asked.new
        least = float(MOST_ROWS)
        for start, stop in self.cuts(tp, pp):
            free = self.room_bytes - self._fixed(tp, start, stop)
            each = sum(self.forwards.kept_bytes(tp, length)[start:stop])
            least = min(least, free / each if each else math.inf)
        most = int(least) if least > 0 else 0
        return most // pp * pp if most >= pp else most

    def _fixed(self, tp: int, start: int, stop: int) -> float:
        """Bytes of a stage beside what is kept of tokens."""
        forwards, device = self.forwards, self.cluster.device
        setting = forwards.setting(tp, 1.0)
        weights = forwards.weight_bytes(tp, start, stop)
        tokens = CHUNK if self.asked.rows is None else self.asked.rows * self.asked.prompt
        passing = forwards.passing_bytes(tp, min(CHUNK, tokens))
        return weights + passing + device.reserved_bytes + communicator_bytes(setting)

    def cuts(self, tp: int, pp: int) -> list[tuple[int, int]]:
        """`pp` stages of consecutive blocks of which the slowest takes least for a token of as many
        rows as stages."""

        def cuts() -> list[tuple[int, int]]:
            blocks = self.forwards.blocks(tp, float(pp))
            length = self.asked.prompt + self.asked.new
            read = self.forwards.attention_s(tp, pp, length, 1)
            seconds = [b.body_s + b.head_s + r for b, r in zip(blocks, read, strict=True)]
            return _evenly(seconds, pp)

        return self._cuts.of((tp, pp), cuts)

    def priced(self, tp: int, pp: int, rows: int) -> ServingPlan:
        """A plan's price."""
        asked, forwards = self.asked, self.forwards
        groups, cuts = min(pp, rows), self.cuts(tp, pp)
        group = math.ceil(rows / max(groups, 1))
        length = asked.prompt + asked.new
        first = self._forward(tp, cuts, group, asked.prompt, asked.prompt)
        full = self._forward(tp, cuts, group, length, 1)
        mean = self._forward(tp, cuts, group, asked.prompt + asked.new // 2, 1)
        # groups follow each other through the stages
        round_s = max(sum(mean), groups * max(mean))
        first_s = sum(first) + (groups - 1) * max(first)
        batch_s = first_s + (asked.new - 1) * round_s
        replicas = self.cluster.num_devices // (tp * pp)
        sizes = [
            (
                forwards.weight_bytes(tp, start, stop),
                rows * sum(forwards.kept_bytes(tp, length)[start:stop]),
                self._fixed(tp, start, stop),
            )
            for start, stop in cuts
        ]
        weights, kept, _ = max(sizes, key=lambda of: of[1] + of[2])
        return ServingPlan(
            tp=tp,
            pp=pp,
            replicas=replicas,
            rows=rows,
            first_s=first_s,
            token_s=max(sum(full), groups * max(full)),
            tokens_per_s=replicas * rows * asked.new / batch_s,
            weight_bytes=weights,
            kept_bytes=kept,
            peak_bytes=max(of[1] + of[2] for of in sizes),
        )

    def _forward(
        self, tp: int, cuts: list[tuple[int, int]], rows: float, length: int, new: int
    ) -> list[float]:
        """Seconds of each stage for `new` tokens of each row, the last of `length`; prompts go in
        chunks."""
        forwards, device = self.forwards, self.cluster.device
        tokens = rows * new
        chunks = max(1, math.ceil(tokens / CHUNK))
        body, head = forwards.blocks(tp, tokens / chunks), forwards.blocks(tp, rows)
        read = forwards.attention_s(tp, rows, length, new)
        sends = forwards.chain(tp).send_s if len(cuts) > 1 else None
        found = []
        for number, (start, stop) in enumerate(cuts):
            seconds = sum(read[start:stop])
            for k in range(start, stop):
                launched = body[k].kernels * device.launch_overhead_s
                seconds += chunks * (body[k].body_s + launched) + head[k].head_s
            if sends is not None and number + 1 < len(cuts):
                seconds += forwards.send_s(tp, stop, tokens)
            found.append(seconds)
        return found


def _evenly(seconds: list[float], parts: int) -> list[tuple[int, int]]:
    """So many runs of consecutive numbers, none empty, of which the largest sum is least."""
    count, sums = len(seconds), [0.0, *accumulate(seconds)]
    best = [[math.inf] * (count + 1) for _ in range(parts + 1)]
    at = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for k in range(1, parts + 1):
        for stop in range(k, count - (parts - k) + 1):
            for start in range(k - 1, stop):
                worst = max(best[k - 1][start], sums[stop] - sums[start])
                if worst < best[k][stop]:
                    best[k][stop], at[k][stop] = worst, start
    ends = [count]
    for k in range(parts, 0, -1):
        ends.append(at[k][ends[-1]])
    return [*pairwise(ends[::-1])]


def _decided(name: str, wanted: int | None, legal: list[int]) -> list[int]:
    """The values that are left of what is legal. Raises `ServingError` for another."""
    if wanted is None:
        return legal
    if wanted not in legal:
        raise ServingError(f"={wanted}", place=f"serving: {name}", legal=legal, way_out="take one")
    return [wanted]

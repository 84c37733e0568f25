"""Result of a rehearsal, and its text: a verdict, a table of ranks, notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshwright.executor.rehearsal.estimate import NO_PRICE, Estimate, Priced
from meshwright.executor.rehearsal.events import RankLog
from meshwright.executor.rehearsal.memory import BUFFERS, SAVED, TRANSIENT
from meshwright.executor.rehearsal.proof import Mismatch
from meshwright.planner.plan import Plan, sized

WEIGHTS, GRADIENTS, STATES, BATCH = "weights", "gradients", "optimizer states", "batch"
KINDS = (WEIGHTS, GRADIENTS, STATES, BATCH, SAVED, BUFFERS, TRANSIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Result of a rehearsal.

    It is of one `plan`, and of no other. `logs` are by rank, one of each kind, or all; `kind_of`
    names for every rank the one that stands for it. `group_of` gives a rank's device group,
    `priced` is what the plan's price says, `estimate` a second one of the step, from the logs (none
    without prices, or where something doesn't match). `left_out` says what was not rehearsed, and
    why.
    """

    plan: Plan
    logs: Mapping[int, RankLog]
    kind_of: Mapping[int, int]
    mismatches: tuple[Mismatch, ...]
    group_of: Mapping[int, int]
    priced: Priced = NO_PRICE
    estimate: Estimate | None = None
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything matches."""
        return not self.mismatches

    @property
    def priced_bytes(self) -> Sequence[int]:
        """The peak that tensors of each group have at the plan's price; empty without one."""
        return self.priced.peak_bytes

    @property
    def stands_for(self) -> Counter[int]:
        """For each rank that was rehearsed, the number of ranks that do the same."""
        return Counter(self.kind_of.values())

    @property
    def peak_bytes(self) -> list[int]:
        """The largest peak of a rank of each device group."""
        peaks = [0] * (1 + max(self.group_of.values()))
        for rank, log in self.logs.items():
            group = self.group_of[rank]
            peaks[group] = max(peaks[group], log.peak_bytes)
        return peaks

    def __str__(self) -> str:
        return "\n".join([self.line, *self._table(), *self._notes()])

    @property
    def short(self) -> list[str]:
        """Lines for a report: as `str()`, but of each device group only the fullest rank."""
        fullest = {self.group_of[r]: r for r in sorted(self.logs, key=self._fullness)}
        return [self.line, *self._table(fullest.values()), *self._notes()]

    def _fullness(self, rank: int) -> tuple[int, int]:
        return self.logs[rank].peak_bytes, -rank

    @property
    def line(self) -> str:
        """The verdict: kinds of ranks, mismatches, peak bytes of tensors beside the price's."""
        count = len(self.mismatches)
        said = f"{count or 'no'} mismatch{'es' if count > 1 else ''}"
        priced = f" (price {sized(max(self.priced_bytes))})" if self.priced_bytes else ""
        kinds, ranks = len(self.logs), len(self.kind_of)
        counts = f"{kinds} kind{'s' if kinds > 1 else ''} of {ranks} rank{'s' if ranks > 1 else ''}"
        return (
            f"rehearsed: {counts}, {said}, peak "
            f"{sized(max(self.peak_bytes))}{priced}, {self.seconds:.1f} s"
        )

    def _table(self, ranks: Collection[int] | None = None) -> list[str]:
        head = ["rank", "stands for", "group", "peak MiB", "priced", "TFLOP", "sent MiB"]
        rows, stands_for = [[*head, *KINDS]], self.stands_for
        for rank in sorted(self.logs if ranks is None else ranks):
            log, group = self.logs[rank], self.group_of[rank]
            priced = f"{self.priced_bytes[group] / 2**20:.1f}" if self.priced_bytes else "-"
            row = [str(rank), str(stands_for[rank]), str(group)]
            row += [f"{log.peak_bytes / 2**20:.1f}", priced]
            row += [f"{sum(log.flops.values()) / 1e12:.3g}"]
            row += [f"{sum(log.sent_bytes.values()) / 2**20:.1f}"]
            row += [f"{log.peak_by_kind.get(kind, 0) / 2**20:.1f}" for kind in KINDS]
            rows.append(row)
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return ["  ".join(x.rjust(w) for x, w in zip(r, widths, strict=True)) for r in rows]

    def _notes(self) -> list[str]:
        estimated, price = self.estimate, self.priced.step
        steps = [estimated.beside(price)] if estimated and price else []
        return [*map(str, self.mismatches), *steps, *(f"not rehearsed: {x}" for x in self.left_out)]

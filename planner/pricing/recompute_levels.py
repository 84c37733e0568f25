"""Time against memory of stages: recompute more blocks, hold less.

With h micro-batches in flight a stage uses `static + h·activation` bytes. Rung 0 keeps everything;
each further rung recomputes all blocks by a policy that keeps less and takes longer. Between two
rungs some blocks follow one policy and the rest the other, so that for n blocks the share is a
multiple of 1/n:

    λ = ⌈n · (bytes₀ - room) / (bytes₀ - bytes₁)⌉ / n,      time = (1-λ)·time₀ + λ·time₁

where both bytes count what one recomputed block holds during its backward. Which blocks, and
exactly how many, is decided for the chosen stages by `planner/pricing/recompute.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from meshwright.costmodel.blocks.policies import RECOMPUTE
from meshwright.costmodel.blocks.stage import FIELDS, StageCosts, stage_costs
from meshwright.costmodel.operators.cost import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Rung below and share of the one above, arrays over stages; where nothing fits, `fits` is
    False."""

    rung: np.ndarray
    share: np.ndarray
    fits: np.ndarray

    def nothing(self) -> Share:
        """The first rung everywhere."""
        return Share(rung=self.rung * 0, share=self.share * 0.0, fits=self.fits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Rungs of every stage (arrays over stages, or numbers); `blocks` in each stage."""

    policies: tuple[str, ...]
    rungs: tuple[StageCosts, ...]
    blocks: np.ndarray

    def share(self, held: float, room_bytes: float) -> Share:
        """The least recompute with which each stage fits `room_bytes` with `held` micro-batches in
        flight."""
        first = self.rungs[0]
        fits = np.asarray(first.static_bytes + held * first.activation_bytes <= room_bytes)
        rung, share = np.zeros(fits.shape, dtype=np.int64), np.zeros(fits.shape)
        for k in range(1, len(self.rungs)):
            low, high = self.rungs[k - 1], self.rungs[k]
            more = high.passing_bytes - low.passing_bytes
            above = high.static_bytes + held * high.activation_bytes
            below = low.static_bytes + more + held * low.activation_bytes
            here = ~fits & np.asarray(above <= room_bytes)
            part = (below - room_bytes) / np.maximum(below - above, 1.0)
            part = np.ceil(np.clip(part, 0.0, 1.0) * self.blocks - 1e-9) / self.blocks
            rung, share = np.where(here, k - 1, rung), np.where(here, part, share)
            fits = fits | here
        return Share(rung=rung, share=share, fits=fits)

    def everywhere(self, chosen: Share) -> StageCosts:
        """All stages' components at the shares chosen for them."""
        names = [each.name for each in fields(StageCosts)]
        return StageCosts(
            **{
                name: blended([np.asarray(getattr(r, name)) for r in self.rungs], chosen)
                for name in names
            }
        )

    def at(self, where: Any, chosen: Share) -> StageCosts:
        """One stage's components at the share chosen for it; `where` indexes the arrays."""
        k, part = int(chosen.rung[where]), float(chosen.share[where])

        def of(name: str) -> float:
            low = np.asarray(getattr(self.rungs[k], name))[where]
            if not part:
                return float(low)
            return float(
                (1 - part) * low + part * np.asarray(getattr(self.rungs[k + 1], name))[where]
            )

        return StageCosts(**{each.name: of(each.name) for each in fields(StageCosts)})


def settled(part: np.ndarray, policy: str) -> np.ndarray:
    """A block's components (`FIELDS`) with its recompute policy decided: no rung changes it."""
    get = {name: part[k] for k, name in enumerate(FIELDS)}
    if policy != "none":
        for name, what in (
            ("backward_s", "s"),
            ("backward_comm_s", "comm_s"),
            ("backward_host_s", "host_s"),
        ):
            get[name] = get[name] + get.get(f"{policy}_{what}", 0.0)
        get["saved_bytes"] = get["saved_bytes"] - get[f"{policy}_bytes"]
    if policy == "full":
        get["settled_bytes"] = get["largest_bytes"]
    for name in FIELDS:
        if name.partition("_")[0] in RECOMPUTE or name == "largest_bytes":
            get[name] = 0.0
    return np.array([get[name] for name in FIELDS])


def blended(values: Sequence[np.ndarray], chosen: Share) -> np.ndarray:
    """Values of the rungs, mixed as chosen."""
    out = np.array(values[0], dtype=np.float64)
    for k in range(len(values) - 1):
        here = (chosen.rung == k) & (chosen.share > 0)
        out = np.where(here, values[k] + chosen.share * (values[k + 1] - values[k]), out)
    return out


def ladder(
    sums: np.ndarray, setting: Setting, policies: Sequence[str], blocks: np.ndarray
) -> Ladder:
    """Rungs of the stages with these sums (last axis: `FIELDS`); `policies` by rising cost. One
    that frees nothing anywhere is left out."""
    kept: list[str] = []
    rungs: list[StageCosts] = []
    for policy in policies:
        costs = stage_costs(sums, setting, policy)
        if rungs and not np.any(costs.activation_bytes < rungs[-1].activation_bytes * (1 - 1e-9)):
            continue
        kept.append(policy)
        rungs.append(costs)
    return Ladder(policies=tuple(kept), rungs=tuple(rungs), blocks=np.maximum(blocks, 1))

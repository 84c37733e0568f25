"""A plan as another software's configuration, with what that can't say and what is written
instead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.planner.decisions import DECISIONS
from meshwright.planner.frameworks.configuration import Configuration, Shares, layers_of
from meshwright.planner.frameworks.correspondence import ConfigurationError, Format, Lost
from meshwright.planner.frameworks.formats import configuration_of
from meshwright.planner.plan import Plan, StagePlan, pipelines, placement_of

WHOLE = "full"  # what stands for a policy that a software has not: it keeps the least
MISSING = "it has no key for it"
OTHER = "it has other values alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A configuration's `text` for the software of a `format`, in a `file` of that name, what is
    lost in it, what the user's `script` has to say, and both read again: what will run."""

    format: str
    version: str
    file: str
    text: str
    lost: tuple[Lost, ...]
    script: tuple[str, ...]
    configuration: Configuration


def exported(plan: Plan, kind: Format, *, optimizer: str | None = None) -> Exported:
    """The plan as a configuration. Raises `ConfigurationError` where what is left contradicts
    itself."""
    if plan.servers:
        raise ConfigurationError(
            f": servers={plan.servers}, and {kind.name} has none",
            place="plan", legal="servers=0", way_out="plan again without servers",
        )  # fmt: skip
    if plan.outer_loop is not None:
        raise ConfigurationError(
            f": {plan.replicas} replicas train apart, of which {kind.name} has no outer loop",
            place="plan: outer_loop",
            legal="a plan without",
            way_out="write plan.of_one_replica, which each of them runs, or run the plan with "
            "train_step",
        )
    values, lost = values_of(plan, kind)
    _fold(values, kind, lost)
    if optimizer is not None and "optimizer" in kind.names:
        values["optimizer"] = optimizer
    text, found = kind.write(values)
    script = {name: values[name] for name in kind.by_script if _used(name, values)}
    again = configuration_of(
        kind, found, f"{kind.name} as written", plan.num_ranks, plan.global_batch_size, script
    )
    folded = {each.what for each in lost}
    for name, decision in DECISIONS.items():
        if name in folded:
            continue
        ours = values.get(name, decision.off)
        theirs = again.values.get(name, decision.off)
        theirs = decision.off if theirs is None else theirs
        if _same(name, ours, theirs, values):
            continue
        why = OTHER if name in kind.names else MISSING
        lost.append(_lost(what=name, value=str(ours), why=why, instead=str(theirs)))
    shares, counts = again.values.get("layers"), values["layers"]
    if isinstance(shares, Shares):
        shares = shares.counts(sum(counts), len(counts))
    if values["pp"] > 1 and shares != counts:
        why = OTHER if "layers" in kind.names else MISSING
        lost.append(_lost(what="layers", value=str(counts), why=why, instead=str(shares)))
    if values["precision"] != (theirs := again.values.get("precision")):
        lost.append(
            _lost(what="precision", value=values["precision"], why=OTHER, instead=str(theirs))
        )
    splits = {pattern: how for stage in plan.stages for pattern, how in stage.shardings.items()}
    if splits:
        lost.append(
            Lost(
                what="shardings", value=f"{len(splits)} of operators",
                why="it splits operators of the tensor axis by rules of its own",
                instead="those rules",
            )
        )  # fmt: skip
    return Exported(
        format=kind.name, version=kind.version, file=kind.file, text=text, lost=tuple(lost),
        script=tuple(f"{name}={value}: {kind.by_script[name]}" for name, value in script.items()),
        configuration=again,
    )  # fmt: skip


_lost = partial(Lost, frees=True)


def _used(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a script has to say it: it is there, and not what is taken without a word."""
    value = values.get(name)
    return value is not None and (name not in DECISIONS or value not in (DECISIONS[name].off, 1))


def _fold(values: dict[str, Any], kind: Format, lost: list[Lost]) -> None:
    """Axes that the software has not become data parallelism, of as many rows at once."""
    for axis in ("pp", "cp", "tp"):
        degree = values.get(axis) or 1
        has = axis in kind.names or axis in kind.by_script
        if degree == 1 or (has and axis not in kind.lacks(values)):
            continue
        dp = values["dp"] * degree
        lost.append(_lost(what=axis, value=str(degree), why=MISSING, instead=f"1, with dp={dp}"))
        values.update({axis: 1, "dp": dp})
        if axis == "pp":
            values["virtual_stages"] = 1
        if axis == "cp":
            values.pop("cp_kind")
        if values.get("dp_shard") and axis != "cp":  # which it counts
            values["dp_shard"] *= degree
    rows, batch = values["microbatch_size"], values["global_batch_size"]
    share, left = divmod(batch, values["dp"])
    if left:
        raise ConfigurationError(
            f": global_batch_size={batch} is no multiple of dp={values['dp']}, which replaces what "
            f"{kind.name} has not",
            place="plan", legal=f"multiples of {values['dp']}", way_out="another target, or plan",
        )  # fmt: skip
    values["microbatch_size"] = rows = math.gcd(share, rows)
    values["num_microbatches"] = share // rows


def _same(name: str, ours: Any, theirs: Any, values: Mapping[str, Any]) -> bool:
    if ours == theirs:
        return True
    if name == "schedule":
        return bool(values["pp"] == 1)
    if name == "dp_shard":
        return ours in (None, values["dp"] * values["cp"]) and theirs is None
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        return {k: v for k, v in ours.items() if v} == {k: v for k, v in theirs.items() if v}
    return False


def values_of(plan: Plan, kind: Format) -> tuple[dict[str, Any], list[Lost]]:
    """A plan's values, one of each for all stages, and what stages have otherwise. Raises
    `ConfigurationError` for branches apart, which no other software has."""
    if plan.branches:
        raise ConfigurationError(
            f"={list(plan.branches)}: stages of {kind.name} follow each other",
            place="plan: branches", legal="none", way_out="plan again with branches=1",
        )  # fmt: skip
    chain = [plan.stages[k] for k in pipelines(plan)[0]]
    names = [name for stage in chain for name in stage.blocks]
    layers: set[str] = {*layers_of(names)}
    lost: list[Lost] = []
    values: dict[str, Any] = {
        "global_batch_size": plan.global_batch_size,
        "precision": plan.precision,
        "devices": plan.num_ranks,
        "pp": len(plan.devices),
        "virtual_stages": len(plan.stages) // len(plan.devices),
        "microbatch_size": max(1, plan.microbatch_rows // chain[0].dp),
        "placement": placement_of(plan),
        "layers": [sum(name in layers for name in stage.blocks) for stage in chain],
    }
    for name, decision in DECISIONS.items():
        holders = plan.having(name)
        if name in values or not holders:
            continue
        if decision.acts == "block":
            values[name] = _policy(chain, layers, kind, lost)
            continue
        each = [getattr(holder, name) for holder in holders]
        values[name] = value = each[0] if decision.parts else max(each, key=_order)
        if any(other != value for other in each):
            said = ", ".join(dict.fromkeys(map(str, each)))
            why = "all stages have the same there"
            lost.append(_lost(what=name, value=f"{said} by stage", why=why, instead=str(value)))
    if values["cp"] == 1:
        values.pop("cp_kind", None)
    return values, lost


def _order(value: Any) -> tuple[bool, Any]:
    return value is not None, value


def _policy(chain: Sequence[StagePlan], layers: set[str], kind: Format, lost: list[Lost]) -> Any:
    """The policy of all layers, or (policy, number) of the first ones of each stage where the
    software counts them; else what keeps the least."""
    by_stage = [
        [policy for name, policy in zip(s.blocks, s.policies, strict=True) if name in layers]
        for s in chain
    ]
    used = {policy for policies in by_stage for policy in policies}
    if len(used) < 2:
        policy = next(iter(used), "none")
        return policy if _says(kind, policy) else _rounded(policy, lost)
    some = used - {"none"}
    counts = [sum(policy != "none" for policy in policies) for policies in by_stage]
    said = f"{'/'.join(sorted(some))} of {sum(counts)} of {sum(map(len, by_stage))} layers"
    most = max(counts)
    if some == {WHOLE} and _says(kind, (WHOLE, most)):
        if min(counts) < most:
            why = "each stage has the same number there"
            lost.append(
                _lost(what="recompute", value=said, why=why, instead=f"{WHOLE} of {most} a stage")
            )
        return WHOLE, most
    return _rounded(said, lost)


def _rounded(said: str, lost: list[Lost]) -> str:
    lost.append(_lost(what="recompute", value=said, why=OTHER, instead=f"{WHOLE} of all layers"))
    return WHOLE


def _says(kind: Format, policy: Any) -> bool:
    """Whether a format has a policy: what it writes of it, it reads again."""
    name = "recompute"
    table = next((each for each in kind.table if name in each.names), None)
    if table is None:
        return policy == "none" or (policy == WHOLE and name in kind.by_script)
    return bool(
        table.read({**table.left_out, **table.write({name: policy, "zero": 3})}).get(name) == policy
    )

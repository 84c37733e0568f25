"""`meshwright.rule`: a sharding rule for an operator, added in one line and verified before use."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from meshwright.costmodel.graph import Graph, Op, TensorMeta, map_refs
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.rules import (
    Dims,
    OpFactors,
    RuleError,
    UserRule,
    divided,
    place_of,
    words,
)
from meshwright.costmodel.rules import registry as rules
from meshwright.costmodel.user_rules.verify import (
    Fault,
    Trial,
    faults,
    first_line,
    meta_of,
    random_operands,
    splits,
)

logger = logging.getLogger(__name__)

_TRIED = Memo[str, str]()  # rules on calls: why they were not verified, empty where they hold

SMALL = 6  # elements of a factor in a trial: two odd parts, three even ones; none broadcasts
DEGREES = (2, 3, 5, 7)  # parts tried, where they divide a factor
LARGEST_TRIAL = 2**22  # elements of all operands together
DISCOVER = "scripts/discover_rule proposes a rule"


def rule(
    operator: Any,
    spec: str,
    *,
    whole: str = "",
    mean: str = "",
    pinned: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    flops: float = 0.0,
    uncounted: str = "",
    counts: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    override: bool = False,
    verify: bool = True,
) -> None:
    """Say how an operator can be split: `rule("mylib::op", "b s h, h o -> b s o", flops=2.0)`.

    `operator` is a name, with or without the overload, or the operator. `spec` names the dims of
    every tensor taken and made (its language: `costmodel/rules/language.py`): a factor splits in
    all tensors that have it; one that no result has is summed, or averaged if `mean` lists it;
    those listed in `whole` are never split. `pinned` operands are added once to a sum (biases),
    those of a set in `linear` may be partial together. Forward FLOPs are `flops` times the product
    of all factors but the `uncounted`. `counts` maps integer arguments to the factor that they
    count.

    The rule is verified on small random tensors in two and in three parts, forward and backward,
    where a model that has the operator is planned, unless `verify` is False; factors are only split
    into equal parts. A rule that is shipped is replaced only with `override`. Raises RuleError.
    """
    target = target_of(operator)
    added = UserRule(
        target=target,
        spec=spec,
        options={
            "whole": whole,
            "mean": mean,
            "pinned": tuple(pinned),
            "linear": tuple(map(tuple, linear)),
            "flops": flops,
            "uncounted": uncounted,
            "counts": dict(counts or {}),
            "sizes": dict(sizes or {}),
        },
        verify=verify,
    )
    _check_spec(added)
    if not override and rules.shipped_rule_for(_bare(target)) is not None:
        raise RuleError(
            "there is one already",
            place=f"rule of {target}",
            legal="one rule",
            way_out="pass override=True to use yours in its place",
        )
    rules.GIVEN[target] = added


def target_of(operator: Any) -> str:
    """`mylib.op` or `mylib.op.overload`."""
    if isinstance(operator, torch._ops.OpOverload):
        return str(operator)
    name = getattr(operator, "_qualname", None) or getattr(operator, "_qualified_op_name", operator)
    if not isinstance(name, str):
        raise RuleError(
            f"{operator!r:.60} is no operator", place="rule", legal="'namespace::name' or it"
        )
    parts = name.replace("::", ".").removeprefix("torch.ops.").split(".")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None) if len(parts) in (2, 3) else None
    if packet is None or (len(parts) == 3 and parts[2] not in packet.overloads()):
        known = ", ".join(packet.overloads()) if packet is not None else "registered operators"
        raise RuleError(
            f"no operator {name!r}",
            place="rule",
            legal=f"{known}, as 'namespace::name'",
            way_out="Register it with torch.library.custom_op before its rule is given",
        )
    return ".".join(parts)


def overload_of(target: str) -> str:
    """`mylib.op` -> `mylib.op.default`, or the first overload there is."""
    parts = target.split(".")
    if len(parts) == 3:
        return target
    names = getattr(getattr(torch.ops, parts[0]), parts[1]).overloads()
    return f"{target}.{'default' if 'default' in names else names[0]}"


def _bare(target: str) -> Op:
    """A call of an operator without arguments."""
    return Op(name="", target=overload_of(target), args=(), kwargs={}, results=())


def _check_spec(added: UserRule) -> None:
    """Raise RuleError for a spec that fits no call: syntax, names, operand numbers, counts."""
    place = f"rule of {added.target}, {added.spec!r}"
    if added.spec.count("->") != 1:
        raise RuleError("", place=place, legal="'operand, operand -> result', with one '->'")
    left, right = (side.split(",") for side in added.spec.split("->"))
    named: set[str] = set()
    for term in (*left, *right):
        names = [name for word in words(term) for name in word.strip("()").split()]
        legible = all(re.fullmatch(r"\*?[a-zA-Z]\w*", name) for name in names)
        if re.sub(r"[\w\s*()]", "", term) or not legible:
            what, legal = f"{term.strip()!r} is not made of", "names, *names and (a b)"
            raise RuleError(f"{what} {legal}", place=place, legal=legal)
        if len(set(names)) != len(names):
            raise RuleError(
                f"{term.strip()!r} names a dim twice", place=place, legal="once per tensor"
            )
        named |= set(names)
    stars = {name[1:] for name in named if name.startswith("*")}
    patterns = {name: added.options.get(name, "") for name in ("whole", "mean", "uncounted")}
    for option, listed in patterns.items():
        for pattern in str(listed).split():
            _check_pattern(pattern, f"{place}: {option}={pattern!r}")
            hits = any(re.fullmatch(pattern, name) for name in named)
            if not hits and not any(pattern.startswith(star) for star in stars):
                raise RuleError(
                    f"={pattern!r} is no factor", place=f"{place}: {option}", legal=sorted(named)
                )
    most = _most_operands(added.target)
    if most is not None and len(left) > most:
        raise RuleError(
            f"{len(left)} operands, but the operator takes {most} at most",
            place=place,
            legal=f"up to {most} operands",
        )
    indices = {*added.options["pinned"], *(i for g in added.options["linear"] for i in g)}
    if wrong := [i for i in indices if not 0 <= i < len(left)]:
        raise RuleError(
            f"operand {wrong[0]} of pinned or linear", place=place, legal=f"below {len(left)}"
        )
    for name, factor in added.options["counts"].items():
        try:
            place_of(_bare(added.target), name)
        except ValueError as error:
            raise RuleError(f"counts: {error}", place=place) from None
        if factor not in named:
            raise RuleError(f"counts: {factor!r} is no factor", place=place, legal=sorted(named))


def _check_pattern(pattern: str, place: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise RuleError(
            f" is no regular expression: {error}", place=place, legal="a regular expression"
        ) from None


def _most_operands(target: str) -> int | None:
    """The most tensors that an operator takes; None where it takes lists of them."""
    namespace, name, *overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    most = 0
    for version in overload or packet.overloads():
        types = [str(a.type) for a in getattr(packet, version)._schema.arguments]
        if any("List[" in t and "Tensor" in t for t in types):
            return None
        most = max(most, sum("Tensor" in t for t in types))
    return most


# --- verification --------------------------------------------------------------------------------


def verified(graph: Graph) -> Graph:
    """The graph, with notes of users' rules that could not be tried; RuleError for a wrong one."""
    notes: dict[str, None] = {}
    for op in (*graph.derived, *graph.ops):
        added = rules.given_for(op.target)
        if added is None:
            continue
        operands = [graph.values[v] for v in op.operands]
        factors = added.rule(op, operands, [graph.values[v] for v in op.results])
        if not added.verify:
            continue
        call = map_refs((op.args, op.kwargs), lambda _: "")
        key = repr((added, op.target, call, operands, factors))
        if why := _TRIED.of(key, partial(verify_call, added, op, operands, factors)):
            notes[f"the rule of {added.target} was not verified in full: {why}"] = None
    return replace(graph, notes=(*graph.notes, *notes)) if notes else graph


def verify_call(added: UserRule, op: Op, operands: Sequence[TensorMeta], factors: OpFactors) -> str:
    """Try a rule on random tensors shaped like one call's, small where the operator allows it; the
    part that can't be tried, and why. The numbers are the same on every rank, not the caller's."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return _verify_call(added, op, operands, factors)


def _verify_call(
    added: UserRule, op: Op, operands: Sequence[TensorMeta], factors: OpFactors
) -> str:
    why = ""
    needs = [meta.requires_grad for meta in operands]
    for sizes in _trial_sizes(factors, added.options["sizes"]):
        pairs = zip(operands, factors.operands, strict=True)
        small = [_resized(meta, dims, sizes) for meta, dims in pairs]
        if sum(meta.numel for meta in small) > LARGEST_TRIAL:
            why = why or f"it does not run on less than {LARGEST_TRIAL} elements"
            continue
        args, kwargs = divided(op, factors, op.args, op.kwargs, sizes)
        call = replace(op, args=tuple(args), kwargs=kwargs)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            try:
                trial = Trial.of(call, random_operands(small, dtype), needs)
            except Exception as error:  # noqa: BLE001 - any: the next trial may run
                why = first_line(error)
                continue
            return _judge(added, call, trial)
    return why


def _judge(added: UserRule, call: Op, trial: Trial) -> str:
    """The part of a rule that was not tried, in words; RuleError where it does not hold."""
    metas = [meta_of(x) for x in trial.operands]
    local = added.rule(call, metas, [meta_of(y) for y in trial.whole.results])
    if wrong := faults(trial, local, DEGREES):
        raise RuleError(wrong_rule(added, local, wrong))
    logger.debug("rule of %s holds: %s", added.target, added.spec)
    for factor, parts in splits(local, DEGREES).items():
        if not parts:
            return f"factor {factor!r} of {local.sizes[factor]} elements was not split"
    gradients = any(gradient is not None for gradient in trial.whole.gradients)
    floating = any(y.is_floating_point() for y in trial.whole.results)
    return "no gradient flows to its operands" if floating and not gradients else ""


def wrong_rule(added: UserRule, factors: OpFactors, wrong: Sequence[Fault]) -> str:
    bad = {fault.factor for fault in wrong}
    good = [f for f, kind in factors.kinds.items() if kind != "whole" and f not in bad]
    return (
        f"rule of {added.target}, {added.spec!r}, does not hold: split, factor "
        f"{'; factor '.join(map(str, wrong))}. Factors that hold: {', '.join(good) or 'none'}. "
        f"List the wrong ones in whole=, or correct the spec; {DISCOVER}"
    )


def _trial_sizes(factors: OpFactors, spec_sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes of the factors to try, the smallest first; some operators want those they have."""
    unsplit = {n: size for n, size in factors.sizes.items() if factors.kinds[n] == "whole"}
    small = {n: spec_sizes.get(n, min(unsplit.get(n, SMALL), SMALL)) for n in factors.sizes}
    return [small, {**small, **unsplit}, dict(factors.sizes)]


def _resized(meta: TensorMeta, dims: Dims, sizes: Mapping[str, int]) -> TensorMeta:
    return replace(meta, shape=tuple(math.prod(sizes[name] for name in dim) for dim in dims))

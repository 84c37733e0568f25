"""What a block's backward holds beyond what its forward kept, at its highest point.

The moments of a backward (`backward.py`) are made into a few numbers for each recompute policy,
relative to the kept bytes of the block, of which those of runs of blocks can be composed
(`costmodel/stages/excess.py`). How the gradients of parameters grow meanwhile depends on what
reduces them, so that there is a number for each way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.costmodel.blocks.backward import Moment
from meshwright.costmodel.blocks.policies import RECOMPUTE, REGATHER, parts_of

FP32 = 4


class Excess(NamedTuple):
    """Bytes beyond the kept ones of a micro-batch, at the highest point:

    later   of a backward that adds to gradients that are there
    grown   of the first one, all gradients that it makes being left where they are, in fp32
    first   of the half of a backward that puts weights' gradients off, with what it puts off
    second  of the other half, beside what was put off
    inside  of a backward under ZeRO-3, with the weights that are gathered for it; up to where the
            block's gradients are scattered
    edge    of the same, without that
    inner   of a later one, if the block may be in a segment
    """

    later: float = 0.0
    grown: float = 0.0
    first: float = 0.0
    second: float = 0.0
    inside: float = 0.0
    edge: float = 0.0
    inner: float = 0.0


def excesses(
    course: Sequence[Moment],
    numels: Sequence[float],
    freed: Mapping[str, float],
    *,
    weight_bytes: int,
    alone_bytes: int,
    segmented: bool,
) -> dict[str, Excess]:
    """The excess of a block under every policy. `course` are the moments of its backward, `numels`
    the elements of its parameters by their number, `freed` the bytes that policies make again;
    gradients of `alone_bytes` and more are no copies where autograd makes them in fp32; it may be
    `segmented`."""
    found: dict[tuple[float, bool, bool], Excess] = {}
    by_policy = {}
    for policy in RECOMPUTE:
        again, (_, gathers) = freed.get(policy, 0.0), parts_of(policy)
        gathers = gathers and policy in freed
        key = again, gathers, gathers and policy == REGATHER
        if key not in found:
            own = _excess(course, numels, key, weight_bytes, alone_bytes)
            found[key] = own._replace(inner=own.later * segmented)
        by_policy[policy] = found[key]
    return by_policy


def _excess(
    course: Sequence[Moment],
    numels: Sequence[float],
    repeated: tuple[float, bool, bool],
    weight_bytes: int,
    alone_bytes: int,
) -> Excess:
    again, gathers, alone = repeated
    course = [moment.with_parts() for moment in course] if gathers else course
    # what is gathered again alone is made again by the second half where that reads it
    late = again if alone and any(moment.regathered for moment in course) else 0.0
    releases = not again or alone
    later = grown = first = inside = end = again
    second = late
    made = taken = put_off = 0.0  # gradients as autograd makes them, in fp32; what is put off
    for moment in course:
        held = again - moment.released * releases
        given = [weight_bytes * numels[k] for k in moment.parameters]
        during, left = held + moment.during + sum(given), sum(given)
        later, grown = max(later, during), max(grown, during + taken)
        inside = max(inside, during + made)
        kept = held if late == 0.0 else -moment.released
        first = max(first, kept + moment.during + put_off)
        put_off += moment.put_off
        end = held + moment.after
        for own in given:
            copied = FP32 * own / weight_bytes
            left, taken, made = left - own, taken + copied, made + own
            later = max(later, end + left + own)
            in_place = weight_bytes == FP32 and copied >= alone_bytes
            grown = max(grown, end + left + taken + (0.0 if in_place else own))
            inside = max(inside, end + left + made)
            if moment.put_off:
                second = max(second, own + late)
            else:
                first = max(first, kept + moment.after + put_off + own)
    numel = sum(numels[k] for moment in course for k in moment.parameters)
    gathered = 2 * weight_bytes * numel
    return Excess(
        later=later,
        grown=grown,
        first=first,
        second=second,
        inside=gathered + max(inside, end + made + FP32 * numel),
        edge=gathered + inside,
    )

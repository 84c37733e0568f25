"""What a block's backward holds beyond what its forward kept, at its highest point.

The moments of a backward (`backward.py`) are made into a few numbers for each recompute policy,
relative to the kept bytes of the block, of which those of runs of blocks can be composed
(`costmodel/stages/sums.py`). How the gradients of parameters grow meanwhile depends on what
reduces them, so that there is a number for each way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.costmodel.blocks.backward import Moment
from meshwright.costmodel.memory import FP32
from meshwright.costmodel.recompute import RECOMPUTE, REGATHER, parts_of


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
    parts: Sequence[Moment],
    numels: Sequence[float],
    freed: Mapping[str, float],
    *,
    weight_bytes: int,
    alone_bytes: int,
    segmented: bool,
) -> dict[str, Excess]:
    """The excess of a block under every policy. `course` are the moments of its backward, `parts`
    those where it gathers again, `numels` the elements of its parameters by their number, `freed`
    the bytes that policies make again; gradients of `alone_bytes` and more are no copies where
    autograd makes them in fp32; it may be `segmented`."""

    def releasing(moments: Sequence[Moment]) -> dict[bool, Excess]:
        sizes = numels, weight_bytes, alone_bytes
        return {flag: _excess(moments, *sizes, releases=flag) for flag in (True, False)}

    plain = releasing(course)
    gathers = plain if parts is course else releasing(parts)
    # what is gathered again alone is made again by the second half where that reads it
    late = any(moment.regathered for moment in course)
    found = {}
    for policy in RECOMPUTE:
        again, (_, gathering) = freed.get(policy, 0.0), parts_of(policy)
        own, alone = plain[not again], policy == REGATHER
        if gathering and policy in freed:
            own = gathers[alone or not again]
        later = again * (not (alone and late))
        found[policy] = Excess(
            later=own.later + again,
            grown=own.grown + again,
            first=own.first + later,
            second=own.second + again - later,
            inside=own.inside + again,
            edge=own.edge + again,
            inner=(own.later + again) * segmented,
        )
    return found


def _excess(
    course: Sequence[Moment],
    numels: Sequence[float],
    weight_bytes: int,
    alone_bytes: int,
    *,
    releases: bool,
) -> Excess:
    """Beside what is made again; `releases`: what is kept is let go on the way."""
    later = grown = first = second = inside = end = 0.0
    made = taken = put_off = 0.0  # gradients as autograd makes them, in fp32; what is put off
    for moment in course:
        held = -moment.released * releases
        given = [weight_bytes * numels[k] for k in moment.parameters]
        left = sum(given)
        during = held + moment.during + left
        later, grown = max(later, during), max(grown, during + taken)
        inside = max(inside, during + made)
        first = max(first, held + moment.during + put_off)
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
                second = max(second, own)
            else:
                first = max(first, end + put_off + own)
    weights = weight_bytes * sum(numels)
    gathered = 2 * weights  # and the next one's; in a forward also those of the one before
    return Excess(
        later=later,
        grown=grown,
        first=first,
        second=second,
        inside=gathered + max(inside, end + max(made + taken, weights)),
        edge=gathered + inside,
    )

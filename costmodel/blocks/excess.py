"""Excess of a block's backward over the bytes that its forward kept, at its highest point.

The moments of a backward (`backward.py`) become a few numbers for each recompute policy, of which
those of runs of blocks are composed (`costmodel/stages/sums.py`): one for each way in which
gradients of parameters grow meanwhile, which depends on their reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.costmodel.blocks.backward import Moment
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
    kept_bytes: int,
    alone_bytes: int,
    segmented: bool,
) -> dict[str, Excess]:
    """The excess of a block under every policy. `course` are the moments of its backward, `parts`
    those where it gathers again, `numels` the elements of its parameters by their number, `freed`
    the bytes that policies make again; autograd makes gradients in `weight_bytes` an element, which
    are added up in `kept_bytes`: those of `alone_bytes` and more are no copies where the two are
    one; it may be `segmented`."""

    def releasing(moments: Sequence[Moment]) -> dict[bool, Excess]:
        sizes = numels, weight_bytes, kept_bytes, alone_bytes
        return {flag: _excess(moments, *sizes, releases=flag) for flag in (True, False)}

    plain = releasing(course)
    gathers = plain if parts is course else releasing(parts)
    # what is gathered again alone is made again by the second half where that reads it
    late = any(moment.regathered for moment in course)
    by_policy = {}
    for policy in RECOMPUTE:
        again, (_, gathering) = freed.get(policy, 0.0), parts_of(policy)
        excess, alone = plain[not again], policy == REGATHER
        if gathering and policy in freed:
            excess = gathers[alone or not again]
        later = again * (not (alone and late))
        by_policy[policy] = Excess(
            later=excess.later + again,
            grown=excess.grown + again,
            first=excess.first + later,
            second=excess.second + again - later,
            inside=excess.inside + again,
            edge=excess.edge + again,
            inner=(excess.later + again) * segmented,
        )
    return by_policy


def _excess(
    course: Sequence[Moment],
    numels: Sequence[float],
    weight_bytes: int,
    kept_bytes: int,
    alone_bytes: int,
    *,
    releases: bool,
) -> Excess:
    """Excess beside what is made again; `releases`: what is kept is let go on the way."""
    later = grown = first = second = inside = end = 0.0
    unreduced = taken = put_off = 0.0  # gradients as autograd makes them, added up; what is put off
    for moment in course:
        held = -moment.released * releases
        gradients = [weight_bytes * numels[k] for k in moment.parameters]
        pending = sum(gradients)
        during = held + moment.during + pending
        later, grown = max(later, during), max(grown, during + taken)
        inside = max(inside, during + unreduced)
        first = max(first, held + moment.during + put_off)
        put_off += moment.put_off
        end = held + moment.after
        for gradient in gradients:
            copied = kept_bytes * gradient / weight_bytes
            pending, taken, unreduced = pending - gradient, taken + copied, unreduced + gradient
            later = max(later, end + pending + gradient)
            in_place = weight_bytes == kept_bytes and copied >= alone_bytes
            grown = max(grown, end + pending + taken + (0.0 if in_place else gradient))
            inside = max(inside, end + pending + unreduced)
            if moment.put_off:
                second = max(second, gradient)
            else:
                first = max(first, end + put_off + gradient)
    weights = weight_bytes * sum(numels)
    gathered = 2 * weights  # and the next one's; in a forward also those of the one before
    return Excess(
        later=later,
        grown=grown,
        first=first,
        second=second,
        inside=gathered + max(inside, end + max(unreduced + taken, weights)),
        edge=gathered + inside,
    )

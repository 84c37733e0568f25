"""Even out what devices do that run several stages each.

`cut_evenly` bounds every stage by the slowest one; a device that takes turns between stages
``k, k+p, ...`` is as slow as their sum

    max over devices d of  Σ_{k on d} t[l(k), c_k, c_{k+1}],

in which a long stage may be made up for by short ones, and so in what it holds.  From the even cut,
blocks move one by one from the busiest to the least busy device, all cuts between the two stages by
one place, as long as the maximum falls and no device comes to hold more than there is room for: a
local optimum.
"""

from collections.abc import Sequence

import numpy as np

from meshwright.planner.inter_op.table import Floats, Ints

MOST_MOVES = 64


def even_out(
    cuts: Sequence[int],
    time_s: Floats,
    held_bytes: Floats,
    level_of_stage: Ints,
    device_of_stage: Ints,
    room_bytes: float,
) -> tuple[tuple[int, ...], float]:
    """The cuts after all moves that help, and the seconds of the busiest device.

    ``cuts`` are P+1 ascending positions; ``time_s`` and ``held_bytes`` are (L, C+1, C+1), +inf
    where a stage is not legal; ``level_of_stage`` and ``device_of_stage`` are (P,).
    """

    def loads(table: Floats, cuts: Ints) -> Floats:
        """(devices,): the sum over all stages of each."""
        own = table[level_of_stage, cuts[:-1], cuts[1:]]
        total: Floats = np.bincount(device_of_stage, weights=own).astype(np.float64)
        return total

    best = np.array(cuts)
    busy = loads(time_s, best)
    most = max(room_bytes, float(loads(held_bytes, best).max()))
    for _ in range(MOST_MOVES):
        found: tuple[Ints, Floats] | None = None
        for one in _moves(best, busy, device_of_stage):
            after = loads(time_s, one)
            faster = after.max() < (found[1] if found else busy).max() * (1 - 1e-9)
            if faster and loads(held_bytes, one).max() <= most:
                found = one, after
        if found is None:
            break
        best, busy = found
    return tuple(int(c) for c in best), float(busy.max())


def _moves(cuts: Ints, loads: Floats, devices: Ints) -> list[Ints]:
    """Cuts with a block less for a stage of the busiest device and one more for a stage of the
    least busy one."""
    found = []
    for source in np.flatnonzero(devices == loads.argmax()):
        for target in np.flatnonzero(devices == loads.argmin()):
            moved = cuts.copy()
            if source < target:
                moved[source + 1 : target + 1] -= 1
            else:
                moved[target + 1 : source + 1] += 1
            if (np.diff(moved) > 0).all():
                found.append(moved)
    return found

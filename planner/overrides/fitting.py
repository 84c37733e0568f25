"""Check of overrides against cluster and batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from meshwright.planner.decisions import DECISIONS, divisors
from meshwright.planner.overrides.overrides import OverrideError, Overrides, spelled

_WAY_OUT = "change or drop one of them, or what they must fit"


def check_overrides(
    overrides: Overrides,
    *,
    num_devices: int,
    global_batch_size: int,
    num_blocks: int,
    sequences: bool = True,
) -> None:
    """Check the degrees against cluster, batch and blocks, before anything is searched; raises
    `OverrideError`.

    Where `tp`, `cp` and `dp` are one value for all blocks all stages are alike: `tp · cp · dp`
    divides the devices, `tp · cp · dp · pp` is their number; a free `cp` is 1 without `sequences`
    to split. Stages of other meshes need `pp` times as many as are set at most. `dp ·
    microbatch_size · num_microbatches` divides the batch, and is the batch where all three are set.
    """
    pp, (per_device, _) = overrides.everywhere("pp"), overrides.virtual()
    stages = len(overrides.stages or ()) or (pp and pp * (per_device or 1) // overrides.copies)
    if pp is None and stages and per_device:
        pp = stages * overrides.copies // per_device
    if stages is not None and stages > num_blocks:
        asked = {"pp": pp or stages}
        if per_device is not None and per_device > 1:
            asked["virtual_stages"] = per_device
        raise OverrideError(
            f"the model has {num_blocks} blocks",
            place=f"override {_shown(asked, ())}",
            legal=f"1 to {num_blocks} stages",
        )
    no_cp = overrides.everywhere("cp") in ((1,) if sequences else (1, None))
    mesh = {name: overrides.everywhere(name) for name in ("tp", *(["cp"] * (not no_cp)), "dp")}
    forbidden = [name for name in overrides.forbid if name in mesh or name == "pp"]
    devices = f"the cluster's {num_devices} devices"
    for name, decision in DECISIONS.items():
        for pattern, value in overrides.items(name) if decision.of_devices else ():
            if (pattern is not None or decision.shared) and value > num_devices:
                raise OverrideError(
                    f"more than {devices}",
                    place=f"override {spelled(name, pattern, value)}",
                    legal=f"up to {num_devices}",
                    way_out=_WAY_OUT,
                )
    free = pp is None or None in mesh.values()
    degrees = mesh if free else {**mesh, "pp": pp}
    _check_product(degrees, num_devices, devices, forbidden, free=free)
    if free:
        least = {name: n for name, n in {**mesh, "pp": pp}.items() if n is not None}
        needed = math.prod(least.values())
        if needed > num_devices:
            raise OverrideError(
                f"needs at least {needed} devices, more than {devices}",
                place=f"override {_shown(least, forbidden)}",
                legal=f"up to {num_devices} together",
                way_out=_WAY_OUT,
            )
    rows = {
        name: overrides.everywhere(name) for name in ("dp", "microbatch_size", "num_microbatches")
    }
    batch, free = f"global_batch_size={global_batch_size}", None in rows.values()
    _check_product(rows, global_batch_size, batch, forbidden, free=free)


def _check_product(
    factors: Mapping[str, int | None],
    total: int,
    what: str,
    forbidden: Collection[str],
    *,
    free: bool,
) -> None:
    """Raise unless the product of the factors that are set divides `total`, or where none is
    `free`, equals it."""
    degrees = {name: value for name, value in factors.items() if value is not None}
    product = math.prod(degrees.values())
    if product == total or (free and total % product == 0):
        return
    raise OverrideError(
        f"{('the product ' if len(degrees) > 1 else '')}{product} "
        f"{('does not divide' if free else 'is not')} {what}",
        place=f"override {_shown(degrees, forbidden)}",
        legal=divisors(total) if free else total,
        way_out=_WAY_OUT,
    )


def _shown(degrees: Mapping[str, int], forbidden: Collection[str]) -> str:
    return ", ".join(
        f"{name}={value}" + (f" (forbid={name!r})" if name in forbidden else "")
        for name, value in degrees.items()
    )

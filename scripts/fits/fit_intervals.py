"""Fits the intervals of predictions (`costmodel/residuals.json`) to published measurements.

    python -m scripts.fits.fit_intervals [--write]

Rows of the halves that nothing was fitted on (`scripts/validate_costmodel`) are priced, and their
residuals taken apart (`scripts/experts/residuals.py`). Printed are the deviations of each effect,
the 80 % interval of each GPU, kind of model and target, and the part of the rows of each left-out
model that lies in the interval of the others: what the intervals are worth. Peak memory is of other
software, by target, where it was read from an allocator. --write keeps them. About five minutes.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.costmodel import intervals
from meshwright.costmodel.intervals import OTHER, family_of
from scripts.experts.residuals import NO_LESS, Effects, Residual, coverage, ends, interval
from scripts.experts.rows import published_rows
from scripts.published import Unpriced, evaluate_row, read_row
from scripts.validate_costmodel import halves, later_halves

PATH = Path(intervals.__file__).with_name("residuals.json")
BY_DRIVER = ("BLOOM",)  # sources whose memory is nvidia-smi's, with the context of the driver
FEWEST_MODELS = 3  # of a target with an interval of its own for memory


def residuals() -> dict[str, list[Residual]]:
    """Of step times, of dense models and of those with experts, and of memory."""
    found: dict[str, list[Residual]] = {"dense": [], "experts": [], "memory": []}
    for name, fitted, row in itertools.chain(halves(published_rows()), later_halves("")):
        if fitted:
            continue
        try:
            evaluation = evaluate_row(row)
        except Unpriced:
            continue
        of = {
            "model": f"{name} {row['model']}",
            "gpu": family_of(read_row(row).cluster.device.name),
            "target": evaluation.target.name,
        }
        prediction = evaluation.prediction
        ratio = float(row["iteration_time_s"]) / prediction.step_time_s
        kind = "dense" if row["moe_experts"] in ("", "0", "1") else "experts"
        found[kind].append(Residual(ratio=ratio, **of))
        published = row.get("peak_mem_gib")
        if published and not row["source"].startswith(BY_DRIVER):
            ratio = float(published) * 2**30 / max(prediction.peak_memory_bytes)
            found["memory"].append(Residual(ratio=ratio, **of))
    return found


def of_steps(kinds: Mapping[str, Sequence[Residual]]) -> dict[str, Any]:
    """The table of step times, of dense models and of those with experts, of which fewer are known:
    their effects vary no less; the ends are those of both."""
    found: dict[str, dict[str, float]] = {}
    fitted, least = dict[str, Effects](), NO_LESS
    for kind, rows in kinds.items():
        fitted[kind] = Effects(rows).fitted(least)
        least = fitted[kind].variances
    left_out = {kind: effects.left_out() for kind, effects in fitted.items()}
    together = [each for own in left_out.values() for each in own]
    reach = ends(together)
    print(f"{reach[0]:.2f} to {reach[1]:.2f} deviations")
    for kind, rows in kinds.items():
        effects, within = fitted[kind], coverage(left_out[kind], together)
        said = ", ".join(f"{name} {own**0.5:.1%}" for name, own in effects.variances.items())
        print(f"{kind}: {said}; within {within:.0%}")
        names = [dict.fromkeys([*(getattr(r, n) for r in rows), OTHER]) for n in ("gpu", "target")]
        for gpu, target in itertools.product(*names):
            of = Residual(model="", ratio=1.0, gpu=gpu, target=target)
            found[f"{gpu}, {kind}, {target}"] = interval(effects, of, reach)
    rows = [r for own in kinds.values() for r in own]
    return {
        "rows": {
            kind: dict(collections.Counter(r.gpu for r in own)) for kind, own in kinds.items()
        },
        "models": len({r.model for r in rows}),
        "intervals": found,
    }


def of_memory(rows: Sequence[Residual]) -> dict[str, Any]:
    """The table of peak memory: all rows together, and by target where several models were
    measured; there the effects of kind and GPU are left aside."""
    found = {}
    for name in ("all", *dict.fromkeys(r.target for r in rows)):
        own = [Residual(model=r.model, ratio=r.ratio) for r in rows if name in ("all", r.target)]
        models = {r.model for r in own}
        if name == "all" or len(models) >= FEWEST_MODELS:
            effects = Effects(own).fitted()
            of = Residual(model="", ratio=1.0)
            said = "allocators of other software" if name == "all" else f"{name}'s allocator"
            found[name] = {
                **interval(effects, of, ends(effects.left_out())),
                "rows": len(own),
                "models": len(models),
                "of": said,
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="keep them in costmodel")
    args = parser.parse_args()
    found = residuals()
    table = {"memory": of_memory(found.pop("memory")), "step": of_steps(found)}
    for name, own in table["step"]["intervals"].items():
        print(f"  {name:40} {own['low']:5.2f} {own['middle']:5.2f} {own['high']:5.2f}")
    for name, own in table["memory"].items():
        print(f"  memory {name:33} {own['low']:5.2f} {own['middle']:5.2f} {own['high']:5.2f}")
    if args.write:
        date = datetime.date.today().isoformat()
        PATH.write_text(json.dumps({"date": date, **table}, indent=1) + "\n")


if __name__ == "__main__":
    main()

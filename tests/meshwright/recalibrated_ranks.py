"""A rank of `test_recalibrating.py`: plans of both axes and of two stages, recalibrated on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from meshwright import Overrides, distributed
from meshwright.executor.errors import StateError
from meshwright.profiles.store import Store
from tests.helpers.tiny import ROWS, batch, host, net, planned

PLANS = {"dp": Overrides(dp=2), "tp": Overrides(tp=2), "pp": Overrides(pp=2, num_microbatches=2)}


def main(folder: Path) -> None:
    results = {}
    for name, overrides in PLANS.items():
        result = planned(net(), cluster=host(2), overrides=overrides)
        try:
            result.recalibrate()
        except StateError as error:
            refused = str(error)
        for _ in range(11):
            result.train_step(batch(ROWS))
        found = result.recalibrate()
        again = planned(net(), cluster=host(2), plan=result.plan)
        steps = [s for d in Store().devices() for s in Store().read(d).steps]
        results[name] = {
            "too early": refused,
            "measured_s": found.measured_s,
            "before_s": found.before_s,
            "after_s": found.after_s,
            "samples": found.samples,
            "again_s": again.monitor.predicted.train_step_s,
            "parts": sorted({part for s in steps for part in s.parts}),
            "plans": len({s.plan for s in steps}),
            "words": str(found),
        }
    texts = [""] * 2
    dist.all_gather_object(texts, results["pp"]["words"])
    results["ranks agree"] = {"found": texts[0] == texts[1]}
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    with distributed("gloo"):
        main(Path(sys.argv[1]))

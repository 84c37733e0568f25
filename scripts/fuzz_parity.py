"""Random plans of random models against the single device.

    scripts/fuzz_parity [--plans 100] [--ranks 4] [--seed 0]

Plan k has the seed `--seed` + k. Printed for each that fails: the seed, what differs, the model,
the plan, and the command that runs it alone. The exit status is 1 where any does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

# the generator lives with the tests
from tests.parity.fuzzing import fuzz

PER_LAUNCH = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="of each plan (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (%(default)s)")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.plans)
    failed = 0
    for start in range(0, len(seeds), PER_LAUNCH):
        with tempfile.TemporaryDirectory() as folder:
            failures = fuzz(Path(folder), seeds[start : start + PER_LAUNCH], options.ranks)
        for failure in failures:
            print(f"seed {failure.seed}: {failure.reason}\n{failure.draw.spec}")
            print(failure.draw.plan.to_json(), end="")
            print(
                f"again: scripts/fuzz_parity --plans 1 --ranks {options.ranks} "
                f"--seed {failure.seed}\n"
            )
        failed += len(failures)
        done = min(start + PER_LAUNCH, len(seeds))
        print(f"{done} plans on {options.ranks} ranks, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

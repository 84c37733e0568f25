"""Random plans of random models against the single device.

    scripts/fuzz_parity [--plans 100] [--ranks 4] [--seed 0]

Plan k has the seed `--seed` + k. Printed for each that fails: the seed, what differs, the model,
the plan, and the command that runs it alone. The exit status is 1 where any does.
"""

from __future__ import annotations

import argparse
import sys

# the generator and the launcher live with the tests
from tests.helpers.ranks import end_all
from tests.parity.fuzzing import fuzz

REPORTED = 50  # plans between two lines of progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="of each plan (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (%(default)s)")
    options = parser.parse_args()
    failed = 0
    for done, seed in enumerate(range(options.seed, options.seed + options.plans), 1):
        failure = fuzz(seed, options.ranks)
        if failure is not None:
            failed += 1
            print(f"seed {seed}: {failure.reason}\n{failure.draw.spec}")
            print(failure.draw.plan.to_json(), end="")
            print(f"again: scripts/fuzz_parity --plans 1 --ranks {options.ranks} --seed {seed}\n")
        if done % REPORTED == 0 or done == options.plans:
            print(f"{done} plans on {options.ranks} ranks, {failed} failed", flush=True)
    end_all()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Plans of two ranks with several micro-batches, one of each kind."""

from typing import Any

PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "num_microbatches": 2},
    "zero2": {"dp": 2, "zero": 2, "num_microbatches": 2},
    "zero3": {"dp": 2, "zero": 3, "num_microbatches": 2},
    "tp2": {"tp": 2, "num_microbatches": 2},
    "pp2": {"pp": 2, "schedule": "1f1b", "num_microbatches": 4},
    "pp2 zb": {"pp": 2, "schedule": "zb_h1", "num_microbatches": 4},
}

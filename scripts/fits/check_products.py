"""The catalog's products beside published ones: errors by device and kind.

    python -m scripts.fits.check_products [--data DIR] [--rows]

DIR holds `gemm.csv` (columns gpu, dtype, kind, m, n, k, groups, tflops; of groups m is of each).
Rows with all of m, n and k on GPUs of the catalog are taken; fp8 counts at twice the 16-bit rate,
with operands of one byte and a result of two. The error is that of the seconds of
`costmodel/kernels/compute.py` with the launch, which these tables amortise over many calls but not
over one.

Tables show kernels in a loop, mostly of the best shapes, with zeros or small numbers in them, while
the curves of the A100 and of the H100 are fitted to steps (scripts/fits/fit_devices.py), in which
clocks are lower and other kernels use the caches. So a bias over zero is expected; what counts is
whether it is the same for all kinds: that of groups next to that of the same product undivided.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.costmodel.kernels import matmul_seconds
from meshwright.profiles.cluster import Cluster, Device

DEVICES: Mapping[str, str] = {
    "A100 SXM": "a100-80gb",
    "A100-80GB SXM": "a100-80gb",
    "A100-class": "a100-80gb",
    "H100 SXM": "h100-sxm",
    "H800 SXM5": "h800-sxm",
    "H200 SXM": "h200-sxm",
    "GB200 SXM": "gb200",
    "B200 SXM": "b200",
    "B300 SXM": "b300",
    "V100-32GB SXM": "v100-32gb",
}
FEW_ROWS = 256  # of a group or of a product: fewer, and its weights' traffic decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`groups` products (m × k)·(k × n) that took `seconds`."""

    device: str
    kind: str
    eight_bits: bool
    m: int
    n: int
    k: int
    groups: int
    seconds: float

    def priced_s(self, device: Device) -> float:
        """Seconds of one grouped kernel, with its launch."""
        wide = 1 if self.eight_bits else 2
        moved = self.groups * (wide * self.k * (self.m + self.n) + 2 * self.m * self.n)
        if self.eight_bits:
            rate = {"bf16": 2 * device.flops("bf16")}
            device = dataclasses.replace(device, peak_flops={**device.peak_flops, **rate})
        dtype = "bf16" if "bf16" in device.peak_flops else "fp16"
        busy_s = matmul_seconds(device, dtype, self.m, self.n, self.k, self.groups, moved)
        return busy_s + device.launch_overhead_s


def measured(rows: Iterable[Mapping[str, str]]) -> list[Measured]:
    """The products of a table that the catalog can price."""
    found = []
    for row in rows:
        text = next((text for text in DEVICES if row["gpu"].startswith(text)), None)
        wide = row["dtype"].startswith(("bf16", "fp16", "fp8"))
        if text is None or not wide or not (row["m"] and row["n"] and row["k"]):
            continue
        m, n, k, groups = (int(row[c] or 1) for c in ("m", "n", "k", "groups"))
        eight_bits = row["dtype"].startswith("fp8")
        found.append(
            Measured(
                device=DEVICES[text],
                kind=kind_of(row["kind"], m, groups) + ", fp8" * eight_bits,
                eight_bits=eight_bits,
                m=m,
                n=n,
                k=k,
                groups=groups,
                seconds=2 * m * n * k * groups / (float(row["tflops"]) * 1e12),
            )
        )
    return found


def kind_of(text: str, m: int, groups: int) -> str:
    if "best" in text:
        return "best shape"
    if "module" in text:
        return "in a module"
    rows = "few rows" if m <= FEW_ROWS else "many rows"
    return f"{'grouped' if 'grouped' in text or groups > 1 else 'dense'}, {rows}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/validation"))
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args()
    with (options.data / "gemm.csv").open(encoding="utf-8", newline="") as file:
        found = measured(csv.DictReader(file))
    parts = defaultdict(list)
    for each in found:
        error = each.priced_s(Cluster.from_catalog(each.device).device) / each.seconds - 1
        parts[each.device, each.kind].append(error)
        if options.rows:
            sides = f"{each.m} x {each.n} x {each.k}, {each.groups}"
            print(f"  {each.device} {each.kind}: {sides}: {error:+.1%}")
    for (device, kind), errors in sorted(parts.items()):
        mean, bias = statistics.mean(map(abs, errors)), statistics.mean(errors)
        print(f"{device:12} {kind:24} {len(errors):4} error {mean:6.1%} bias {bias:+6.1%}")


if __name__ == "__main__":
    main()

"""Checks and fits the exchange of tokens between experts against published kernels.

    python -m scripts.fits.fit_experts [--data DIR]

DIR holds `moe_dispatch_combine.csv` (columns source, gpu, ranks_ep, nodes, op, precision, impl,
sm_count, measurement, bandwidth_GBps, time_us, link, notes). Its bandwidths are those of DeepEP's
own tests: of T tokens with k copies, spread evenly over n ranks on N nodes, a rank's kernel took

    T · h · bytes · pairs / bandwidth    pairs = N (1 - (1 - 1/N)^k)  between nodes,
                                                 n (1 - (1 - 1/n)^k)  inside one,

the (token, place) pairs with its own place counted (tests/test_internode.py, test_hybrid_ep.py and
utils.py of deepseek-ai/DeepEP). Tables have 4,096 tokens of 7,168 numbers, 8 copies of each; fp8
has a scale of 4 bytes for 128 numbers. DeepEP's tests limit a token to 4 nodes, which the formula
of `costmodel/kernels/collectives.py` doesn't know: their 8 nodes are left out.

Of tables with several counts of compute units the fastest is taken. "kernel" is the kernel alone,
"call" what a training step calls, with its copies; these are priced with the operators' streams.
Fitted is a link's `direct_efficiency`, to the kernels of every other group size, by least squares
of logarithms; the other sizes are held out. Printed: errors of `exchange_seconds` by the catalog
and by the fit, beside those of an all-to-all, and the seconds that calls take beyond their kernels
over those that streams are priced at.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.costmodel.kernels import Group, exchange_seconds, reached_part, stream_seconds
from meshwright.profiles.cluster import Cluster

TOKENS, HIDDEN, COPIES = 4096, 7168, 8
BYTES: Mapping[str, float] = {"bf16": 2.0, "fp8": 1.0 + 4 / 128}
MOST_NODES = 4  # that DeepEP's tests send a token to
# the first text that a row's GPU starts with, to a catalog node
NODES: Mapping[str, str] = {
    "H800": "hgx-h800",
    "SM90": "dgx-h100",
    "H100": "dgx-h100",
    "H200 EFA": "p5.48xlarge",
    "B200 EFA": "p6-b200.48xlarge",
    "GB200": "gb200-nvl72",
    "B200": "dgx-b200",
    "SM100 (B200) CX7": "dgx-b200",
    "SM100 (B200)": "dgx-b200",
}
# (node, link): what is fitted, where a link was assumed and whole tables are there
FITS = (("dgx-h100", "inter_link"), ("gb200-nvl72", "intra_link"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A measured dispatch or combine of one rank: `call` with its copies, or the kernel alone."""

    node: str
    impl: str
    op: str
    precision: str
    ranks: int
    nodes: int
    call: bool
    measured_s: float

    @property
    def nbytes(self) -> float:
        """Bytes of all copies of a rank's tokens."""
        return TOKENS * COPIES * HIDDEN * BYTES[self.precision]

    @property
    def cluster(self) -> Cluster:
        per_node = self.ranks // self.nodes
        return Cluster.from_catalog(self.node, num_nodes=self.nodes, devices_per_node=per_node)

    @property
    def link(self) -> str:
        return "inter_link" if self.nodes > 1 else "intra_link"

    def priced_s(self, cluster: Cluster | None = None, *, once_per_node: bool = True) -> float:
        return exchange_seconds(
            self.nbytes,
            COPIES,
            Group(size=self.ranks, per_node=self.ranks // self.nodes),
            cluster or self.cluster,
            once_per_node=once_per_node,
        )


def exchanges(rows: Iterable[Mapping[str, str]]) -> list[Exchange]:
    """The exchanges of a training step in a table, each by its fastest count of compute units."""
    fastest: dict[Exchange, float] = {}
    for row in rows:
        found = read(row)
        if found is None:
            continue
        key = dataclasses.replace(found, measured_s=0.0)
        fastest[key] = min(found.measured_s, fastest.get(key, math.inf))
    return [dataclasses.replace(key, measured_s=s) for key, s in fastest.items()]


def read(row: Mapping[str, str]) -> Exchange | None:
    """A row's exchange; None for decoding, superseded numbers and 8 nodes of DeepEP's tests."""
    ranks, nodes, impl = int(row["ranks_ep"]), int(row["nodes"]), row["impl"]
    grouped = impl.startswith("DeepEP") and nodes > MOST_NODES and row["link"] == "RDMA"
    if "low-latency" in impl or "superseded" in row["notes"] or grouped:
        return None
    if "MNNVL" in row["link"]:  # one domain of NVLink
        nodes = 1
    precision = row["precision"] or ("fp8" if row["op"] == "dispatch" else "bf16")
    places = nodes if nodes > 1 else ranks
    pairs = places * reached_part(places, COPIES)
    sent = TOKENS * HIDDEN * BYTES[precision] * pairs
    return Exchange(
        node=next(node for text, node in NODES.items() if row["gpu"].startswith(text)),
        impl=impl,
        op=row["op"],
        precision=precision,
        ranks=ranks,
        nodes=nodes,
        call="Torch API" in row["measurement"],
        measured_s=sent / (float(row["bandwidth_GBps"]) * 1e9),
    )


def split(found: Sequence[Exchange]) -> tuple[list[Exchange], list[Exchange]]:
    """Exchanges of every other group size, and the others."""
    sizes = sorted({each.ranks for each in found})
    fitted = set(sizes[::2])
    return [x for x in found if x.ranks in fitted], [x for x in found if x.ranks not in fitted]


def with_efficiency(cluster: Cluster, link: str, fraction: float) -> Cluster:
    """A cluster whose `link` reaches this fraction where all send to all."""
    changed = dataclasses.replace(getattr(cluster, link), direct_efficiency=fraction)
    return dataclasses.replace(cluster, **{link: changed})


def fit(found: Sequence[Exchange], link: str) -> float:
    """The `direct_efficiency` of a link, to half a percent, with the least squares."""

    def squares(fraction: float) -> float:
        priced = (x.priced_s(with_efficiency(x.cluster, link, fraction)) for x in found)
        return sum(math.log(s / x.measured_s) ** 2 for s, x in zip(priced, found, strict=True))

    return min((k / 200 for k in range(60, 201)), key=squares)


def errors(found: Sequence[Exchange], link: str = "", fraction: float = 1.0) -> str:
    """Number, mean absolute error and bias; with a link's fraction, by that instead."""
    each = [
        x.priced_s(with_efficiency(x.cluster, link, fraction) if link else None) / x.measured_s - 1
        for x in found
    ]
    if not each:
        return "   0"
    mean, bias = statistics.mean(map(abs, each)), statistics.mean(each)
    return f"{len(each):4} error {mean:6.1%} bias {bias:+6.1%}"


def copies_s(found: Exchange) -> float:
    """Seconds that the streams of a dispatch or a combine are priced at (operators/pricing.py)."""
    moved = found.nbytes / COPIES + 3 * found.nbytes
    return stream_seconds(found.cluster.device, moved)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/validation"))
    data = parser.parse_args().data / "moe_dispatch_combine.csv"
    with data.open(encoding="utf-8", newline="") as file:
        found = exchanges(csv.DictReader(file))
    groups: dict[tuple[str, str, str, str], list[Exchange]] = defaultdict(list)
    for x in found:
        kind = "call" if x.call else "kernel"
        groups[x.node, x.link, kind, x.impl].append(x)
    for name, each in sorted(groups.items()):
        over = statistics.mean(x.priced_s(once_per_node=False) / x.measured_s for x in each)
        print(f"{' '.join(name):48} {errors(each)}; as an all-to-all {over:.2f} of measured")
    for node, link in FITS:
        kernels = [x for x in found if (x.node, x.link, x.call) == (node, link, False)]
        fitted, held_out = split(kernels)
        fraction = fit(fitted, link)
        print(f"\n{node} {link}: direct_efficiency {fraction:.3f}")
        for label, part in (("fitted", fitted), ("held out", held_out)):
            by_fit = errors(part, link, fraction)
            print(f"  {label:9} catalog {errors(part)}; fit {by_fit}")
    beyond(found)


def beyond(found: Sequence[Exchange]) -> None:
    """Print what calls take beyond their kernels, by GPU, over what streams are priced at."""
    kernels = {dataclasses.replace(x, measured_s=0.0): x.measured_s for x in found if not x.call}
    parts = defaultdict(list)
    for x in found:
        alone = kernels.get(dataclasses.replace(x, call=False, measured_s=0.0))
        if x.call and alone is not None:
            parts[x.node, x.link].append((x.measured_s - alone) / copies_s(x))
    print()
    for (node, link), each in sorted(parts.items()):
        print(f"{node} {link}: calls beyond kernels {statistics.mean(each):.2f} of priced streams")


if __name__ == "__main__":
    main()

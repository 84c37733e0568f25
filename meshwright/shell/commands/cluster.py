"""`meshwright cluster`: cluster files, begun, shown with what follows from them, and made anew."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from meshwright.planner.document import Document, Part, Table
from meshwright.profiles.inputs import ClusterError, MeshwrightError, read_text, write_text
from meshwright.shell.named import cluster_named
from meshwright.shell.terminal import Answer

SIZES = ((2**20, "1 MiB"), (2**26, "64 MiB"), (2**30, "1 GiB"))  # of all-reduces that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    begin = actions.add_parser("init", help="write a commented file for some nodes")
    begin.add_argument("--gpu", required=True, help="a device or node of `meshwright catalog`")
    begin.add_argument("--nodes", type=int, default=1, help="nodes (1)")
    begin.add_argument("--per-node", type=int, help="devices of a node (as the catalog has it)")
    begin.add_argument("--net", metavar="RATE", help='line rate of a node\'s NICs, e.g. "25Gb/s"')
    begin.add_argument("-o", "--output", metavar="FILE", help="write it there (else print it)")
    look = actions.add_parser("show", help="bandwidth of each group of ranks, and all numbers")
    look.add_argument("cluster", help="a .toml file, or a name and nodes as for --cluster")
    anew = actions.add_parser("convert", help="write a file of bare numbers with their units")
    anew.add_argument("file", help="a .toml file")
    anew.add_argument("-o", "--output", metavar="FILE", help="write it there (else print it)")
    schema = actions.add_parser("schema", help="print the JSON schema of cluster files")
    for action in (begin, look, anew, schema):  # where people write it
        text = "print JSON instead of text"
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=text)


def run(args: argparse.Namespace) -> Answer:
    return {"init": _init, "show": _show, "convert": _convert, "schema": _schema}[args.action](args)


def _init(args: argparse.Namespace) -> Answer:
    from meshwright.profiles.cluster import Cluster
    from meshwright.profiles.cluster_file import initial

    base = Cluster.from_catalog(args.gpu, num_nodes=args.nodes)
    per_node = base.devices_per_node if args.per_node is None else args.per_node
    text = initial(base, gpu=args.gpu, nodes=args.nodes, per_node=per_node, net=args.net)
    return _written(text, args.output)


def _convert(args: argparse.Namespace) -> Answer:
    from meshwright.profiles.cluster_file import converted

    return _written(converted(read_text(args.file)), args.output)


def _written(text: str, path: str | None) -> Answer:
    """A file's text, written or as the answer, if it is that of a cluster."""
    import tempfile

    from meshwright.profiles.cluster import Cluster

    with tempfile.TemporaryDirectory() as folder:
        try:
            Cluster.load(write_text(Path(folder) / "cluster.toml", text, "cluster file"))
        except MeshwrightError as error:
            said = str(error).replace(f"{folder}/", "")
            raise ClusterError(said, place="the file as it would be written") from None
    if path is None:
        return Answer(data=lambda: {"text": text}, text=lambda: text.rstrip("\n"))
    write_text(path, text, "cluster file")
    return Answer(
        data=lambda: {"file": path, "text": text},
        text=lambda: f"written to {path}; `meshwright cluster show {path}` prints what follows",
    )


def _schema(args: argparse.Namespace) -> Answer:
    from meshwright.profiles.cluster_file import schema
    from meshwright.profiles.hardware.catalog_reader import catalog_names

    found = schema(catalog_names())
    return Answer(data=lambda: found, text=lambda: json.dumps(found, indent=2))


def _show(args: argparse.Namespace) -> Answer:
    cluster = cluster_named(args.cluster)
    rows = list(_groups(cluster))
    data = {"cluster": cluster.to_dict(), "groups": rows}
    heads = ["ranks", "on nodes", *(f"all-reduce of {name}" for _, name in SIZES)]
    cells = [
        [str(row["ranks"]), str(row["nodes"]), *(f"{x / 1e9:.3g} GB/s" for x in row["bus"])]
        for row in rows
    ]
    parts: list[Part] = [
        cluster.describe(),
        "",
        "Bus bandwidth of neighbouring ranks, as prices have it (2(n-1)/n of the bytes a second)",
        Table(heads=heads, rows=cells),
    ]
    if cluster.assumptions:
        parts += ["", "Assumed, or replaced", *(f"  {note}" for note in cluster.assumptions)]
    return Answer(data=lambda: data, text=lambda: Document(tuple(parts)))


def _groups(cluster: Any) -> Any:
    """Groups of neighbours: powers of two within a node, a node, two, four, ... nodes and all."""
    from meshwright.costmodel.kernels import collective_time, group_for

    node, total = cluster.devices_per_node, cluster.num_devices
    sizes = {n for n in (2**k for k in range(1, 20)) if n <= node and node % n == 0}
    sizes |= {node * 2**k for k in range(20) if node * 2**k <= total} | {total}
    for size in sorted(sizes - {1}):
        group = group_for(cluster, size=size, stride=1)
        bus = [
            2 * (size - 1) / size * nbytes / collective_time("all_reduce", nbytes, group, cluster)
            for nbytes, _ in SIZES
        ]
        yield {"ranks": size, "nodes": -(-size // node), "bus": bus}

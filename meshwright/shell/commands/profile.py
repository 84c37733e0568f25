"""`meshwright profile`: measure, take in or write a file, or forget steps."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from meshwright.arguments import default_precision
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.host import FOLDER_VARIABLE
from meshwright.profiles.profile import device_name, is_device_of
from meshwright.profiles.store import Store
from meshwright.profiles.timings import PROFILE_S
from meshwright.shell.commands import flags
from meshwright.shell.named import CommandError, cluster_named, model_named
from meshwright.shell.terminal import Answer, say

if TYPE_CHECKING:
    from meshwright.shell.profile_command import Imported, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """Number of plans whose measured steps were forgotten, and their device."""

    device: str
    plans: int
    cache: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        plans = f"{self.plans} plan{'s' * (self.plans != 1)}"
        return f"forgotten: steps of {plans} on {self.device}; cache {self.cache}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, optional=True)
    parser.add_argument(
        "--budget", type=float, default=PROFILE_S, help=f"seconds, all in all ({PROFILE_S:g})"
    )
    parser.add_argument("--again", action="store_true", help="time what the cache knows, too")
    parser.add_argument("--export", metavar="FILE", help="write what is known of the device")
    parser.add_argument(
        "--import",
        dest="imported",
        metavar="FILE",
        help="take in measurements first: what --export wrote, an nccl-tests log (.log, .txt) or a "
        "table of collectives (.csv)",
    )
    parser.add_argument(
        "--forget-steps", action="store_true", help="forget what recalibrate() kept of the device"
    )
    log = parser.add_argument_group("of the imported log, where it doesn't say so itself")
    log.add_argument("--ranks", type=int, metavar="N", help="GPUs of the run")
    log.add_argument("--nodes", type=int, metavar="K", help="nodes of the run")
    log.add_argument("--collective", metavar="NAME", help="what was measured, e.g. all_reduce")
    parser.add_argument(
        "--collectives",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time collectives on local ranks",
    )
    parser.add_argument(
        "--flash",
        metavar="FOLDER",
        default=os.environ.get(FOLDER_VARIABLE),
        help=f"time files in a folder on the node's flash (default: {FOLDER_VARIABLE})",
    )


def forget_steps(cluster: Cluster, store: Store | None = None) -> Forgotten:
    """Delete all measured steps of the cluster's device, of any driver and torch. Raises OSError
    where the cache can't be had."""
    store = store or Store()
    plans = store.forget_steps(lambda name: is_device_of(cluster, name))
    return Forgotten(device=device_name(cluster), plans=plans, cache=str(store.path))


def run(args: argparse.Namespace) -> Answer:
    summary = _performed(args, cluster_named(args.cluster))
    return Answer(data=summary.to_dict, text=lambda: str(summary))


def _performed(args: argparse.Namespace, cluster: Cluster) -> Summary | Imported | Forgotten:
    """Perform the command by its flags."""
    from meshwright.profiles.measure import FILE_BYTES, check_folder
    from meshwright.shell.profile_command import Effort, import_profile, profile_model

    if args.forget_steps:
        return forget_steps(cluster)
    if args.imported:
        imported = import_profile(
            cluster, args.imported, ranks=args.ranks, nodes=args.nodes, collective=args.collective
        )
        if args.model is None:
            _export(args, cluster)
            return imported
        say(str(imported))
    if args.model is None or args.global_batch_size is None:
        raise CommandError(
            "a model and --batch are missing",
            place="profile",
            legal="MODEL --batch N, or --import FILE",
        )
    if args.flash:
        check_folder(args.flash, FILE_BYTES * cluster.devices_per_node)
    model, example, *rest = model_named(args.model)
    summary = profile_model(
        model,
        example,
        rest[0] if rest else None,
        cluster,
        batch=args.global_batch_size,
        precision=args.precision or default_precision(cluster),
        effort=Effort(
            budget_s=args.budget, collectives=args.collectives, again=args.again, flash=args.flash
        ),
    )
    _export(args, cluster)
    return summary


def _export(args: argparse.Namespace, cluster: Cluster) -> None:
    from meshwright.shell.profile_command import export_profile

    if args.export:
        count = export_profile(cluster, args.export)
        say(f"{count} measurements written to {args.export}")

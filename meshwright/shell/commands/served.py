"""Serving plans of a model that the command line names: `plan --serve`, `fit --generate`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from meshwright.shell import override_flags
from meshwright.shell.commands.parallelized import arguments_of
from meshwright.shell.named import CommandError, cluster_named
from meshwright.shell.progress import progress_shown

if TYPE_CHECKING:
    from meshwright.planner.serving import Serving

PROMPT, NEW = 1024, 256  # tokens, where nobody says
DECIDED = ("tp", "pp")  # by overrides
OF_TRAINING = {
    "output": "-o", "trace": "--trace", "html": "--html", "rehearse": "--rehearse",
    "plan": "--plan", "source": "--from", "sensitivity": "--sensitivity",
    "global_batch_size": "--batch", "optimizer": "--optimizer", "target": "--target",
    "tf32": "--tf32", "expert_imbalance": "--expert-imbalance", "objective": "--objective",
    "time_limit_s": "--time-limit", "allow": "--allow", "rows_meet": "--rows-meet",
    "watts": "--watts", "tokens": "--tokens", "full": "--full",
}  # fmt: skip


def serving(args: argparse.Namespace, flag: str) -> Serving:
    """The plans to serve a model. Raises `CommandError` for flags of training beside `flag`."""
    from meshwright.planner.serving import Asked
    from meshwright.serving import plan_serving

    given: dict[str, Any] = override_flags.overrides_of(args).given()
    beside = [said for name, said in OF_TRAINING.items() if getattr(args, name, None)]
    beside += [f"--{name.replace('_', '-')}" for name in given if name not in DECIDED]
    if beside:
        raise CommandError(
            f" decides nothing of serving: {', '.join(beside)}",
            place=f"{flag} beside {beside[0]}",
            legal="--tp, --pp, and the flags of serving",
            way_out="drop it",
        )
    questions = Asked(
        prompt=args.prompt or PROMPT,
        new=args.new or NEW,
        rows=args.rows,
        token_s=args.token_s,
        first_s=args.first_s,
        tokens_per_s=args.tokens_per_s,
        tp=given.get("tp"),
        pp=given.get("pp"),
    )
    cluster = cluster_named(args.cluster)
    model, arguments = arguments_of(args)
    kept: dict[str, Any] = {
        name: arguments[name]
        for name in ("example_inputs", "loss_fn", "precision", "memory_margin", "profile")
        if arguments.get(name) is not None
    }
    with progress_shown():
        return plan_serving(model, cluster, questions, **kept)


def check_training(args: argparse.Namespace) -> None:
    """Raise `CommandError` for flags of serving without it, and for no batch."""
    names = ("prompt", "new", "rows", "token_s", "first_s", "tokens_per_s")
    if asked := [name for name in names if getattr(args, name) is not None]:
        raise CommandError(
            " is of serving",
            place=f"--{asked[0].replace('_', '-')}",
            legal="beside --serve (plan) or --generate (fit)",
            way_out="give that flag, or drop this one",
        )
    if args.global_batch_size is None and not getattr(args, "source", None):
        raise CommandError("is missing", place="--batch", legal="rows per optimizer step")

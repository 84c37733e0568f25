"""`meshwright run`: train for a few steps."""

from __future__ import annotations

import argparse

from meshwright.shell.commands import flags
from meshwright.shell.commands.parallelized import parallelized
from meshwright.shell.named import cluster_named
from meshwright.shell.progress import progress_shown
from meshwright.shell.terminal import Answer, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser)
    parser.add_argument("--plan", help="plan file; without it a plan is searched")
    parser.add_argument(
        "--steps", type=flags.positive, default=10, help="optimizer steps (default 10)"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--weights",
        metavar="PATH",
        help="a torch.save file, safetensors or a checkpoint; a model on meta is initialised else",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="run the model's blocks through torch.compile; plans are for target compiled then",
    )
    parser.add_argument(
        "--timeline", metavar="FILE", help="time the last step, and write it as a Chrome trace"
    )
    flags.add_search(parser)


def run(args: argparse.Namespace) -> Answer | None:
    """Trains on all ranks; the answer is rank 0's."""
    from meshwright.executor.ranks import launch
    from meshwright.running import repeated

    cluster = cluster_named(args.cluster)
    with launch.distributed(cluster.backend):
        result, example = parallelized(args)
        if args.weights:
            with progress_shown():
                result.load_weights(args.weights)
        elif not result.runtime.loaded:
            result.init_weights()
        batch = repeated(example, args.global_batch_size)
        optimizer = result.make_optimizer(args.optimizer or "adamw", lr=args.lr)
        losses, timed = list[float](), None
        for step in range(args.steps):
            if args.timeline and step + 1 == args.steps:
                optimizer.zero_grad()
                timed = result.timeline(args.timeline, batch)
                optimizer.step()
            loss = timed.loss if timed else result.train_step(batch, optimizer=optimizer)
            losses.append(loss.item())
            if launch.rank() == 0:
                of = max(step - result.plan.staleness, -1) + 1
                came = f"loss {losses[-1]:.4f}" + f" of step {of}" * (of <= step)
                say(f"step {step + 1}/{args.steps}: {came if of else 'no loss yet'}")
        while (late := result.drain(optimizer)) is not None:
            losses.append(late.item())
        losses = losses[result.plan.staleness :]
        if launch.rank() != 0:
            return None
        if timed:
            say(str(timed))
    return Answer(
        data=lambda: {"losses": losses}, text=lambda: f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    )

"""Flags that commands share; those of `auto_parallelize` have its arguments' names as `dest`, and
its defaults where they are not given."""

from __future__ import annotations

import argparse
from typing import Any

from meshwright.arguments import MEMORY_MARGIN, OBJECTIVES, ROWS_MEET
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.targets import TARGETS
from meshwright.planner.decisions import ALLOWABLE


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; legal: an integer from 1")
    return int(text)


def add_model(
    parser: argparse.ArgumentParser,
    *,
    optional: bool = False,
    several: bool = False,
    source: bool = False,
    serves: bool = False,
) -> None:
    """`optional` where a command does something without a model, `several` clusters, `source` where
    a configuration of another software may say the rest, `serves` where it may plan no training."""
    parser.add_argument(
        "model",
        nargs="?" if optional else None,
        help="module:function returning (model, example_inputs[, loss_fn]), or hf:CONFIG",
    )
    parser.add_argument(
        "--cluster",
        **({"action": "append", "required": True} if several else {"default": "local:1"}),
        help="catalog name, name:nodes, local:N, detect, or a TOML file "
        + ("(repeatable)" if several else "(default local:1)"),
    )
    parser.add_argument(
        "--batch",
        dest="global_batch_size",
        type=int,
        metavar="BATCH",
        required=not (optional or source or serves),
        help="global batch size, rows per optimizer step",
    )
    parser.add_argument(
        "--precision", help=f"{', '.join(PRECISIONS)} (default: fp32 on CPUs, else bf16)"
    )
    if source:
        parser.add_argument(
            "--from",
            dest="source",
            metavar="FILE",
            help="configuration of DeepSpeed, accelerate, transformers (TrainingArguments as "
            "JSON), torchtitan, Megatron-LM (a file of flags) or Megatron-Bridge",
        )
    if not optional:
        add_prices(parser)


def add_prices(parser: argparse.ArgumentParser) -> None:
    """Arguments of prices beside the model and the cluster."""
    parser.add_argument(
        "--optimizer",
        help="whose states and steps are counted: adamw (the default: torch's, kernel by kernel), "
        "adamw_fused, adamw8bit, sgd, ...",
    )
    parser.add_argument(
        "--target",
        choices=tuple(TARGETS),
        help="software to plan for: its prices, and only what it can run (default: eager, what "
        "train_step runs)",
    )
    parser.add_argument(
        "--no-profile",
        dest="profile",
        action="store_false",
        help="ignore what `meshwright profile` measured",
    )
    parser.add_argument(
        "--expert-imbalance",
        type=float,
        metavar="RATIO",
        help="tokens of the busiest rank of experts over the mean (default 1.0, balanced)",
    )
    parser.add_argument("--rows-meet", choices=ROWS_MEET, help="where rows of a batch may meet")
    parser.add_argument(
        "--tf32", action="store_true", help="fp32 products of GPUs round their operands to TF32"
    )
    parser.add_argument(
        "--allow",
        action="append",
        choices=ALLOWABLE,
        help="what may change a training's numbers, and is left out else (repeatable)",
    )


def add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="the simplest of the plans that prices can't tell from the best, or the fastest",
    )
    parser.add_argument(
        "--memory-margin",
        type=float,
        metavar="PART",
        help=f"part of a device's memory that the plan leaves free (default {MEMORY_MARGIN})",
    )
    parser.add_argument(
        "--time-limit",
        dest="time_limit_s",
        type=float,
        metavar="SECONDS",
        help="end the search then, with the best plan found and what it may miss",
    )


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; legal: a number above 0")
    return value


def add_serving(parser: argparse.ArgumentParser, flag: str, what: str) -> None:
    """A flag for serving in place of training, and those of what is served."""
    group = parser.add_argument_group("serving", f"what {flag} takes beside the model")
    group.add_argument(flag, action="store_true", dest="serves", help=what)
    for name, words in (
        ("--prompt", "tokens of a prompt (default 1024)"),
        ("--new", "new tokens of a row (default 256)"),
        ("--rows", "rows at once on a replica (default: as many as pay)"),
    ):
        group.add_argument(name, type=positive, metavar="N", help=words)
    for name, words in (
        ("--token-s", "most seconds from token to token"),
        ("--first-s", "most seconds to a first token"),
        ("--tokens-per-s", "new tokens a second that are wanted, of as few devices as may be"),
    ):
        group.add_argument(name, type=positive_number, metavar="NUMBER", help=words)


def add_price(parser: argparse.ArgumentParser, **more: Any) -> None:
    """`--price`, `--watts` and `--tokens`."""
    parser.add_argument(
        "--price",
        type=positive_number,
        metavar="MONEY",
        help=f"price per device and hour{', once for all clusters or once for each' * bool(more)}",
        **more,
    )
    parser.add_argument(
        "--watts",
        type=positive_number,
        metavar="WATTS",
        help="power that a device takes with its share of the machine, for energy in kWh",
    )
    parser.add_argument(
        "--tokens", type=positive_number, metavar="NUMBER", help="tokens to train on"
    )


def add_report(parser: argparse.ArgumentParser) -> None:
    """`--full`, and the flags of costs."""
    parser.add_argument(
        "--full",
        action="store_true",
        help="print everything: every family, what overrides cost, advice, assumptions, proofs",
    )
    add_price(parser)


def asked_costs(args: argparse.Namespace) -> dict[str, float | None]:
    """Arguments of `Report.cost` by the flags of `add_price`; empty where none is given."""
    asked = {"tokens": args.tokens, "price_per_hour": args.price, "power_watts": args.watts}
    return asked if any(value is not None for value in asked.values()) else {}

"""Proposes a sharding rule for an operator, by running it on shards.

    scripts/discover_rule aten.linear --example "torch.randn(4, 8, 16), torch.randn(6, 16)"
    scripts/discover_rule mylib::op --import mylib.ops --example mylib.ops:example

An example is the call's arguments as Python, in which `torch` and `F` are known, or a function
`module:function` that returns them. Its sizes should be even, at least 4, and different where dims
mean different things; keyword arguments are given as `dict(...)` last. Printed is the line that
adds the rule, and what stays whole.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.costmodel.rules import RuleError
from meshwright.costmodel.user_rules import overload_of, target_of
from scripts.discovery.discover import Proposal, discover


def example_of(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments."""
    module, colon, function = text.partition(":")
    if colon and module.replace(".", "").isidentifier() and function.isidentifier():
        made = getattr(importlib.import_module(module), function)()
    else:
        made = eval(f"({text},)", {"torch": torch, "F": F})
    args = list(made) if isinstance(made, (tuple, list)) else [made]
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return args, kwargs


def show(proposal: Proposal) -> str:
    lines = [proposal.line()]
    if not proposal.found:
        lines.append("# nothing can be split: the operator runs in full on every rank")
    for name, dim, size in proposal.whole:
        odd = ", which was not tried: odd, or below 4" if size % 2 or size < 4 else ""
        lines.append(f"# whole: dim {dim} of {name} ({size}){odd}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operator", help="mylib::op, aten.linear, aten.sum.dim_IntList ...")
    parser.add_argument("--example", required=True, help="arguments, or module:function")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        help="a module that registers the operator",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the example (%(default)s)")
    options = parser.parse_args(arguments)
    for module in options.modules:
        importlib.import_module(module)
    torch.manual_seed(options.seed)
    try:
        target = overload_of(target_of(options.operator))
        args, kwargs = example_of(options.example)
        print(show(discover(target, args, kwargs)))
    except (RuleError, ValueError, RuntimeError) as error:
        print(f"discover_rule: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

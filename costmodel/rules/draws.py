"""Operators that draw random numbers.

What they draw must not depend on the plan: every rank, and one device, must see the same mask. The
executor draws by counter, as a function of a seed and of an element's global number, what is named
in `COUNTED`; other draws run on one device only.
"""

from __future__ import annotations

import functools

import torch

from meshwright.costmodel.graph import Op, argument

DROPOUTS = frozenset({"dropout", "feature_dropout"})
ATTENTION = "scaled_dot_product_attention"
UNIFORM = frozenset({"rand", "rand_like", "uniform"})
NORMAL = frozenset({"randn", "randn_like", "normal_functional"})
INTEGERS = frozenset({"randint", "randint_like"})
FLAGS = "bernoulli"
COUNTED = DROPOUTS | UNIFORM | NORMAL | INTEGERS | {ATTENTION, FLAGS}
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def draws(op: Op) -> bool:
    """Whether a call draws random numbers: dropouts only in training, and with a chance to drop."""
    if not op.target.startswith("aten."):
        return _random(op.target)
    if op.short.endswith("dropout"):
        return bool(argument(op, 2, "train", True)) and argument(op, 1, "p", 0.0) != 0.0
    if op.short == ATTENTION:
        return bool(argument(op, 4, "dropout_p", 0.0))
    if op.short in RECURRENT:
        _, layers, p, train = op.args[3:7]
        return bool(train) and p != 0.0 and layers > 1
    if op.short == "rrelu":
        return bool(argument(op, 3, "training", False))
    return _random(op.target)


@functools.cache
def _random(target: str) -> bool:
    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload, None)
    return found is not None and torch.Tag.nondeterministic_seeded in found.tags

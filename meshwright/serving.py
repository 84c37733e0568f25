"""`plan_serving`: how to serve a causal language model on a cluster, priced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from meshwright.api import Arguments, asked
from meshwright.planner.serving import Asked, Forwards, Serving, Servings, attentions
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import ArgumentError
from meshwright.running import logits_and_ids

MARGIN = 0.05  # of a device's memory, left free


def plan_serving(model: nn.Module, cluster: Cluster, questions: Asked, **arguments: Any) -> Serving:
    """Plans to serve a causal language model, best first: tensor axes, pipelines, replicas, and
    rows at once, priced by `questions`; `arguments` are those of `auto_parallelize` that say what
    the model is (`example_inputs`, `loss_fn`, `precision`).

    Seconds are those of an engine with fused kernels, whose rows come and go together. Raises
    `ServingError` for a model without torch's attention, where nothing fits, and for bounds that no
    plan keeps; ValueError as `auto_parallelize`.
    """
    checked(questions)
    margin = arguments.pop("memory_margin", MARGIN)
    return Servings(forwards_of(model, cluster, **arguments), questions, margin).served()


def forwards_of(model: nn.Module, cluster: Cluster, **arguments: Any) -> Forwards:
    """Prices of a model's forwards; raises as `plan_serving`."""
    question = asked(model, cluster, Arguments(**{"global_batch_size": 1, **arguments}))
    logits, _ = logits_and_ids(question.traced)
    problem = question.problem
    return Forwards(problem, attentions(problem.graph, windows_of(model)), logits)


def checked(questions: Asked) -> None:
    """Raise `ArgumentError` for numbers that ask for nothing."""
    for name in ("prompt", "new", "rows", "tp", "pp"):
        value = getattr(questions, name)
        if value is not None and (type(value) is not int or value < 1):
            raise ArgumentError.refused(name, value, legal="an integer from 1")
    for name in ("token_s", "first_s", "tokens_per_s"):
        value = getattr(questions, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise ArgumentError.refused(name, value, legal="a number over 0")


def windows_of(model: nn.Module) -> Sequence[int | None]:
    """Tokens that each layer of a model of transformers keeps, as its cache has them; empty for
    others."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return ()
    from transformers import DynamicCache

    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]

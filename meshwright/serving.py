"""`plan_serving`: how to serve a causal language model on a cluster, priced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.api import Arguments, asked
from meshwright.arguments import check_margin, check_types, margin_of
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.planner.errors import ServingError
from meshwright.planner.serving import Asked, Forwards, Serving, Servings, attentions
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import ArgumentError
from meshwright.running import logits_and_ids

TRACED = 64  # tokens of a row
OF_MODEL = ("example_inputs", "loss_fn", "precision", "profile")  # arguments that say what it is


def plan_serving(model: nn.Module, cluster: Cluster, questions: Asked, **arguments: Any) -> Serving:
    """Plans to serve a causal language model, best first: tensor axes, pipelines, replicas, and
    rows at once, priced by `questions`; `arguments` are those of `auto_parallelize` that say what
    the model is (`example_inputs`, `loss_fn`, `precision`).

    Seconds are those of an engine with fused kernels, whose rows come and go together. Raises
    `ServingError` for a model without torch's attention, where nothing fits, and for bounds that no
    plan keeps; ValueError as `auto_parallelize`.
    """
    checked(questions)
    margin = arguments.pop("memory_margin", None)
    check_margin(margin, cluster)
    _check_positions(model, questions)
    forwards = forwards_of(model, cluster, **arguments)
    return Servings(forwards, questions, margin_of(margin)).served()


def forwards_of(model: nn.Module, cluster: Cluster, **arguments: Any) -> Forwards:
    """Prices of a model's forwards; raises as `plan_serving`."""
    if unknown := sorted(arguments.keys() - {*OF_MODEL}):
        raise ArgumentError(
            f": {', '.join(unknown)}", place="plan_serving", legal=f"{[*OF_MODEL]}, memory_margin"
        )
    check_types(model=model, cluster=cluster, overrides=None, plan=None)
    given = {"global_batch_size": 1, **arguments}
    given["example_inputs"] = _short(arguments.get("example_inputs"))
    question = asked(model, cluster, Arguments(**given))
    logits, _ = logits_and_ids(question.traced)
    problem = question.problem
    if PRECISIONS[problem.precision].narrow:
        raise ArgumentError.refused("precision", problem.precision, legal=["fp32", "bf16", "fp16"])
    return Forwards(problem, attentions(problem.graph, windows_of(model)), logits)


def _short(example: Any) -> Any:
    """The example with sequences of at most `TRACED` tokens: prices are of tokens, whatever the
    length that was traced."""
    leaves, spec = pytree.tree_flatten(example)
    ids = [x for x in leaves if isinstance(x, torch.Tensor) and x.ndim == 2]
    if not ids:
        return example
    length = ids[0].shape[1]
    cut = [
        x[:, :TRACED] if isinstance(x, torch.Tensor) and x.ndim == 2 and x.shape[1] == length else x
        for x in leaves
    ]
    return pytree.tree_unflatten(cut, spec)


def _check_positions(model: nn.Module, questions: Asked) -> None:
    """Raise `ServingError` for more tokens than the model has positions."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if type(most) is int and questions.prompt + questions.new > most:
        raise ServingError(
            f"={questions.prompt} and new={questions.new}: the model has {most:,} positions",
            place="prompt",
            legal=f"at most {most:,} tokens in all",
            way_out="a config with more (max_position_embeddings)",
        )


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

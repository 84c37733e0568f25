"""TracedModel: the user's model with its loss as a graph, at any number of rows."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import FactorTable, analyse
from meshwright.costmodel.user_rules import verified
from meshwright.planner.batch import batch_rows
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.tracing import trace


class TracedModel:
    """A model traced at the sample batch, and again at a plan's micro-batch when it is lowered.

    It keeps the model alive until its weights are `handed_over` to a runtime; after that the model
    is the user's to keep or to let go.
    """

    def __init__(
        self, model: nn.Module, example: Any, loss_fn: Callable[..., Any] | None, precision: str
    ) -> None:
        self.example, self._loss_fn, self._precision = example, loss_fn, precision
        self._known = weakref.ref(model)
        self._kept: nn.Module | None = model
        started = time.process_time()
        # at least two rows: a batch of one would look like no batch at all
        self.graph, self.factors = self._traced(model, max(2, batch_rows(example)), like=None)
        self.phases_s = {"trace": time.process_time() - started}

    @property
    def model(self) -> nn.Module:
        """The user's model; ValueError where it was freed."""
        model = self._known()
        if model is None:
            raise ValueError(
                "replan: the model's weights were handed to the last plan, and the model was freed "
                "since; keep a reference to it, or save a checkpoint and plan anew"
            )
        return model

    def at(self, rows: int) -> tuple[Graph, FactorTable]:
        """The graph and the factors of its tensors' dims at so many rows, cut into blocks alike."""
        if rows == self.graph.batch_size:
            return self.graph, self.factors
        return self._traced(self.model, rows, like=self.graph)

    def handed_over(self) -> None:
        """Let the model go: its weights are a runtime's now."""
        self._kept = None

    def _traced(
        self, model: nn.Module, rows: int, *, like: Graph | None
    ) -> tuple[Graph, FactorTable]:
        graph = verified(
            trace(
                model,
                self.example,
                loss_fn=self._loss_fn,
                batch_size=rows,
                precision=self._precision,
            )
        )
        factors = analyse(graph)
        return cut_blocks(graph, factors, like), factors

"""Evaluation and generation under the training layout: no rank gathers the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.executor.errors import BatchError, StateError
from meshwright.executor.ranks import background, gloo_group, together
from meshwright.executor.runtime import Counted, Counting, Runtime, counting, forward
from meshwright.planner.batch import batch_rows
from meshwright.profiles.inputs import shown
from meshwright.profiles.inputs.limits import is_number
from meshwright.running.generation import Generator
from meshwright.running.inputs import completed
from meshwright.running.planned import PlannedModel
from meshwright.running.steps import with_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The mean `loss` of a data set of so many `batches` and `rows`; `counted` is what it is the
    mean over: targets that are not ignored, or rows. `perplexity` is exp(loss) of a plain
    cross-entropy, else None."""

    loss: float
    perplexity: float | None
    counted: float
    rows: int
    batches: int


class Evaluation(PlannedModel):
    """A planned model that is evaluated."""

    _generator: Generator | None = None

    def _evaluable(self) -> Runtime:
        """The runtime, for an evaluation. Raises `StateError` for a forward that runs other
        operators in evaluation mode than were planned."""
        self._traced.check_unchanged(training=False)
        runtime = self.runtime
        with runtime.user.as_passed():
            found = self._traced.why_not_evaluated
        if found:
            raise StateError(
                f"evaluation: the model was planned in training mode, and runs otherwise in "
                f"evaluation: the first difference is {found}; legal: dropout, batch norm and "
                "leaves, which follow the mode. Way out: load full_state_dict() into a model of "
                "its own, call .eval(), and evaluate that; or plan the model in .eval() mode"
            )
        return runtime

    def eval_step(self, batch: Any, targets: Any = None, *, local: bool = False) -> torch.Tensor:
        """The mean loss of a global batch (fp32 scalar), on every rank: forward only, without
        dropout, batch norm by its running statistics; `local` as in `train_step`. Weights, buffers
        and gradients stay as they are. StateError for a forward that runs other operators in
        evaluation mode. Collective."""
        self._traced.check_batch(batch)
        return self._evaluable().eval_step(with_targets(batch, targets), local=local)

    def forward(self, batch: Any, targets: Any = None, *, gather: bool = False) -> Any:
        """The model's output for a global batch in evaluation mode, without gradients, as the plan
        splits it: no rank gathers the weights. Collective.

        `batch` is as for `train_step`, of at most `global_batch_size` rows; labels and `targets`,
        which only the loss reads, may be left out. What returns has the structure of the model's
        output. With `gather` its tensors are those of the whole batch, on every rank; else the rows
        that this rank's data rank reads (micro-batch by micro-batch, all columns), on the ranks of
        the stage that makes them, and None on others. The loss is the mean of the batch on every
        rank, None without labels. None stands, too, for what the plan does not compute: what is no
        tensor (caches), and tensors that the loss does not come from. StateError where nothing else
        is in the output.
        """
        self._traced.check_batch(batch)
        runtime, outputs = self._evaluable(), self._traced.graph.outputs
        assert outputs is not None, "a trace knows its outputs"
        loss = self._traced.graph.loss
        asked = [v for v in outputs.known.values() if v != loss]
        if not asked and loss not in outputs.known.values():
            raise StateError(
                f"forward: of the model's outputs {list(outputs.paths)} none is on the way to the "
                "loss, so that the plan does not compute them; legal: outputs that the loss comes "
                "from. Way out: load full_state_dict() into a model of its own and call that"
            )
        filled = completed(
            with_targets(batch, targets), self._traced, asked, rows=self.plan.global_batch_size
        )
        found = forward(runtime, filled.batch, asked, rows=filled.rows, gather=gather)
        leaves: dict[str | None, Any] = dict(found.values.items())
        leaves[loss] = None if filled.invented else found.loss
        return pytree.tree_unflatten([leaves.get(v) for v in outputs.values], outputs.spec)

    def evaluate(
        self,
        batches: Iterable[Any],
        *,
        weigh: Callable[[Any], float] | None = None,
        local: bool | None = None,
    ) -> Evaluated:
        """The mean loss over a data set, on every rank: over all targets that are not ignored, or
        all rows, whatever batch they are in; the last batch may have fewer rows. Collective.

        `batches` gives what `eval_step` takes, the same on every rank, or each rank's own rows
        where it is `local`, as a `data_loader` is; StateError on all ranks where one has fewer, and
        the error of one that fails. Which numbers batches count by follows
        from the loss; where it does not (StateError), `weigh` gives that of a batch. A data set
        that counts nothing is a StateError, too.
        """
        _check_asked(batches, weigh)
        runtime = self._evaluable()
        background.finish_all()  # a save in the background uses the same group
        local = bool(getattr(batches, "local", False)) if local is None else local
        if local and weigh is not None:
            raise StateError(
                "weigh= is given, and each rank gives rows of its own, which it would weigh alone",
                place="evaluate",
                legal="weigh= with the same batches on every rank",
                way_out="give global batches, or a loss that tells what it counts",
            )
        how = counting(runtime.graph, self._traced.use) if weigh is None else Counting()
        total = weight = 0.0
        rows = number = 0
        group = None if runtime.place.mesh is None else gloo_group()
        for batch in together("evaluate", batches, group):
            self._traced.check_batch(batch)
            own = self._global_rows(batch) if local else batch_rows(batch)
            loss, count = _counted(runtime, batch, how, rows=own, local=local)
            count = count if weigh is None else _weight(weigh(batch))
            if count:  # the mean over nothing is no number
                total, weight = total + loss * count, weight + count
            rows, number = rows + own, number + 1
        if not weight:
            raise StateError(
                f"evaluate: {number} batches count {weight:g}, of which there is no mean; legal: "
                "at least one batch with a target that counts. Way out: give a loader that is not "
                "used up"
            )
        mean = total / weight
        perplexity = math.exp(mean) if how.exponential and mean < 700 else None
        return Evaluated(
            loss=mean, perplexity=perplexity, counted=weight, rows=rows, batches=number
        )

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        *,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> torch.Tensor:
        """Greedy continuations of prompts by a causal language model, under the training layout:
        [rows, longest prompt and new tokens] of ids, on every rank. Collective.

        `input_ids` [rows, length] are the same on every rank; prompts of unequal lengths are padded
        on the right with `pad_token_id`. New tokens follow each prompt at once; a row ends with
        `eos_token_id`, and the rest is padding. Every token costs a forward over the whole length:
        nothing is cached. Raises StateError for a model that is no causal language model, as its
        logits tell.
        """
        runtime = self._evaluable()
        if self._generator is None or self._generator.runtime is not runtime:
            self._generator = Generator(runtime, self._traced, self.plan.global_batch_size)
        return self._generator(
            input_ids, max_new_tokens, eos_token_id=eos_token_id, pad_token_id=pad_token_id
        )


def _check_asked(batches: object, weigh: object) -> None:
    """Raise `BatchError` for what are no batches, and for what weighs none."""
    if isinstance(batches, str | bytes | Mapping | type) or not isinstance(batches, Iterable):
        raise BatchError(
            f"are a {type(batches).__name__}, {shown(batches)}",
            place="evaluate: batches",
            legal="an iterable of batches, as a list or a data_loader",
            way_out="give one",
        )
    if weigh is not None and not callable(weigh):
        raise BatchError(
            f"={shown(weigh)}",
            place="evaluate: weigh",
            legal="a function of a batch, or None",
            way_out="leave it out",
        )


def _weight(found: object) -> float:
    """What a batch counts. Raises `BatchError` for no such number."""
    value = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found
    if not is_number(value) or value < 0:
        raise BatchError(
            f"returned {shown(found)}",
            place="evaluate: weigh",
            legal="a function that returns a number from 0",
            way_out="return how many targets of the batch count",
        )
    return float(value)


def _counted(
    runtime: Runtime, batch: Any, how: Counting, *, rows: int, local: bool
) -> tuple[float, float]:
    """The loss of a batch of so many rows, and what it counts. Collective."""
    if not how.values:
        return float(runtime.eval_step(batch, local=local)), float(rows)
    counts: list[Counted] = []

    def keep(step: Any) -> Counted:
        counts.append(Counted(how, step))
        return counts[0]

    loss, _ = runtime.evaluate(batch, how.values, keep=keep, local=local)
    return float(loss), counts[0].whole()

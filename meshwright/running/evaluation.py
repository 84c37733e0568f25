"""Evaluation and generation under the training layout: no rank gathers the weights."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.executor.errors import BatchError, StateError
from meshwright.executor.ranks import (
    all_gather_object,
    background,
    launch,
    progress,
    run_on_all,
    together,
)
from meshwright.executor.runtime import (
    CachedForward,
    Counted,
    Counting,
    Runtime,
    counting,
    forward,
    group_of,
    why_not_cached,
)
from meshwright.planner.batch import batch_rows, input_leaves, unusual_kind
from meshwright.profiles.inputs import shown
from meshwright.profiles.inputs.limits import MAX_COUNT, checked_booleans, is_number
from meshwright.running.planned import PlannedModel, in_replica
from meshwright.running.steps import with_targets
from meshwright.traced import TracedModel

log = logging.getLogger(__name__)


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
        apart = progress.on_its_own() if self.plan.is_served else nullcontext()
        with apart, runtime.user.as_passed():
            why = self._traced.why_not_evaluated
        if why:
            raise StateError(
                f"evaluation: the model was planned in training mode, and runs otherwise in "
                f"evaluation: the first difference is {why}; legal: dropout, batch norm and "
                "leaves, which follow the mode. Way out: load full_state_dict() into a model of "
                "its own, call .eval(), and evaluate that; or plan the model in .eval() mode"
            )
        return runtime

    @checked_booleans
    @in_replica
    def eval_step(self, batch: Any, targets: Any = None, *, local: bool = False) -> torch.Tensor:
        """The mean loss of a global batch (fp32 scalar), on every rank: forward only, without
        dropout, batch norm by its running statistics; `local` as in `train_step`. Weights, buffers
        and gradients stay as they are. StateError for a forward that runs other operators in
        evaluation mode. Collective. Of replicas that train apart each evaluates its rows with its
        own weights, and the mean is over all, by what each counts."""
        self._traced.check_batch(batch)
        runtime, inputs = self._evaluable(), with_targets(batch, targets)
        if self._world is None:
            return runtime.eval_step(inputs, local=local)
        try:
            how = counting(runtime.graph, self._traced.use)
        except StateError:
            how = Counting()
        here = inputs if local else self._rows_here(inputs)
        loss, count = _counted(runtime, here, how, rows=self._rows_in(here, local), local=local)
        total, weight = self._of_replicas("eval_step", loss * count if count else 0.0, count)
        return torch.tensor(total / weight if weight else math.nan)

    def _rows_in(self, batch: Any, local: bool) -> int:
        """Rows of a batch of one replica, of which a rank's own are given where it is `local`."""
        if not local:
            return batch_rows(batch)
        return self._global_rows(batch) // self.plan.replicas

    def _of_replicas(self, place: str, *numbers: float) -> list[float]:
        """Sums of numbers over replicas that train apart. Collective."""
        if self._world is None:
            return [*numbers]
        self.meetings.arrive_alike(place, f"step {self.meetings.runtime.steps}")
        return self._world.sums(*numbers)

    @checked_booleans
    @in_replica
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
        self.without_servers("forward")
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
            with_targets(batch, targets), self._traced, asked, rows=runtime.plan.global_batch_size
        )
        result_rows = forward(runtime, filled.batch, asked, rows=filled.rows, gather=gather)
        leaves: dict[str | None, Any] = dict(result_rows.values.items())
        leaves[loss] = None if filled.invented else result_rows.loss
        return pytree.tree_unflatten([leaves.get(v) for v in outputs.values], outputs.spec)

    @checked_booleans
    @in_replica
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
        self.without_servers("evaluate")
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
        group = group_of(runtime)
        for batch in together("evaluate", batches, group):
            self._traced.check_batch(batch)
            here = batch if local else self._rows_here(batch)
            row_count = self._rows_in(here, local)
            loss, count = _counted(runtime, here, how, rows=row_count, local=local)
            count = count if weigh is None else _weight(weigh(here))
            if count:  # the mean over nothing is no number
                total, weight = total + loss * count, weight + count
            rows, number = rows + row_count, number + 1
        total, weight, all_rows = self._of_replicas("evaluate", total, weight, float(rows))
        rows = round(all_rows)
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

    @checked_booleans
    @in_replica
    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        *,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
    ) -> torch.Tensor:
        """Greedy continuations of prompts by a causal language model, under the training layout:
        [rows, longest prompt and new tokens] of ids, on every rank. Collective.

        `input_ids` [rows, length] are the same on every rank; prompts of unequal lengths are padded
        on the right with `pad_token_id`. New tokens follow each prompt at once; a row ends with
        `eos_token_id`, and the rest is padding. After a forward over the prompts a token costs one
        over a few tokens, which reads the keys and values of those before; without `use_cache`, or
        where they can't be kept (the log says why), one over the whole length. Raises StateError
        for a model that is no causal language model, as its logits tell.
        """
        self.without_servers("generate")
        runtime = self._evaluable()
        if self._generator is None or self._generator.runtime is not runtime:
            self._generator = Generator(runtime, self._traced, runtime.plan.global_batch_size)
        return self._generator(
            input_ids,
            max_new_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            use_cache=use_cache,
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
        raise BatchError.refused(
            "evaluate: weigh", weigh, legal="a function of a batch, or None", way_out="leave it out"
        )


def _weight(weight: object) -> float:
    """Weight of a batch. Raises `BatchError` for no such number."""
    value = weight.item() if isinstance(weight, torch.Tensor) and weight.numel() == 1 else weight
    if not is_number(value) or value < 0:
        raise BatchError(
            f"returned {shown(weight)}",
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


# --- generation -----------------------------------------------------------------------------------

# Greedy generation by forwards of the training layout.
#
# Prompts are padded on the right: a causal model's logits at a position do not depend on what comes
# after it, which is tried before the first token. Batches have the planned rows, and the planned
# length or the next power of two of it, so that few shapes are lowered.
#
# With a cache all rows go on at the same position, from the end of the shortest prompt: a longer
# prompt gives its own token there. Whether forwards that go on give the logits of whole ones is
# tried before the first token, too.


MASK = "attention_mask"
CLOSE = 1e-4  # of the largest logit: what rounding makes of equal sums


class Generator:
    """Generates with a running plan. Raises `StateError` for one of no causal language model: one
    output `logits` [rows, length, classes], made of ids [rows, length] and maybe a mask."""

    def __init__(self, runtime: Runtime, traced: TracedModel, rows: int) -> None:
        self.runtime, self.traced, self.rows = runtime, traced, rows
        self.logits, self.ids = logits_and_ids(traced)
        self.causal: bool | None = None
        why = why_not_cached(runtime.planned.checked)
        self.cached = None if why else CachedForward(runtime, self.logits)
        if why and launch.rank() == 0:
            log.info("generate: without a cache, as %s", why)

    def __call__(
        self,
        prompts: torch.Tensor,
        max_new_tokens: int,
        *,
        eos_token_id: int | None,
        pad_token_id: int | None,
        use_cache: bool,
    ) -> torch.Tensor:
        """The prompts with what follows them. Collective."""
        background.finish_all()  # a save in the background uses the same group
        group = group_of(self.runtime)
        names = {"eos": eos_token_id, "pad": pad_token_id}
        asked = max_new_tokens, eos_token_id, pad_token_id, use_cache
        run_on_all(group, lambda: _check(prompts, max_new_tokens, names))
        _check_same(all_gather_object(group, (_digest(prompts), *asked)))
        pad = eos_token_id if pad_token_id is None else pad_token_id
        pad = 0 if pad is None else pad
        lengths = _lengths(prompts, pad_token_id)
        longest = int(lengths.max())
        self._check_causal()
        ids = torch.full((len(prompts), longest + max_new_tokens), pad, dtype=torch.int64)
        ids[:, :longest] = prompts[:, :longest]
        ends = lengths.clone()
        for first in range(0, len(prompts), self.rows):
            part = slice(first, first + self.rows)
            keep = use_cache and self.cached is not None and self._fits(ids.shape[1])
            extend = self._go_on if keep else self._extend
            extend(ids[part], ends[part], max_new_tokens, eos_token_id)
        if self.cached is not None:
            self.cached.cache.begin(None)  # lets go
        return ids[:, : int(ends.max())].to(prompts.device)

    def _extend(
        self, ids: torch.Tensor, ends: torch.Tensor, new_tokens: int, eos: int | None
    ) -> None:
        """Write the tokens that follow each row's end, and move the end."""
        open_rows = torch.ones(len(ids), dtype=torch.bool)
        width = self._width(ids.shape[1])
        every = torch.arange(len(ids))
        for _ in range(new_tokens):
            next_ids = self._at(ids, ends, ends - 1, width).argmax(dim=-1).cpu()
            ids[every[open_rows], ends[open_rows]] = next_ids[open_rows]
            ends += open_rows
            if eos is not None:
                open_rows &= next_ids != eos
            if not open_rows.any():
                return

    def _go_on(
        self, ids: torch.Tensor, ends: torch.Tensor, new_tokens: int, eos: int | None
    ) -> None:
        """The same by a cache: token after token of all rows."""
        width = self._width(ids.shape[1])
        open_rows = torch.ones(len(ids), dtype=torch.bool)
        limits, first = ends + new_tokens, int(ends.min())
        for at in range(first, ids.shape[1]):
            here = open_rows & (ends == at)
            next_ids = self._cached_at(ids, ends, at - 1, width, all_tokens=at == first)
            next_ids = next_ids.argmax(dim=-1).cpu()
            ids[here, at] = next_ids[here]
            ends += here
            open_rows &= ends < limits
            if eos is not None:
                open_rows &= ~here | (next_ids != eos)
            if not open_rows.any():
                return

    def _cached_at(
        self, ids: torch.Tensor, ends: torch.Tensor, at: int, width: int, *, all_tokens: bool
    ) -> torch.Tensor:
        """The logits [rows, classes] at a position of all rows, by the cache. Collective."""
        cached = self.cached
        assert cached is not None
        start = None if all_tokens else min(max(at + 1 - cached.tokens, 0), width - cached.tokens)
        batch, few = (self._batch(ids[:, :w], ends, w) for w in (width, cached.tokens))
        return cached(batch, few, at, rows=len(ids), start=start)

    def _fits(self, length: int) -> bool:
        return self.cached is not None and self._width(length) >= self.cached.tokens

    def _at(
        self, ids: torch.Tensor, ends: torch.Tensor, at: torch.Tensor, width: int
    ) -> torch.Tensor:
        """The logits [rows, classes] at one position of each row, on every rank. Collective."""
        logits = forward(
            self.runtime,
            self._batch(ids, ends, width),
            [self.logits],
            rows=len(ids),
            gather=True,
            at=at,
        ).values[self.logits]
        assert logits is not None, "gathered on every rank"
        return logits

    def _batch(self, ids: torch.Tensor, ends: torch.Tensor, width: int) -> Any:
        """The batch of ids, which end in each row, padded to a width."""
        padded = torch.nn.functional.pad(ids, (0, width - ids.shape[1]))
        batch: dict[str, Any] = {self.ids: padded}
        if MASK in self.traced.graph.inputs.values():
            name = next(n for n, p in self.traced.graph.inputs.items() if p == MASK)
            mask = torch.arange(width) < ends[:, None]
            batch[MASK] = mask.to(self.traced.graph.values[name].dtype)
        graph = self.traced.graph
        inputs: Any = batch
        if self.ids.isdigit():  # of a tuple
            inputs = (padded,)
        else:
            inputs |= {path: x for path, x in graph.fixed.items() if "." not in path}
        return completed(inputs, self.traced, [self.logits], rows=self.rows).batch

    def _width(self, length: int) -> int:
        """The length at which rows of so many tokens run: planned, or a power of two of it, within
        what the model's own config allows."""
        width = self._planned
        while width < length:
            width *= 2
        config = getattr(self.runtime.model, "config", None)
        most = getattr(config, "max_position_embeddings", None)
        return max(length, min(width, most)) if isinstance(most, int) else width

    @property
    def _planned(self) -> int:
        return self.traced.graph.values[self.logits].shape[1]

    def _check_causal(self) -> None:
        """Raise `StateError` where later tokens change logits of earlier positions. Collective."""
        if self.causal is None:
            width = self._planned
            classes = self.traced.graph.values[self.logits].shape[2]
            half = max(1, width // 2)
            ids = torch.arange(self.rows * width).view(self.rows, width) % classes
            other = torch.cat([ids[:, :half], (ids[:, half:] + classes // 2 + 1) % classes], 1)
            ends, at = torch.full((self.rows,), width), torch.full((self.rows,), half - 1)
            one, two = (self._at(x, ends, at, width) for x in (ids, other))
            self.causal = _close(one, two)
            if self.causal and self._fits(half + 1):
                self._check_cached(ids, other, half)
        if not self.causal:
            raise StateError(
                "generate: the model's logits at a position change with the tokens after it, so "
                "its attention is not causal; legal: causal language models. Way out: use forward"
            )

    def _check_cached(self, ids: torch.Tensor, other: torch.Tensor, half: int) -> None:
        """Drop the cache where a forward that goes on gives other logits than a whole one.
        Collective."""
        width = ids.shape[1]
        ends = torch.full((self.rows,), width)
        whole = self._at(ids, ends, torch.full((self.rows,), half), width)
        self._cached_at(other, ends, half - 1, width, all_tokens=True)
        if not _close(whole, self._cached_at(ids, ends, half, width, all_tokens=False)):
            self.cached = None
            if launch.rank() == 0:
                log.info("generate: without a cache, which other operators than attention need")


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return bool((one - two).abs().max() <= CLOSE * one.abs().max())


def logits_and_ids(traced: TracedModel) -> tuple[str, str]:
    """The value of the logits, and the path of the ids that they are made of."""
    graph = traced.graph
    known = {} if graph.outputs is None else graph.outputs.known
    candidates = {p: v for p, v in known.items() if len(graph.values[v].shape) == 3}
    logits = candidates.get("logits") or (
        next(iter(candidates.values())) if len(candidates) == 1 else None
    )
    read = graph.behind([logits] if logits else [])
    needed = {name: graph.inputs[name] for name in graph.inputs if name in read}
    ids = [name for name, path in needed.items() if path != MASK]
    if logits and len(ids) == 1:
        meta, shape = graph.values[ids[0]], graph.values[logits].shape
        is_ids = not meta.dtype.is_floating_point and len(meta.shape) == 2
        if is_ids and shape[:2] == meta.shape and ids[0] in graph.batched:
            return logits, needed[ids[0]]
    inputs = sorted(needed.values()) or sorted(graph.inputs.values())
    raise StateError(
        f"generate: the model makes {sorted(known)} of the inputs {inputs}; "
        "legal: a causal language model, whose output `logits` [rows, length, classes] is made of "
        "ids [rows, length] and of nothing else but an attention_mask. Way out: plan it with these "
        "inputs alone (and labels), or use forward"
    )


def _check(prompts: object, max_new_tokens: object, tokens: Mapping[str, object]) -> None:
    """Raise `BatchError` for what are no prompts, and for numbers that can't be."""
    if not isinstance(prompts, torch.Tensor):
        what = f"are a {type(prompts).__name__}, {shown(prompts)}"
    elif prompts.dim() != 2 or 0 in prompts.shape or prompts.is_meta or unusual_kind(prompts):
        what = f"are {prompts.dtype} of shape {tuple(prompts.shape)} on {prompts.device}"
    elif prompts.is_floating_point() or prompts.is_complex() or prompts.dtype is torch.bool:
        what = f"are of {prompts.dtype}"
    else:
        what = ""
    if what:
        raise BatchError(
            what,
            place="generate: input_ids",
            legal="a tensor of ids, integers [rows, length]",
            way_out="tokenize the prompts, padded on the right",
        )
    numbers = {"max_new_tokens": (max_new_tokens, 1)}
    numbers |= {f"{n}_token_id": (x, -MAX_COUNT) for n, x in tokens.items() if x is not None}
    for name, (number, least) in numbers.items():
        if type(number) is not int or not least <= number <= MAX_COUNT:
            raise BatchError.refused(
                f"generate: {name}",
                number,
                legal="an integer from 1" if least > 0 else "the integer of a token, or None",
                way_out="give one",
            )


def _digest(prompts: torch.Tensor) -> tuple[Any, ...]:
    ids = prompts.to("cpu", torch.int64).contiguous()
    return tuple(ids.shape), zlib.crc32(ids.numpy().tobytes())


def _check_same(of_ranks: Sequence[Any]) -> None:
    """Raise `StateError`, on all ranks, where one asks for something else than rank 0."""
    if unlike := [rank for rank, of_rank in enumerate(of_ranks) if of_rank != of_ranks[0]]:
        raise StateError(
            f"ranks {unlike} give other prompts or arguments than rank 0",
            place="generate",
            legal="the same on every rank",
            way_out="read the prompts on rank 0 and broadcast them",
        )


def _lengths(prompts: torch.Tensor, pad: int | None) -> torch.Tensor:
    """The tokens of each prompt before its padding."""
    if pad is None:
        return torch.full((len(prompts),), prompts.shape[1])
    real = (prompts != pad).cpu()
    lengths = prompts.shape[1] - real.flip(1).long().argmax(1)
    if not real.any(1).all():
        raise StateError(
            "generate: a prompt is all padding; legal: prompts of one token at least, padded on "
            "the right"
        )
    return lengths


# --- inputs ---------------------------------------------------------------------------------------

# A batch for a forward: what only the loss reads may be missing, and is made up.


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A batch that has every input, its own `rows`, and whether some input was `invented`."""

    batch: Any
    rows: int
    invented: bool


def completed(batch: Any, traced: TracedModel, values: Collection[str], *, rows: int) -> Completed:
    """The batch with zeros for what is missing and the `values` of the graph are not made of; then
    also with as many rows as planned where it has fewer, its first repeated."""
    graph = traced.graph
    leaves = {path: x for path, x in input_leaves(batch)[0] if x is not None}
    sized = (leaves[p] for p in traced.batched if isinstance(leaves.get(p), torch.Tensor))
    row_count = next((len(x) for x in sized if x.dim()), rows)
    needed = {graph.inputs[name] for name in graph.behind(values) if name in graph.inputs}
    missing = [n for n, path in graph.inputs.items() if path not in leaves and path not in needed]
    if not missing or any("." in graph.inputs[name] for name in missing):
        return Completed(batch=batch, rows=row_count, invented=False)
    for name in missing:
        path, meta = graph.inputs[name], graph.values[name]
        shape = _shape(traced, name, leaves)
        if name in graph.batched:
            shape[0] = row_count
        batch = _with(batch, path, torch.zeros(shape, dtype=meta.dtype))
    if row_count < rows and not traced.use.meetings:
        batch = _repeated(batch, traced.batched, rows)
    return Completed(batch=batch, rows=row_count, invented=True)


def _shape(traced: TracedModel, name: str, leaves: Mapping[str, Any]) -> list[int]:
    """The shape of a missing input beside those given: a dim is as long as theirs that is the same
    factor, or was planned as long in the same place; else as planned."""
    graph, dims = traced.graph, traced.factors.dims
    sizes = list(graph.values[name].shape)
    alike: list[tuple[int, int, int]] = []  # how sure, dim, size
    for other, path in graph.inputs.items():
        if not isinstance(x := leaves.get(path), torch.Tensor):
            continue
        planned = graph.values[other].shape
        for d, atoms in enumerate(dims[name]):
            alike += [(2, d, x.shape[k]) for k, dim in enumerate(dims[other]) if dim == atoms]
            if planned[d : d + 1] == (sizes[d],):
                alike.append((1, d, x.shape[d]))
    for _, d, size in sorted(alike):
        sizes[d] = size
    return sizes


def _with(batch: Any, path: str, x: torch.Tensor) -> Any:
    """A batch with one more entry: by name, or the next one."""
    if isinstance(batch, Mapping):
        return {**batch, path: x}
    entries = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    at = int(path)
    return (*entries[:at], x, *entries[at + 1 :])


def _repeated(batch: Any, batched: Collection[str], rows: int) -> Any:
    """A batch of so many rows, its first repeated at the end."""
    leaves, spec = input_leaves(batch)

    def more(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x[:1].expand(rows - len(x), *x.shape[1:])])

    return pytree.tree_unflatten([more(x) if p in batched else x for p, x in leaves], spec)

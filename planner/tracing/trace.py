"""Model -> Graph, by `torch.export`; with `convert.py` the one adapter to torch's tracing
internals.

The user's model is never touched and no weight is materialised: a copy is traced whose tensors are
fake (shapes on the CPU, no memory), in the train/eval mode the user set, for one micro-batch of
`batch_size` rows. The graph is ATen before decomposition (`linear`, `layer_norm`,
`scaled_dot_product_attention` stay whole) and ends in the scalar loss.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright.costmodel.graph import Graph
from meshwright.planner.batch import _plain_batch, batch_rows, input_leaves, split_batch
from meshwright.planner.errors import TraceError, Untraceable, around
from meshwright.planner.tracing.context import explain, quiet, recorded_gradients, unvalidated
from meshwright.planner.tracing.convert import convert
from meshwright.planner.tracing.dtypes import Way, ways, writes_floats
from meshwright.planner.tracing.leaves.record import Leaves
from meshwright.planner.tracing.similar.stand_ins import Irregular, StandIns
from meshwright.planner.tracing.transformers.adapter import adapted
from meshwright.planner.tracing.user_module.fake_copy import weightless
from meshwright.planner.tracing.user_module.hooks import check_hooks
from meshwright.planner.tracing.user_module.similar_layers import Alike, find_alike
from meshwright.planner.tracing.user_module.sources import user_frame
from meshwright.planner.tracing.user_module.untraceable import further, place_of
from meshwright.planner.tracing.values.fx_nodes import mixed_operands

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# --- the batch -----------------------------------------------------------------------------------


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """One clear error where the batch does not fit the model's forward."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = sorted(kwargs) if kwargs else f"{len(args)} positional"
        raise ValueError(
            f"example_inputs do not fit {type(model).__name__}.forward: {error}. Given: {given}; "
            f"its parameters are {list(signature.parameters)}. Name the entries of the dict after "
            "them, or pass a tuple in their order; targets go with a loss_fn of (output, targets)"
        ) from None


# --- the loss that is traced --------------------------------------------------------------------


class _Loss(nn.Module):
    """`batch -> loss` as a module of flat tensor arguments."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        example: Any,
        stand_ins: StandIns,
        kept: Leaves,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.stand_ins, self.kept = stand_ins, kept
        named, self.spec = input_leaves(example)
        self.leaves = [leaf for _, leaf in named]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        batch = pytree.tree_unflatten(leaves, self.spec)
        args, kwargs, targets = split_batch(batch, self.loss_fn)
        with self.kept.recording():
            with _written_buffers(self.model), self.stand_ins.watched():
                output = self.model(*args, **kwargs)
            loss = self.loss_fn(output, *targets) if self.loss_fn else _own_loss(output)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss
        maker = "loss_fn" if self.loss_fn else "the model"
        what = _described(output if loss is None and not self.loss_fn else loss)
        raise TraceError(
            f"{maker} gives {what} where a scalar loss is needed; pass loss_fn=, labels among the "
            "inputs so that the model computes its loss, or the sum of several losses"
        )


@contextmanager
def _written_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers that the forward assigns anew (`self.ema = ...`) are written to in place at its end:
    export sees that, and not the assignment."""
    owned = [(m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    yield
    for module, name, before in owned:
        after = getattr(module, name)
        if after is not before:
            with torch.no_grad():
                before.copy_(after)
            setattr(module, name, before)


def _own_loss(output: Any) -> Any:
    """The loss in a model's output: its `loss`, the first of a tuple, or the output itself."""
    if isinstance(output, Mapping):
        return output.get("loss")
    loss = getattr(output, "loss", output)
    return loss[0] if isinstance(loss, (tuple, list)) and loss else loss


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {list(output)}"
    return f"a {type(output).__name__}"


# --- tracing -------------------------------------------------------------------------------------


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
    repeats: bool = True,
) -> Graph:
    """Trace forward and loss for one micro-batch of `batch_size` rows (default: the example's).

    With `repeats`, only some of the layers that are built alike are traced, where that gives the
    graph of a full trace up to the names of values. Raises `ValueError` for a batch that does not
    fit, and `TraceError` with the user's source line where neither `torch.export` nor
    `torch.fx.symbolic_trace` can follow the model.
    """
    if precision not in DTYPES:
        raise ValueError(f"precision={precision!r}; legal: {', '.join(DTYPES)}")
    rows = batch_rows(example_inputs)
    wanted = rows if batch_size is None else batch_size
    if wanted < 1:
        raise ValueError(f"batch_size={batch_size!r}; legal: an integer from 1")
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ValueError(
            "loss_fn has parameters of its own; make it a part of the model, which then returns "
            "the loss"
        )
    args, kwargs, _ = split_batch(_plain_batch(example_inputs), loss_fn)
    _check_call(model, args, kwargs)
    check_hooks(model)

    fakes = FakeTensorMode()
    dtype = DTYPES[precision]
    example, inputs = _fake_batch(example_inputs, fakes, dtype, rows, wanted)

    kept: dict[str, str] = {}

    def traced(groups: Sequence[Alike]) -> Graph:
        def make(cast_buffers: bool) -> _Loss:
            def like(t: torch.Tensor, d: torch.dtype) -> torch.Tensor:
                with fakes:
                    return torch.empty(t.shape, dtype=d)

            def fake(module: Any, replaced: Mapping[int, Any]) -> Any:
                return weightless(module, dtype, like, cast_buffers=cast_buffers, replaced=replaced)

            stand_ins = StandIns(model, groups)
            loss = fake(loss_fn, {}) if isinstance(loss_fn, nn.Module) else loss_fn
            copied = fake(model, stand_ins.memo())
            leaves = Leaves(model, kept, wanted / rows)
            leaves.dress(copied, tuple(stand_ins.blank))
            stand_ins.dress(copied)
            return _Loss(copied, loss, example, stand_ins, leaves)

        program, module, notes = _export(make, ways(dtype, short=bool(groups)))
        return convert(
            program,
            module=module,
            model=model,
            loss_fn=loss_fn,
            inputs=inputs,
            rows=wanted,
            notes=(*notes, *module.kept.notes()),
            groups=groups,
            leaves=module.kept.found,
        )

    first: Untraceable | None = None
    while True:
        try:
            return (_shortened(model, traced) if repeats else None) or traced(())
        except Untraceable as error:
            first = first or error
            more = further(model, kept, error)
            if not more:
                raise first if first is error else _no_leaf(first, error) from None
            kept = more


def _no_leaf(first: Untraceable, last: Untraceable) -> TraceError:
    return TraceError(f"{first}\nAs one node of the graph it won't do either: {last}")


def _shortened(model: nn.Module, traced: Callable[[Sequence[Alike]], Graph]) -> Graph | None:
    """The graph by way of layers that are alike; None where only a full trace can tell."""
    try:
        groups = find_alike(model)
        return traced(groups) if groups else None
    except Exception:  # a full trace is the judge of whatever went wrong, and gives the message
        log.debug("traced in full", exc_info=True)
        return None


def _fake_batch(
    example_inputs: Any, fakes: FakeTensorMode, dtype: torch.dtype, rows: int, wanted: int
) -> tuple[Any, list[tuple[str, bool]]]:
    """The batch as fake tensors of `wanted` rows, and per tensor its path and whether it has
    rows."""
    named, spec = input_leaves(example_inputs)
    inputs: list[tuple[str, bool]] = []
    leaves: list[Any] = []
    for path, leaf in named:
        if not isinstance(leaf, torch.Tensor):
            leaves.append(leaf)
            continue
        batched = leaf.dim() > 0 and leaf.shape[0] == rows
        shape = (wanted, *leaf.shape[1:]) if batched else tuple(leaf.shape)
        inputs.append((path, batched))
        with fakes:
            cast = dtype if leaf.is_floating_point() else leaf.dtype
            leaves.append(torch.empty(shape, dtype=cast))
    return pytree.tree_unflatten(leaves, spec), inputs


def _export(
    make: Callable[[bool], _Loss], tried: Sequence[Way]
) -> tuple[torch.export.ExportedProgram, _Loss, tuple[str, ...]]:
    """The exported loss, by the first way that works, and notes on the way taken."""
    first: TraceError | None = None
    for way in tried:
        wrapper = make(way.buffers)
        if way.symbolic and wrapper.kept.classes:
            break  # it would look into leaves
        tensors = tuple(leaf for leaf in wrapper.leaves if isinstance(leaf, torch.Tensor))
        try:
            with (
                quiet(),
                torch.enable_grad(),
                adapted(wrapper.model),
                recorded_gradients(),
                unvalidated(),
                way.casts(),
            ):
                if way.symbolic:
                    wrapper.model = _symbolic(wrapper)
                program = torch.export.export(wrapper, tensors, strict=False)
                wrapper.stand_ins.check()
        except (TraceError, Irregular):
            raise
        except Exception as error:  # whatever export raises, another way may work
            log.debug("tracing failed", exc_info=True)
            first = first or _failure(error, wrapper)
        else:
            wrapper.kept.undress()
            mixed_at = mixed_operands(program)
            if mixed_at is None and not (way.buffers and writes_floats(program)):
                return program, wrapper, (way.note,) if way.note else ()
            first = first or _dtype_error(mixed_at or "an unknown place")
    assert first is not None
    raise first


def _failure(error: Exception, wrapper: _Loss) -> Untraceable:
    why = f"{user_frame(traceback.extract_tb(error.__traceback__))} can't be traced"
    made = Untraceable(explain(error), places=around(place_of(error, wrapper.model)), why=why)
    made.__cause__ = error
    return made


def _dtype_error(place: str) -> TraceError:
    return TraceError(
        f"the model can't run in this precision: at {place}; cast with .to(weight.dtype), or "
        "choose precision='fp32'"
    )


def _symbolic(wrapper: _Loss) -> fx.GraphModule:
    """The model as `torch.fx.symbolic_trace` sees it, less what its output does not need."""
    batch = pytree.tree_unflatten(wrapper.leaves, wrapper.spec)
    args, kwargs, _ = split_batch(batch, wrapper.loss_fn)
    signature = inspect.signature(wrapper.model.forward)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    fixed = {
        name: value
        for name, value in bound.arguments.items()
        if value is None or isinstance(value, (bool, int, float, str))
    }
    module = fx.symbolic_trace(wrapper.model, concrete_args=fixed or None)
    module.graph.eliminate_dead_code()
    module.recompile()
    generated = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # generated code renames arguments
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return generated(*bound.args, **bound.kwargs)

    module.forward = forward
    return module

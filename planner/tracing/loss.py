"""The module that is exported: model and loss as one function of flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.planner.batch import path_of, split_batch
from meshwright.planner.errors import TraceError
from meshwright.planner.tracing.context import generators_untouched
from meshwright.planner.tracing.fake_batch import FakeBatch, tensor_of
from meshwright.planner.tracing.leaves import LeafRecorder
from meshwright.planner.tracing.similar import StandIns
from meshwright.planner.tracing.user_module import Held, Key, Watch, attributes_read, holders_of
from meshwright.planner.tracing.values import share_memory


class LossModule(nn.Module):
    """Tensors of a batch, in order -> scalar loss, or the quotient of a sum and a count. `model` is
    a copy of the user's in fake tensors, in which `stand_ins` and `leaf_recorder` have replaced
    forwards; `loss_fn` None: the model's output has the loss."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        batch: FakeBatch,
        stand_ins: StandIns,
        leaf_recorder: LeafRecorder,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.batch = batch
        self.stand_ins = stand_ins
        self.leaf_recorder = leaf_recorder
        self.watch = Watch({**holders_of(model, "model"), **holders_of(loss_fn, "loss_fn")})
        self._read_of_model = attributes_read(leaf_recorder.model, loss_fn)
        self._last = _Last()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The loss of one forward, then the tensors among the leaves of the model's output, as
        `returned` says, then those whose values were asked for. Attributes that it changes are
        noted by `watch`, and put back. Raises TraceError for no loss."""
        before = Held(self.watch.holders)
        loss, output = self.once(*tensors)
        after = Held(self.watch.holders)
        if others := before.rebuilt(after):
            key = min(others)
            raise TraceError(
                f"at {self.watch.place(key)} the forward replaces {'.'.join(key)!r}, a parameter "
                "or a module; make it before planning, and change its values between steps"
            )
        self.watch.changed = before.changed(after)
        before.restore()
        self._last.returned, outputs = Returned.of(output, loss)
        asked = [*self.batch.known.asked.values()] if self.batch.known else []
        self._last.known = [x.value for x in asked]
        return loss, *outputs, *(x.copy for x in asked)

    @property
    def returned(self) -> Returned:
        """The output of the last forward."""
        return self._last.returned

    @property
    def known(self) -> list[torch.Tensor]:
        """The values that the last forward asked for, of its last results."""
        return self._last.known

    def attribute_of(self, tensor: torch.Tensor) -> Key | None:
        """The attribute of a module that holds a tensor, or one of its memory; None without."""
        for path, holder in self.watch.holders.items():
            for name, value in vars(holder).items() if isinstance(holder, nn.Module) else ():
                if isinstance(value, torch.Tensor) and share_memory(value, tensor):
                    return path, name
        return None

    def once(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The loss and the model's output of one forward, from the attributes that the last one
        left."""
        args, kwargs, targets = split_batch(self.batch.filled(tensors), self.loss_fn)
        if self.batch.known is not None:
            self.batch.known.begin(tensors)
        before = Held(self.watch.holders) if self._read_of_model else None
        drawn = nullcontext() if self.leaf_recorder.classes else generators_untouched()
        with self.leaf_recorder.recording(), self.watch.recording(), drawn:
            with _buffers_in_place(self.model), self.stand_ins.watched():
                output = self.model(*args, **kwargs)
            if before is not None:
                self._check_read_of_model(before)
            maker = "loss_fn" if self.loss_fn else "the model"
            made_by = _with_lines(self.loss_fn)
            with _buffers_in_place(self.loss_fn):
                loss = made_by(output, *targets) if self.loss_fn else _loss_in(output)
            if self.loss_fn and _is_pair(loss):
                _check_real(maker, *loss)
                loss = loss[0] / loss[1]
        loss = tensor_of(loss)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            _check_real(maker, loss)
            return loss, output
        what = _described(output if loss is None and not self.loss_fn else loss)
        raise TraceError(
            f"{maker} gives {what} where a scalar loss is needed; pass loss_fn=, labels among the "
            "inputs so that the model computes its loss, or the sum of several losses; a loss_fn "
            "may return (sum, count)"
        )

    def _check_read_of_model(self, before: Held) -> None:
        """Raise `TraceError` for a loss that reads what the forward just left in the model."""
        changed = before.changed(Held(self.watch.holders))
        left = sorted(".".join(key) for key in changed if key[1] in self._read_of_model)
        if left:
            raise TraceError(
                f"the loss reads {left[0].removeprefix('model.')!r} of the model beside its "
                "output, which the forward sets: a plan keeps none of it between the two. Return "
                "it from the forward, too (return output, extra)",
                place="loss_fn",
            )


@dataclass(frozen=True, slots=True)
class Returned:
    """Output of a model: the paths of its leaves, the structure `spec`, and of each leaf whether it
    is a tensor ("tensor"), the loss itself ("loss"), or neither (None). Other than tuples, lists,
    dicts and mappings of a library everything is a leaf."""

    paths: tuple[str, ...]
    kinds: tuple[str | None, ...]
    spec: Any

    @staticmethod
    def of(output: Any, loss: torch.Tensor) -> tuple[Returned, list[torch.Tensor]]:
        """And the leaves that are tensors, but for the loss, in order."""
        leaves, spec = pytree.tree_flatten_with_path(
            output, is_leaf=lambda x: not isinstance(x, (tuple, list, Mapping))
        )
        kinds = tuple(
            "loss" if x is loss else "tensor" if isinstance(x, torch.Tensor) else None
            for _, x in leaves
        )
        tensors = [x for (_, x), kind in zip(leaves, kinds, strict=True) if kind == "tensor"]
        return Returned(tuple(path_of(path) for path, _ in leaves), kinds, spec), tensors


def _with_lines(function: Any) -> Any:
    """A plain function under the name of which export records the frames, so that operators of a
    loss know their line."""
    if isinstance(function, partial):
        return partial(_with_lines(function.func), *function.args, **function.keywords)
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace(co_name="forward")
    renamed = FunctionType(
        code, function.__globals__, None, function.__defaults__, function.__closure__
    )
    renamed.__kwdefaults__ = function.__kwdefaults__
    return renamed


class _Last:
    """The last forward's output: an export resets a module's attributes, but not this object's."""

    returned: Returned
    known: list[torch.Tensor]


@contextmanager
def _buffers_in_place(model: Any) -> Iterator[None]:
    """Context at whose end buffers that the forward assigned anew (`self.ema = ...`) are the old
    tensors again, with the new values written to them: export sees writes, and no assignment."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    buffers = [
        (m, path, name, b) for path, m in modules for name, b in m.named_buffers(recurse=False)
    ]
    yield
    for module, path, name, before in buffers:
        after = getattr(module, name)
        if after is not before:
            _check_same_kind(f"{path}.{name}".lstrip("."), before, after)
            with torch.no_grad():
                before.copy_(after)
            setattr(module, name, before)


def _check_same_kind(name: str, before: torch.Tensor, after: Any) -> None:
    """Raise TraceError where a buffer becomes something that its old memory can't hold."""
    tensor = isinstance(after, torch.Tensor)
    kind = before.shape, before.is_floating_point()
    if tensor and (after.shape, after.is_floating_point()) == kind:
        return
    now = (tuple(after.shape), after.dtype) if tensor else after
    raise TraceError(
        f" becomes {now}; a planned model keeps its buffers' shapes and dtypes",
        place=f"the forward: buffer {name!r}, of {tuple(before.shape)} and {before.dtype}",
        legal="its shape and dtype",
        way_out=(
            "Ways out: register it as the forward leaves it; where it has the rows of a batch, "
            "keep one row of it, or pass it in the batch"
        ),
    )


def _loss_in(output: Any) -> Any:
    """The loss in a model's output: its `loss`, the first of a tuple, or the output itself."""
    if _is_pair(output):
        raise TraceError(
            "the model gives two scalars, which may be a loss and a number beside it, or a sum and "
            "a count to divide it by; pass loss_fn=lambda output: output[0] for the one, "
            "loss_fn=lambda output: output for the other"
        )
    if isinstance(output, Mapping):
        return output.get("loss")
    loss = getattr(output, "loss", output)
    return loss[0] if isinstance(loss, (tuple, list)) and loss else loss


def _check_real(maker: str, loss: Any, count: Any = 1) -> None:
    """Raise TraceError for a loss without a gradient by its dtype, and for a complex count."""
    complex_count = isinstance(count, torch.Tensor) and count.is_complex()
    if loss.dtype.is_floating_point and not complex_count:
        return
    what, dtype = ("count", count.dtype) if complex_count else ("loss", loss.dtype)
    legal = "real, whole or floating" if complex_count else "float32, float64, bfloat16, float16"
    raise TraceError(
        f"{maker} gives a {what} of {dtype}, which nothing can be trained on; legal: {legal}. Way "
        "out: of a complex number take .abs() or .real; keep counts, argmax and comparisons out of "
        "the loss, as they have no gradient"
    )


def _is_pair(loss: Any) -> bool:
    """Whether it is two scalars of which the first may be trained on: a sum and a count."""
    if not isinstance(loss, (tuple, list)) or len(loss) != 2:
        return False
    first, second = loss
    counts = isinstance(second, int | float)
    if isinstance(second, torch.Tensor):
        counts = second.numel() == 1 and not second.requires_grad
    return counts and isinstance(first, torch.Tensor) and first.numel() == 1


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {list(output)}"
    return f"a {type(output).__name__}"

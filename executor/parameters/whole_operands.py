"""Sharded tensors in code that knows whole ones: masks, slices, averages made before planning.

torch refuses an operator on a DTensor and a plain tensor, lets writes to a slice of a sharded dim
go to a copy, and has no rule for many operators. From now on (`act_as_whole`) each of these acts
on parameters and gradients as on one device:

    a plain tensor beside a DTensor   is whole: each rank reads its part of it
    x[index] = value                  each rank writes the elements that it holds
    x[:n].zero_(), x.t().mul_(2)      what is written to a copy of a view is written to x, too
    anything else torch refuses       runs on whole tensors, on every rank, and what it wrote is
                                      written to each rank's part

The last two gather whole tensors, and are collective as all reads of DTensors are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

from meshwright.executor.errors import StateError

Function = Callable[..., Any]
T = torch.Tensor

# functions of elements, beside which torch takes a plain tensor as one that every rank has whole
_POINTWISE = frozenset((
    "add", "addcdiv", "addcmul", "and", "bitwise_and", "bitwise_or", "clamp", "clamp_max",
    "clamp_min", "copy", "div", "eq", "ge", "gt", "le", "lerp", "logical_and", "logical_or", "lt",
    "masked_fill", "maximum", "minimum", "mul", "ne", "or", "pow", "sub", "truediv", "true_divide",
    "where",
))  # fmt: skip
# that return a view of their first argument
_VIEWS = frozenset((
    "__getitem__", "chunk", "diagonal", "expand", "flatten", "movedim", "narrow", "permute",
    "reshape", "select", "split", "squeeze", "swapaxes", "t", "tensor_split", "transpose",
    "unbind", "unflatten", "unfold", "unsqueeze", "view",
))  # fmt: skip
# that draw numbers of the shape of their first argument
_DRAWS = frozenset((
    "bernoulli", "bernoulli_", "cauchy_", "dropout", "exponential_", "geometric_", "log_normal_",
    "multinomial", "normal_", "poisson", "rand_like", "randint_like", "randn_like", "random_",
    "uniform_",
))  # fmt: skip
_NORMS = frozenset(("norm", "vector_norm", "matrix_norm"))
_GRAD, _DATA = vars(torch._C.TensorBase)["grad"], vars(torch._C.TensorBase)["data"]
PROPERTY = type(_GRAD.__get__)  # getters and setters of attributes, most of what is called


@cache
def act_as_whole() -> None:
    """From now on DTensors act as whole tensors in this process."""
    cls: Any = DTensor
    cls.__torch_function__ = classmethod(_function)


def whole_of(x: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a DTensor, collective among its ranks; a plain tensor itself."""
    if not isinstance(x, DTensor):
        return x
    kind = x.device_mesh.device_type
    there: Any = x if x.device.type == kind else x.to(kind)  # NCCL gathers nothing of the host's
    full: torch.Tensor = there.full_tensor()
    return full


def part_like(x: DTensor, whole: torch.Tensor) -> DTensor:
    """A whole tensor, which all ranks have, laid out as `x`."""
    return _laid_out(whole, x, x.placements)


def _laid_out(whole: torch.Tensor, x: DTensor, placements: Iterable[Any]) -> DTensor:
    replicated = DTensor.from_local(whole, x.device_mesh, _everywhere(x), run_check=False)
    return replicated.redistribute(placements=tuple(placements))


def _everywhere(x: DTensor) -> list[Replicate]:
    """The placements of a tensor that each rank of the mesh of `x` has whole."""
    return [Replicate()] * x.device_mesh.ndim


def _function(
    cls: type,
    func: Function,
    types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """`__torch_function__` of DTensors."""
    kwargs = kwargs or {}
    if isinstance(func, PROPERTY):
        return attribute(func, args)
    with torch._C.DisableTorchFunctionSubclass():
        if func is T.__iter__:
            func, args = T.unbind, (*args, 0)
            return iter(_marked(args, func, kwargs, func(*args)))
        if func is T.__setitem__ and _written(*args):
            return None
        result = _run(func, args, kwargs)
        if func.__name__ in _NORMS and isinstance(result, DTensor):
            return all_reduced(result)
        if func.__name__ in _VIEWS:
            return _marked(args, func, kwargs, result)
        if _writes(func):
            _write_back(args[0] if args else None)
        return result


def attribute(func: Function, args: tuple[Any, ...]) -> Any:
    """Read an attribute, or set one: a plain tensor as its gradient or data is a whole one."""
    with torch._C.DisableTorchFunctionSubclass():
        if len(args) == 1 or func not in (_GRAD.__set__, _DATA.__set__):
            return func(*args)
        x, whole = args
        data = func == _DATA.__set__
        given = isinstance(whole, torch.Tensor) and (data or _is_plain(whole))
        if not (isinstance(x, DTensor) and given and x.shape == whole.shape):
            return func(x, whole)
        whole = whole.detach()
        part = (
            part_like(x, whole) if _is_plain(whole) else whole.redistribute(placements=x.placements)
        )
        if not data:
            return func(x, part)
        x._local_tensor.data = part._local_tensor  # what was there stays with who refers to it
        return None


def _run(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator, as DTensors run it if they do."""
    if func.__name__ in _DRAWS:  # of the numbers that one device draws
        return _on_whole(func, args, kwargs)
    if func.__name__.startswith("_fused_"):  # steps of optimizers, element by element
        return func(*tree_map_only(DTensor, _local, args), **tree_map_only(DTensor, _local, kwargs))
    first = args[0] if args else None
    whole = any(_is_plain(x) and x.dim() for x in _tensors(args, kwargs))
    to_plain = _writes(func) and _is_plain(next(iter(_tensors((first,), {})), None))
    if whole or to_plain:
        name = func.__name__.removeprefix("_foreach_").strip("_")
        pointwise = {name, name.removeprefix("i"), name.removeprefix("r")} & _POINTWISE
        if to_plain or not pointwise:
            return _on_whole(func, args, kwargs)
        with implicit_replication():
            return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        # nothing has run then, on any rank
        words = "sharding strategy", "placement changes", "Sharding propagation failed", "got mixed"
        if not any(word in str(error) for word in words):
            raise
    return _on_whole(func, args, kwargs)


def _on_whole(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator on whole tensors; what it writes to DTensors is written to their
    parts, and a result of the shape of one is laid out as that."""
    sharded = {id(x): x for x in _tensors(args, kwargs) if isinstance(x, DTensor)}
    whole = {key: whole_of(x) for key, x in sharded.items()}
    versions = {key: x._version for key, x in whole.items()}

    def replaced(x: Any) -> Any:
        return tree_map_only(DTensor, lambda t: whole[id(t)], x)

    result = func(*replaced(args), **replaced(dict(kwargs)))
    written = {}
    for key, x in sharded.items():
        if whole[key]._version != versions[key]:
            written[id(whole[key])] = x
            with torch.no_grad():
                x._local_tensor.copy_(part_like(x, whole[key])._local_tensor)
    given = {id(x) for x in _tensors(args, kwargs)}

    def back(x: torch.Tensor) -> torch.Tensor:
        if id(x) in written or id(x) in given:
            return written.get(id(x), x)
        first = next(iter(sharded.values()))
        if func.__name__ in _VIEWS:  # to which may be written
            return DTensor.from_local(x, first.device_mesh, _everywhere(first), run_check=False)
        like = next((s for s in sharded.values() if s.shape == x.shape), None)
        return x if like is None else part_like(like, x)

    return tree_map_only(torch.Tensor, back, result)


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors among arguments, and in lists there."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from (t for t in x if isinstance(t, torch.Tensor))


def _local(x: DTensor) -> torch.Tensor:
    return x._local_tensor


def all_reduced(x: DTensor) -> DTensor:
    """A DTensor with no partial placement. Collective where it has one."""
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements) if placements != [*x.placements] else x


def _is_plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor)


# --- writes to views ------------------------------------------------------------------------------


def _marked(args: tuple[Any, ...], func: Function, kwargs: Mapping[str, Any], result: Any) -> Any:
    """The results of a view; one that is a copy, as the viewed dim is sharded, knows of what."""
    x = args[0]
    several = isinstance(result, list | tuple)
    for k, view in enumerate(result if several else [result]):
        if isinstance(x, DTensor) and isinstance(view, DTensor) and view is not x:
            of, here = (t._local_tensor.untyped_storage()._cdata for t in (x, view))
            if of != here or hasattr(x, "_view_of"):
                vars(view)["_view_of"] = x, func, args[1:], kwargs, k if several else None
    return result


def _writes(func: Function) -> bool:
    """Whether a function writes to its first argument."""
    name = func.__name__
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name[3:-2] + "_" in dir(T))
    return name.endswith("_")


def _write_back(written: Any) -> None:
    """Write what was written to a copy of a view to what it is a view of. Collective then."""
    for x in written if isinstance(written, list | tuple) else (written,):
        while isinstance(x, DTensor) and hasattr(x, "_view_of"):
            base, func, args, kwargs, k = x._view_of
            with torch.no_grad():
                whole, values = whole_of(base.detach()), whole_of(x.detach())
                views = func(whole, *tree_map_only(DTensor, whole_of, args), **kwargs)
                (views if k is None else views[k]).copy_(values)
                base._local_tensor.copy_(part_like(base, whole)._local_tensor)
            x = base


# --- writes to elements ---------------------------------------------------------------------------

Rows = list[tuple[torch.Tensor, bool]]  # by dim: numbers along it, and whether the dim is dropped


def _written(x: Any, index: Any, value: Any) -> bool:
    """Whether `x[index] = value` is done, each rank its own elements with nothing gathered: for an
    index of slices, numbers and at most one list of numbers or flags, or a mask of all and a
    number."""
    if not isinstance(x, DTensor) or hasattr(x, "_view_of"):
        return False
    if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise StateError(
            "requires grad, and elements of it are written with gradients on",
            place="a parameter",
            way_out="write inside `with torch.no_grad():`, or to .data or .grad",
        )
    value = whole_of(value) if isinstance(value, DTensor) else value
    single = not isinstance(value, torch.Tensor) or not value.dim()
    masks = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    if masks and single and index.shape == x.shape:
        with implicit_replication():
            x.masked_fill_(index, value)
        return True
    rows = _rows(x.shape, index)
    if rows is None or any(p.is_partial() for p in x.placements):
        return False
    local = x._local_tensor
    held = [_held(x, dim, chosen) for dim, (chosen, _) in enumerate(rows)]
    if not single:
        shape = [len(chosen) for chosen, dropped in rows if not dropped]
        value = value.to(local.device, local.dtype).expand(shape)
        value = value.reshape([len(chosen) for chosen, _ in rows])
        value = value[_index([there for _, there in held], local.device)]
    local[_index([here for here, _ in held], local.device)] = value
    return True


def _index(numbers: list[torch.Tensor], device: torch.device) -> tuple[Any, ...]:
    """The index of all combinations of numbers along each dim: slices where they are in a row."""
    ends = [(int(n[0]), int(n[-1]) + 1) if len(n) else (0, 0) for n in numbers]
    if all(torch.equal(n, torch.arange(*end)) for n, end in zip(numbers, ends, strict=True)):
        return tuple(slice(*end) for end in ends)
    return torch.meshgrid(*(n.to(device) for n in numbers), indexing="ij")


def _rows(shape: torch.Size, index: Any) -> Rows | None:
    """Numbers that an index selects along each dim; None of one that is no product of such."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, torch.Tensor | list)]:
        at = next(k for k, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    lists = [k for k, part in enumerate(parts) if isinstance(part, torch.Tensor | list)]
    for k in lists:
        numbers = whole_of(parts[k]) if isinstance(parts[k], torch.Tensor) else parts[k]
        parts[k] = torch.as_tensor(numbers).cpu()
    odd = any(part is None or isinstance(part, bool) for part in parts)
    if odd or len(parts) != len(shape) or len(lists) > 1 or any(parts[k].dim() != 1 for k in lists):
        return None
    chosen = [torch.arange(size)[part] for size, part in zip(shape, parts, strict=True)]
    return [(numbers.reshape(-1), not numbers.dim()) for numbers in chosen]


def _held(x: DTensor, dim: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of `chosen` numbers along a dim in this rank's part, of those that are there, and
    their places in `chosen`."""
    cut = [_along_first(p) if getattr(p, "dim", None) == dim else Replicate() for p in x.placements]
    size = x.shape[dim]
    here = _laid_out(torch.arange(size, device=x.device), x, cut)._local_tensor.cpu()
    places = torch.full((size,), -1)
    places[here] = torch.arange(len(here))
    found = places[chosen]
    there = (found >= 0).nonzero()[:, 0]
    return found[there], there


def _along_first(placement: Any) -> Any:
    """The placement of a shard, along dim 0."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)

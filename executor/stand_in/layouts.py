"""The layouts that DTensor works out for operators, kept from one rank's rehearsal to the next.

DTensor keeps them itself, with the mesh of the rank; and working them out takes, for an optimizer
that steps all of its parameters at once, the square of their number. They follow from the shapes
and placements of the operands and the sizes of the mesh, which ranks have in common. Those of
operands that have to be laid out anew are not kept: they may hold lengths of one rank's parts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param  # private
from torch.distributed.tensor import DTensor, _sharding_prop, debug
from torch.distributed.tensor._dtensor_spec import DTensorSpec  # private, as all of this
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from meshwright.executor.stand_in.known import Key


class KnownLayouts:
    """Layouts worked out for operators of any rank so far."""

    def __init__(self) -> None:
        self.known: dict[Key, Any] = {}

    @contextmanager
    def of_rank(self) -> Iterator[None]:
        """Context in which one rank is rehearsed."""
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        work_out = propagator.propagate_op_sharding_non_cached

        def propagated(schema: Any) -> Any:
            meshes: dict[int, DeviceMesh] = {}
            key = _key(schema, meshes)
            mesh = next(iter(meshes.values()), None)
            if key in self.known:
                return _on(mesh, self.known[key])
            sharding = work_out(schema)
            if len(meshes) == 1 and sharding.redistribute_schema is None:
                self.known[key] = sharding
            return sharding

        propagator.propagate_op_sharding_non_cached = propagated
        try:
            with _flags_asked_once():
                yield
        finally:
            propagator.propagate_op_sharding_non_cached = work_out
            _forget()


@contextmanager
def _flags_asked_once() -> Iterator[None]:
    """Context in which an operator's operands are asked once whether any is in strided shards;
    torch asks all of them for each tensor of a list."""
    module: Any = _sharding_prop
    spread = getattr(module, "_propagate_use_strided_shard_flag", None)  # as torch 2.13 has it
    if spread is None:
        yield
        return
    asked: list[tuple[Any, bool]] = [(None, False)]  # the operator, and the answer

    def spread_if_strided(strategy: Any, schema: Any) -> None:
        if asked[0][0] is not schema:
            placements = (p for spec in schema.args_spec for p in spec.placements)
            asked[0] = schema, any(isinstance(p, _StridedShard) for p in placements)
        if asked[0][1]:
            spread(strategy, schema)

    module._propagate_use_strided_shard_flag = spread_if_strided
    try:
        yield
    finally:
        module._propagate_use_strided_shard_flag = spread


@dataclass(frozen=True, slots=True)
class Known:
    """Facts on operators from the ranks before: results on fake tensors, and layouts."""

    results: dict[Key, Any] = field(default_factory=dict)
    layouts: KnownLayouts = field(default_factory=KnownLayouts)


def _forget() -> None:
    """Empty DTensor's caches: their layouts hold this rank's mesh, which the next one equals."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:  # private; older versions key their caches otherwise
        clear()


def _key(schema: Any, meshes: dict[int, DeviceMesh]) -> Key:
    """All that the layouts of an operator's results depend on; collects the operands' meshes."""
    leaves, tree = pytree.tree_flatten((schema.args_schema, schema.kwargs_schema))
    key: list[Any] = [schema.op, tree]
    for x in leaves:
        if isinstance(x, DTensorSpec):
            mesh = meshes.setdefault(id(x.mesh), x.mesh)
            of = x.placements, x.tensor_meta, x.shard_order, x.use_strided_shard_as_shard_order
            key += (*of, mesh.shape, mesh.mesh_dim_names, mesh.device_type)
        else:
            key += (type(x), x)
    return tuple(key)


def _on(mesh: DeviceMesh | None, schema: Any) -> Any:
    """The same layouts on another mesh of the same sizes."""

    def moved(spec: DTensorSpec) -> DTensorSpec:
        spec = copy.copy(spec)
        spec.mesh = mesh  # type: ignore[assignment]
        return spec

    schema = copy.copy(schema)
    schema.__dict__.pop("mesh", None)  # kept there when it was asked for
    schema.output_spec = pytree.tree_map_only(DTensorSpec, moved, schema.output_spec)
    return schema


# --- parts ----------------------------------------------------------------------------------------

# Parts that are read of tensors which `fully_shard` divides among ranks.
#
# It cuts every parameter into as many parts as there are ranks and takes its own, and the size of
# the first. Among a thousand ranks, on tensors without values, making the others takes longer than
# all of the rest.


class Parts(Sequence[torch.Tensor]):
    """A tensor in `count` parts along a dim, as `torch.chunk` cuts it, each made when it is asked
    for; those beyond its end are empty."""

    def __init__(self, full: torch.Tensor, count: int, dim: int) -> None:
        self.whole, self.number, self.dim = full, count, dim
        self.length = full.size(dim)
        self.each = -(-self.length // count)

    def __len__(self) -> int:
        return self.number

    @overload
    def __getitem__(self, k: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, k: int | slice) -> Any:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(self.number))]
        if not 0 <= k < self.number:
            raise IndexError(k)
        start = k * self.each
        if self.length and start >= self.length:
            return self.whole.new_empty(0)
        return self.whole.narrow(self.dim, start, min(self.each, self.length - start))


@contextmanager
def parts_on_demand() -> Iterator[None]:
    """Context in which `fully_shard` makes only the parts that it reads."""
    module: Any = _fsdp_param
    cut = module._chunk_with_empty
    module._chunk_with_empty = lambda tensor, num_chunks, dim: Parts(tensor, num_chunks, dim)
    try:
        yield
    finally:
        module._chunk_with_empty = cut

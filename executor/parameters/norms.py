"""Gradient norm of the whole model from every rank's shards, and clipping by it.

With every element i of every trained parameter counted once,

    ‖g‖_p = (Σ_i |g_i|^p)^(1/p),        ‖g‖_∞ = max_i |g_i|.

An element is held by c ranks: the replicas on its stage's mesh (data ranks among which ZeRO does
not divide it, tensor ranks that do not split it), times the groups of devices that hold a copy of a
tied parameter. Each rank adds up its *share*, Σ |g_i|^p / c over what it holds (of ‖g‖_∞ the
maximum), and one all-reduce of one number adds up the shares. No replica stands for the others, so
a value that is not finite on a single one of them makes the norm so on every rank; and all ranks
get the all-reduce's bits.

On a CPU torch adds up a tensor in fp32, in as many chains as a vector has lanes: over 10⁸ normal
elements the norm comes out 1 % too small, over 2·10⁸ 3 % (torch 2.13). By rows of 4096 elements and
then over the rows it is right to 10⁻⁶ in the same time. GPU kernels add in trees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from meshwright.executor.parameters.parameters import StageParameter, local_of
from meshwright.executor.ranks import Place
from meshwright.profiles.inputs import ArgumentError, shown
from meshwright.profiles.inputs.limits import is_number

ROW = 4096  # elements


def copies(parameter: StageParameter, place: Place) -> int:
    """The number of ranks of the plan that hold each element of a stored parameter."""
    holders = place.holders(experts=parameter.experts)
    count = holders.replicate.size
    if not parameter.shard_placement.sharded:
        count *= holders.shard.size
    if not parameter.placement.sharded:
        count *= place.tensor.size
    # virtual stages of the same devices share one copy
    return count * max(1, len({place.meshes[k].ranks for k in parameter.shared_stages}))


def norm_share(
    gradients: Iterable[tuple[StageParameter, torch.Tensor]], place: Place, norm_type: float = 2.0
) -> torch.Tensor:
    """This rank's share of Σ |g_i|^p, or of max |g_i| for p = inf: an fp64 scalar.

    `gradients` are local tensors of the shape of `stored`. Raises ValueError unless norm_type > 0.
    """
    if not (_is_norm(norm_type) and norm_type > 0):
        raise ArgumentError(
            f"={shown(norm_type)}: a norm needs norm_type > 0",
            place="norm_type",
            legal="numbers above 0",
            way_out="2.0 is the usual one, float('inf') the largest element",
        )
    by_copies: dict[int, list[torch.Tensor]] = {}
    for p, gradient in gradients:
        if gradient.numel():
            by_copies.setdefault(copies(p, place), []).extend(_row_norms(gradient, norm_type))
    total = torch.zeros((), dtype=torch.float64, device=place.device)
    for count, tensors in sorted(by_copies.items()):
        norm = get_total_norm(tensors, norm_type).double().to(place.device)
        if math.isinf(norm_type):
            total = torch.maximum(total, norm)
        else:
            total += norm**norm_type / count
    return total


def total_norm(share: torch.Tensor, place: Place, norm_type: float = 2.0) -> torch.Tensor:
    """The norm, an fp32 scalar, from every rank's share; the same bits on every rank. Collective.

    Not finite if any gradient on any rank is not, or if fp32 can't hold it.
    """
    largest = math.isinf(norm_type)
    total = share.clone()
    if place.mesh is not None:
        if largest:  # what MAX makes of NaN is the backend's affair
            total.nan_to_num_(nan=math.inf, posinf=math.inf)
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return (total if largest else total ** (1 / norm_type)).float()


def _row_norms(x: torch.Tensor, norm_type: float) -> list[torch.Tensor]:
    """The norms of the rows of `ROW` elements of a CPU tensor and the rest of it, none of them
    empty: together they have the norm of `x`. A GPU tensor itself."""
    flat = x.reshape(-1)
    rows = flat.numel() // ROW if flat.is_cpu else 0
    if not rows:
        return [flat]
    table, rest = flat[: rows * ROW].view(rows, ROW), flat[rows * ROW :]
    norms = torch.linalg.vector_norm(table, norm_type, dim=1)
    return [norms, rest] if rest.numel() else [norms]


def _is_norm(order: object) -> bool:
    return is_number(order) or order == math.inf or isinstance(order, torch.Tensor)


def clip_(
    parameters: Iterable[StageParameter], place: Place, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale `.grad` of all parameters by min(1, max_norm / (norm + 1e-6)); returns the norm before.

    As `torch.nn.utils.clip_grad_norm_` of the whole model on one device. Collective: every rank
    calls it, also one whose parameters have no gradient. Raises ValueError where max_norm is
    negative or NaN.
    """
    if not (_is_norm(max_norm) and max_norm >= 0):
        raise ArgumentError(
            f"={shown(max_norm)}: gradients are scaled down to a norm >= 0",
            place="max_norm",
            legal="numbers from 0",
            way_out="float('inf') computes the norm and clips nothing",
        )
    with torch.no_grad():  # under which a DTensor's local tensor costs a thirtieth
        gradients = [(p, local_of(p.api.grad)) for p in parameters if p.api.grad is not None]
        norm = total_norm(norm_share(gradients, place, norm_type), place, norm_type)
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for _, gradient in gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, here in by_device.items():
            torch._foreach_mul_(here, coefficient.to(device))
    return norm

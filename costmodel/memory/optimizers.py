"""Optimizers: what each keeps, moves and makes for a parameter.

torch runs Adam and AdamW kernel by kernel unless `fused=True` is said, on GPUs over all parameters
at once (`torch.optim.adamw._multi_tensor_adamw`): weights decay (2 words read or written), both
moments are updated (3; 2 and 3), the roots of the second are made and corrected (2, 2, 2), and
weights are updated (4), in all 20 words of fp32; and the roots of all parameters lie there at once.
The fused kernel reads weight, gradient and moments, and writes all but the gradient: 7 words, and
nothing beside. On a CPU the same goes on parameter by parameter, in 3 to 5 times the seconds of the
fused kernel. 8-bit states are updated by a kernel a tensor (bitsandbytes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.profiles.inputs import MeshwrightError

FUSED = "_fused"
FP32 = 4
DTENSOR_ISSUES = 3.0  # of an operator on distributed tensors, beside one on plain ones (20, 7 us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Bytes a parameter: its moments (fp32 unless the name says otherwise), what a step reads and
    writes, and what a step makes beside that on a GPU, of all parameters at once (`temporary`); on
    a CPU so many fp32 tensors of the size of one parameter (`tensors`), by so many operators."""

    moments: int
    moved: int
    temporary: int = 0
    tensors: int = 0
    operators: int = 0


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType({
    "adamw": Optimizer(moments=8, moved=80, temporary=4, tensors=2, operators=9),
    "adamw_fused": Optimizer(moments=8, moved=28),
    "adam": Optimizer(moments=8, moved=72, temporary=4, tensors=2, operators=8),
    "adam_fused": Optimizer(moments=8, moved=28),
    "adamw_bf16": Optimizer(moments=4, moved=20),
    "adamw8bit": Optimizer(moments=2, moved=16),
    "sgd": Optimizer(moments=0, moved=12, operators=1),
    "momentum": Optimizer(moments=4, moved=20, operators=2),
    "lion": Optimizer(moments=4, moved=20, operators=5),
    "adagrad": Optimizer(moments=4, moved=20, operators=5),
})  # fmt: skip


def optimizer_named(name: str) -> Optimizer:
    """An optimizer by its name; ValueError for one whose states are unknown."""
    try:
        return OPTIMIZERS[name]
    except (KeyError, TypeError):  # unknown, or no name at all
        way_out = "name the one with as many moments as yours, which may be any torch optimizer"
        legal = sorted(OPTIMIZERS)
        raise MeshwrightError.refused("optimizer", name, legal=legal, way_out=way_out) from None


def fused(name: str) -> str:
    """The fused kernel of an optimizer, where torch has one, else the optimizer."""
    return name + FUSED if name + FUSED in OPTIMIZERS else name


def optimizer_bytes(optimizer: str) -> int:
    """Moment bytes per parameter."""
    return optimizer_named(optimizer).moments


def optimizer_step_bytes(numel: float, *, optimizer: str) -> float:
    """Bytes an optimizer step reads and writes for `numel` parameters."""
    return numel * optimizer_named(optimizer).moved


def optimizer_issues(optimizer: str, *, device: str) -> float:
    """Operators that a step issues for one parameter; on a GPU a few kernels step all of them."""
    return optimizer_named(optimizer).operators * DTENSOR_ISSUES if device == "cpu" else 0.0


def optimizer_temporary_bytes(numels: Sequence[float], *, optimizer: str, device: str) -> float:
    """Bytes that an optimizer makes beside its states in a step of parameters of such sizes."""
    record = optimizer_named(optimizer)
    if device == "cuda":
        return record.temporary * sum(numels)
    return record.tensors * FP32 * max(numels, default=0.0)

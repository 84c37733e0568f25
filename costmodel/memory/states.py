"""Model states by precision and ZeRO stage, and communication buffers (docs/decides/memory.md).

ZeRO-1 divides also the gradient shard handed to the optimizer; of ZeRO-3 only the optimizer's shard
stays.
Frozen parameters have no master, gradient and moments. ZeRO-3 divides them like the others, in the
dtype of the user's model; else they are whole, as they are computed with, beside those of the model
where these have another dtype.

Of the `host` part, master and moments lie in host memory; with ZeRO-3 all does, below it gradients
where they go there as a backward makes them (`sent`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.graph import TensorMeta
from meshwright.costmodel.memory.optimizers import Optimizer
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER

A = TypeVar("A", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates(Generic[A]):
    """Bytes of weights that are computed with, of gradients, and of all that the optimizer
    keeps."""

    weights: A
    gradients: A
    optimizer: A

    @property
    def nbytes(self) -> A:
        """Bytes in all."""
        return self.weights + self.gradients + self.optimizer


def model_states(
    numel: A,
    *,
    weight_bytes: int,
    sharing: Sharing,
    dp: A | int,
    optimizer: Optimizer,
    target: Target = EAGER,
    away: tuple[float, float] = (0.0, 0.0),
    moments: tuple[A, A] | None = None,
) -> ModelStates[A]:
    """Bytes of the states of `numel` local (tensor-parallel) parameters, or of an array of them,
    whose weights are computed with in `weight_bytes` an element. `away` are the parts of the states
    that lie in host memory, and of the gradients that are sent there; `moments` bytes of theirs,
    not divided and divided, where these depend on shapes."""
    host, sent = away
    kept = optimizer.kept_bytes
    whole, divided = moments or (numel * optimizer.moments, numel * optimizer.moments / dp)
    mixed = weight_bytes < kept
    gradient = target.gradient_bytes if mixed and not target.gradients_come else kept
    master = kept if mixed and target.master else 0
    if not sharing.divides:
        return ModelStates(
            weights=numel * weight_bytes,
            gradients=numel * (gradient * (1 - sent)),
            optimizer=(1 - host) * (numel * master + whole),
        )
    if not sharing.divides_gradients:
        # the shard the optimizer reads is a part of the gradients where they lie in buckets
        in_buckets = target.bucket_copies == 0 and gradient == kept
        shard = 0 if in_buckets or target.gradients_come else kept
        return ModelStates(
            weights=numel * weight_bytes,
            gradients=numel * (gradient * (1 - sent)),
            optimizer=(1 - host) * (numel * kept / dp + divided) + numel * shard * (1 - sent) / dp,
        )
    parts = numel / dp
    held = numel if target.whole_gradients else parts
    if not sharing.gathers:
        master = kept if target.gradients_come else master
        return ModelStates(
            weights=numel * weight_bytes,
            gradients=held * (gradient * (1 - sent)),
            optimizer=(1 - host) * (parts * master + divided),
        )
    # one copy of the weights is left, the optimizer's where it has one
    parts, held = parts * (1 - host), held * (1 - host)
    return ModelStates(
        weights=parts * max(weight_bytes, master),
        gradients=held * gradient,
        optimizer=(1 - host) * divided,
    )


def fixed_bytes(
    numel: float,
    shards: float,
    *,
    weight_bytes: int,
    sharing: Sharing,
    kept: int,
    moments: tuple[float, float],
    host: bool = False,
) -> tuple[float, float]:
    """Bytes of weights and of optimizer states of a trained parameter between the steps of
    `train_step`: weights as they are computed with, and as they are `kept`; the optimizer's, ZeRO's
    shard of them, which are ZeRO-3's weights, with `moments`, not divided and divided; not on the
    device with `host`."""
    divided = sharing.divides and shards > 1
    weights = numel * weight_bytes
    if divided and sharing.gathers:
        return (0.0, 0.0) if host else (kept * numel / shards, moments[1])
    if host:
        return weights, 0.0
    if divided:
        return weights, numel * kept / shards + moments[1]
    return weights, numel * kept * (weight_bytes < kept) + moments[0]


def late_bytes(
    numel: A, held: A, *, weight_bytes: int, kept: int, whole: bool, versions: int, waiting: int
) -> A:
    """Bytes beside those of a stage that is flushed, of trained parameters of which a rank steps
    `held` elements: `versions` of the weights that forwards under way have read, a copy of what is
    stepped too where that is what is computed with (`whole`), and gradients of `waiting` steps."""
    copies = versions - 1 + (whole and versions > 1 and weight_bytes == kept)
    return copies * weight_bytes * numel + waiting * kept * held


def frozen_bytes(meta: TensorMeta, numel: float, shards: float | None = None) -> float:
    """Bytes of so many elements of a frozen parameter, divided among `shards` or whole."""
    stored = (meta.stored or meta.dtype).itemsize
    if shards:
        return stored * numel / shards
    return (meta.dtype.itemsize + stored * (meta.stored is not None)) * numel


def working_bytes(
    numel: A,
    largest: A,
    gathered: A,
    *,
    weight_bytes: int,
    gradient_bytes: int,
    sharing: Sharing,
    dp: int,
    target: Target,
) -> A:
    """Bytes of communication buffers for `numel` local trained parameters, at most `largest` in a
    block, `gathered` with frozen ones: gradient buckets, no fuller than there are gradients; under
    ZeRO-3 weights of the block in use and of the next one; under ZeRO-2 and 3 the gradients of a
    block before they are scattered."""
    if dp == 1:
        return 0.0 * largest
    if not sharing.divides_gradients:
        room = target.bucket_copies * target.bucket_bytes
        buckets: A = np.minimum(room, numel * gradient_bytes)
        return buckets
    scattered = 0 if target.whole_gradients else gradient_bytes
    return largest * scattered + gathered * (2 * weight_bytes if sharing.gathers else 0)

"""Weights of a running plan: initialised from a seed, or read from files, only as far as each rank
needs them.

A rank's part of a tensor is a few boxes of it (`executor.checkpoint.parts`): one for a plain shard,
one per fused projection for a strided one, smaller under ZeRO. Each box is copied, or read, to
where it is kept: a rank reads the elements it stores, each once, and no other. The whole of a
tensor is on a rank only while its module is being initialised.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from meshwright.executor.checkpoint.files import open_source
from meshwright.executor.checkpoint.initialise import initialise
from meshwright.executor.checkpoint.names import SHOWN, Wanted, match_names
from meshwright.executor.checkpoint.parts import Parts, boxes
from meshwright.executor.parameters.parameters import as_torch, settle
from meshwright.executor.runtime.runtime import Runtime

log = logging.getLogger(__name__)


def init_weights(runtime: Runtime, seed: int = 0) -> None:
    """Give the plan of a model on meta the values of a single device's initialisation with `seed`
    (see `executor.checkpoint.initialise`), each rank its part.

    Every rank calls this with the same seed; nothing is communicated. What is real in the model
    keeps its value. Raises ValueError, on all ranks alike, where nothing is on meta, or a tensor
    has no initialiser.
    """
    graph, model = runtime.graph, runtime.model
    if not any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "init_weights: nothing of the model is on the meta device, its values are those that "
            "it was planned with; build it under `with torch.device('meta'):` to have it "
            "initialised here"
        )
    used = {*graph.parameters.values(), *graph.buffers.values(), *runtime.unused}
    _initialise(runtime, seed, used, whole_stream=True)
    _finish(runtime)


def load_weights(runtime: Runtime, path: str | Path) -> None:
    """Read this rank's part of the weights from a `torch.save` file, safetensors or a DCP folder.

    Names are the model's FQNs, a tied parameter's any of its own; where names are not found, one
    prefix more or less is tried ("model.", a base model's), the one that explains most. Values are
    converted to the model's dtypes; buffers that the file doesn't hold keep theirs, or are
    initialised where the model is on meta. Every rank calls this, nothing is communicated. Raises
    ValueError, on all ranks alike and before a weight is changed, for missing or misshapen names
    and ambiguous prefixes; names nobody asked for are logged on rank 0.
    """
    source = open_source(path)
    matched = match_names(_wanted(runtime), source.shapes, str(path))
    initialise_buffers(runtime, given=matched.stored)
    held = _held(runtime)
    for fqn in matched.stored.keys() & _unused(runtime):
        runtime.unused[fqn] = torch.empty_like(runtime.unused[fqn], device="cpu")
        held[fqn] = [Parts.of(runtime.unused[fqn])]
    source.fill(
        [
            piece
            for fqn, name in matched.stored.items()
            for parts in held.get(fqn, ())
            for piece in parts.pieces(name)
        ]
    )
    if matched.unexpected and runtime.place.rank == 0:
        names = ", ".join(matched.unexpected[:SHOWN])
        log.warning("weights: %s: %d unexpected, e.g. %s", path, len(matched.unexpected), names)
    _finish(runtime)


def initialise_buffers(runtime: Runtime, *, given: Collection[str]) -> None:
    """Give the buffers that are on meta and not among the `given` names the values that the model's
    own initialisers give them. Raises as `init_weights` does."""
    valueless = runtime.unset.intersection(runtime.graph.buffers.values()).difference(given)
    if valueless:
        _initialise(runtime, 0, valueless, whole_stream=False)
        runtime.unset -= valueless


# --- what a rank holds ----------------------------------------------------------------------------


def _held(runtime: Runtime) -> dict[str, list[Parts]]:
    """This rank's memory by FQN. Stages of one rank have buffers of their own, hence the list."""
    found = {p.fqn: [Parts.of(p.api)] for p in runtime.held}
    axis = runtime.place.tensor
    for stage in runtime.stages.values():
        for value, (fqn, placement) in stage.buffers.items():
            shape = torch.Size(runtime.graph.values[value].shape)
            held = boxes(shape, (as_torch(placement),), (axis.size,), (axis.rank,))
            parts = Parts(shape=shape, local=stage.program.tensors[value], boxes=held)
            found.setdefault(fqn, []).append(parts)
    return found


def _unused(runtime: Runtime) -> set[str]:
    """Tensors that the graph doesn't read, on the ranks whose state dict has them. Until they get a
    value they are the user's, which stay as they are."""
    return set(runtime.unused) if 0 in runtime.place.stages else set()


def _initialise(runtime: Runtime, seed: int, only: Collection[str], *, whole_stream: bool) -> None:
    held, unused = _held(runtime), _unused(runtime)

    def take(fqn: str, whole: torch.Tensor) -> None:
        if fqn in unused:
            runtime.unused[fqn] = whole
        for parts in held.get(fqn, ()):
            for piece in parts.pieces(fqn):
                piece.into.copy_(whole[piece.box])

    initialise(runtime.model, take, seed=seed, only=only, whole_stream=whole_stream)


def _finish(runtime: Runtime) -> None:
    settle(runtime.held)
    runtime.loaded, runtime.unset = True, frozenset()


# --- what the model wants -------------------------------------------------------------------------


def _wanted(runtime: Runtime) -> dict[str, Wanted]:
    """The whole model's tensors by FQN, so that all ranks find the same names and errors."""
    graph = runtime.graph
    aliases: dict[str, list[str]] = {}
    for alias, fqn in graph.aliases.items():
        aliases.setdefault(fqn, []).append(alias)

    def wanted(fqn: str, shape: Sequence[int], required: bool) -> Wanted:
        names = (fqn, *aliases.get(fqn, ()))
        return Wanted(names=names, shape=tuple(shape), required=required)

    found = {q: wanted(q, graph.values[v].shape, True) for v, q in graph.parameters.items()}
    found |= {q: wanted(q, graph.values[v].shape, False) for v, q in graph.buffers.items()}
    found |= {q: wanted(q, x.shape, x.is_meta) for q, x in runtime.unused.items()}
    return found

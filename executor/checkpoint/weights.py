"""Weights of a running plan: initialised from a seed or read from files, each rank its chunks only.

A rank's chunks of a tensor (`chunks.py`) are one box for a plain shard, one per fused projection
for a strided one, smaller under ZeRO. Each is copied, or read, to where it is kept: a rank reads
the elements it stores, each once, and no other. A whole tensor is on a rank only while its module
is being initialised.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from meshwright.executor.checkpoint.chunks import LocalChunks, local_chunks
from meshwright.executor.checkpoint.initialise import initialise
from meshwright.executor.checkpoint.name_matching import SHOWN, Wanted, match_names
from meshwright.executor.checkpoint.weight_files import open_source
from meshwright.executor.parameters import as_torch, refresh_frozen
from meshwright.executor.runtime import RankState

log = logging.getLogger(__name__)


def init_weights(state: RankState, seed: int = 0) -> None:
    """Initialise the parts of the model on meta as a single device would with `seed`
    (`initialise.py`), each rank its chunks.

    Every rank calls this with the same seed; nothing is communicated. Real tensors keep their
    values. Raises ValueError, on all ranks alike, where nothing is on meta, or a tensor has no
    initialiser.
    """
    graph, model = state.graph, state.model
    if not any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "init_weights: nothing of the model is on the meta device, its values are those that "
            "it was planned with; build it under `with torch.device('meta'):` to have it "
            "initialised here"
        )
    used = {*graph.parameters.values(), *graph.buffers.values(), *state.unused}
    _initialise(state, seed, used, whole_stream=True)
    _finish(state)


def load_weights(state: RankState, path: str | Path) -> None:
    """Read this rank's chunks of the weights from a `torch.save` file, safetensors or a DCP folder.

    Names are the model's FQNs, a tied parameter's any of its own; where names are not found, one
    prefix more or less is tried ("model.", a base model's), the one that explains most. Values are
    converted to the model's dtypes; buffers that the file doesn't hold keep theirs, or are
    initialised where the model is on meta. Every rank calls this, nothing is communicated. Raises
    ValueError, on all ranks alike and before a weight is changed, for missing or misshapen names
    and ambiguous prefixes; rank 0 logs stored names that match nothing.
    """
    source = open_source(path)
    matched = match_names(_wanted(state), source.shapes, str(path))
    initialise_buffers(state, given=matched.stored)
    chunks = _local_chunks(state)
    for fqn in matched.stored.keys() & _unused(state):
        state.unused[fqn] = torch.empty_like(state.unused[fqn], device="cpu")
        chunks[fqn] = [LocalChunks.of(state.unused[fqn])]
    source.fill(
        [
            read
            for fqn, name in matched.stored.items()
            for local in chunks.get(fqn, ())
            for read in local.reads(name)
        ]
    )
    if matched.unexpected and state.place.rank == 0:
        names = ", ".join(matched.unexpected[:SHOWN])
        log.warning("weights: %s: %d unexpected, e.g. %s", path, len(matched.unexpected), names)
    _finish(state)


def initialise_buffers(state: RankState, *, given: Collection[str]) -> None:
    """Run the model's own initialisers for the buffers on meta that are not among the `given`
    names. Raises as `init_weights` does."""
    valueless = state.uninitialised.intersection(state.graph.buffers.values()).difference(given)
    if valueless:
        _initialise(state, 0, valueless, whole_stream=False)
        state.uninitialised -= valueless


# --- this rank's chunks ---------------------------------------------------------------------------


def _local_chunks(state: RankState) -> dict[str, list[LocalChunks]]:
    """This rank's chunks by FQN; several of a buffer that several stages of the rank hold."""
    by_fqn = {p.fqn: [LocalChunks.of(p.api)] for p in state.stage_parameters}
    axis = state.place.tensor
    for stage in state.stages.values():
        for value, (fqn, placement) in stage.buffers.items():
            shape = torch.Size(state.graph.values[value].shape)
            chunks = local_chunks(shape, (as_torch(placement),), (axis.size,), (axis.rank,))
            local = stage.program.tensors[value]
            by_fqn.setdefault(fqn, []).append(LocalChunks(shape=shape, local=local, chunks=chunks))
    return by_fqn


def _unused(state: RankState) -> set[str]:
    """FQNs of tensors that the graph doesn't read, on the ranks whose state dict has them. The
    tensors are the user's until they are replaced."""
    return set(state.unused) if 0 in state.place.stages else set()


def _initialise(state: RankState, seed: int, only: Collection[str], *, whole_stream: bool) -> None:
    chunks, unused = _local_chunks(state), _unused(state)

    def take(fqn: str, whole: torch.Tensor) -> None:
        if fqn in unused:
            state.unused[fqn] = whole
        for local in chunks.get(fqn, ()):
            for read in local.reads(fqn):
                read.into.copy_(whole[read.index])

    initialise(state.model, take, seed=seed, only=only, whole_stream=whole_stream)


def _finish(state: RankState) -> None:
    refresh_frozen(state.stage_parameters)
    state.loaded, state.uninitialised = True, frozenset()


# --- the whole model's tensors --------------------------------------------------------------------


def _wanted(state: RankState) -> dict[str, Wanted]:
    """The whole model's tensors by FQN, so that all ranks find the same names and errors."""
    graph = state.graph
    aliases: dict[str, list[str]] = {}
    for alias, fqn in graph.aliases.items():
        aliases.setdefault(fqn, []).append(alias)

    def wanted(fqn: str, shape: Sequence[int], required: bool) -> Wanted:
        names = (fqn, *aliases.get(fqn, ()))
        return Wanted(names=names, shape=tuple(shape), required=required)

    tensors = {q: wanted(q, graph.values[v].shape, True) for v, q in graph.parameters.items()}
    tensors |= {q: wanted(q, graph.values[v].shape, False) for v, q in graph.buffers.items()}
    tensors |= {q: wanted(q, x.shape, x.is_meta) for q, x in state.unused.items()}
    return tensors

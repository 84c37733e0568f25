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

from meshwright.executor.checkpoint.initialise import initialise
from meshwright.executor.checkpoint.name_matching import SHOWN, Wanted, match_names
from meshwright.executor.errors import StateError
from meshwright.executor.files import LocalChunks, open_source
from meshwright.executor.parameters import refresh_frozen
from meshwright.executor.ranks import run_on_all
from meshwright.executor.runtime import RankState, group_of

log = logging.getLogger(__name__)


def init_weights(state: RankState, seed: int = 0) -> None:
    """Initialise the parts of the model on meta as a single device would with `seed`
    (`initialise.py`), each rank its chunks.

    Every rank calls this with the same seed; nothing is communicated. Real tensors keep their
    values. Raises ValueError, on all ranks alike, where nothing is on meta, or a tensor has no
    initialiser.
    """
    graph = state.graph
    if not state.user.on_meta:
        raise StateError(
            "nothing of the model is on the meta device, its values are those that it was planned "
            "with",
            place="init_weights",
            legal="a model on the meta device",
            way_out="build it under `with torch.device('meta'):` to have it initialised here",
        )
    used = {*graph.parameters.values(), *graph.buffers.values(), *state.unread}
    _initialise(state, seed, used, whole_stream=True)
    _finish(state)


def load_weights(state: RankState, path: str | Path) -> None:
    """Read this rank's chunks of the weights from a `torch.save` file, safetensors or a DCP folder.

    Names are the model's FQNs, a tied parameter's any of its own; where names are not found, one
    prefix more or less is tried ("model.", a base model's), the one that explains most. Values are
    converted to the model's dtypes; buffers that the file doesn't hold keep theirs, or are
    initialised where the model is on meta. Collective: of a folder that `save_pretrained` wrote,
    each rank verifies some of the files. Raises ValueError, on all ranks alike and before a weight
    is changed, for missing or misshapen names and ambiguous prefixes, RuntimeError for damage; rank
    0 logs stored names that match nothing.
    """
    source = open_source(path)
    matched = match_names(wanted_tensors(state), source.shapes, str(path))
    place, ranks = state.place, state.plan.num_ranks
    run_on_all(group_of(state), lambda: source.check(place.rank, ranks))
    initialise_buffers(state, given=matched.stored)
    chunks = _local_chunks(state)
    unread = {
        fqn: torch.empty_like(state.unused[fqn], device="cpu")
        for fqn in matched.stored.keys() & set(state.unread)
    }
    chunks |= {fqn: LocalChunks.of(x) for fqn, x in unread.items()}
    source.fill(
        [
            read
            for fqn, name in matched.stored.items()
            if fqn in chunks
            for read in chunks[fqn].reads(name)
        ]
    )
    for fqn, x in unread.items():
        state.user.write(fqn, x)
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


def _local_chunks(state: RankState) -> dict[str, LocalChunks]:
    """This rank's chunks by FQN."""
    named = {p.fqn: p.api for p in state.stage_parameters}
    named |= {fqn: b.whole for fqn, b in state.held_buffers.items()}
    return {fqn: LocalChunks.of(x) for fqn, x in named.items()}


def _initialise(state: RankState, seed: int, only: Collection[str], *, whole_stream: bool) -> None:
    chunks = _local_chunks(state)
    unread: dict[str, torch.Tensor] = {}

    def take(fqn: str, x: torch.Tensor) -> None:
        if fqn in state.unread:
            unread[fqn] = x
        elif fqn in chunks:
            for read in chunks[fqn].reads(fqn):
                read.into.copy_(x[read.index])

    with state.user.as_passed() as model:
        only = state.user.on_meta.intersection(only)
        initialise(model, take, seed=seed, only=only, whole_stream=whole_stream)
    for fqn, x in unread.items():
        state.user.write(fqn, x)


def _finish(state: RankState) -> None:
    refresh_frozen(state.stage_parameters)
    state.loaded, state.uninitialised = True, frozenset()


# --- the whole model's tensors --------------------------------------------------------------------


def wanted_tensors(state: RankState) -> dict[str, Wanted]:
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

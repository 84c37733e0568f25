"""States of the user's objects in a checkpoint: alike on all ranks, in parts, or of each rank.

Every rank encodes the states of its objects (`values.py`), and rank 0 merges the ranks' trees:

- what is equal on all ranks is stored once;
- a DTensor is stored as the model's tensors are, by the parts that ranks hold;
- dicts with other keys on other ranks, as of a pipeline's stages, are stored as their union;
- anything else that differs is stored for each rank.

A load gives an object the union's keys that its own state has (all, where it has none), a DTensor
in its own layout, and a rank what that rank saved, of as many ranks; else it is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.executor import files
from meshwright.executor.checkpoint import values
from meshwright.executor.errors import SavedError
from meshwright.executor.files.checksums import checksum_of
from meshwright.executor.files.safetensors_file import bytes_view
from meshwright.executor.parameters import empty_like

EXTRA = "extra"
_TAG, _UNION, _RANKS = values.TAG, "union", "ranks"


# --- save -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStates:
    """States of a rank's objects: trees by name, and their tensors by key."""

    trees: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(states: Mapping[str, Any], compared: bool) -> RankStates:
        """Raises `SavedError` for a state that JSON and tensors can't hold. Tensors have checksums
        where ranks are `compared`."""
        tensors: dict[str, torch.Tensor] = {}

        def keep(x: torch.Tensor, path: str) -> Any:
            tensors[path] = x.detach()
            if isinstance(x, DTensor):
                return {"sharded": [str(x.dtype), *x.shape]}
            plain = {"plain": [str(x.dtype), *x.shape]}
            if not compared:
                return plain
            blocks = [memoryview(bytes_view(x))] if x.numel() else []
            return plain | {"xxh3_64": checksum_of(blocks)}

        trees = {
            name: values.encode_state(name, state, keep, f"{EXTRA}/{values.step(name)}")
            for name, state in states.items()
        }
        return RankStates(trees=trees, tensors=tensors)

    def chunks(self, writes: Mapping[str, str]) -> dict[str, files.LocalChunks]:
        """The chunks that this rank writes: of sharded tensors, and of `writes`, stored name ->
        key."""
        writers, chunks = files.ReplicaWriters(), {}
        for key, x in sorted(self.tensors.items()):
            if isinstance(x, DTensor) and writers.choose(x, x.device_mesh).mine:
                chunks[key] = files.LocalChunks.of(x)
        return chunks | {name: files.LocalChunks.of(self.tensors[k]) for name, k in writes.items()}


@dataclass(slots=True, kw_only=True)
class Merged:
    """Trees of all ranks in one; the tensors that each rank writes, as stored name -> its key."""

    trees: dict[str, Any] = field(default_factory=dict)
    writes: dict[int, dict[str, str]] = field(default_factory=dict)

    @staticmethod
    def of(ranks: Sequence[Mapping[str, Any]]) -> Merged:
        """Raises `SavedError` where sharded tensors stand in what differs between ranks."""
        merged = Merged()
        for name in dict.fromkeys(name for trees in ranks for name in trees):
            trees = {rank: trees[name] for rank, trees in enumerate(ranks) if name in trees}
            merged.trees[name] = merged._merge(trees, f"{EXTRA}/{values.step(name)}", len(ranks))
        return merged

    def _merge(self, trees: Mapping[int, Any], path: str, world: int) -> Any:
        first, tree = next(iter(trees.items()))
        if all(other == tree for other in trees.values()):
            self._write(tree, first, "")
            return tree
        if all(isinstance(x, dict) and _TAG not in x for x in trees.values()):
            keys = dict.fromkeys(key for of_rank in trees.values() for key in of_rank)
            union = {
                key: self._merge(
                    {rank: x[key] for rank, x in trees.items() if key in x},
                    f"{path}/{values.step(key)}",
                    world,
                )
                for key in keys
            }
            same = all(x.keys() == union.keys() for x in trees.values())
            return union if same else {_TAG: _UNION, "of": union}
        for rank, of_rank in trees.items():
            self._write(of_rank, rank, f"@{rank}", path)
        entries = [_renamed(trees[k], f"@{k}") if k in trees else None for k in range(world)]
        return {_TAG: _RANKS, "of": entries}

    def _write(self, tree: Any, rank: int, suffix: str, differs: str = "") -> None:
        for node in _tensor_nodes(tree):
            if "plain" in node:
                self.writes.setdefault(rank, {})[node["of"] + suffix] = node["of"]
            elif differs:
                raise SavedError(
                    f"{differs!r} is another on other ranks, and holds tensors that are sharded",
                    place="checkpoint",
                    legal="sharded tensors in dicts, by the names of parameters",
                    way_out="have state_dict() return such",
                )


def _tensor_nodes(tree: Any) -> list[dict[str, Any]]:
    if isinstance(tree, list):
        return [node for x in tree for node in _tensor_nodes(x)]
    if not isinstance(tree, dict):
        return []
    if tree.get(_TAG) == values.TENSOR:
        return [tree]
    return [node for x in tree.values() for node in _tensor_nodes(x)]


def _renamed(tree: Any, suffix: str) -> Any:
    """A tree whose tensors have a suffix to their keys."""
    if isinstance(tree, list):
        return [_renamed(x, suffix) for x in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get(_TAG) == values.TENSOR:
        return tree | {"of": tree["of"] + suffix}
    return {key: _renamed(x, suffix) for key, x in tree.items()}


# --- load -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """A rank's part of saved states: rank `rank` of `world`, of the tensors `stored`; `fqns` are
    the model's names, of which an object may have its stage's only."""

    rank: int
    world: int
    stored: Mapping[str, files.StoredTensor]
    fqns: Collection[str]
    place: str

    def needs_layout(self, tree: Any) -> bool:
        """Whether a load must know the state that an object has, to give it its part."""
        if isinstance(tree, list):
            return any(map(self.needs_layout, tree))
        if not isinstance(tree, dict):
            return False
        inner = any(map(self.needs_layout, tree.values()))
        return (
            inner or tree.get(_TAG) == _UNION or "sharded" in tree or any(map(self._of_model, tree))
        )

    def _of_model(self, key: str) -> bool:
        """Whether a key is a name of the model, or one in a module of it, as AveragedModel's."""
        return key in self.fqns or key.partition(".")[2] in self.fqns

    def state(self, name: str, tree: Any, current: Any) -> tuple[Any, list[files.ChunkRead]]:
        """The state to give the object `name`, and the reads that fill its tensors. `current` is
        its state now, where `needs_layout` asks for it. Raises `SavedError` for a state of other
        ranks."""
        layouts: dict[str, torch.Tensor] = {}

        def keep(x: torch.Tensor, path: str) -> Any:
            layouts[path] = x
            return {}

        root = f"{EXTRA}/{values.step(name)}"
        like = None if current is None else values.encode_state(name, current, keep, root)
        reads: list[files.ChunkRead] = []

        def tensor(node: Mapping[str, Any]) -> torch.Tensor:
            saved, layout = self.stored[node["of"]], layouts.get(node.get("like", ""))
            if isinstance(layout, DTensor) and tuple(layout.shape) == saved.shape:
                x: torch.Tensor = empty_like(layout.detach(), saved.dtype)
            else:
                device = None if layout is None else layout.device
                x = torch.empty(saved.shape, dtype=saved.dtype, device=device)
            reads.extend(files.LocalChunks.of(x).reads(node["of"]))
            return x

        return values.decoded(self._part(tree, like, root), tensor), reads

    def _part(self, tree: Any, like: Any, path: str) -> Any:
        """The tree without unions and ranks; its tensors say which of the object's are alike."""
        if isinstance(tree, list):
            aligned = isinstance(like, list) and len(like) == len(tree)
            pairs = zip(tree, like if aligned else [None] * len(tree), strict=True)
            return [self._part(x, other, f"{path}/{k}") for k, (x, other) in enumerate(pairs)]
        if not isinstance(tree, dict):
            return tree
        kind, other = tree.get(_TAG), like if isinstance(like, dict) else {}
        if kind == _RANKS:
            return self._part(self._own(tree["of"], path), like, path)
        if kind == values.TENSOR:
            return tree | ({"like": other["of"]} if other.get(_TAG) == kind else {})
        if kind == _UNION:
            tree = tree["of"]
        if other:  # names of other ranks' stages are theirs
            absent = tree.keys() - other.keys()
            theirs = {key for key in absent if kind == _UNION or self._of_model(key)}
            tree = {key: x for key, x in tree.items() if key not in theirs}
        return {k: self._part(x, other.get(k), f"{path}/{values.step(k)}") for k, x in tree.items()}

    def _own(self, of_ranks: Sequence[Any], path: str) -> Any:
        if len(of_ranks) == self.world:
            return of_ranks[self.rank]
        raise SavedError(
            f"{path!r} is another on each of {len(of_ranks)} ranks, and this run has {self.world}",
            place=self.place,
            way_out=f"leave {path.split('/')[1]!r} out of extra=, or load on as many ranks",
        )

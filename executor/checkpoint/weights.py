"""Weights of a running plan: initialised from a seed or read from files, each rank its chunks only.

A rank's chunks of a tensor (`chunks.py`) are one box for a plain shard, one per fused projection
for a strided one, smaller under ZeRO. Each is copied, or read, to where it is kept: a rank reads
the elements it stores, each once, and no other. A whole tensor is on a rank only while its module
is being initialised.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.executor.checkpoint.name_matching import SHOWN, Wanted, match_names
from meshwright.executor.errors import StateError
from meshwright.executor.files import LocalChunks, open_source
from meshwright.executor.ranks import run_on_all
from meshwright.executor.runtime import RankState, group_of

log = logging.getLogger(__name__)


def init_weights(state: RankState, seed: int = 0) -> None:
    """Initialise the parts of the model on meta as a single device would with `seed`
    (`initialise`), each rank its chunks.

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
    state.all_loaded()


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
    state.all_loaded()


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


# --- initialisation -------------------------------------------------------------------------------

# Deferred initialisation: a model on meta gets its first values one module at a time, on the CPU.
#
# The values are those of a single device, bit for bit, whatever the plan: with ties kept,
#
#     model.to_empty(device="cpu"); torch.manual_seed(seed); model.apply(init)
#
# where `init` is, for each module, children first:
#
# - `_init_weights(module)` of the nearest module above (or itself) that has such a method, as
#   transformers' models do (a model inside a model governs its own part);
# - where there is none, or it leaves some of the module's own tensors unwritten, the module's own
#   `reset_parameters()`, `_reset_parameters()` or `init_weights()`, and the former after it.
#
# Every rank runs every initialiser, so that the random stream is the same on all; what a rank
# doesn't hold it drops. An initialiser may reach into other modules (GPT-2 scales the projections
# of its grandchildren), so all are first rehearsed on meta, which costs no memory and shows which
# tensors each one uses. A tensor then lives from its first initialiser to its last, with gaps
# where the next one overwrites it unread. A tied tensor is one tensor: each owner writes it, the
# last writer wins.
#
# The model itself stays on meta. Its real tensors keep their values, though initialisers see
# copies.


Take = Callable[[str, torch.Tensor], None]
Step = Callable[[], object]
Governor = Callable[[nn.Module], object]
Region = tuple[int, int, tuple[int, ...], tuple[int, ...]]

OWN = ("reset_parameters", "_reset_parameters", "init_weights")
# In-place operators that read nothing of what they write.
OVERWRITING = frozenset(
    {
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    }
)


class _Fate(Enum):
    """A tensor's fate after an initialiser has run."""

    TAKE = auto()  # final: no later one uses it
    KEEP = auto()  # a later one reads it
    DROP = auto()  # a later one overwrites it, or it never had a value


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelTensor:
    """One tensor of the model, all its FQNs, and its places: the dict of a module, and the name
    there."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor in all its places."""
        for holder, name in self.places:
            holder[name] = tensor

    def current(self, holder: Mapping[str, Any]) -> torch.Tensor:
        """The tensor now in its place in a module's dict."""
        tensor: torch.Tensor = next(h[name] for h, name in self.places if h is holder)
        return tensor

    def like(self, data: torch.Tensor) -> torch.Tensor:
        """`data` as a parameter or a buffer, as the tensor is."""
        if isinstance(self.tensor, nn.Parameter):
            return nn.Parameter(data, requires_grad=self.tensor.requires_grad)
        return data

    def fresh(self) -> torch.Tensor:
        """Memory to initialise: empty for a tensor on meta, a copy of a real one."""
        if self.tensor.is_meta:
            return self.like(torch.empty_like(self.tensor, device="cpu"))
        return self.like(self.tensor.detach().to("cpu", copy=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """One module's initialisation.

    `own` gives per FQN of the module's tensors the dict that holds it; `uses`, per tensor that is
    read or written, own or not, whether it is overwritten unread; `written` the regions (elements,
    offset, shape, stride) of it that are written.
    """

    steps: tuple[Step, ...]
    own: Mapping[str, dict[str, Any]]
    uses: Mapping[str, bool]
    written: Mapping[str, frozenset[Region]]


def initialise(
    model: nn.Module,
    take: Take,
    *,
    seed: int,
    only: Collection[str] | None = None,
    whole_stream: bool = True,
) -> None:
    """Call `take(fqn, value)` with the whole initial value of each tensor that `model` has on meta,
    a tied one under each of its names.

    `only` restricts the names. `whole_stream=False` skips initialisers that these don't need: the
    random values then differ. Raises ValueError, before anything is allocated, where no initialiser
    writes a tensor. The random state of the process is left as it was.
    """
    tensors = _model_tensors(model)
    wanted = {
        fqn
        for fqn, entry in tensors.items()
        if entry.tensor.is_meta and (only is None or not set(only).isdisjoint(entry.names))
    }

    def hand_over(fqn: str, value: torch.Tensor) -> None:
        for name in tensors[fqn].names if fqn in wanted else ():
            take(name, value)

    try:
        visits = _Rehearsal(tensors).run(model)
        _put_back(tensors.values())
        _check_written(tensors, visits, wanted)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            _run(tensors, visits if whole_stream else _needed(visits, wanted), hand_over)
            for fqn in sorted(wanted):  # no initialiser writes a tensor without elements
                if not tensors[fqn].tensor.numel():
                    hand_over(fqn, tensors[fqn].fresh().detach())
    finally:
        _put_back(tensors.values())


def _model_tensors(model: nn.Module) -> dict[str, _ModelTensor]:
    """The model's tensors by their first FQN."""
    by_id: dict[int, _ModelTensor] = {}
    places: set[tuple[int, str]] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is None:
                    continue
                entry = by_id.setdefault(id(tensor), _ModelTensor(tensor=tensor))
                entry.names.append(f"{prefix}.{name}".lstrip("."))
                if (id(holder), name) not in places:
                    entry.places.append((holder, name))
                    places.add((id(holder), name))
    return {entry.names[0]: entry for entry in by_id.values()}


def _put_back(tensors: Iterable[_ModelTensor]) -> None:
    """Put the user's own tensors back in their places."""
    for entry in tensors:
        entry.put(entry.tensor)


# --- who initialises what -------------------------------------------------------------------------


def _walk(
    module: nn.Module, name: str = "", governor: Governor | None = None
) -> Iterator[tuple[str, nn.Module, Governor | None]]:
    """Name, module and governing `_init_weights` of each module, in `nn.Module.apply`'s order."""
    governor = _governing(module) or governor
    for child_name, child in module.named_children():
        yield from _walk(child, f"{name}.{child_name}".lstrip("."), governor)
    yield name, module, governor


def _governing(module: nn.Module) -> Governor | None:
    """The module's `_init_weights(module)`, if it has one (transformers' convention)."""
    method = getattr(module, "_init_weights", None)
    return method if callable(method) and _takes_arguments(method) else None


def _own_initialiser(module: nn.Module) -> Step | None:
    """The module's first method of `OWN` that takes no arguments, and doesn't walk its children."""
    for name in OWN:
        method: Step | None = getattr(module, name, None)
        if not callable(method) or _takes_arguments(method):
            continue
        if name == "init_weights" and _governing(module):
            continue  # it walks all modules by itself
        return method
    return None


def _takes_arguments(method: Callable[..., object]) -> bool:
    """Whether a method can't be called without arguments."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return any(p.default is p.empty and p.kind not in kinds for p in parameters)


# --- the rehearsal on meta ------------------------------------------------------------------------


class _UseRecorder(TorchDispatchMode):
    """Records by storage what operators do to it: `uses` and `written` as in `_Visit`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[int, bool] = {}
        self.written: dict[int, set[Region]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            overwrites = func._schema.name in OVERWRITING
            for k, argument in enumerate(func._schema.arguments):
                operand = args[k] if k < len(args) else (kwargs or {}).get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for x in operand if isinstance(operand, (list, tuple)) else (operand,):
                    if isinstance(x, torch.Tensor):
                        self._note(x, writes, overwrites)
        return func(*args, **(kwargs or {}))

    def _note(self, x: torch.Tensor, writes: bool, overwrites: bool) -> None:
        storage = x.untyped_storage()
        fills_storage = x.numel() * x.element_size() == storage.nbytes()
        self.uses.setdefault(storage._cdata, writes and overwrites and fills_storage)
        if writes:
            region = (x.numel(), int(x.storage_offset()), tuple(x.shape), x.stride())
            self.written.setdefault(storage._cdata, set()).add(region)


class _Rehearsal:
    """Runs every initialiser on stand-ins on meta, to record which tensors each one uses."""

    def __init__(self, tensors: Mapping[str, _ModelTensor]) -> None:
        self.tensors = tensors
        self.stand_ins: dict[str, torch.Tensor] = {}
        self.of_storage: dict[int, str] = {}
        self.own: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        for fqn, entry in tensors.items():
            self._stand_in(fqn)
            for holder, _ in entry.places:
                self.own.setdefault(id(holder), []).append((fqn, holder))

    def _stand_in(self, fqn: str) -> None:
        entry = self.tensors[fqn]
        self.stand_ins[fqn] = entry.like(torch.empty_like(entry.tensor, device="meta"))
        self.of_storage[_storage(self.stand_ins[fqn])] = fqn
        entry.put(self.stand_ins[fqn])

    def run(self, model: nn.Module) -> list[_Visit]:
        """The initialisations of all modules, in order."""
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("meta"):
            visits = [self._visit(*named) for named in _walk(model)]
        return [visit for visit in visits if visit.steps]

    def _visit(self, name: str, module: nn.Module, governor: Governor | None) -> _Visit:
        holders = (module._parameters, module._buffers)
        attributes = dict(pair for holder in holders for pair in self.own.get(id(holder), []))
        governed = (partial(governor, module),) if governor else ()
        initialiser = _own_initialiser(module)
        visit = self._watched(name, governed, attributes)
        written = all(
            _covered(self.tensors[fqn], visit.written.get(fqn, set())) for fqn in attributes
        )
        if initialiser is None or (governor and written):
            return visit
        return self._watched(name, (initialiser, *governed), attributes)

    def _watched(
        self, name: str, steps: tuple[Step, ...], own: Mapping[str, dict[str, Any]]
    ) -> _Visit:
        recorder = _UseRecorder()
        try:
            with recorder:
                for step in steps:
                    step()
        except Exception as error:
            error.add_note(
                f"while rehearsing the initialisation of {name or 'the model'!r} on meta, where "
                f"tensors have no values; initialise it without reading any, or build it on a real "
                f"device"
            )
            raise
        names = self.of_storage
        uses = {names[key]: over for key, over in recorder.uses.items() if key in names}
        written = {names[key]: frozenset(r) for key, r in recorder.written.items() if key in names}
        for fqn, holder in own.items():
            if self._replaced(fqn, holder):
                uses.setdefault(fqn, True)
                written[fqn] = frozenset({(self.tensors[fqn].tensor.numel(), 0, (), ())})
        return _Visit(steps=steps, own=own, uses=uses, written=written)

    def _replaced(self, fqn: str, holder: Mapping[str, Any]) -> bool:
        """Whether the initialiser replaced the tensor (`self.weight = ...`) or its storage
        (`self.weight.data = ...`); a new stand-in then takes its place."""
        key = _storage(self.stand_ins[fqn])
        now = self.tensors[fqn].current(holder)
        if now is self.stand_ins[fqn] and self.of_storage.get(key) == fqn:
            return False
        self.of_storage = {k: other for k, other in self.of_storage.items() if other != fqn}
        self._stand_in(fqn)
        return True


def _storage(x: torch.Tensor) -> int:
    """The identity of a tensor's storage."""
    return int(x.untyped_storage()._cdata)


def _covered(entry: _ModelTensor, written: Collection[Region]) -> bool:
    """Whether distinct written regions add up to the whole tensor."""
    return sum(region[0] for region in written) >= entry.tensor.numel()


def _check_written(
    tensors: Mapping[str, _ModelTensor], visits: Sequence[_Visit], wanted: Collection[str]
) -> None:
    written: dict[str, set[Region]] = {}
    for visit in visits:
        for fqn, regions in visit.written.items():
            written.setdefault(fqn, set()).update(regions)
    lacking = sorted(fqn for fqn in wanted if not _covered(tensors[fqn], written.get(fqn, ())))
    if lacking:
        raise StateError(
            f"deferred initialisation: no initialiser writes {lacking}",
            way_out="define reset_parameters(self) in their modules (of buffers too), or load them",
        )


def _needed(visits: Sequence[_Visit], wanted: Collection[str]) -> list[_Visit]:
    """The initialisations that `wanted` depends on, in order."""
    live = set(wanted)
    needed = []
    for visit in reversed(visits):
        if live & set(visit.uses):
            live |= {fqn for fqn, overwritten in visit.uses.items() if not overwritten}
            needed.append(visit)
    return needed[::-1]


# --- the run on the CPU ---------------------------------------------------------------------------


def _run(tensors: Mapping[str, _ModelTensor], visits: Sequence[_Visit], take: Take) -> None:
    held: dict[str, torch.Tensor] = {}
    peak_bytes = 0
    for visit, after in zip(visits, _lifetimes(visits), strict=True):
        for fqn in after:
            if fqn not in held:
                held[fqn] = tensors[fqn].fresh()
            tensors[fqn].put(held[fqn])
        peak_bytes = max(peak_bytes, sum(x.nbytes for x in held.values()))
        for step in visit.steps:
            step()
        held |= {fqn: tensors[fqn].current(holder) for fqn, holder in visit.own.items()}
        for fqn, fate in after.items():
            tensors[fqn].put(tensors[fqn].tensor)
            if fate is _Fate.TAKE:
                take(fqn, held.pop(fqn).detach())
            elif fate is _Fate.DROP:
                del held[fqn]
    log.info("initialised %d tensors, at most %d bytes at a time", len(tensors), peak_bytes)


def _lifetimes(visits: Sequence[_Visit]) -> list[dict[str, _Fate]]:
    """Per initialisation, the fates of the tensors that must exist while it runs. A module's own
    are among them even if unused: it may look at their device."""
    later: dict[str, _Fate] = {}  # by the uses that follow
    fates = []
    for visit in reversed(visits):
        unused = [fqn for fqn in visit.own if fqn not in visit.uses]
        keeps = _Fate.KEEP
        after = {fqn: keeps if later.get(fqn) is keeps else _Fate.DROP for fqn in unused}
        after |= {fqn: later.get(fqn, _Fate.TAKE) for fqn in visit.uses}
        later |= {
            fqn: _Fate.DROP if overwritten else keeps for fqn, overwritten in visit.uses.items()
        }
        fates.append(after)
    return fates[::-1]

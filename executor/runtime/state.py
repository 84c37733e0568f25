"""State dicts of one rank: its parameters, buffers and gradients under the user's FQNs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.costmodel.graph import Graph
from meshwright.executor.lowering import all_gather, local_part
from meshwright.executor.parameters import StageParameter, load, refresh_frozen
from meshwright.executor.ranks import Place, background, broadcast_object, gloo_group
from meshwright.executor.stages import BuiltStage
from meshwright.planner.plan import Plan


class RankState:
    """The parameters and buffers that one rank of a running plan holds.

    `stages` are this rank's, by number; `stage_parameters` all their parameters in the order of the
    forward, each once. `loaded` says whether they have values. `persistent` are the names in the
    user's state dict, `uninitialised` those of buffers on meta that have no value yet. `unused` are
    the user's tensors that the graph does not read.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        place: Place,
        model: nn.Module,
        stages: Mapping[int, BuiltStage],
        shared: Sequence[StageParameter],
    ) -> None:
        """`shared` are parameters that several stages of this rank read."""
        self.plan = plan
        self.graph = graph
        self.place = place
        self._model = _kept(model)
        self.stages = stages
        own = (p for stage in stages.values() for p in stage.parameters)
        self.stage_parameters: tuple[StageParameter, ...] = (*own, *shared)
        self.loaded = not any(p.is_meta for p in model.parameters())
        self.persistent = frozenset(model.state_dict())
        self.uninitialised = frozenset(fqn for fqn, b in model.named_buffers() if b.is_meta)
        used = {*graph.parameters.values(), *graph.aliases, *graph.buffers.values()}
        self.unused = {n: x.detach() for n, x in model.state_dict().items() if n not in used}

    @property
    def model(self) -> nn.Module:
        """The user's model. Raises ValueError where it had weights, now this rank's, and was
        freed."""
        model = self._model()
        if model is None:
            raise ValueError(
                "the model had weights, which were handed over, and was freed: nothing of it is on "
                "the meta device, to be initialised; build it under `with torch.device('meta'):` "
                "for that, or use load_weights, load_state_dict or load_checkpoint"
            )
        return model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the user's FQNs, as DTensors on its mesh."""
        for p in self.stage_parameters:
            yield p.fqn, p.api

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer."""
        return (p for _, p in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers under the user's FQNs, tied names included."""
        state: dict[str, torch.Tensor] = {}
        aliases: dict[str, list[str]] = {}
        for alias, fqn in self.graph.aliases.items():
            aliases.setdefault(fqn, []).append(alias)
        for p in self.stage_parameters:
            for name in (p.fqn, *aliases.get(p.fqn, [])):
                state[name] = p.api.detach()
        for stage in self.stages.values():
            for value, (fqn, placement) in stage.buffers.items():
                if fqn not in self.persistent:
                    continue
                local = stage.program.tensors[value]
                if placement.sharded:
                    size = self.graph.values[value].shape[placement.dim]
                    local = all_gather(local, placement, self.place.tensor, size)
                state[fqn] = local
        return state | (self.unused if 0 in self.stages else {})

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """All stages' state as whole CPU tensors, on every rank. Collective; for models that fit
        one host. Waits for a checkpoint that is saved in the background."""
        return self._merged({name: _whole(x) for name, x in self.state_dict().items()})

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """All stages' gradients as whole CPU tensors by FQN, on every rank. Collective."""
        named = dict(self.named_parameters())
        return self._merged(
            {name: _whole(p.grad) for name, p in named.items() if p.grad is not None}
        )

    def _merged(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The union of all device groups' tensors, each broadcast by its group's first rank."""
        leaders = [ranks[0] for ranks in self.plan.devices]
        if len(leaders) == 1:
            return tensors
        background.finish_all()  # a save there communicates over the same group
        group = gloo_group()
        parts = [
            broadcast_object(group, rank, tensors if rank == self.place.rank else {})
            for rank in leaders
        ]
        return {name: x for part in parts for name, x in part.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's shards from whole tensors (or DTensors of the same layout) by FQN.

        Names of other stages are ignored; a missing or misshapen one raises ValueError, and so does
        a buffer of a model on meta that the state does not hold. What the graph doesn't read may be
        missing where it has a value.
        """
        buffers = {fqn for stage in self.stages.values() for fqn, _ in stage.buffers.values()}
        if valueless := sorted(buffers & self.uninitialised - set(state)):
            raise ValueError(
                f"state dict: buffers {valueless} have no value: the model is on the meta device "
                f"and they are not in the state (registered with persistent=False); call "
                f"init_weights first, which gives them theirs, read a file by load_weights, or add "
                f"them to the state"
            )
        unread = {
            name: _entry(state, [name], x.shape)
            for name, x in (self.unused if 0 in self.stages else {}).items()
            if name in state or x.is_meta
        }
        self._load_parameters(state)
        self._load_buffers(state)
        for name, source in unread.items():  # what was there may be the user's own
            self.unused[name] = _whole(source).to(self.unused[name].dtype)
        self.loaded, self.uninitialised = True, frozenset()

    def _load_parameters(self, state: Mapping[str, torch.Tensor]) -> None:
        for p in self.stage_parameters:
            names = [p.fqn, *(a for a, fqn in self.graph.aliases.items() if fqn == p.fqn)]
            source = _entry(state, names, p.shape)
            if isinstance(source, DTensor) and _same_layout(source, p.api):
                with torch.no_grad():
                    p.stored.copy_(source.to_local())
                continue
            whole = source.full_tensor() if isinstance(source, DTensor) else source
            load(p, whole.to(self.place.device), self.place)
        refresh_frozen(self.stage_parameters)

    def _load_buffers(self, state: Mapping[str, torch.Tensor]) -> None:
        axis = self.place.tensor
        for stage in self.stages.values():
            for value, (fqn, placement) in stage.buffers.items():
                if fqn in state:
                    whole = _entry(state, [fqn], self.graph.values[value].shape)
                    whole = whole.to(self.place.device)
                    if placement.sharded:
                        whole = local_part(whole, placement, axis.size, axis.rank)
                    stage.program.tensors[value].copy_(whole)


def _kept(model: nn.Module) -> Callable[[], nn.Module | None]:
    """A reference to the model: strong if it is on meta, to be initialised later, else weak."""
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return lambda: model
    return weakref.ref(model)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A whole copy on the CPU."""
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return whole.detach().to("cpu", copy=True)


def _entry(
    state: Mapping[str, torch.Tensor], names: Sequence[str], shape: Sequence[int]
) -> torch.Tensor:
    """The state dict's tensor under the first of `names` that it has. Raises ValueError where it
    has none, or one of another shape."""
    name = next((n for n in names if n in state), None)
    if name is None:
        raise ValueError(
            f"state dict: missing {names[0]!r}; it has {len(state)} names, e.g. {sorted(state)[:3]}"
        )
    if tuple(state[name].shape) != tuple(shape):
        raise ValueError(
            f"state dict: {names[0]!r} has shape {tuple(state[name].shape)}, the model "
            f"{tuple(shape)}"
        )
    return state[name]


def _same_layout(x: DTensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same device mesh and placements."""
    return (
        isinstance(y, DTensor) and x.device_mesh == y.device_mesh and x.placements == y.placements
    )

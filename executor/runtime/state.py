"""State dicts of one rank: its parameters, buffers and gradients under the user's FQNs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.costmodel.graph import Graph
from meshwright.executor.errors import SavedError
from meshwright.executor.parameters import StageParameter, load, refresh_frozen, whole_of
from meshwright.executor.ranks import OBJECTS, Place, broadcast_object, gloo_group
from meshwright.executor.stages import BuiltStage, HeldBuffer, UserModel
from meshwright.planner.plan import Plan
from meshwright.profiles.inputs import shown

T = TypeVar("T")


class RankState:
    """The parameters and buffers that one rank of a running plan holds.

    `stages` are this rank's, by number; `stage_parameters` all their parameters in the order of the
    forward, each once; `held_buffers` all their buffers, by FQN. `loaded` says whether they have
    values. `persistent` are the names in the user's state dict, `uninitialised` those of buffers on
    meta that have no value yet. `unread` names the user's tensors that the graph does not read.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        place: Place,
        user: UserModel,
        stages: Mapping[int, BuiltStage],
        shared: Sequence[StageParameter],
    ) -> None:
        """`shared` are parameters that several stages of this rank read."""
        self.plan = plan
        self.graph = graph
        self.place = place
        self.user = user
        self.stages = stages
        parameters = (p for stage in stages.values() for p in stage.parameters)
        self.stage_parameters: tuple[StageParameter, ...] = (*parameters, *shared)
        buffers = (b for stage in stages.values() for b in stage.buffers)
        self.held_buffers: dict[str, HeldBuffer] = {b.fqn: b for b in buffers}
        self.loaded = user.on_meta.isdisjoint(name for name, _ in user.module.named_parameters())
        self.persistent = frozenset(user.module.state_dict())
        named_buffers = {name for name, _ in user.module.named_buffers()}
        self.uninitialised = user.on_meta & named_buffers
        used = {*graph.parameters.values(), *graph.aliases, *graph.buffers.values()}
        self.unread = tuple(name for name in user.module.state_dict() if name not in used)
        if not self.loaded:
            user.when_loaded(self.all_loaded)

    def all_loaded(self) -> None:
        """Take note that all parameters and buffers have new values."""
        self.loaded, self.uninitialised = True, frozenset()
        refresh_frozen(self.stage_parameters)

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.user.module

    @property
    def unused(self) -> dict[str, torch.Tensor]:
        """The user's tensors that the graph does not read, by FQN."""
        return {name: self.user.tensor(name).detach() for name in self.unread}

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
        self.follow_buffers()
        for fqn, b in self.held_buffers.items():
            if fqn in self.persistent:
                state[fqn] = b.whole.detach()
        return state | (self.unused if 0 in self.stages else {})

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """All stages' state as whole CPU tensors, on every rank. Collective; for models that fit
        one host."""
        return self.merged({name: _whole(x) for name, x in self.state_dict().items()})

    def follow_buffers(self) -> None:
        """Read what was written to the model's buffers since the last step."""
        with torch.no_grad():
            for stage in self.stages.values():
                stage.program.written.clear()  # of a step that failed
                for b in stage.buffers:
                    b.follow(self.user, stage.program.tensors)

    def settle_buffers(self) -> None:
        """Give the model's buffers what the forward made of them."""
        for stage in self.stages.values():
            for b in stage.buffers:
                b.settle(stage.program.tensors, stage.program.written)

    def everything(self) -> dict[str, torch.Tensor]:
        """`full_state_dict` with the buffers that are not persistent, each tensor under its first
        name. Collective."""
        self.follow_buffers()
        named = {p.fqn: p.api.detach() for p in self.stage_parameters}
        named |= {fqn: b.whole for fqn, b in self.held_buffers.items()}
        first = self.user.first
        return self.merged({first.get(name, name): _whole(x) for name, x in named.items()})

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """All stages' gradients as whole CPU tensors by FQN, on every rank. Collective."""
        named = dict(self.named_parameters())
        return self.merged(
            {name: _whole(p.grad) for name, p in named.items() if p.grad is not None}
        )

    def merged(self, tensors: dict[str, T]) -> dict[str, T]:
        """The union of all device groups' values, each broadcast by its group's first rank.
        Collective."""
        leaders = [ranks[0] for ranks in self.plan.devices]
        if len(leaders) == 1:
            return tensors
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
        if not isinstance(state, Mapping):
            raise SavedError(
                f"is a {type(state).__name__}, {shown(state)}",
                place="state dict",
                legal="tensors by name",
                way_out="give what state_dict() or full_state_dict() returned",
            )
        if valueless := sorted(self.held_buffers.keys() & self.uninitialised - set(state)):
            raise SavedError(
                f"buffers {valueless} have no value: the model is on the meta device "
                "and they are not in the state (registered with persistent=False)",
                place="state dict",
                way_out="call init_weights first, which gives them theirs, read a file by "
                "load_weights, or add them to the state",
            )
        unread = {
            name: _entry(state, [name], x.shape)
            for name, x in self.unused.items()
            if name in state or (x.is_meta and 0 in self.stages)
        }
        self._load_parameters(state)
        for fqn, b in self.held_buffers.items():
            if fqn in state:
                self.user.write(fqn, _entry(state, [fqn], b.whole.shape))
        for name, source in unread.items():
            self.user.write(name, _whole(source).to(self.user.tensor(name).dtype))
        self.all_loaded()

    def _load_parameters(self, state: Mapping[str, torch.Tensor]) -> None:
        for p in self.stage_parameters:
            names = [p.fqn, *(a for a, fqn in self.graph.aliases.items() if fqn == p.fqn)]
            source = _entry(state, names, p.shape)
            if isinstance(source, DTensor) and _same_layout(source, p.api):
                with torch.no_grad():
                    p.stored.copy_(source.to_local())
                continue
            load(p, whole_of(source).to(self.place.device), self.place)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A whole copy on the CPU."""
    return whole_of(x).detach().to("cpu", copy=True)


def _entry(
    state: Mapping[str, torch.Tensor], names: Sequence[str], shape: Sequence[int]
) -> torch.Tensor:
    """The state dict's tensor under the first of `names` that it has. Raises ValueError where it
    has none, or one of another shape."""
    name = next((n for n in names if n in state), None)
    if name is None:
        raise SavedError(
            f"missing {names[0]!r}; it has {len(state)} names, e.g. {sorted(state)[:3]}",
            place="state dict",
            way_out="give the whole model's, under the model's own names",
        )
    if tuple(state[name].shape) != tuple(shape):
        raise SavedError(
            f"{names[0]!r} has shape {tuple(state[name].shape)}, the model {tuple(shape)}",
            place="state dict",
            way_out="give whole tensors of this model, not parts",
        )
    return state[name]


def _same_layout(x: DTensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same device mesh and placements."""
    return (
        isinstance(y, DTensor) and x.device_mesh == y.device_mesh and x.placements == y.placements
    )


def group_of(state: RankState, name: str = OBJECTS) -> dist.ProcessGroup | None:
    """The gloo group of all ranks, that of the main thread or `BESIDE` it; None on one device."""
    return None if state.place.mesh is None else gloo_group(name)

"""Optimizers that work on whole tensors (Shampoo, Muon), of parameters that ranks hold parts of.

Every such parameter has one owner among the ranks of its mesh. In a step its value and gradient are
gathered, the owner's optimizer steps on them as on one device, and the owner sends the new value
to the ranks, which keep their parts. Each rank steps and keeps the states of 1/n of the elements;
a step moves every element three times. Others are stepped where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.costmodel.operators import owners_of
from meshwright.executor.errors import OptimizerError
from meshwright.executor.parameters.parameters import StageParameter, load, part_of, wrap_like
from meshwright.executor.parameters.whole_operands import whole_of
from meshwright.executor.ranks import Place, all_gather_object, gloo_group, launch

Groups = list[dict[str, Any]]
IN_PLACE = -1  # in place of an owner


class WholeTensors(torch.optim.Optimizer):
    """An optimizer of `optimizer_class` over whole tensors in the place of `params`.

    `params` are parameters of `held`, those of a rank, or torch's groups of them; with `whole` only
    those of these FQNs are stepped whole, the others in place. Learning-rate
    schedules, `param_groups` and `zero_grad` are those of any optimizer. `step` and `state_dict`
    are collective, and the states by FQN those of the whole model. Raises ValueError for parameters
    of another model.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        held: Sequence[StageParameter],
        place: Place,
        options: Mapping[str, Any],
        whole: Collection[str] | None = None,
    ) -> None:
        known = {id(p.api): p for p in held}
        groups = _groups(params)
        all_params = [p for group in groups for p in group["params"]]
        if any(id(p) not in known for p in all_params):
            raise OptimizerError(
                "parameters that are not this model's",
                place="whole_tensor_optimizer",
                legal="those of named_parameters(), or groups of them",
            )
        self.place = place
        self.chosen = [known[id(p)] for p in all_params]
        own = [whole is None or p.fqn in whole for p in self.chosen]
        sizes = [math.prod(p.shape) for p, owned in zip(self.chosen, own, strict=True) if owned]
        owners = iter(owners_of(sizes, 1 if place.mesh is None else place.mesh.size()))
        self.owners = [next(owners) if owned else IN_PLACE for owned in own]
        self.whole = [
            nn.Parameter(torch.empty(p.shape, device="meta")) if owned else p.api
            for p, owned in zip(self.chosen, own, strict=True)
        ]
        for k in self._own():
            p = self.chosen[k]
            self.whole[k] = nn.Parameter(_nothing(p.stored.dtype, p.shape, place.device))
        full_tensors = iter(self.whole)
        for group in groups:
            group["params"] = [next(full_tensors) for _ in group["params"]]
        if not self.whole:  # a stage may have none; schedules look for a group all the same
            groups[0]["params"] = [nn.Parameter(torch.zeros(1, 1))]
        self.inner = optimizer_class(groups, **options)
        super().__init__(self.inner.param_groups, dict(self.inner.defaults))
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _own(self) -> list[int]:
        """The numbers of the whole parameters that this rank steps."""
        mesh = self.place.mesh
        ranks = [self.place.rank] if mesh is None else mesh.mesh.flatten().tolist()
        return [
            k
            for k, owner in enumerate(self.owners)
            if owner != IN_PLACE and ranks[owner] == self.place.rank
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter with a gradient. ValueError for a closure."""
        if closure is not None:
            raise OptimizerError(
                "step() takes no closure", place="whole_tensor_optimizer", way_out="call train_step"
            )
        owned = set(self._own())
        stepped = [
            k
            for k, p in enumerate(self.chosen)
            if p.api.grad is not None and self.owners[k] != IN_PLACE
        ]
        for k in stepped:
            self._gather(k, owned=k in owned)
        self.inner.step()
        for k in stepped:
            p = self.chosen[k]
            value = self.whole[k].data if k in owned else _blank(p, self.place)
            self._broadcast(value, self.owners[k])
            load(p, value, self.place)
            self.whole[k].grad = None
            if k in owned:  # the next step gathers it anew
                self.whole[k].data = _nothing(value.dtype, value.shape, value.device)

    def _gather(self, k: int, *, owned: bool) -> None:
        """The value and the gradient of parameter k, for its owner."""
        value, gradient = whole_of(self.chosen[k].api), whole_of(self.chosen[k].api.grad)
        if owned:
            self.whole[k].data, self.whole[k].grad = value.clone(), gradient

    def _broadcast(self, x: torch.Tensor, owner: int) -> None:
        """The owner's tensor on all ranks of the mesh: along one dim after the other."""
        mesh = self.place.mesh
        if mesh is None:
            return
        for dim, at in enumerate(torch.unravel_index(torch.tensor(owner), mesh.shape)):
            dist.broadcast(x, group=mesh.get_group(dim), group_src=int(at))

    # --- as an optimizer of what ranks hold ---

    def spread(self) -> torch.optim.Optimizer:
        """An optimizer of the inner one's class over the parameters as ranks hold them, with states
        that are laid out as these, or whole on each rank: for checkpoints, which any plan reads.
        Collective."""
        held: torch.optim.Optimizer = object.__new__(type(self.inner))
        numbers = {id(p): k for k, p in enumerate(self.whole)}
        groups = [
            {
                **group,
                "params": [self.chosen[numbers[id(p)]].api for p in group["params"]
                           if id(p) in numbers],
            }
            for group in self.inner.param_groups
        ]  # fmt: skip
        torch.optim.Optimizer.__init__(held, groups, dict(self.inner.defaults))
        for k, p in enumerate(self.chosen):
            if self.owners[k] == IN_PLACE:
                held.state[p.api] = self.inner.state.get(p.api, {})
        known = self._kinds_of_states()
        for k, p in enumerate(self.chosen):
            if kinds := known.get(p.fqn):
                own = self.inner.state.get(self.whole[k], {})
                held.state[p.api] = {
                    name: self._spread(k, own.get(name), kind) for name, kind in kinds.items()
                }
        return held

    def take(self, held: torch.optim.Optimizer) -> None:
        """Go on from the states and options of an optimizer as `spread` makes it. Collective."""
        for group, given in zip(self.inner.param_groups, held.param_groups, strict=True):
            group |= {name: x for name, x in given.items() if name != "params"}
        owned = {*self._own()}
        for k, p in enumerate(self.chosen):
            state = held.state.get(p.api, {})
            if self.owners[k] == IN_PLACE:
                if state:
                    self.inner.state[p.api] = state
                continue
            whole = {name: whole_of(x) for name, x in sorted(state.items())}
            if k in owned and whole:
                self.inner.state[self.whole[k]] = whole

    def _kinds_of_states(self) -> dict[str, dict[str, Any]]:
        """By FQN and name of each state of a whole tensor: shape and dtype, or a value without
        dims. Collective."""
        own = {
            self.chosen[k].fqn: {
                name: (tuple(x.shape), x.dtype)
                if isinstance(x, torch.Tensor) and x.ndim
                else x.cpu()
                if isinstance(x, torch.Tensor)
                else x
                for name, x in self.inner.state.get(self.whole[k], {}).items()
            }
            for k in self._own()
        }
        if not launch.running():
            return own
        return {f: s for part in all_gather_object(gloo_group(), own) for f, s in part.items()}

    def _spread(self, k: int, x: Any, kind: Any) -> Any:
        """A state of parameter k on all of its ranks: the owner's, in parts where it has the
        parameter's shape."""
        if not (isinstance(kind, tuple) and len(kind) == 2 and isinstance(kind[1], torch.dtype)):
            return kind
        p, (shape, dtype) = self.chosen[k], kind
        value = torch.empty(shape, dtype=dtype, device=self.place.device) if x is None else x
        self._broadcast(value, self.owners[k])
        if shape == tuple(p.shape):
            return wrap_like(p, part_of(p, value, self.place).clone())
        mesh = self.place.mesh
        if mesh is None or not isinstance(p.api, DTensor):
            return value
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`Optimizer.zero_grad` on the model's parameters."""
        for p in self.chosen:
            if set_to_none:
                p.api.grad = None
            elif p.api.grad is not None:
                p.api.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The whole model's states by FQN, and the options of groups; the same on all ranks."""
        mine = self.inner.state_dict()
        states = {
            self.chosen[k].fqn: {name: whole_of(x) for name, x in state.items()}
            for k, state in sorted(mine["state"].items())
        }
        if launch.running():
            parts = all_gather_object(gloo_group(), states)
            states = {fqn: state for part in parts for fqn, state in part.items()}
        options = [
            {name: x for name, x in group.items() if name not in ("params", "param_names")}
            for group in mine["param_groups"]
        ]
        return {"state": states, "param_groups": options}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states of what this rank steps, and the options of groups."""
        mine, states = self.inner.state_dict(), dict(state_dict["state"])
        owned = {k: self.chosen[k].fqn for k in self._own()}
        for k, p in enumerate(self.chosen):
            if self.owners[k] == IN_PLACE and p.fqn in states:
                owned[k] = p.fqn
                states[p.fqn] = {
                    name: wrap_like(p, part_of(p, x, self.place).clone())
                    if isinstance(x, torch.Tensor) and x.shape == torch.Size(p.shape)
                    else x
                    for name, x in states[p.fqn].items()
                }
        groups = zip(mine["param_groups"], state_dict["param_groups"], strict=True)
        self.inner.load_state_dict({
            "state": {k: states[fqn] for k, fqn in owned.items() if fqn in states},
            "param_groups": [group | options for group, options in groups],
        })  # fmt: skip
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def _nothing(dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """A tensor of a shape that takes no memory."""
    return torch.empty((), dtype=dtype, device=device).expand(tuple(shape))


def _groups(params: Iterable[Any]) -> Groups:
    """torch's parameter groups of what an optimizer is given, copied."""
    entries = list(params)
    if entries and isinstance(entries[0], dict):
        return [{**group, "params": list(group["params"])} for group in entries]
    return [{"params": entries}]


def _blank(parameter: StageParameter, place: Place) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.stored.dtype, device=place.device)

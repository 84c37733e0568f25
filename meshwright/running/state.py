"""State of a running plan: parameters, the optimizer's states, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.costmodel.memory import optimizer_named
from meshwright.costmodel.operators import matrices_of
from meshwright.executor import export
from meshwright.executor.checkpoint import Saving, checkpoint, load_apart, save_apart, weights
from meshwright.executor.errors import OptimizerError
from meshwright.executor.parameters import BY_NAME, Muon, WholeTensors, named_kind
from meshwright.executor.ranks import background, gloo_group, launch, progress, run_on_all
from meshwright.executor.runtime import ServedRuntime, group_of
from meshwright.executor.stages import check_trains, chosen_matrices, stepped_whole
from meshwright.profiles.inputs import ArgumentError
from meshwright.profiles.inputs.limits import checked_booleans
from meshwright.running.planned import PlannedModel, in_replica

T = TypeVar("T")


class State(PlannedModel):
    """A planned model whose weights are read, written and optimized."""

    _saving: Saving | None = None

    def _check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Raise ValueError, on all ranks, for an optimizer of more than the model. Collective."""
        if self._why_not or (optimizer is None and self._runtime is None):
            return  # nothing runs; where ranks do, all of them have a runtime
        if isinstance(optimizer, WholeTensors):
            return  # it was made over this model's
        runtime = self.runtime
        background.finish_all()  # a save may use the group
        group = group_of(runtime)
        with progress.during("checking the optimizer"):
            run_on_all(group, lambda: check_trains(optimizer, runtime.model))

    @in_replica
    def _checked_optimizer(
        self, optimizer: torch.optim.Optimizer | None
    ) -> torch.optim.Optimizer | None:
        """An optimizer that trains the model alone, as this rank holds it. Collective."""
        self._check_optimizer(optimizer)
        return self._held(optimizer)

    def _held(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
        """An optimizer over parameters as this rank holds them. Collective."""
        return optimizer.spread() if isinstance(optimizer, WholeTensors) else optimizer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the user's FQNs: the model's own objects where every rank holds
        the whole model, else DTensors on the stage's (dp, tp) mesh."""
        return self.runtime.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """For any torch optimizer. Norms and means of a parameter are those of the whole; one that
        needs whole matrices has `whole_tensor_optimizer`."""
        return (p for _, p in self.named_parameters())

    @in_replica
    def make_optimizer(
        self,
        kind: str | Callable[..., torch.optim.Optimizer] | None = None,
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """`kind(params, **options)`, whole where parts of a tensor would be stepped otherwise.

        `kind` is a name of plans or a class of optimizers, None the one that was planned; `params`
        as for `whole_tensor_optimizer`. Matrices of Muon, Adafactor and Shampoo, and all that ranks
        hold parts of where an unknown kind's step of an element depends on others of its tensor,
        are stepped by owners, as by `whole_tensor_optimizer`; all else where it is. Of "muon"
        without `params`, tables and the last product's weights are stepped by AdamW. Raises
        `ArgumentError` for a name without a class.
        """
        kind = self._problem.optimizer if kind is None else kind
        make = BY_NAME.get(kind) if isinstance(kind, str) else kind
        made = make.func if isinstance(make, partial) else make
        if make not in BY_NAME.values() and not (
            isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
        ):
            raise ArgumentError.refused(
                "make_optimizer: kind", kind, legal=[*BY_NAME],
                way_out="give the class that you train with: make_optimizer(ItsClass, lr=...)",
            )  # fmt: skip
        assert make is not None
        name = kind if isinstance(kind, str) else named_kind(made)
        held, place = self.runtime.stage_parameters, self.runtime.place
        matrices: Mapping[str, Any] = {}
        if name:
            matrices = matrices_of(self._problem.graph, optimizer_named(name))
        if params is None:
            params = [p.api for p in held if p.trainable]
            if make is Muon:
                split = [(p.api, p.value in matrices) for p in held if p.trainable]
                params = [
                    {"params": [p for p, is_matrix in split if is_matrix is adapt], "adapt": adapt}
                    for adapt in (True, False)
                ]
        elif matrices:
            params = [*params]
            matrices = chosen_matrices(params, held)
        stages = [(s.divides, s.tp > 1, s.dp * s.tp * s.cp > 1) for s in self.plan.stages]
        whole = stepped_whole(
            make, options, name=name, matrices=matrices, held=held,
            cut=any((divided and several) or tp for divided, tp, several in stages),
            several=any(several for _, _, several in stages),
        )  # fmt: skip
        try:
            if whole is None:
                return make(params, **options)
            self._check_steps_whole(f"make_optimizer: {kind}")
            return WholeTensors(make, params, held=held, place=place, options=options, whole=whole)
        except TypeError as error:
            raise ArgumentError(
                f"({', '.join(options)}): {error}", place=f"make_optimizer: {kind}",
                legal="options of that optimizer",
            ) from error  # fmt: skip

    @in_replica
    def whole_tensor_optimizer(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """`optimizer_class(params, **options)` on whole tensors, for optimizers that can't work on
        parts of a matrix (Shampoo, K-FAC, Muon).

        `params` are of `named_parameters()`, or torch's groups of them; None means all that train.
        Each tensor is gathered to one owner among its ranks, stepped there, and sent back: every
        rank keeps the states of its share, and each element crosses the links three times a step.
        Its `state_dict` is collective; a checkpoint takes it as any optimizer, for every plan.
        """
        self.without_servers("whole_tensor_optimizer")
        self._check_steps_whole("whole_tensor_optimizer")
        runtime = self.runtime
        chosen = [p for p in self.parameters() if p.requires_grad] if params is None else params
        held, place = runtime.stage_parameters, runtime.place
        return WholeTensors(optimizer_class, chosen, held=held, place=place, options=options)

    def _check_steps_whole(self, who: str) -> None:
        """Raise ValueError where gradients come late, with which tensors are not stepped whole."""
        if self.plan.staleness:
            raise OptimizerError(
                " would step whole tensors, whose owners the plan's late gradients do not reach",
                place=who,
                legal="an optimizer that steps each element by itself, as adamw",
                way_out="take one, or plan with Overrides(staleness=0)",
            )

    @contextmanager
    def _as_met(self) -> Iterator[None]:
        """Context in which the weights are those of the last meeting of replicas, where there are
        several."""
        if self.plan.outer_loop is None:
            yield
        else:
            with self.meetings.holding():
                yield

    @in_replica
    def state_dict(self) -> dict[str, torch.Tensor]:
        """This stage's parameters (DTensors) and buffers by FQN, tied names included; of replicas
        that train apart copies of the weights at their last meeting, collective within each."""
        if self.plan.outer_loop is None:
            return self.runtime.state_dict()
        with self._as_met():
            return {name: x.clone() for name, x in self.runtime.state_dict().items()}

    @in_replica
    def full_state_dict(self, *, rank: int | None = None) -> dict[str, torch.Tensor]:
        """The whole model's state as CPU tensors, for `model.load_state_dict`; on every rank, or
        tensor by tensor on one `rank`, the others getting an empty dict. Collective. Of replicas
        that train apart the weights at their last meeting, and `rank` is one of each."""
        with self._as_met():
            if rank is None or self.plan.is_served:
                state = self.runtime.full_state_dict()
                return state if rank in (None, launch.rank()) else {}
            return export.full_state_dict(self.runtime, rank)

    @in_replica
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's parts from a whole state dict by FQN."""
        self.runtime.check_drained("load_state_dict")
        self.runtime.load_state_dict(state)

    @in_replica
    def init_weights(self, seed: int = 0) -> None:
        """Initialise a model that is on meta as `model.to_empty(device="cpu")`, `torch.manual_seed`
        and `model.apply` of the modules' own initialisers do on one device (not as the constructor,
        which draws in its own order), whatever the plan: one module whole at a time, each rank
        keeping its part. ValueError where nothing is on meta; it names tensors without an
        initialiser.
        """
        self.runtime.check_drained("init_weights")
        weights.init_weights(self.runtime, seed)

    @in_replica
    def load_weights(self, path: str | Path) -> None:
        """Read weights from a `torch.save` file, safetensors (a file, or a folder with an index) or
        a checkpoint, each rank only its part. Collective. Checkpoints and folders of
        `save_pretrained` are verified by their checksums. ValueError for missing or misshapen names
        and for names of files outside the folder, RuntimeError for a file that is damaged or would
        run code.
        """
        self.runtime.check_drained("load_weights")
        weights.load_weights(self.runtime, path)

    @checked_booleans
    def save_pretrained(
        self,
        path: str | Path,
        *,
        max_shard_size: int | str = "5GB",
        trainable_only: bool = False,
        dtype: torch.dtype | None = None,
        submodule: str | None = None,
    ) -> None:
        """Write the weights as transformers' `from_pretrained` reads them, to a folder that all
        ranks see: safetensors, config, index. Collective; all ranks write, no tensor but one at a
        time is whole, and a folder saved before is replaced when the new one is complete.

        Files hold at most `max_shard_size` (bytes, or "5GB"), floats as `dtype` (None: as they
        train, fp32). The model of transformers is the user's model, or the only one among its
        submodules, or that which `submodule` names; without one, the folder has no config. With
        `trainable_only` peft's adapters are written as peft reads them; of a model without
        adapters the trained parameters. Raises ValueError for what can't be saved so, RuntimeError
        where writing fails, the same on all ranks. Of replicas that train apart the weights at
        their last meeting; `meet()` before makes these the latest.
        """
        options: dict[str, Any] = {
            "max_shard_size": max_shard_size,
            "trainable_only": trainable_only,
            "dtype": dtype,
            "submodule": submodule,
        }
        if self._world is None:
            self._written(lambda: export.save_pretrained(self.runtime, path, **options))
            return
        self.meetings.begin()

        def first() -> None:
            if self._world is not None and self._world.number == 0:
                with self._inside(), self._as_met():
                    export.save_pretrained(self.runtime, path, **options)

        self.meetings.arrive_alike("save_pretrained", str(path))
        run_on_all(gloo_group(), first)

    def _written(self, write: Callable[[], T]) -> T | None:
        """Write by all ranks; beside servers by the first one, as all have all. Collective."""
        runtime = self.runtime
        return runtime.on_first(write) if isinstance(runtime, ServedRuntime) else write()

    def _same_extra(self, extra: Any) -> Callable[[], Any]:
        """A function of the objects to save: beside servers rank 0's, or SavedError where those of
        others have other states. Collective; what it gives is called on rank 0."""
        runtime = self.runtime
        if not isinstance(runtime, ServedRuntime) or extra is None:
            return lambda: extra
        states, trees = checkpoint.compared_states(extra)
        every = runtime.gathered(trees)
        return lambda: checkpoint.same_states(states, every)

    @checked_booleans
    def save_checkpoint(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> Saving:
        """Write parameters, buffers, optimizer states, the number of steps, seed and loss scale to
        a folder that all ranks see. Collective.

        A checkpoint already at `path`, which may be a link, is replaced when the new one is
        complete; killed at any point, one of the two is there. Where the folder holds what no save
        wrote, ValueError names it. `extra` are your own objects with `state_dict()`, the same
        on all ranks, such as `{"scheduler": scheduler}`. Asynchronous, it returns when the state is
        copied to the host: training may go on, `.wait()` on what is returned says that it is on the
        disk, and the next save or load, and the end of the process, wait for it. An error in the
        background is raised by `.wait()` or the next save.

        Replicas that train apart are saved as they are, and the weights at their last meeting with
        the first replica's buffers; a meeting that is due is at the `train_step` after, here and
        where it is loaded.
        """
        if self._saving is not None:
            before, self._saving = self._saving, None
            before.wait()
        self.runtime.check_drained("save_checkpoint")
        held, runtime = self._checked_optimizer(optimizer), self.runtime
        if self.plan.outer_loop is not None:
            save_apart(self.meetings, path, held, extra=extra)
            return Saving(thread=None)
        states = runtime.all_states(held) if isinstance(runtime, ServedRuntime) else nullcontext()
        same = self._same_extra(extra)
        with states:
            self._saving = self._written(
                lambda: checkpoint.save(
                    runtime, path, held, extra=same(), asynchronous=asynchronous
                )
            )
        self._saving = self._saving or Saving(thread=None)
        return self._saving

    def load_checkpoint(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Read what `save_checkpoint` wrote, under this plan or another. Collective.

        The optimizer may be new; its class must be the one that was saved, its groups may be in any
        order. What is read is verified by its checksums; older checkpoints, without, are warned
        about. Raises FileNotFoundError, ValueError (another model or optimizer) or RuntimeError (a
        damaged file, or one that would run code), the same on all ranks.
        """
        self.runtime.check_drained("load_checkpoint")
        held, runtime = self._checked_optimizer(optimizer), self.runtime
        if self.plan.outer_loop is not None:
            load_apart(self.meetings, path, held, extra=extra)
        else:
            checkpoint.load(runtime, path, held, extra=extra)
        if isinstance(runtime, ServedRuntime) and held is not None:
            runtime.keep_own(held)
        if isinstance(optimizer, WholeTensors) and held is not None:
            optimizer.take(held)

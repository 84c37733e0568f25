"""`fit`: a whole training run in one call, over what any user can call of a parallel model."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from meshwright.api import auto_parallelize
from meshwright.data import collated, data_loader, first_samples, is_stream
from meshwright.executor.ranks import StopRequests, launch
from meshwright.model import ParallelModel
from meshwright.monitor import MetricsLogger, logger_for
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import InfeasibleError, Plan, PlanError
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import MeshwrightError, checked_path, shown
from meshwright.profiles.inputs.limits import MAX_ROWS, is_number
from meshwright.running import check_in_backward
from meshwright.shell.progress import StepProgress
from meshwright.training.kept import FitError, KeptCheckpoints, locked
from meshwright.training.loop import Evaluations, Loop, Saves, Watch

SAMPLES = 2  # of the data, that a plain module is traced on


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A run that has ended: the trained model and its optimizer; the `steps` that were made in all,
    earlier runs that it resumed included; the `loss` of the last one (None where this run made
    none) and of the last evaluation; the step of the best one; and why it `ended`: "steps", "data",
    "signal" (SIGTERM), "patience" or "watch"."""

    result: ParallelModel
    optimizer: torch.optim.Optimizer
    steps: int
    loss: float | None
    eval_loss: float | None
    best_step: int | None
    ended: str


def fit(
    model: nn.Module | ParallelModel,
    data: Any,
    *,
    planning: Mapping[str, Any] | None = None,
    optimizer: Callable[[ParallelModel], torch.optim.Optimizer],
    steps: int | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    max_grad_norm: float | None = 1.0,
    evaluation: Any = None,
    evaluate_every: int = 500,
    patience: int | None = None,
    metric: str = "eval_loss",
    greater_is_better: bool = False,
    folder: str | Path | None = None,
    save_every: int | Literal["best"] | None = None,
    keep: int = 3,
    load_best: bool = False,
    resume: bool | Literal["given"] | Path = True,
    hosts: Iterable[int] = (),
    log_to: MetricsLogger | str | Path | None = None,
    log_every: int = 10,
    progress: bool | None = None,
    watch: Watch | None = None,
    **loading: Any,
) -> Fitted:
    """Train a model, from the newest checkpoint in `folder` on, to the end. Collective: all ranks
    of the plan call it alike.

    `model` is what `auto_parallelize` returned, or a plain module, which is planned first, by the
    arguments of `auto_parallelize` that `planning` gives: `global_batch_size` at least. By default
    the cluster is the one that torchrun started (`Cluster.detect()`), and `example_inputs` are the
    first samples of the data.

    `data` is a dataset, of which each rank loads its own rows, one that is streamed (torch's
    `IterableDataset`), or an iterable of batches: a `data_loader`, or one that gives the same
    global batches on every rank. `loading` are further arguments of `data_loader` for datasets
    (shuffle, seed, collate_fn, num_workers, ...). Without
    `steps` the run ends with the data (of a dataset: one epoch), else data begin anew as often as
    it takes. Gradients are accumulated as planned: over the micro-batches of `global_batch_size`.

    `optimizer` makes one of the parallel model's parameters (`lambda result:
    torch.optim.AdamW(result.parameters(), lr=3e-4)`), `schedule` a learning-rate scheduler of torch
    of that, which is stepped with every step. `max_grad_norm` clips the norm of all gradients; None
    doesn't.

    `evaluation`, a dataset or an iterable of batches as above, is evaluated every `evaluate_every`
    steps; with `patience`, the run ends after so many evaluations in a row without a better
    `metric`, which is a lower loss, or the number of that name, where `greater_is_better` a higher
    one. It may also be a collective function without arguments that gives numbers by name, the
    `metric` among them. With `load_best` the run ends with the weights after the best evaluation,
    as far as they were saved: `save_every="best"` saves after each that is better than all before.

    `folder`, which all ranks see, gets a checkpoint `step-<n>` every `save_every` steps, at the end
    of the run and where a process gets SIGTERM, upon which the run ends, or SIGUSR1; the newest
    `keep` stay. The run resumes from the newest that is sound, under any plan: weights, optimizer,
    schedule, and the position in the data where they have a state (`data_loader` has), to the
    sample. Where the script gives another learning rate, schedule, seed or other option than the
    run that it resumes was given, a warning says both values, and that which was saved goes on;
    `resume="given"` takes what is given now, and a path is the checkpoint to go on from.
    `resume=False` refuses a folder with checkpoints. Another run that writes into the folder is
    refused.

    The plan of a plain module is kept in the folder, too, and taken again where the run goes on
    with as many hosts of the same devices, and is planned by the same arguments. `hosts` are
    numbers of hosts that it may go on with (`range(2, 5)`): plans for them are made before the
    first step, and a number of hosts on which the run could not go on is a warning then.

    `log_to` gets the metrics of every `log_every`th step and the evaluations: a logger of
    `meshwright.monitor`, any function of a mapping, or the path of a file for JSON lines. Rank 0
    shows them as lines on stderr, with a bar of the steps; by default on a terminal alone,
    `progress` says otherwise (elsewhere there is no bar).

    `watch` is a function of each `RunEvent`, on every rank; what it returns of "log", "evaluate",
    "save" and "stop" is done after the step, on all ranks where one asks.

    Raises ValueError for arguments that can't be, and what `train_step`, `evaluate` and checkpoints
    raise.
    """
    check_counts(
        steps=steps,
        evaluate_every=evaluate_every,
        patience=patience,
        save_every=None if save_every == "best" else save_every,
        keep=keep,
        log_every=log_every,
    )
    check_best(metric, greater_is_better, load_best, progress)
    check_functions(
        optimizer=optimizer,
        schedule=schedule,
        max_grad_norm=max_grad_norm,
        resume=resume,
        watch=watch,
    )
    computed = is_function(evaluation)
    _check_data("data", data, {} if computed or _is_dataset(evaluation) else loading)
    if evaluation is not None and not computed:
        _check_data("evaluation", evaluation, {})
    path = None if folder is None else checked_path(folder, "fit: folder")
    loggers = () if log_to is None else (logger_for(log_to),)
    shown = _shown(progress)
    if shown is not None:
        loggers = (*loggers, shown)
    requests = StopRequests()
    with requests.listening():
        result = _planned(model, data, planning, loading, path, counted_hosts(hosts))
        built = optimizer(result)
        check_made("optimizer", built)
        check_in_backward(result.plan, built, max_grad_norm, "fit")
        scheduled = None if schedule is None else schedule(built)
        if schedule is not None:
            check_made("schedule", scheduled)
        loop = Loop(
            result=result,
            optimizer=built,
            schedule=scheduled,
            loader=_loader(result, data, loading),
            steps=steps,
            max_grad_norm=max_grad_norm,
            saves=_saves(path, keep, save_every, load_best=load_best, resume=bool(resume)),
            evaluations=_evaluations(
                result,
                evaluation,
                loading,
                {
                    "every": evaluate_every,
                    "patience": patience,
                    "metric": metric,
                    "greater_is_better": greater_is_better,
                },
            ),
            loggers=loggers,
            log_every=log_every,
            shown=shown,
            watch=watch,
            takes_given=resume == "given",
            start=resume if isinstance(resume, Path) else None,
        )
        with nullcontext() if path is None else locked(path):
            ended = loop.run(requests)
        if shown is not None:
            shown.end()
    return Fitted(
        result=result,
        optimizer=built,
        steps=loop.progress.step,
        loss=None if loop.loss is None else float(loop.loss.detach()),
        eval_loss=loop.progress.eval_loss,
        best_step=loop.progress.best_step,
        ended=ended,
    )


def _planned(
    model: nn.Module | ParallelModel,
    data: Any,
    planning: Mapping[str, Any] | None,
    loading: Mapping[str, Any],
    folder: Path | None,
    hosts: tuple[int, ...],
) -> ParallelModel:
    if isinstance(model, ParallelModel):
        check_alone("fit", model.plan)
        check_hosts(hosts, folder, decided=True)
        if planning is not None:
            raise FitError(
                f" {shown(planning)} is given with a model that has a plan",
                place="fit: planning",
                legal="None",
                way_out="pass them to auto_parallelize, or pass the plain module here",
            )
        return model
    check_planned(model, planning)
    options = dict(planning or {})
    check_hosts(hosts, folder, decided="plan" in options)
    check_alone("fit", planning)
    if "global_batch_size" not in options:
        raise FitError(
            " has no global_batch_size",
            place="fit: planning",
            legal="arguments of auto_parallelize",
            way_out='planning={"global_batch_size": 64}',
        )
    if "example_inputs" not in options:
        options["example_inputs"] = (
            _first_samples(data, loading) if _is_dataset(data) else _first(data)
        )
    cluster = options.pop("cluster", None) or Cluster.detect()
    if folder is None or "plan" in options:
        return auto_parallelize(model, cluster, **options)
    plans = KeptPlans(folder=folder / "plans", asked=options)
    result = plans.planned(model, cluster)
    plans.plan_ahead(result, cluster, hosts)
    return result


def _first_samples(data: Any, loading: Mapping[str, Any]) -> Any:
    """A batch of the first samples of a dataset."""
    samples = first_samples(data, SAMPLES)
    if not samples:
        raise FitError(
            f" is a {type(data).__name__} of no samples",
            place="fit: data",
            legal="a dataset of global_batch_size samples or more",
            way_out="give one",
        )
    collate: Callable[[list[Any]], Any] = loading.get("collate_fn") or collated
    return collate(samples)


def _first(batches: Any) -> Any:
    """The first of batches that are iterated over again later."""
    if iter(batches) is batches:
        raise FitError(
            f" are a {type(batches).__name__}, which gives each of them once",
            place="fit: data",
            legal="a dataset, or batches that can be iterated over again",
            way_out='give planning={"example_inputs": ...}, or a loader',
        )
    state = batches.state_dict() if hasattr(batches, "state_dict") else None
    first = next(iter(batches), None)
    if state is not None:
        batches.load_state_dict(state)
    return first


def _is_dataset(data: Any) -> bool:
    if isinstance(data, list | tuple | str | bytes | Mapping | type):
        return False
    return hasattr(data, "__getitem__")


def _check_data(name: str, data: Any, loading: Mapping[str, Any]) -> None:
    if not _is_dataset(data):
        check_batches(name, data, loading)


def _loader(result: ParallelModel, data: Any, loading: dict[str, Any]) -> Any:
    """Batches of a dataset; batches that are given, as they are. Raises ValueError for a list of
    what are no batches."""
    if _is_dataset(data) or is_stream(data):
        return data_loader(data, result, **loading)
    if isinstance(data, list | tuple) and data and result.is_sample(data[0]):
        raise FitError(
            f" is a {type(data).__name__} of samples, which have no dim of rows",
            place="fit: data",
            legal="a list of batches, or a dataset of samples",
            way_out="torch.utils.data.Subset(samples, range(len(samples))) is a dataset",
        )
    return data


def _evaluations(
    result: ParallelModel, evaluation: Any, loading: Mapping[str, Any], asked: Mapping[str, Any]
) -> Evaluations | None:
    if evaluation is None:
        return None
    if is_function(evaluation):
        return Evaluations(run=evaluation, **asked)
    options = {**loading, "shuffle": False, "drop_last": False}
    if not callable(options.get("lengths")):
        options.pop("lengths", None)  # of the training samples
    batches = _loader(result, evaluation, options)
    return Evaluations(run=lambda: {"eval_loss": result.evaluate(batches).loss}, **asked)


def _saves(
    folder: Path | None, keep: int, every: int | str | None, *, load_best: bool, resume: bool
) -> Saves | None:
    if folder is None:
        return None
    checkpoints = KeptCheckpoints(folder=folder, keep=keep)
    if not resume and (steps := checkpoints.steps()):
        raise FitError(
            f" holds checkpoints of {len(steps)} steps, the last {steps[-1]}, and resume=False",
            place=f"fit: folder {str(folder)!r}",
            legal="a folder without checkpoints, or resume=True",
            way_out="give another folder, or move the checkpoints elsewhere",
        )
    return Saves(checkpoints=checkpoints, every=every, load_best=load_best)


def _shown(progress: bool | None) -> StepProgress | None:
    """The bar and lines of this rank, if it shows them."""
    shows = sys.stderr.isatty() if progress is None else progress
    return StepProgress() if shows and launch.rank() == 0 else None


# --- plans ----------------------------------------------------------------------------------------

# The plans of a run, kept beside its checkpoints: for the hosts there are, and those there may be.
#
# A run that lost a host, or got one, goes on by the plan that is there for as many, without a
# search.


log = logging.getLogger(__name__)

_PLAIN = (str, int, float, Overrides)  # arguments of auto_parallelize that a plan's name tells


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlans:
    """Plans in a `folder`, which all ranks see, by cluster and by what was `asked` of
    `auto_parallelize`. That they are of the same model is checked when one is taken."""

    folder: Path
    asked: Mapping[str, Any]

    def path(self, cluster: Cluster) -> Path:
        told = {name: repr(x) for name, x in self.asked.items() if isinstance(x, _PLAIN)}
        text = json.dumps([cluster.to_dict(), told], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return self.folder / f"{cluster.num_nodes}x{cluster.devices_per_node}-{digest}.json"

    def has(self, cluster: Cluster) -> bool:
        """The same on all ranks. Collective."""
        path = self.path(cluster)
        return launch.agree_on(path.is_file)

    def planned(self, model: nn.Module, cluster: Cluster) -> ParallelModel:
        """By the plan that is there, else by one that is searched, and kept. Collective; raises as
        `auto_parallelize` does."""
        launch.start(cluster.backend)
        if self.has(cluster):
            path = self.path(cluster)
            try:
                decided = {"plan": path, "overrides": None}
                return auto_parallelize(model, cluster, **{**self.asked, **decided})
            except (PlanError, InfeasibleError) as error:  # the same on all ranks
                log.warning("the plan kept in %s is not taken, and made again: %s", path, error)
        result = auto_parallelize(model, cluster, **self.asked)
        self._keep(result.plan, cluster)
        return result

    def plan_ahead(self, result: ParallelModel, cluster: Cluster, hosts: Iterable[int]) -> None:
        """Have a plan for each of these numbers of hosts; those on which the run can't go on are
        named in a warning. Collective."""
        for count in sorted(set(hosts) - {cluster.num_nodes}):
            other = cluster.on_nodes(count)
            if self.has(other):
                continue
            try:
                self._keep(result.plan_for(other), other)
            except (InfeasibleError, OverrideError) as error:
                log.warning("with %d hosts this run can't go on: %s", count, error)

    def _keep(self, plan: Plan, cluster: Cluster) -> None:
        def write() -> None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                plan.save(self.path(cluster))
            except OSError as error:
                log.warning("a plan is not kept, and will be searched again: %s", error)

        launch.agree_on(write)


# --- arguments ------------------------------------------------------------------------------------

# Checks of what `fit` is given: each error names the argument and the legal values.


MOST_HOSTS = 1000  # a plan is searched for each
PLANNING = tuple(inspect.signature(auto_parallelize).parameters)[1:]


def refused(name: str, given: Any, legal: str, way_out: str) -> MeshwrightError:
    return FitError.refused(f"fit: {name}", given, legal=legal, way_out=way_out)


def check_counts(*, keep: Any, **counts: Any) -> None:
    """Raise ValueError for a count that counts nothing; one that is None has no end."""
    for name, count in {**counts, "keep": 0 if keep is None else keep}.items():
        if count is not None and not (type(count) is int and 1 <= count <= MAX_ROWS):
            raise refused(
                name, count, f"an integer from 1 to {MAX_ROWS}, or None where that is the default",
                "leave it out for the default",
            )  # fmt: skip


def counted_hosts(hosts: Any) -> tuple[int, ...]:
    """Numbers of hosts that a run may go on with. Raises ValueError for what are none."""
    listed = isinstance(hosts, Iterable) and not isinstance(hosts, str | bytes)
    counts = tuple(islice(hosts, MOST_HOSTS + 1)) if listed else ()
    if not listed or len(counts) > MOST_HOSTS:
        raise refused(
            "hosts", hosts, f"up to {MOST_HOSTS} numbers of hosts", "give a range or a list of them"
        )
    check_counts(keep=1, **{f"hosts[{k}]": count for k, count in enumerate(counts)})
    return counts


def check_hosts(hosts: tuple[int, ...], folder: Path | None, *, decided: bool) -> None:
    """Raise ValueError where there is nothing to plan for other hosts, or no place to keep it."""
    if hosts and (decided or folder is None):
        raise FitError(
            " are given, but " + ("the plan is, too" if decided else "no folder"),
            place="fit: hosts",
            legal="with a plain module, which is planned here, and a folder that keeps its plans",
            way_out="leave hosts out, or pass folder=, and the module without plan=",
        )


def check_alone(who: str, planned: Plan | Mapping[str, Any] | None) -> None:
    """Raise ValueError, before anything is searched, for replicas that train apart, of a plan or
    that are asked for in arguments of `auto_parallelize`."""
    plan = planned if isinstance(planned, Plan) else None
    asked: Mapping[str, Any] = planned if isinstance(planned, Mapping) else {}
    if isinstance(given := asked.get("plan"), str | Path):
        plan = Plan.load(given)
    elif isinstance(given, Plan):
        plan = given
    overrides, allowed = asked.get("overrides"), asked.get("allow") or ()
    several = isinstance(overrides, Overrides) and (overrides.replicas or 1) > 1
    if not (several or "replicas" in allowed or (plan is not None and plan.outer_loop)):
        return
    raise FitError(
        ": replicas that train apart stop, save and evaluate at steps of their own, of which the "
        "loop knows nothing",
        place=f"{who}: replicas",
        legal="a plan without an outer loop, and no replicas in overrides or allow",
        way_out="train with auto_parallelize and a loop of train_step(batch, optimizer=...)",
    )


def check_functions(
    *, optimizer: Any, schedule: Any, max_grad_norm: Any, resume: Any, watch: Any = None
) -> None:
    """Raise ValueError for what makes nothing."""
    if not _takes_one(optimizer) or _is_optimizer_class(optimizer):
        raise refused(
            "optimizer", optimizer, "a function of the parallel model that returns an optimizer",
            "lambda result: torch.optim.AdamW(result.parameters(), lr=3e-4)",
        )  # fmt: skip
    if schedule is not None and not _takes_one(schedule):
        raise refused(
            "schedule", schedule, "a function of the optimizer that returns a scheduler, or None",
            "lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)",
        )  # fmt: skip
    norm = max_grad_norm
    if norm is not None and not (norm == float("inf") or (is_number(norm) and norm >= 0)):
        raise refused("max_grad_norm", norm, "a number from 0, or None", "None doesn't clip")
    if not isinstance(resume, bool | Path) and resume != "given":
        raise refused(
            "resume", resume, "True, False, 'given', the Path of a checkpoint",
            "True goes on from the newest checkpoint",
        )  # fmt: skip
    if watch is not None and not _takes_one(watch):
        raise refused(
            "watch", watch, "a function of a RunEvent, or None", "lambda event: print(event)"
        )


def check_best(metric: Any, greater_is_better: Any, load_best: Any, progress: Any) -> None:
    """Raise ValueError for what names no number, and for what is no flag."""
    if not isinstance(metric, str):
        raise refused("metric", metric, "the name of a number of the evaluation", '"eval_loss"')
    flags = {"greater_is_better": greater_is_better, "load_best": load_best}
    for name, flag in {**flags, "progress": False if progress is None else progress}.items():
        if not isinstance(flag, bool):
            raise refused(name, flag, "True, False", "leave it out for the default")


def is_function(data: Any) -> bool:
    """Whether this is a function without arguments, and neither a dataset nor batches."""
    return callable(data) and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def _takes_one(function: Any) -> bool:
    """Whether this can be called with one argument, as far as it says."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # it does not say
        return True
    return True


def _is_optimizer_class(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def check_made(name: str, built: Any) -> None:
    """Raise ValueError where the user's function returned what is no optimizer, or no schedule."""
    right = (
        isinstance(built, torch.optim.Optimizer)
        if name == "optimizer"
        else callable(getattr(built, "step", None))
    )
    if not right:
        legal = f"a function that returns {'an' if name == 'optimizer' else 'a'} {name} of torch"
        raise FitError(
            f" returned a {type(built).__name__}, {shown(built)}",
            place=f"fit: {name}",
            legal=legal,
            way_out="return it",
        )  # fmt: skip


def check_planned(model: Any, planning: Any) -> None:
    """Raise ValueError for what is no model, and for planning that is none of
    `auto_parallelize`."""
    if not isinstance(model, nn.Module):
        raise refused(
            "model", model, "what auto_parallelize returned, or a torch.nn.Module", "give one"
        )
    if planning is None:
        return
    if not isinstance(planning, Mapping) or (unknown := set(planning) - set(PLANNING)):
        what = sorted(map(str, unknown)) if isinstance(planning, Mapping) else planning
        raise refused(
            "planning", what, f"a dict of {', '.join(PLANNING)}",
            'planning={"global_batch_size": 64}',
        )  # fmt: skip


def check_batches(name: str, batches: Any, loading: Mapping[str, Any]) -> None:
    """Raise ValueError for what is neither a dataset nor batches, and for a dataset's options
    beside batches, which they say nothing to."""
    if isinstance(batches, str | bytes | Mapping | type) or not isinstance(batches, Iterable):
        raise refused(
            name, batches, "a dataset (len() and samples by number), or an iterable of batches",
            "give a dataset, or a list of batches",
        )  # fmt: skip
    if loading:
        raise refused(
            ", ".join(map(str, loading)), name, "with a dataset",
            "make the batches so yourself, or give the dataset",
        )  # fmt: skip

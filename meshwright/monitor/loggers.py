"""Loggers of metrics: JSON lines, TensorBoard, Weights & Biases, MLflow. Any callable of a flat
mapping of numbers is one; `step` is among them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.profiles.inputs import ArgumentError, NotInstalledError, checked_path, shown

Metrics = Mapping[str, float]


class MetricsLogger(Protocol):
    """Takes the metrics of a step, on rank 0, when the step is over."""

    def __call__(self, metrics: Metrics, /) -> None: ...


def logger_for(to: MetricsLogger | str | Path) -> MetricsLogger:
    """A logger, or one for a path that ends in .jsonl. Raises ValueError for another path, and for
    what can't be called."""
    if isinstance(to, str | Path):
        if checked_path(to, "log_to: logger").suffix == ".jsonl":
            return JsonLinesLogger(to)
    elif callable(to):
        return to
    raise ArgumentError(
        f" is {shown(to)}",
        place="log_to: logger",
        legal="a path that ends in .jsonl, or a function of a mapping of numbers",
        way_out="TensorBoardLogger(folder), WandbLogger(run) and MlflowLogger() of "
        "meshwright.monitor are such",
    )


class JsonLinesLogger:
    """Appends a JSON object a step to a file, whose folder is made. What is not finite is null."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __call__(self, metrics: Metrics) -> None:
        row = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


class TensorBoardLogger:
    """Writes scalars `meshwright/<name>` to a `SummaryWriter`, yours or one for a folder, which is
    made at the first step: only where steps are logged. Raises ImportError without the package
    tensorboard."""

    def __init__(self, to: Any) -> None:
        self.folder = str(to) if isinstance(to, str | Path) else None
        self._make = _writer_class(self.folder) if self.folder is not None else None
        self.writer = to if self.folder is None else None

    def __call__(self, metrics: Metrics) -> None:
        if self.writer is None:
            assert self._make is not None
            self.writer = self._make(self.folder)
        for name, value in metrics.items():
            if name != "step":
                self.writer.add_scalar(f"meshwright/{name}", value, int(metrics["step"]))
        self.writer.flush()


def _writer_class(folder: str) -> Callable[[str | None], Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise NotInstalledError(
            "the package tensorboard is not installed",
            place=f"TensorBoardLogger({folder!r})",
            way_out="`pip install tensorboard`, or JsonLinesLogger(path)",
        ) from error
    make: Callable[[str | None], Any] = SummaryWriter
    return make


class WandbLogger:
    """Logs to a run of Weights & Biases: what `wandb.init()` gives, or a function that gives it,
    which is called at the first step that is logged, on rank 0 alone."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, metrics: Metrics) -> None:
        if not hasattr(self.run, "log"):
            self.run = self.run()
        numbers = {f"meshwright/{k}": v for k, v in metrics.items() if k != "step"}
        self.run.log(numbers, step=int(metrics["step"]))


class MlflowLogger:
    """Logs `meshwright.<name>` to a run of MLflow: to the one of `run_id`, or that is active in
    this process, or to a new one in `experiment`, named `run_name`, which is started at the first
    step that is logged, on rank 0 alone, and ends with the process. Where it is kept is MLflow's to
    say (`mlflow.set_tracking_uri`, MLFLOW_TRACKING_URI). Raises ImportError without the package
    mlflow-skinny, or mlflow."""

    def __init__(
        self,
        *,
        experiment: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
    ) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise NotInstalledError(
                "the package mlflow is not installed",
                place="MlflowLogger()",
                way_out="`pip install mlflow-skinny`, or JsonLinesLogger(path)",
            ) from error
        self._mlflow: Any = mlflow
        self.experiment, self.run_name, self.run_id = experiment, run_name, run_id

    def __call__(self, metrics: Metrics) -> None:
        if self.run_id is None:
            if self._mlflow.active_run() is None:
                if self.experiment is not None:
                    self._mlflow.set_experiment(self.experiment)
                self._mlflow.start_run(run_name=self.run_name)
            self.run_id = self._mlflow.active_run().info.run_id
        numbers = {f"meshwright.{k}": float(v) for k, v in metrics.items() if k != "step"}
        self._mlflow.log_metrics(numbers, step=int(metrics["step"]), run_id=self.run_id)

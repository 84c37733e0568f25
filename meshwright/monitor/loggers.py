"""Loggers of metrics: JSON lines, TensorBoard, Weights & Biases. Any callable of a flat mapping of
numbers is one; `step` is among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.profiles.inputs import NotInstalledError

Metrics = Mapping[str, float]


class MetricsLogger(Protocol):
    """Takes the metrics of a step, on rank 0, when the step is over."""

    def __call__(self, metrics: Metrics, /) -> None: ...


class JsonLinesLogger:
    """Appends a JSON object a step to a file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __call__(self, metrics: Metrics) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(metrics)) + "\n")


class TensorBoardLogger:
    """Writes scalars `meshwright/<name>` to a `SummaryWriter`, yours or one for a folder. Raises
    ImportError without the package tensorboard."""

    def __init__(self, to: Any) -> None:
        self.writer = _writer(to) if isinstance(to, str | Path) else to

    def __call__(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if name != "step":
                self.writer.add_scalar(f"meshwright/{name}", value, int(metrics["step"]))
        self.writer.flush()


def _writer(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise NotInstalledError(
            "the package tensorboard is not installed",
            place=f"TensorBoardLogger({str(folder)!r})",
            way_out="`pip install meshwright[tensorboard]`, or JsonLinesLogger(path)",
        ) from error
    return SummaryWriter(str(folder))


class WandbLogger:
    """Logs to a run of Weights & Biases, which `wandb.init()` gives."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, metrics: Metrics) -> None:
        numbers = {f"meshwright/{k}": v for k, v in metrics.items() if k != "step"}
        self.run.log(numbers, step=int(metrics["step"]))

"""Fits what FSDP of llm-foundry's time hides of its communication, on half of its models.

    python -m scripts.fits.fit_fsdp [--data DIR]

`HIDDEN_FSDP` (`scripts/published/frameworks.py`), the part of ZeRO-3's gathers and scatters that
compute hides of what it could, is the one of `PARTS` with the least mean of

    huber(log(predicted / measured))

over the rows of the half that constants are fitted on (`scripts/validate_costmodel`), A100 and H100
alike. Printed for each part: mean absolute error and bias of both halves. A minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from scripts.experts.rows import published_rows
from scripts.fits.fit_devices import BROAD, Row, errors_line
from scripts.published import Unpriced, evaluate, read_row
from scripts.validate_costmodel import halves

SOURCE = "llm-foundry"
PARTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)


def rows_of(data: Path | None) -> list[Row]:
    """Rows of FSDP that can be priced, of the sources that were fitted together."""
    found = []
    for _, fitted, row in halves(published_rows(SOURCE, data)):
        try:
            setup = read_row(row)
        except Unpriced:
            continue
        found.append(Row(setup, float(row["iteration_time_s"]), row["source"], fitted))
    return found


def residuals(part: float, rows: Sequence[Row]) -> list[float]:
    """log(predicted / measured) where that part is hidden."""
    found = []
    for row in rows:
        framework = row.setup.framework
        target = dataclasses.replace(framework.target, hidden_zero3=part)
        evaluation = evaluate(
            dataclasses.replace(row.setup, framework=dataclasses.replace(framework, target=target))
        )
        found.append(math.log(evaluation.prediction.step_time_s / row.measured_s))
    return found


def loss(residual: float) -> float:
    """Huber's: the square of what is near, the size of what is far."""
    far = abs(residual)
    return far * far / 2 if far < BROAD else BROAD * (far - BROAD / 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with step_times.csv")
    rows = rows_of(parser.parse_args().data)
    losses: dict[float, float] = {}
    for part in PARTS:
        found = residuals(part, rows)
        for half in (True, False):
            own = [x for x, row in zip(found, rows, strict=True) if row.fitted == half]
            print(f"hidden {part:.1f} {errors_line(own, fitted=half)}", flush=True)
            if half:
                losses[part] = statistics.mean(map(loss, own))
    print(f"best on the fitted half: {min(losses, key=losses.__getitem__)}")


if __name__ == "__main__":
    main()

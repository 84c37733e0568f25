"""Ranks of a module of this package on this machine, under torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from meshwright.profiles.inputs.errors import MeasuringError

START_UP_S = 120.0  # importing torch on every rank, joining, leaving
TERMINATE_S = 40.0  # torchrun gives its ranks 30 s


def run_local(
    module: str, *arguments: str, ranks: int, budget_s: float, output: Path, what: str, way_out: str
) -> None:
    """Run `python -m module arguments` on `ranks` processes of one thread, which write `output`;
    what they say goes beside it, and none of them is left when this returns.

    Raises MeasuringError, with their first error, if they fail or take much longer than `budget_s`:
    `what` they do failed.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), "-m", module, *arguments,
    ]  # fmt: skip
    here = str(Path(__file__).absolute().parents[3])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    log = output.with_suffix(".log")
    with log.open("w") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env=environment, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=budget_s + START_UP_S)
        finally:
            _end(process)
    if not output.exists():
        raise MeasuringError(
            f"{what} failed (exit {process.returncode}): "
            + _cause(log.read_text(errors="replace")),
            way_out=way_out,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate torchrun, which ends its ranks then; killed at once it would leave them behind."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=TERMINATE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _cause(said: str) -> str:
    """The first error in the output of ranks and torchrun; without one, the output's end."""
    error = re.search(r"\w+Error: .*", said)
    return error.group() if error else said[-2000:]

"""Kills a host in each phase of a run under torchrun, lets another one come, and compares losses.

    python -m scripts.elastic.trials --trials 20 --hosts 3 --kind emulated --gbit 1

Each trial trains a small GPT-2 by `meshwright.fit` on hosts of one rank each. The host's processes,
torchrun's agent among them, are killed (SIGKILL) as its rank comes into the trial's phase; the rest
goes on with one host less, by a plan for as many, from the last checkpoint, until the host is back;
then all do. Losses of all steps, those that were made twice included, are compared with those of
one device that trained without a break. Prints a row for each trial.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.elastic.hosts import EMULATED, PLAIN, Host, made_hosts, start_store, torchrun
from scripts.elastic.worker import HOST, LOADING, PHASES, Strike, train

STEPS = 60
LIMIT_S = 240.0  # of one trial
TOLERANCE = 1e-4  # relative, of losses in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a run went: seconds from the kill to the next step, and from the host's return to the
    first step with it; steps made again; the largest relative difference of a loss."""

    phase: str
    killed: int
    ended: bool
    without_s: float
    back_s: float
    again: int
    most: float
    ranks: str

    @property
    def passed(self) -> bool:
        return self.ended and self.most <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--kind", choices=(PLAIN, EMULATED), default=PLAIN)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--phase", choices=PHASES, action="append", help="these, not all in turn")
    parser.add_argument("--folder", type=Path, help="keeps logs and losses here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts end with it
    phases = args.phase or PHASES
    folder = args.folder or Path(tempfile.mkdtemp(prefix="trials"))
    expected = reference(folder / "reference")
    print("phase | host | goes on after, s | with it again after, s | again | ranks | difference")
    failed = 0
    for k in range(args.trials):
        place = folder / f"{k:02d}"
        with made_hosts(args.kind, args.hosts, args.gbit) as hosts:
            found = trial(place, hosts, phases[k % len(phases)], k % args.hosts + 1, expected)
        failed += not found.passed
        print(
            f"{found.phase} | {found.killed} | {found.without_s:.1f} | {found.back_s:.1f} | "
            f"{found.again} | {found.ranks} | {found.most:.1e}"
            + ("" if found.passed else " FAILED"),
            flush=True,
        )
    print(f"{args.trials - failed} of {args.trials} ended with the losses of an unbroken run")
    return int(failed > 0)


def reference(folder: Path) -> dict[int, float]:
    """Losses by step of one device without a break: of this process."""
    folder.mkdir(parents=True)
    train(folder, STEPS, (), Strike(folder, host="none"))
    return {line["step"]: line["loss"] for line in lines(folder)}


def trial(
    folder: Path, hosts: Sequence[Host], phase: str, killed: int, expected: dict[int, float]
) -> Trial:
    """One run over `hosts[1:]`, with the rendezvous on the first; `killed` is the number of the
    host that is lost in the phase, and comes back."""
    folder.mkdir(parents=True)
    store, *training = hosts
    victim = hosts[killed]
    endpoint = start_store(store, folder / "store.log")
    (folder / f"struck.{killed}").write_text(phase)
    for host in training:
        start(host, endpoint, folder, least=1, most=len(training))
    if phase == LOADING:  # the first start has none: the host leaves once before
        wait_until(lambda: len(lines(folder)) > 6, LIMIT_S, training)
        victim.kill()
        start(victim, endpoint, folder, least=1, most=len(training))
    halted = folder / f"halted.{killed}"
    wait_until(halted.exists, LIMIT_S, training)
    before = len(lines(folder))
    victim.kill()
    lost_s = time.time()
    rest = [host for host in training if host is not victim]
    wait_until(lambda: len(lines(folder)) > before + 2, LIMIT_S, rest)
    without_s = lines(folder)[before]["time_s"] - lost_s
    came_s, there = time.time(), len(lines(folder))
    start(victim, endpoint, folder, least=1, most=len(training))
    ended = wait_until((folder / "done").exists, LIMIT_S, training, must=False)
    made = lines(folder)
    whole = [x for x in made[there:] if x["ranks"] == len(training)]
    runs = [made[0]["ranks"]]
    for line in made:
        if line["ranks"] != runs[-1]:
            runs.append(line["ranks"])
    return Trial(
        phase=phase,
        killed=killed,
        ended=ended and {line["step"] for line in made} == set(expected),
        without_s=without_s,
        back_s=whole[0]["time_s"] - came_s if whole else float("nan"),
        again=len(made) - len({line["step"] for line in made}),
        most=max(abs(x["loss"] / expected[x["step"]] - 1) for x in made),
        ranks="→".join(map(str, runs)),
    )


def start(host: Host, endpoint: str, folder: Path, *, least: int, most: int) -> None:
    sizes = ",".join(map(str, range(least, most + 1)))
    command = [*torchrun(endpoint, least, most, host), "scripts.elastic.worker", str(folder)]
    environment = {
        HOST: str(host.number),
        "MESHWRIGHT_TIMEOUT_S": "30",
        "HF_HUB_OFFLINE": "1",
        # else torchrun keeps the address of a lost host in all restarts
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    host.start([*command, str(STEPS), sizes], environment, folder / f"host{host.number}.log")


def lines(folder: Path) -> list[dict[str, Any]]:
    """The losses so far; a line that is being written is left out."""
    path = folder / "losses.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_until(condition: Any, limit_s: float, hosts: Sequence[Host], *, must: bool = True) -> bool:
    """Whether a condition came true in time, while agents were running."""
    ends_s = time.monotonic() + limit_s
    while not condition():
        ended = all(host.agent is None or host.agent.poll() is not None for host in hosts)
        if time.monotonic() > ends_s or ended:
            if condition():
                return True
            if must:
                raise TimeoutError(f"not there after {limit_s:g} s, or all hosts have ended")
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    sys.exit(main())

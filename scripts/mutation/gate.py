"""Do the tests notice? Puts one mutant at a time into a copy of the tree, and runs the tests that
its file reaches until one fails.

    scripts/mutants                      all mutants against the change tier
    scripts/mutants --all                against all tests
    scripts/mutants --only schedules     those of a kind, file or name
    scripts/mutants --record             and keep which test killed which, to be tried first

The checkout is not touched: each job has a copy of its own, and a process that forks a fresh one
for each mutant (`server.py`). Tests are run by nearness (`reach.py`), after the test that killed
the mutant when it was recorded last; that is an order, and kills nothing by itself. Which tests
killed is checked at the end: each of them passes without its mutant. Exit status 1 where a mutant
lived, or doesn't fit the code.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.mutation.reach import Tree
from scripts.mutation.table import Mutant, read_mutants

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("server.py")
KILLERS = Path(__file__).with_name("killers.json")
STORE = Path(".pytest_cache", "stored")  # of traced models, whose keys hold the code
TRACED = ("costmodel/", "planner/", "profiles/")  # a mutant in here traces into entries of its own

BUDGET_S, BUDGET_OF_ALL_S = 120.0, 1800.0  # CPU-seconds of a mutant that nothing kills
SILENT_S = 300.0  # a test hangs that takes longer
AT_ONCE = 8  # far test files in one run of pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`killer` is empty where the mutant lived; `why` is "silent" or "died" where the test did not
    end, or what doesn't fit."""

    mutant: Mutant
    killer: str = ""
    why: str = ""
    cpu_s: float = 0.0

    def row(self) -> str:
        how = {"silent": " (hangs)", "died": " (the process dies)"}.get(self.why, "")
        by = f"`{self.killer}`{how}" if self.killer else self.why or "**LIVED**"
        own = self.mutant
        return f"| {own.kind} | {own.name}: {own.breaks} | {by} | {self.cpu_s:.1f} |"


class Copy:
    """A copy of the files of a tree that git knows or would, in a folder of its own."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=tree, capture_output=True, check=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            source, target = tree / name, folder / name
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        (folder / STORE.parent).mkdir()  # the log lies here as well
        if (tree / STORE).is_dir():
            shutil.copytree(tree / STORE, folder / STORE)
        self._entries = self._stored()

    def _stored(self) -> set[Path]:
        return {*(self.folder / STORE).glob("*")}

    def write(self, file: str, text: str) -> None:
        """Also where the old text was as long and is as old."""
        path = self.folder / file
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def forget(self, mutant: Mutant) -> None:
        """Remove what was traced with the mutant."""
        if mutant.file.startswith(TRACED):
            for entry in self._stored() - self._entries:
                entry.unlink()
        self._entries = self._stored()


class Tester:
    """A copy, and the process that runs tests in it."""

    def __init__(self, tree: Tree, folder: Path, options: Sequence[str]) -> None:
        self.copy, self.options = Copy(tree.root, folder), [*options]
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-P", str(SERVER), *tree.others],
            cwd=folder,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n", "the server of tests did not start"

    def run(
        self, stages: Sequence[Sequence[str]], *, budget_s: float, options: Sequence[str] = ("-x",)
    ) -> dict[str, Any]:
        job = {
            "stages": stages,
            "options": [*options, *self.options],
            "budget_s": budget_s,
            "silent_s": SILENT_S,
            "log": str(self.copy.folder / ".pytest_cache" / "log"),
        }
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(job), file=self._server.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._server.stdout.readline())
        return found

    def end(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def stages_for(
    mutant: Mutant, tree: Tree, known: Mapping[str, str], *, ranks: bool = True, far: bool = True
) -> list[list[str]]:
    """What pytest is given, one list after the other."""
    first = known.get(mutant.name, "")
    stages = [[first]] if first and (tree.root / first.split("::")[0]).is_file() else []
    reaching = tree.reaching(mutant.file)
    stages += reaching[:2]
    for own in reaching[2:] if far else ():
        stages += [own[k : k + AT_ONCE] for k in range(0, len(own), AT_ONCE)]
    if not ranks:
        stages = [[t for t in own if not tree.starts_ranks(t.split("::")[0])] for own in stages]
    return [own for own in stages if own]


def verdict(
    mutant: Mutant, tester: Tester, stages: Sequence[Sequence[str]], budget_s: float
) -> Verdict:
    """Run the tests with the mutant in the tester's copy."""
    copy = tester.copy
    source = (copy.folder / mutant.file).read_text()
    try:
        changed = mutant.applied(source)
    except ValueError as error:
        return Verdict(mutant=mutant, why=f"**does not fit**: {error}")
    copy.write(mutant.file, changed)
    try:
        found = tester.run(stages, budget_s=budget_s)
    finally:
        copy.write(mutant.file, source)
        copy.forget(mutant)
    killer = found["failed"][0] if found["failed"] else ""
    return Verdict(mutant=mutant, killer=killer, why=found["why"], cpu_s=found["cpu_s"])


def in_parallel(
    mutants: Sequence[Mutant], testers: Sequence[Tester], judge: Callable[[Mutant, Tester], Verdict]
) -> list[Verdict]:
    """Verdicts, each printed when it is known."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    found: list[Verdict] = []

    def work(tester: Tester) -> None:
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            found.append(judge(mutant, tester))
            print(found[-1].row(), flush=True)

    with ThreadPoolExecutor(len(testers)) as pool:
        for ended in [pool.submit(work, tester) for tester in testers]:
            ended.result()
    return found


def broken_tests(found: Sequence[Verdict], tester: Tester) -> tuple[set[str], float]:
    """Killers that fail without a mutant as well, and the CPU-seconds of asking."""
    killers = sorted({one.killer for one in found if "::" in one.killer})
    if not killers:
        return set(), 0.0
    ran = tester.run([killers], budget_s=BUDGET_OF_ALL_S, options=())
    return {*ran["failed"]} & {*killers}, float(ran["cpu_s"])


def run(args: argparse.Namespace, mutants: Sequence[Mutant]) -> int:
    """0 where all mutants were killed, 1 where not."""
    started_s, tree = time.monotonic(), Tree(args.tree)
    known = json.loads(KILLERS.read_text()) if KILLERS.exists() else {}
    options = ["--all"] if args.all else []
    budget_s = args.budget or (BUDGET_OF_ALL_S if args.all else BUDGET_S)
    print("| kind | mutant | killed by | CPU-s |\n|---|---|---|---|")

    def judge(mutant: Mutant, tester: Tester) -> Verdict:
        stages = stages_for(mutant, tree, known, ranks=not args.no_ranks, far=not args.near)
        return verdict(mutant, tester, stages, budget_s)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        testers = [Tester(tree, Path(folder, str(k)), options) for k in range(args.jobs)]
        found = in_parallel(mutants, testers, judge)
        broken, more_s = broken_tests(found, testers[0])
        if broken:  # what else kills their mutants?
            print("\nfail without a mutant, too:", *sorted(broken), "", sep="\n", flush=True)
            doubted = [one.mutant for one in found if one.killer in broken]
            more_s += sum(one.cpu_s for one in found if one.killer in broken)
            for tester in testers:
                tester.options += [f"--deselect={test}" for test in sorted(broken)]
            found = [one for one in found if one.killer not in broken]
            found += in_parallel(doubted, testers, judge)
        for tester in testers:
            tester.end()
    lived = [one for one in found if not one.killer]
    cpu_min = (sum(one.cpu_s for one in found) + more_s) / 60
    print(
        f"\n{len(found) - len(lived)} of {len(found)} mutants killed, in {cpu_min:.1f} CPU-minutes "
        f"and {(time.monotonic() - started_s) / 60:.1f} minutes of wall"
    )
    for one in lived:
        print(
            f"lived: {one.mutant.name} ({one.mutant.file}): {one.mutant.breaks} {one.why}".strip()
        )
    if args.record:
        known |= {one.mutant.name: one.killer for one in found if one.killer}
        kept = {
            mutant.name: known[mutant.name] for mutant in read_mutants() if mutant.name in known
        }
        KILLERS.write_text(json.dumps(kept, indent=1) + "\n")
    return 1 if lived else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="the second tier of tests too")
    parser.add_argument("--only", action="append", metavar="TEXT", help="in a name, kind or file")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants")
    parser.add_argument("--record", action="store_true", help="keep which test killed which")
    parser.add_argument("--new", action="store_true", help="those that no test is known to kill")
    parser.add_argument("--budget", type=float, metavar="S", help="CPU-seconds for a mutant")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--near", action="store_true", help="the folder of the tests alone")
    parser.add_argument("--no-ranks", action="store_true", help="no tests that start ranks")
    args = parser.parse_args()
    known = json.loads(KILLERS.read_text()) if args.new and KILLERS.exists() else {}
    mutants = [
        mutant
        for mutant in read_mutants()
        if (not args.only or any(mutant.matches(text) for text in args.only))
        and mutant.name not in known
    ]
    if args.list:
        for mutant in mutants:
            print(f"{mutant.kind}: {mutant.name}: {mutant.breaks} ({mutant.file})")
        counts = Counter(mutant.kind for mutant in mutants)
        print(f"{len(mutants)} mutants of {len(counts)} kinds")
        return 0
    return run(args, mutants)


if __name__ == "__main__":
    sys.exit(main())

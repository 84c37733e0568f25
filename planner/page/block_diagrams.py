"""Diagrams of blocks: lines from top to bottom as a rank runs them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.page.cells import Cell, Row, time

MOST_NAMES = 4  # of blocks in the title of a diagram


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a diagram, drawn by its `kind`; `about` is shown on request."""

    kind: str
    what: str
    how: str = ""
    states: str = ""
    forward: Cell | None = None
    backward: Cell | None = None
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagram:
    """`blocks` names all of them where the title has no room."""

    title: str
    blocks: str
    about: str
    lines: Sequence[Line]
    count: int


def diagrams(data: Row) -> list[Diagram]:
    """A diagram for each distinct block."""
    return [_diagram(row) for row in data["blocks"]]


def _diagram(row: Row) -> Diagram:
    first, last = row["stages"][0], row["stages"][-1]
    stages = f"stage {first}" if first == last else f"stages {first} to {last}"
    degrees = " × ".join(f"{a} {row[a]}" for a in ("dp", "cp", "ep", "tp") if row[a] > 1)
    names, more = row["blocks"], len(row["blocks"]) - MOST_NAMES
    return Diagram(
        title=", ".join(names[:MOST_NAMES]) + f" and {more} more" * (more > 0),
        blocks=", ".join(names) if more > 0 else "",
        about=f"{stages}; {degrees or 'one rank'}",
        lines=[*map(line, row["steps"])],
        count=sum(step["kind"] == "run" for step in row["steps"]),
    )


def line(step: Row) -> Line:
    """One step of a block."""
    match step["kind"]:
        case "enter":
            return Line(kind="enter", what=_shaped(step), how=step["role"], states=step["state"])
        case "leave":
            return Line(kind="leave", what=_shaped(step), how="output", states=step["state"])
        case "move":
            states = f"{step['from']} → {step['to']}"
            return Line(kind="move", what=_shaped(step), how="re-shard", states=states)
        case "collective":
            cell, forward = time(step["seconds"]), step["pass"] == "forward"
            return Line(
                kind="collective",
                what=f"{step['collective']} on the {step['axis']} axis",
                how=f"in the {step['pass']}",
                forward=cell if forward else None,
                backward=None if forward else cell,
            )
    operands, results = (", ".join(step[key]) for key in ("operands", "results"))
    return Line(
        kind="run",
        what=" ".join(filter(None, operator_words(step))),
        how=strategy_words(step["strategy"]),
        states=f"{operands} → {results}" if operands else results,
        forward=time(step["forward_s"]),
        backward=time(step["backward_s"]),
        about=" · ".join(filter(None, (step["key"], step["source"]))),
    )


def operator_words(step: Row) -> tuple[str, str]:
    """The module that an operator runs in, where it has a name, and the operator."""
    module = step["key"].partition(":")[0].rpartition(".")[2]
    return "" if module.isdecimal() else module, step["operator"]


def strategy_words(name: str) -> str:
    """The factor that the tensor axis splits, in words; the atom of a dim is in the shardings."""
    factor = re.sub(r"\.\d+$", "", name)
    dim = re.fullmatch(r"d(\d+)", factor)
    return f"dim {dim[1]}" if dim else "by dims" if re.fullmatch(r"f\d+", factor) else factor


def _shaped(step: Row) -> str:
    return f"{step['value']} [{' × '.join(map(str, step['shape']))}]"

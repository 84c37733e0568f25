"""The record of a decision, and of two that rule each other out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from meshwright.costmodel.operators import Sharing
from meshwright.profiles.inputs.limits import MAX_ROWS, is_number

Acts = Literal["plan", "stage", "block"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision: the field `name` of `Overrides`, of `StagePlan` or `Plan` where one has it, and
    its flag, of which `what` is the help.

    Values are the `legal` ones, True and False where False is `off`, for each of the `parts` a
    number from 0 to 1, or else whole numbers from 1. `off` does without it. A plan file has it,
    where it is `written`, in a stage, its mesh or the plan itself, `always` or unless it is off;
    what is `beside` another, with that one, without which it is nothing. It `acts` on the whole
    plan, a stage or a block; all but the first may be given by block. `of_devices`: it counts some
    of the cluster's devices.

    `forbidden`: how it may be forbidden, as itself, which leaves `off` or, where that is no value,
    what the search takes by itself; `named`: those of its values that may be forbidden, by the
    names that forbid them. `allowed`: it is left out unless the user allows it, and refused in a
    given plan where it changes a training's numbers. `of_train_step`: it is priced for that alone.

    Of the data axis: `shared` says what a stage has of it, by how its states are shared out and how
    many ranks hold them, and `zeros` the ZeRO stages without which it has no effect. A number of
    ranks is a part of so many (`part_of`), which None stands for unless it must be a `proper` one.

    A report has a `column` of stages for it, or for several, each with its `cell`; a plan's line
    has what `line` says of the values of its stages, or of the plan's.
    """

    name: str
    what: str
    _: KW_ONLY
    legal: Collection[Any] = ()
    parts: tuple[str, ...] = ()
    off: Any = 1
    acts: Acts = "stage"
    written: Literal["", "mesh", "stage", "plan"] = ""
    always: bool = False
    beside: str = ""
    of_devices: bool = False
    forbidden: bool = False
    named: tuple[tuple[str, Any], ...] = ()
    allowed: Literal["", "numbers", "steps"] = ""
    of_train_step: bool = False
    shared: Callable[[Sharing, int], Any] | None = None
    zeros: tuple[int, ...] = ()
    part_of: Callable[[Sharing, int], int] | None = None
    proper: bool = False
    column: str = ""
    cell: Callable[[Any], str] = str
    line: Callable[[Sequence[Any]], str] | None = None

    @property
    def by_block(self) -> bool:
        """Whether an override may say it of blocks by globs."""
        return self.acts != "plan" and not self.parts

    @property
    def is_flag(self) -> bool:
        return self.off is False

    def uses(self, value: Any) -> bool:
        """Whether a value is another one than `off`, or None."""
        return any(value.values()) if self.parts and value else value not in (None, self.off)

    def accepts(self, value: Any) -> bool:
        """Whether this is one of its values; those of another type that equal one are none."""
        if self.is_flag or isinstance(value, bool):
            return self.is_flag and isinstance(value, bool)
        if self.parts:
            return isinstance(value, Mapping) and all(map(is_number, value.values()))
        if self.legal:
            return type(value) in map(type, self.legal) and value in self.legal
        return isinstance(value, int) and 1 <= value <= MAX_ROWS

    def parts_of(self, sharing: Sharing, holders: int) -> list[int] | None:
        """The numbers of ranks that it may be for stages that share states out so among `holders`
        of the same parameters; None where it is none."""
        if self.part_of is None:
            return None
        whole = self.part_of(sharing, holders)
        return [n for n in divisors(whole) if not self.proper or 1 < n < whole]

    @property
    def values(self) -> str:
        """Its values, in words."""
        if self.parts:
            return f"an object of parts from 0 to 1, of {', '.join(self.parts)}"
        if self.is_flag:
            return "true, false"
        comma = " or " if any("," in str(value) for value in self.legal) else ", "
        return comma.join(map(str, self.legal)) or f"an integer from 1 to {MAX_ROWS}"


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Values of `a` and `b` that `clash`, `why`, and what of them is `legal`.

    What an override asks for may be something else in a plan (an `hpz` of as many ranks as ZeRO
    divides among is none), or may be planned but not run: then the row is of plans alone (`given`),
    or of overrides and plans that run (`priced`).
    """

    a: str
    b: str
    clash: Callable[[Any, Any], Any]
    why: str
    legal: str
    given: bool = True
    priced: bool = True


def divisors(n: int) -> list[int]:
    """The legal degrees of `n` >= 1 equal ranks or rows: all its divisors, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]

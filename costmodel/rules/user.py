"""Sharding rules that users add: what was added, by operator."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.costmodel.graph import Op
from meshwright.costmodel.rules.language import Metas, Misfit, OpFactors, SpecOptions, factors
from meshwright.profiles.inputs import MeshwrightError


class RuleError(MeshwrightError):
    """A rule that can't be, or that does not hold: says which factor, and by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRule:
    """A rule as it was given. Its factors are split into equal parts alone, as they are tried."""

    target: str
    spec: str
    options: SpecOptions
    verify: bool = True

    def rule(self, op: Op, operands: Metas, results: Metas) -> OpFactors:
        """The factors of a call; RuleError where the rule does not fit it."""
        try:
            made = factors(self.spec, op, operands, results, **self.options)
        except Misfit as error:
            shapes = ", ".join(str(list(meta.shape)) for meta in operands)
            given = ", ".join(str(list(meta.shape)) for meta in results)
            raise RuleError(
                f"{error}. The call {op.key} at {op.source or 'an unknown place'} takes "
                f"{shapes or 'no tensors'} and gives {given}",
                place=f"rule of {self.target}, {self.spec!r}",
                way_out="name their dims, or use *x for any number of dims",
            ) from None
        for i in sorted(made.pinned.union(*made.linear)):
            if not (i < len(operands) and operands[i].dtype.is_floating_point):
                legal = [k for k, meta in enumerate(operands) if meta.dtype.is_floating_point]
                raise RuleError(
                    f"operand {i} of pinned or linear is no floating tensor in the call {op.key} "
                    f"at {op.source or 'an unknown place'}",
                    place=f"rule of {self.target}, {self.spec!r}",
                    legal=f"{', '.join(map(str, legal)) or 'none'}",
                )
        return replace(made, equal=True)


GIVEN: dict[str, UserRule] = {}


def given_for(target: str) -> UserRule | None:
    """The user's rule for an operator, by overload or by name."""
    return GIVEN.get(target) or GIVEN.get(target.rsplit(".", 1)[0])

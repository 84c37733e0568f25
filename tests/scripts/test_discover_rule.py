"""Rules found by running operators on shards, against the shipped ones, which the search never
sees."""

from functools import cache

import pytest
import torch

from meshwright.costmodel.graph import TensorMeta, map_refs
from meshwright.costmodel.rules.language import Kind, OpFactors
from meshwright.costmodel.rules.registry import factors_of
from meshwright.costmodel.rules.traits import draws
from meshwright.costmodel.user_rules import meta_of
from scripts.discover_rule import main
from scripts.discovery.discover import SMALLEST, Proposal, discover
from tests.costmodel.rules.rule_cases import (
    AUTOMATIC,
    IMAGES,
    RECURRENT,
    WRITTEN,
    Case,
    CaseModule,
    total,
)
from tests.helpers.sharded_ops import sampled
from tests.helpers.tiers import second_tier, tiered

# where a factor is: (operand, dim) ..., (result, dim) ..., and its kind
Place = tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]], Kind]


def written(made: OpFactors) -> set[Place]:
    """The splits a rule allows that the search could see: whole dims, even, with no implementation
    of their own."""
    found: set[Place] = set()
    for name, kind in made.kinds.items():
        size = made.sizes[name]
        seen = size % 2 == 0 and size >= SMALLEST and kind in ("map", "sum", "mean")
        sides = [_places(dims, name) for dims in (made.operands, made.results)]
        alone = all(
            dim in ((name,), ()) or name not in dim
            for tensor in (*made.operands, *made.results)
            for dim in tensor
        )
        if seen and alone and sides[0] and name not in made.implementations:
            found.add((*sides, kind))
    return found


def _places(tensors: tuple, name: str) -> frozenset[tuple[int, int]]:
    return frozenset(
        (i, d) for i, dims in enumerate(tensors) for d, names in enumerate(dims) if name in names
    )


def proposed(proposal: Proposal) -> set[Place]:
    def places(dims: tuple[int | None, ...]) -> frozenset[tuple[int, int]]:
        return frozenset((i, d) for i, d in enumerate(dims) if d is not None)

    return {(places(f.operands), places(f.results), f.kind) for f in proposal.found}


@cache
def compared(of: Case) -> tuple[set[Place], set[Place]] | None:
    """The written and the discovered splits of a case's operator; None where it draws."""
    torch.manual_seed(0)
    module = CaseModule(of)
    sample = sampled(module, module.batch(), total, differentiable_inputs=True)
    op = next(op for op in sample.ops if op.short == of.op)
    if draws(op) or sample.table.ops[op.name].shape_arg is not None:
        return None  # nothing to compare with; sizes in an argument are cut by the executor
    operands = [sample.values[name] for name in op.operands]
    given = iter(operands)
    args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda _: next(given))
    results = [sample.graph.values[name] for name in op.results]
    metas: list[TensorMeta] = [meta_of(x) for x in operands]
    return written(factors_of(op, metas, results)), proposed(discover(op.target, args, kwargs))


# recurrent kernels read what is not there when weights don't go together
CALLS = [of for of in (*WRITTEN, *IMAGES) if of not in RECURRENT]
EXACTLY = (
    "linear bias", "addmm", "baddbmm", "einsum", "layer_norm", "softmax", "sdpa", "cumsum",
    "conv2d", "conv_transpose2d", "conv2d depthwise", "max_pool2d", "embedding",
    "group_norm plain", "glu", "mean dim", "index", "index_add", "cdist", "where", "gather",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", tiered(EXACTLY, "softmax".__eq__, "one stays, and a line to paste")
)
def test_shipped_rule_is_rediscovered(name: str) -> None:
    of = next(of for of in (*WRITTEN, *IMAGES, *AUTOMATIC) if of.name == name)
    pair = compared(of)
    assert pair is not None
    shipped, found = pair
    # grouped splits are found beyond those of whole dims; a bias that is split must be so for all
    assert shipped <= found


@second_tier("all rules; one of them stays")
def test_most_shipped_rules_are_rediscovered(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [p for of in CALLS if of.known and (p := compared(of)) is not None]
    of_how_many = sum(len(shipped) for shipped, _ in pairs)
    hit = sum(len(shipped & found) for shipped, found in pairs)
    with capsys.disabled():
        print(f"\nrediscovered {hit} of {of_how_many} splits of {len(pairs)} written rules")
    assert hit >= 0.95 * of_how_many


def test_what_draws_or_has_no_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="it draws random numbers"):
        discover("aten.rand_like.default", [torch.randn(4, 6)])
    with pytest.raises(ValueError, match="no tensors"):
        discover("aten.arange.default", [6])


def test_script_prints_the_line_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    example = "torch.randn(4, 6, 8), [8], torch.randn(8), torch.randn(8)"
    assert main(["aten.layer_norm", "--example", example]) == 0
    line, *whole = capsys.readouterr().out.splitlines()
    assert line.startswith('meshwright.rule("aten.layer_norm.default", "a b c, d, e -> a b f"')
    assert "whole='c d e f'" in line
    assert "# whole: dim 2 of operand 0 (8)" in whole

"""Values that the sample batch decides: forwards that ask for them are traced, and noted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meshwright.costmodel.sharding import analyse, row_use
from meshwright.planner.errors import TraceError
from meshwright.planner.tracing import trace
from tests.helpers.courses import FLAGS, KINDS, SIZES, Model, batch_of, selects, split
from tests.helpers.tiers import second_tier, tiered

ASKED = ("writes", "asks_twice", "by_numpy")


@pytest.mark.parametrize(
    "way",
    tiered(
        KINDS,
        lambda way: way.__name__ in ASKED,
        "other ways to ask; a write between, a second question and numpy stay",
        lambda way: way.__name__,
    ),
)
def test_values_that_were_asked_for_are_known(way: Callable[..., torch.Tensor]) -> None:
    graph = trace(Model(way), batch_of())
    assert graph.known
    for value, x in graph.known.items():
        meta = graph.values[value]
        assert (meta.shape, meta.dtype) == (tuple(x.shape), x.dtype)
        assert {graph.inputs.get(v) for v in graph.behind({value})} & {"sizes", "flags"}


def test_what_is_known_is_what_the_forward_asked_for() -> None:
    of_sizes, of_flags = trace(Model(split), batch_of()), trace(Model(selects), batch_of())
    assert [x.item() for x in of_sizes.known.values()] == SIZES.tolist()
    assert [x.tolist() for x in of_flags.known.values()] == [FLAGS.tolist()]


@second_tier("rows that meet in a forward are found in tests/costmodel/sharding/test_rows.py")
def test_rows_that_decide_the_course_meet() -> None:
    for way, meet in ((split, False), (selects, True)):
        graph = trace(Model(way), batch_of())
        assert bool(row_use(graph, analyse(graph)).meetings) == meet, way


@second_tier("a selection by what weights made is refused in test_trace, one by a draw here")
def test_values_that_weights_or_draws_decide_are_unknown() -> None:
    def by_weights(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    def by_draw(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand(()) > 0.5 else x

    def by_write(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        sums = sizes.float()
        view = sums[:2]
        view.add_(x.detach().sum())
        return x * 2 if sums.sum() > 0 else x

    for way in (by_weights, by_draw, by_write):
        with pytest.raises(TraceError, match="depends on tensor values"):
            trace(Model(way), batch_of())


def drawn_empty(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.empty(1).uniform_().item() < 0.5 else x


def drawn_zeros(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return x[:, torch.zeros(8).bernoulli_(0.5).bool()]


def drawn_beside(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    gate = torch.zeros(4)
    gate.uniform_()
    return x[gate > flags.float()]


def written_numpy(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    numbers = sizes.numpy()
    numbers[0] = 5
    return x * sizes[0]


def written_out(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    places = torch.zeros(3, 1, dtype=torch.long)
    torch.nonzero(flags, out=places)
    return x[places[:, 0]]


UNSEEN = [drawn_empty, drawn_zeros, drawn_beside, written_numpy, written_out]


@pytest.mark.parametrize(
    "way",
    tiered(
        UNSEEN,
        (drawn_beside, written_out).__contains__,
        "one that is drawn and one that is written unseen stay",
        lambda way: way.__name__,
    ),
)
def test_what_a_trace_would_get_wrong_is_refused(way: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(TraceError, match="py:"):
        trace(Model(way), batch_of())


@second_tier("a sample on the meta device; samples with values stay")
def test_no_values_are_known_of_a_sample_without_them() -> None:
    batch = {name: x.to("meta") for name, x in batch_of().items()}
    with pytest.raises(TraceError):
        trace(Model(split), batch)

"""Pictures of the documents are what the code draws now, small, and used."""

from xml.etree import ElementTree

import pytest

from meshwright.costmodel.schedules import SCHEDULES, in_flight
from scripts.draw_docs import DOCS, IMAGES, PICTURES
from scripts.drawing import allocator, placements
from scripts.drawing.allocator import Allocator, Tensors, peak_bytes
from scripts.drawing.pipelines import DEVICES, held, pipeline, simulated
from scripts.drawing.tokens import owners, scores
from tests.helpers.tiers import second_tier, tiered

MOST_BYTES = 60_000
SEARCHES = {"frontier", "peaks", "segments", "fragments"}
REASON = "searches of a large model; the search has its own tests"
MIB = 2**20


@pytest.mark.parametrize("name", tiered(PICTURES, lambda name: name not in SEARCHES, REASON))
def test_drawing_anew_gives_the_committed_file(name: str) -> None:
    """After a change of what a picture shows: `python -m scripts.draw_docs`."""
    drawn = PICTURES[name]()
    assert drawn == (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert len(drawn.encode()) < MOST_BYTES
    assert ElementTree.fromstring(drawn)[0].text  # its title


def test_every_picture_is_drawn_and_used() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    for path in IMAGES.glob("*.svg"):
        assert path.stem in PICTURES and f"images/{path.name})" in text, path.name


@pytest.mark.parametrize("name", [n for n, s in SCHEDULES.items() if s.in_flight and s.flushes])
def test_activations_are_those_in_flight(name: str) -> None:
    of = pipeline(name)
    step = simulated(of)
    for device in range(DEVICES):
        most = max(total for _, total in held(of, step, device))
        assert most == in_flight(of, device)


def test_zigzag_evens_causal_scores_out() -> None:
    assert len({*scores(owners(zigzag=True))}) == 1
    in_order = scores(owners(zigzag=False))
    assert in_order[-1] == (2 * len(in_order) - 1) * in_order[0]


def test_some_runs_of_neighbours_pay_and_too_many_lose() -> None:
    one, some, most = (placements.step_s(runs, placements.SENDS[-1]) for runs in (1, 2, 8))
    assert some < one < most
    free = [placements.step_s(runs, 0.0) for runs in placements.RUNS]
    assert free == sorted(free, reverse=True)


# sizes one after the other, all freed between; MiB that torch's allocator then has: E. Yang, "When
# does fragmentation occur in the CUDA caching allocator?", 2026
@pytest.mark.parametrize(
    ("expandable", "first", "second", "reserved"),
    [
        (False, [16] * 8, [32] * 4, (128, 256)),
        (False, [32] * 4, [16] * 8, (128, 128)),
        (True, [16] * 8, [32] * 4, (140, 140)),
    ],
)
def test_the_allocator_takes_what_torch_does(
    expandable: bool, first: list[int], second: list[int], reserved: tuple[int, int]
) -> None:
    of = Allocator(expandable=expandable)
    for sizes, wanted in zip((first, second), reserved, strict=True):
        pieces = [of.take(size * MIB) for size in sizes]
        assert of.reserved == wanted * MIB
        for piece in pieces:
            of.free(piece)
    assert of.held == 0


def test_equal_steps_leave_no_gaps_and_pages_close_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(40.0 * MIB, 1, True), (160.0 * MIB, 2, False), (160.0 * MIB, 3, True)]
    monkeypatch.setattr(allocator, "tensors", lambda: Tensors(made=made, leaving=40.0 * MIB))
    assert len({*peak_bytes(allocator.EQUAL)}) == 1
    held, taken = peak_bytes(allocator.UNEQUAL)
    assert taken > 1.5 * held
    held, taken = peak_bytes(allocator.UNEQUAL, expandable=True)
    assert held <= taken < held + allocator.PAGE


@second_tier("a search of a large model; formulas and rules have tests of their own")
def test_pictures_of_memory_show_what_the_text_says() -> None:
    from scripts.drawing import recompute

    held = recompute.held("full")
    beside = [nbytes - recompute.formula("full", size) for size, nbytes in held.items()]
    assert max(beside) - min(beside) < 0.02 * max(held.values())  # l/k is rounded up
    best = min(held, key=held.__getitem__)
    assert abs(best - recompute.best_size("full")) < 2
    (_, unbounded), (most, full), (_, buffered), (_, pages) = (
        peak_bytes(allocator.UNEQUAL, **ways) for ways in allocator.WAYS.values()
    )
    assert 2.5 < unbounded / most < 3 and most <= full < 1.015 * most
    assert buffered == pytest.approx(full, rel=2e-3) and most <= pages < most + allocator.PAGE
    for ways in allocator.WAYS.values():
        held_bytes, taken = peak_bytes(allocator.EQUAL, **ways)
        assert taken < held_bytes + allocator.PAGE

"""Pictures of the documents are what the code draws now, small, and used."""

from xml.etree import ElementTree

import pytest

from meshwright.costmodel.schedules import SCHEDULES, in_flight
from scripts.draw_docs import DOCS, IMAGES, PICTURES
from scripts.drawing.pipelines import DEVICES, held, pipeline, simulated
from scripts.drawing.tokens import owners, scores
from tests.helpers.tiers import tiered

MOST_BYTES = 60_000
SEARCHES = {"frontier", "peaks"}
REASON = "a dozen searches of one model; the search has its own tests"


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


@pytest.mark.parametrize("name", [name for name, s in SCHEDULES.items() if s.in_flight])
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

"""Schedules with two copies of the model against the closed forms of their papers."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules.schedule import peak_activation
from tests.costmodel.schedules.pipelines import Shape
from tests.costmodel.schedules.test_pipeline_forms import equal, positive


@given(p=st.integers(1, 4), units=st.integers(1, 5), f=positive, longer=st.integers(0, 9))
def test_chimera_idles_as_published(p: int, units: int, f: int, longer: int) -> None:
    """p - 2 slots of F + B = 2F where both take the same; in each unit of p micro-batches as many
    times what B takes more. Of a unit alone (p/2 - 1) 2B."""
    p *= 2
    timeline = equal(Shape(name="chimera", p=p, v=2, m=units * p), f, f + longer, 0)
    bubble_s = (p - 2) * (f + units * longer)
    assert timeline.step_time_s - units * p * (2 * f + longer) == bubble_s
    assert all(timeline.idle_s(d) == bubble_s for d in range(p))


@given(p=st.integers(1, 4), units=st.integers(1, 5))
def test_chimera_holds_as_many_activations_as_published(p: int, units: int) -> None:
    """From p/2 + 1 micro-batches on the first and last device to p on those in the middle."""
    p *= 2
    held = peak_activation(
        "chimera", num_microbatches=units * p, bytes_per_stage=[1.0] * (2 * p), num_devices=p
    )
    assert held == tuple(p / 2 + 1 + min(d, p - 1 - d) for d in range(p))


@given(p=st.integers(1, 4), more=st.integers(0, 9), w=positive, longer=st.integers(0, 5))
def test_dualpipe_has_the_bubble_and_memory_of_half_a_dualpipe_v(
    p: int, more: int, w: int, longer: int
) -> None:
    """(p/2 - 1)(F + I - W), and p + 1 micro-batches on every device."""
    f, m = w + longer, 2 * (2 * p + more)
    shape = Shape(name="dualpipe", p=2 * p, v=2, m=m)
    timeline = equal(shape, f, f, w)
    assert timeline.step_time_s - m * (2 * f + w) == (p - 1) * (2 * f - w)
    held = peak_activation(
        "dualpipe", num_microbatches=m, bytes_per_stage=[1.0] * (4 * p), num_devices=2 * p
    )
    assert held == (2 * p + 1,) * (2 * p)

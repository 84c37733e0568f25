"""Figures of published runs: regret of choices by price, intervals of measured over predicted, the
plot of both."""

import math
import random
import statistics
from xml.etree import ElementTree

import pytest

from scripts.experts import sweeps
from scripts.experts.residuals import Effects, Residual, coverage, ends, interval
from scripts.experts.scatter import Point, scatter
from scripts.experts.sweeps import PLAN, SWEEP, Priced, Row, Sweep
from tests.helpers.tiers import second_tier


def rows(*times: tuple[str, float, float]) -> list[Row]:
    empty = dict.fromkeys((*SWEEP, *PLAN), "1")
    return [
        {**empty, "tp": tp, "iteration_time_s": str(measured), "predicted": str(predicted)}
        for tp, measured, predicted in times
    ]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(row: Row) -> tuple[float, float]:
        return float(row["predicted"]), float(row["tp"])

    monkeypatch.setattr(sweeps, "_price", price)


@pytest.mark.usefixtures("told")
def test_the_choice_is_the_plan_predicted_fastest_of_plans_measured_once() -> None:
    (sweep,) = sweeps.sweeps(rows(("1", 2.0, 5.0), ("2", 2.2, 4.0), ("4", 3, 6), ("8", 4, 7)))
    assert sweep.choice.plan[0] == "2"
    assert sweep.best.plan[0] == "1"
    assert sweep.regret == pytest.approx(0.1)
    assert "10.0%" in str(sweep)
    times = [("1", 1, 1), ("2", 2, 2), ("4", 4, 4), ("8", 5, 5), ("8", 7, 7), ("8", 9, 9)]
    (sweep,) = sweeps.sweeps(rows(*times))
    assert [p.measured_s for p in sweep.plans] == [1, 2, 4, 7]
    assert sweep.rank == pytest.approx(1.0)
    assert list(sweeps.sweeps(rows(*times[2:]))) == []


def sweep_of(*plans: Priced) -> Sweep:
    return Sweep(key=("",) * len(SWEEP), plans=plans)


def priced(tp: str, rows: str, predicted: float, complexity: float) -> Priced:
    plan = (tp, *("1",) * (len(PLAN) - 2), rows)
    return Priced(plan=plan, measured_s=1.0, predicted_s=predicted, complexity=complexity)


def test_of_plans_that_prices_cannot_tell_apart_the_simplest_is_chosen() -> None:
    near = priced("4", "1", 1.01, 0.5)
    far = priced("1", "1", 1.1, 0.0)
    assert sweep_of(priced("8", "1", 1.0, 1.0), near, far).choice is near
    fast = priced("4", "2", 1.0, 0.9)
    assert sweep_of(fast, priced("4", "4", 1.01, 0.0)).choice is fast
    plans = [priced(tp, "1", 1.0, 0.0) for tp in ("4", "2")]
    assert sweep_of(*plans).choice is plans[1]


VARIANCES = {"gpu": 0.1**2, "target": 0.05**2, "model": 0.15**2, "row": 0.05**2}


def drawn(seed: int, models: int, rows: int = 4) -> list[Residual]:
    """Rows of models that have an error of their own each, on three GPUs with theirs."""
    rng = random.Random(seed)
    gpus = {f"gpu {k}": rng.gauss(0, 0.1) for k in range(3)}
    found = []
    for k in range(models):
        gpu, own = rng.choice([*gpus]), rng.gauss(0.05, 0.15)
        logs = [gpus[gpu] + own + rng.gauss(0, 0.05) for _ in range(rows)]
        found += [Residual(model=f"model {k}", ratio=math.exp(x), gpu=gpu) for x in logs]
    return found


@pytest.mark.parametrize(
    ("models", "most"), [(12, 0.97), pytest.param(40, 0.9, marks=second_tier("few models stay"))]
)
def test_rows_of_a_new_model_lie_within_as_often_as_is_said(models: int, most: float) -> None:
    within = []
    for seed in range(60):
        rows = drawn(seed, models + 5)
        effects = Effects(rows[: 4 * models], VARIANCES)
        reach = ends(effects.left_out())
        for new in rows[4 * models :]:
            found = interval(effects, new, reach)
            within.append(found["low"] <= new.ratio <= found["high"])
    assert 0.76 < statistics.mean(within) < most


def test_more_rows_never_widen_and_an_unknown_gpu_does() -> None:
    rows = drawn(3, 20)
    known, unknown = rows[0], Residual(model="", ratio=1.0, gpu="another")
    before = math.inf
    for count in (8, 24, 80):
        effects = Effects(rows[:count], VARIANCES)
        (_, here), (_, elsewhere) = effects.predicted(known), effects.predicted(unknown)
        assert here < before and here < elsewhere
        before = here


def test_the_likeliest_variances_are_about_those_drawn() -> None:
    found = Effects(drawn(2, 30)).fitted().variances
    for name, wanted in (("model", 0.15), ("row", 0.05)):
        assert wanted / 1.5 < math.sqrt(found[name]) < wanted * 1.5


def test_coverage_and_ends_count_models() -> None:
    alike = [(f"model {k}", 0.0) for k in range(6)]
    found = [*alike, ("other", 2.0)]
    assert coverage(found, found) == pytest.approx(6 / 7)
    assert coverage(alike, found) == 1 and coverage(found[-1:], found) == 0
    few = [(f"model {k}", k / 100) for k in range(20)]
    assert ends([*few, *[("model 19", 0.19)] * 500]) == ends(few)
    assert ends([("a", -0.1), ("b", 0.0), ("c", 0.3)]) == (-0.1, 0.3)


POINTS = [
    Point("A100 dense", 1.0, 1.0, False, "a <model>"),
    Point("A100 dense", 0.3, 0.9, True, "b"),
    Point("H100 experts", 20.0, 2.0, False, "c"),
]
SVG = "{http://www.w3.org/2000/svg}"


def plotted(title: str) -> tuple[ElementTree.Element, list[ElementTree.Element]]:
    root = ElementTree.fromstring(scatter(POINTS, title))
    return root, [c for c in root.iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]


def test_every_row_is_a_point_the_right_ones_on_the_diagonal() -> None:
    root, dots = plotted("predicted & measured")
    assert [c.get("fill") == "none" for c in dots] == [False, True, False]
    assert len({c.get("stroke") for c in dots}) == 2
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"A100 dense", "H100 experts", "predicted & measured", "0.1 s", "100 s"} <= set(texts)
    with pytest.raises(ValueError, match="no points"):
        scatter([], "")
    _, dots = plotted("")
    right, above, below = ((float(c.get("cx", 0)), float(c.get("cy", 0))) for c in dots)
    assert right[0] - 56 == pytest.approx(56 + 560 - right[1])
    assert above[0] - 56 < 56 + 560 - above[1]
    assert below[0] - 56 > 56 + 560 - below[1]

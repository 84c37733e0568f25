"""The fit of links finds the numbers that made its rows; its split covers all rows once."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from meshwright.profiles.cluster import Cluster
from meshwright.profiles.measure.imports import CollectiveRow

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "fits" / "fit_links.py"


@pytest.fixture(scope="module")
def fit_links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_links", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_links"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _rows(n_gpus: int) -> list[CollectiveRow]:
    return [
        CollectiveRow(
            collective="all_reduce",
            n_gpus=n_gpus,
            nodes=1,
            size_bytes=2.0**exponent,
            time_s=1.0,
            source="made up",
            gpu="toy",
        )
        for exponent in range(20, 31)
    ]


def test_a_known_link_is_found_again(fit_links: ModuleType) -> None:
    start = Cluster.from_catalog("pcie-8-l4")
    link = dataclasses.replace(start.intra_link, latency_s=7e-6, bandwidth=55e9, efficiency=1.0)
    truth = dataclasses.replace(start, intra_link=link)
    rows = [row for n_gpus in (2, 4, 8) for row in _rows(n_gpus)]
    times = fit_links.predict(truth, rows)
    rows = [dataclasses.replace(row, time_s=s) for row, s in zip(rows, times, strict=True)]
    fit = fit_links.Fit(node="pcie-8-l4", link="intra_link", rows=())
    found = fit_links.solve(fit, start, rows)
    assert found.intra_link.bandwidth == pytest.approx(55e9, rel=0.02)
    assert found.intra_link.latency_s == pytest.approx(7e-6, rel=0.05)
    assert fit_links.predict(found, rows) == pytest.approx(times, rel=0.05)


def test_least_squares_solves_a_linear_problem(fit_links: ModuleType) -> None:
    matrix, target = np.array([[2.0, 1.0], [1.0, 3.0], [0.0, 1.0]]), np.array([3.0, 5.0, 1.0])
    oracle = np.linalg.lstsq(matrix, target, rcond=None)[0]
    found = fit_links.least_squares(lambda point: matrix @ point - target, np.zeros(2))
    assert found == pytest.approx(oracle, abs=1e-3)


def test_every_row_is_fitted_or_held_out(fit_links: ModuleType) -> None:
    rows = _rows(8) + _rows(4)
    fitted, held_out = fit_links.split(rows)
    assert sorted(map(repr, fitted + held_out)) == sorted(map(repr, rows))
    sizes, others = ({row.size_bytes for row in part} for part in (fitted, held_out))
    assert not sizes & others
    assert sizes == {2.0**exponent for exponent in range(20, 31, 2)}

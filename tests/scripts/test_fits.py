"""Fits find the numbers that made their rows: links, what FSDP hides, the exchange of tokens;
products' seconds by hand."""

import dataclasses
import itertools
from dataclasses import replace

import numpy as np
import pytest

from meshwright.costmodel.kernels import reached_part, stream_seconds
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.measure.imports import CollectiveRow
from scripts.fits import check_products, fit_experts, fit_links
from scripts.fits.fit_devices import BROAD
from scripts.fits.fit_fsdp import loss, residuals, rows_of


def _rows(n_gpus: int) -> list[CollectiveRow]:
    row = CollectiveRow(
        collective="all_reduce", n_gpus=n_gpus, nodes=1, size_bytes=0.0, time_s=1.0,
        source="made up", gpu="toy",
    )  # fmt: skip
    return [dataclasses.replace(row, size_bytes=2.0**exponent) for exponent in range(20, 31)]


def test_a_known_link_is_found_again() -> None:
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


def test_least_squares_solves_a_linear_problem_of_half_of_the_rows() -> None:
    matrix, target = np.array([[2.0, 1.0], [1.0, 3.0], [0.0, 1.0]]), np.array([3.0, 5.0, 1.0])
    oracle = np.linalg.lstsq(matrix, target, rcond=None)[0]
    found = fit_links.least_squares(lambda point: matrix @ point - target, np.zeros(2))
    assert found == pytest.approx(oracle, abs=1e-3)
    rows = _rows(8) + _rows(4)
    fitted, held_out = fit_links.split(rows)
    assert sorted(map(repr, fitted + held_out)) == sorted(map(repr, rows))
    sizes, others = ({row.size_bytes for row in part} for part in (fitted, held_out))
    assert not sizes & others
    assert sizes == {2.0**exponent for exponent in range(20, 31, 2)}


def test_far_residuals_weigh_by_their_size_and_hiding_makes_faster() -> None:
    assert loss(0.0) == 0 and loss(-0.05) == loss(0.05) == pytest.approx(0.05**2 / 2)
    assert loss(0.5) - loss(0.4) == pytest.approx(0.1 * BROAD)
    rows = rows_of(None)
    assert {row.fitted for row in rows} == {True, False}
    assert {row.setup.cluster.device.name.startswith("a100") for row in rows} == {True, False}
    far = max(rows, key=lambda row: row.setup.dp)
    slow, middle, fast = (residuals(part, [far])[0] for part in (0.0, 0.5, 1.0))
    assert slow > middle > fast


ROW = {
    "gpu": "H100", "ranks_ep": "16", "nodes": "2", "op": "dispatch", "precision": "bf16",
    "impl": "HybridEP", "measurement": "Only Kernel Time", "bandwidth_GBps": "50",
    "link": "IB (algorithm bandwidth)", "notes": "",
}  # fmt: skip


def read(**changes: str) -> fit_experts.Exchange:
    found = fit_experts.read({**ROW, **changes})
    assert found is not None
    return found


@pytest.mark.parametrize(("places", "copies"), [(2, 1), (2, 5), (3, 4), (4, 3)])
def test_distinct_places_are_those_of_all_choices(places: int, copies: int) -> None:
    choices = list(itertools.product(range(places), repeat=copies))
    mean = sum(len(set(choice)) for choice in choices) / len(choices)
    assert places * reached_part(places, copies) == pytest.approx(mean)


def test_bandwidths_of_exchanges_are_read_and_the_fastest_taken() -> None:
    """Of 2^8 choices of a node for 8 copies all but two reach both nodes."""
    found = read()
    nodes = (254 * 2 + 2 * 1) / 256
    assert found.measured_s == pytest.approx(4096 * 7168 * 2 * nodes / 50e9)
    eight = read(precision="fp8")
    assert eight.measured_s / found.measured_s == pytest.approx((7168 + 4 * 56) / (2 * 7168))
    found = read(gpu="GB200", link="MNNVL")
    assert (found.nodes, found.link, found.cluster.num_nodes) == (1, "intra_link", 1)
    for other in (
        {"impl": "DeepEP low-latency"},
        {"notes": "superseded by newer numbers"},
        {"impl": "DeepEP normal", "nodes": "8", "ranks_ep": "64", "link": "RDMA"},
    ):
        assert fit_experts.exchanges([{**ROW, **other}]) == []
    (found,) = fit_experts.exchanges([ROW, {**ROW, "bandwidth_GBps": "80"}])
    assert found.measured_s == pytest.approx(read().measured_s * 50 / 80)


@pytest.mark.parametrize(("link", "nodes"), [("inter_link", "4"), ("intra_link", "1")])
def test_a_known_efficiency_is_found_again(link: str, nodes: str) -> None:
    sizes = ("8", "4") if nodes == "1" else ("32", "16")
    found = []
    for each in (read(ranks_ep=size, nodes=nodes) for size in sizes):
        slower = fit_experts.with_efficiency(each.cluster, link, 0.6)
        found.append(replace(each, measured_s=each.priced_s(slower)))
    assert fit_experts.fit(found, link) == pytest.approx(0.6)
    fitted, held_out = fit_experts.split(found)
    assert {x.ranks for x in fitted}.isdisjoint(x.ranks for x in held_out)
    assert len(fitted) + len(held_out) == len(found)


PRODUCT = {"gpu": "H800 SXM5", "dtype": "fp8", "kind": "grouped masked", "m": "16", "n": "512"}


def test_seconds_of_products_in_eight_bits() -> None:
    """16 rows of 4 groups: the traffic of 4 (16·1024 + 1024·512) + 4·16·512·2 bytes decides."""
    row = {**PRODUCT, "k": "1024", "groups": "4", "tflops": "100"}
    (found,) = check_products.measured([row])
    assert found.kind == "grouped, few rows, fp8"
    assert found.seconds == pytest.approx(2 * 16 * 512 * 1024 * 4 / 100e12)
    plain = Cluster.from_catalog("h800-sxm").device
    device = replace(plain, matmul_efficiency=1.0, tiles=(), launch_overhead_s=0.25)
    nbytes = 4 * (16 * 1024 + 1024 * 512) + 4 * 16 * 512 * 2
    assert found.priced_s(device) == pytest.approx(0.25 + stream_seconds(device, nbytes))
    row = {**PRODUCT, "m": "8192", "n": "8192", "k": "8192", "groups": "", "tflops": "100"}
    (found,) = check_products.measured([{**row, "kind": "dense"}])
    plain = Cluster.from_catalog("h800-sxm").device
    device = replace(plain, matmul_efficiency=1.0, tiles=(), launch_overhead_s=0.0)
    assert found.priced_s(device) == pytest.approx(2 * 8192**3 / (2 * 989e12))
    row = {**PRODUCT, "k": "8", "groups": "", "tflops": "1"}
    others = [{**row, "gpu": "MI300X"}, {**row, "dtype": "fp32/tf32"}, {**row, "k": ""}]
    assert check_products.measured(others) == []

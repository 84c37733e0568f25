"""The exchange of tokens: bandwidths read back by hand and by laying out every choice of experts;
a known efficiency is found again. Products: seconds by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from meshwright.costmodel.kernels import reached_part, stream_seconds
from meshwright.profiles.cluster import Cluster
from scripts.fits import check_products, fit_experts

ROW = {
    "gpu": "H100",
    "ranks_ep": "16",
    "nodes": "2",
    "op": "dispatch",
    "precision": "bf16",
    "impl": "HybridEP",
    "measurement": "Only Kernel Time",
    "bandwidth_GBps": "50",
    "link": "IB (algorithm bandwidth)",
    "notes": "",
}


@pytest.mark.parametrize(("places", "copies"), [(2, 1), (2, 5), (3, 4), (4, 3)])
def test_distinct_places_are_those_of_all_choices(places: int, copies: int) -> None:
    choices = list(itertools.product(range(places), repeat=copies))
    mean = sum(len(set(choice)) for choice in choices) / len(choices)
    assert places * reached_part(places, copies) == pytest.approx(mean)


def test_a_bandwidth_between_nodes_counts_a_token_once_for_each_node() -> None:
    """Of 2^8 choices of a node for 8 copies all but two reach both nodes."""
    found = fit_experts.read(ROW)
    assert found is not None
    nodes = (254 * 2 + 2 * 1) / 256
    assert found.measured_s == pytest.approx(4096 * 7168 * 2 * nodes / 50e9)
    eight = fit_experts.read({**ROW, "precision": "fp8"})
    assert eight is not None
    assert eight.measured_s / found.measured_s == pytest.approx((7168 + 4 * 56) / (2 * 7168))


def test_nodes_of_one_domain_of_nvlink_are_one() -> None:
    found = fit_experts.read({**ROW, "gpu": "GB200", "link": "MNNVL"})
    assert found is not None
    assert (found.nodes, found.link, found.cluster.num_nodes) == (1, "intra_link", 1)


@pytest.mark.parametrize(
    "other",
    [
        {"impl": "DeepEP low-latency"},
        {"notes": "superseded by newer numbers"},
        {"impl": "DeepEP normal", "nodes": "8", "ranks_ep": "64", "link": "RDMA"},
    ],
)
def test_what_no_training_step_or_other_routing_measured_is_left_out(other: dict[str, str]) -> None:
    assert fit_experts.exchanges([{**ROW, **other}]) == []


def test_the_fastest_count_of_compute_units_is_taken() -> None:
    (found,) = fit_experts.exchanges([ROW, {**ROW, "bandwidth_GBps": "80"}])
    slow = fit_experts.read(ROW)
    assert slow is not None
    assert found.measured_s == pytest.approx(slow.measured_s * 50 / 80)


@pytest.mark.parametrize(("link", "nodes"), [("inter_link", "4"), ("intra_link", "1")])
def test_a_known_efficiency_is_found_again(link: str, nodes: str) -> None:
    sizes = ("8", "4") if nodes == "1" else ("32", "16")
    made = [fit_experts.read({**ROW, "ranks_ep": size, "nodes": nodes}) for size in sizes]
    found = []
    for each in made:
        assert each is not None
        slower = fit_experts.with_efficiency(each.cluster, link, 0.6)
        found.append(replace(each, measured_s=each.priced_s(slower)))
    assert fit_experts.fit(found, link) == pytest.approx(0.6)
    fitted, held_out = fit_experts.split(found)
    assert {x.ranks for x in fitted}.isdisjoint(x.ranks for x in held_out)
    assert len(fitted) + len(held_out) == len(found)


PRODUCT = {"gpu": "H800 SXM5", "dtype": "fp8", "kind": "grouped masked", "m": "16", "n": "512"}


def test_weights_of_few_rows_are_read_in_eight_bits() -> None:
    """16 rows of 4 groups: the traffic of 4 (16·1024 + 1024·512) + 4·16·512·2 bytes decides."""
    row = {**PRODUCT, "k": "1024", "groups": "4", "tflops": "100"}
    (found,) = check_products.measured([row])
    assert found.kind == "grouped, few rows, fp8"
    assert found.seconds == pytest.approx(2 * 16 * 512 * 1024 * 4 / 100e12)
    plain = Cluster.from_catalog("h800-sxm").device
    device = replace(plain, matmul_efficiency=1.0, tiles=(), launch_overhead_s=0.25)
    nbytes = 4 * (16 * 1024 + 1024 * 512) + 4 * 16 * 512 * 2
    assert found.priced_s(device) == pytest.approx(0.25 + stream_seconds(device, nbytes))


def test_many_rows_of_eight_bits_take_half_of_sixteen() -> None:
    row = {**PRODUCT, "m": "8192", "n": "8192", "k": "8192", "groups": "", "tflops": "100"}
    (found,) = check_products.measured([{**row, "kind": "dense"}])
    plain = Cluster.from_catalog("h800-sxm").device
    device = replace(plain, matmul_efficiency=1.0, tiles=(), launch_overhead_s=0.0)
    assert found.priced_s(device) == pytest.approx(2 * 8192**3 / (2 * 989e12))


def test_products_of_other_gpus_and_widths_are_left_out() -> None:
    row = {**PRODUCT, "k": "8", "groups": "", "tflops": "1"}
    others = [{**row, "gpu": "MI300X"}, {**row, "dtype": "fp32/tf32"}, {**row, "k": ""}]
    assert check_products.measured(others) == []

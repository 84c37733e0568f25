"""Published collectives: what of a log or a table holds for a cluster, and that plans use it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.operators.pricing import Pricer
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.measure.imports import CollectiveRow, is_gpu, timings_for, world_of_log
from meshwright.profiles.profile import INTERPOLATED, MEASURED, Profile, load_profile
from meshwright.profiles.store import DeviceId, Measurements, Store, export_json, import_json
from meshwright.shell.profile_command import import_profile
from tests.helpers import tiny
from tests.helpers.planning import setting_on
from tests.meshwright.commands import Captured, failed, printed, timing

MIB = 2**20
PAIR = Cluster.from_catalog("dgx-a100", num_nodes=2)
GPU = "NVIDIA A100-SXM4-80GB"
TABLE = (
    "source,collective,gpu,nodes,gpus_per_node,n_gpus,intra_link,inter_link,size_bytes,"
    "size_convention,time_us,algbw_GBps,busbw_GBps,trust\n"
)
# size in bytes -> microseconds out of place and in place
TIMES_US = {MIB: (40.0, 39.0), 4 * MIB: (100.0, 99.0)}


def log(
    *, program: str = "all_reduce_perf", hosts: tuple[str, ...] = ("node-a",) * 8, gpu: str = GPU
) -> str:
    head = [f"# Collective test starting: {program}", "# Using devices"]
    head += [
        f"#  Rank {rank:2d} Group  0 Pid {400 + rank} on {host} device {rank % 8:2d} "
        f"[0000:{rank:02x}:00] {gpu}"
        for rank, host in enumerate(hosts)
    ]
    table = [
        f"{size} {size // 4} float sum -1 {out} 1.0 1.0 0 {into} 1.0 1.0 0"
        for size, (out, into) in TIMES_US.items()
    ]
    return "\n".join([*head, *table, ""])


def row(**changes: object) -> CollectiveRow:
    given: dict[str, object] = {
        "collective": "all_reduce", "n_gpus": 8, "nodes": 1, "size_bytes": MIB, "time_s": 1e-4,
        "source": "one", "gpu": "A100-80GB SXM",
    }  # fmt: skip
    return CollectiveRow(**{**given, **changes})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def taken(store: Store, *logs: str) -> Profile:
    for text in logs:
        path = store.path.parent / "run.log"
        path.write_text(text)
        import_profile(PAIR, path, store)
    return loaded(store)


def loaded(store: Store | None = None) -> Profile:
    profile = load_profile(PAIR, store)
    assert profile is not None
    return profile


def test_a_log_prices_the_plans_of_a_cluster_that_is_not_here(store: Store, tmp_path: Path) -> None:
    profile = taken(store, log())
    assert profile.collective("all_reduce", MIB, 8, 8) == (pytest.approx(40e-6), MEASURED)
    between = profile.collective("all_reduce", 2.5 * MIB, 8, 8)
    assert between == (pytest.approx(70e-6), INTERPOLATED)  # half way
    graph, table = tiny.cut(tiny.net())
    given = {"rows": 4, "microbatches": 1, "precision": "bf16"}
    setting = setting_on(PAIR, dp=2, tp=8, profile=profile, **given)
    prices = Pricer(graph=graph, table=table, setting=setting)
    assert prices.comm("forward_s", "all_reduce", 2.5 * MIB).seconds == pytest.approx(70e-6)
    # the source is kept
    assert {c.source for c in profile.measurements.collectives} == {str(tmp_path / "run.log")}
    export_json(profile.measurements, tmp_path / "p.json")
    again = import_json(tmp_path / "p.json", accepts=lambda name: True, expected="")
    assert again == profile.measurements


@pytest.mark.parametrize(
    ("program", "kind", "factor"),
    [
        ("all_reduce_perf", "all_reduce", 1),
        ("reduce_scatter_perf", "reduce_scatter", 1),
        ("alltoall_perf", "all_to_all", 16),  # of 16 ranks' buffers together
    ],
)
def test_sizes_are_those_of_the_full_tensor(
    store: Store, program: str, kind: str, factor: int
) -> None:
    profile = taken(store, log(program=program, hosts=("a",) * 8 + ("b",) * 8))
    found = profile.collective(kind, factor * MIB, 16, 8)
    assert found == (pytest.approx(40e-6), MEASURED)


def test_own_curves_come_before_published_ones(store: Store) -> None:
    taken(store, log(), log(program="all_gather_perf"))
    mine = timing(backend="nccl", ranks=16, size=8, per_node=8, nbytes=2 * MIB, repetitions=9)
    own = DeviceId(name=GPU, driver="1", torch="2")
    store.add(Measurements(device=own, operators={}, collectives=(mine,)))
    profile = loaded(store)
    assert profile.measurements.device == own
    assert profile.collective("all_reduce", 2 * MIB, 8, 8) == (0.5, MEASURED)
    assert profile.collective("all_reduce", MIB, 8, 8) == (0.5, INTERPOLATED)
    assert profile.collective("all_gather", MIB, 8, 8) == (pytest.approx(40e-6), MEASURED)


@pytest.mark.parametrize(
    ("cluster", "known"),
    [
        (Cluster.from_catalog("a100-80gb", num_nodes=2), True),  # whose usual node it is
        (Cluster.from_catalog("jean-zay-a100", num_nodes=2), False),  # same GPU, other network
        (Cluster.from_catalog("dgx-a100", num_nodes=4), False),
        (Cluster.from_catalog("dgx-h100", num_nodes=2), False),
    ],
)
def test_curves_belong_to_their_node_and_world(store: Store, cluster: Cluster, known: bool) -> None:
    taken(store, log())
    profile = load_profile(cluster, store)
    found = profile.collective("all_reduce", MIB, 8, 8) if profile else None
    assert (found is not None) == known


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "H100 SXM"}, "not of a100-80gb"),
        ({"gpu": ""}, "not of a100-80gb"),
        ({"in_place": True}, "in place"),
        ({"n_gpus": 9, "nodes": 2}, "not as many GPUs on each node"),
        ({"n_gpus": 24, "nodes": 3}, "more than 2 nodes of 8 GPUs"),
        ({"n_gpus": 16}, "more than 2 nodes of 8 GPUs"),
        ({"n_gpus": 8, "nodes": 2}, "leaves GPUs of its nodes idle"),
        ({"collective": "p2p", "n_gpus": 8}, "sends in a ring"),
    ],
)
def test_rows_of_other_groups_are_left_out(changes: dict[str, object], reason: str) -> None:
    timings, skipped = timings_for([row(), row(**changes)], PAIR)
    assert [(t.size, t.per_node) for t in timings] == [(8, 8)]
    ((why, count),) = skipped.items()
    assert why.startswith(reason) and count == 1


@pytest.mark.parametrize(
    "changes",
    [{"n_gpus": 2}, {"n_gpus": 16, "nodes": 2}, {"collective": "p2p", "n_gpus": 2}, {"gpu": GPU}],
)
def test_rows_of_its_groups_are_taken(changes: dict[str, object]) -> None:
    made = row(**changes)
    (timing,), skipped = timings_for([made], PAIR)
    assert skipped == {}
    assert (timing.kind, timing.size, timing.ranks) == (made.collective, made.n_gpus, 16)
    assert timing.per_node * made.nodes == timing.size


def test_a_curve_is_of_one_source_and_the_longest() -> None:
    few = [row(source="a"), row(source="a"), row(source="a")]  # of one size
    many = [row(source="b", inter_link="EDR", size_bytes=k * MIB) for k in (1, 2)]
    timings, skipped = timings_for([*few, *many], PAIR)
    assert [(t.nbytes, t.source) for t in timings] == [(MIB, "b (EDR)"), (2 * MIB, "b (EDR)")]
    assert skipped == {"another source has more of the curve": 3}


def test_of_several_networks_none_is_taken_for_the_clusters() -> None:
    between = [row(n_gpus=16, nodes=2, inter_link=link) for link in ("EDR", "HDR")]
    assert len(timings_for(between[:1], PAIR)[0]) == 1
    timings, skipped = timings_for([*between, row()], PAIR)
    assert [t.size for t in timings] == [8]
    ((why, count),) = skipped.items()
    assert why.startswith("between nodes, of several networks") and count == 2


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=9))
def test_several_rows_of_one_size_give_their_median(micros: list[int]) -> None:
    (timing,), _ = timings_for([row(time_s=us * 1e-6) for us in micros], PAIR)
    low, high = sorted(micros)[(len(micros) - 1) // 2], sorted(micros)[len(micros) // 2]
    assert timing.seconds == pytest.approx((low + high) / 2 * 1e-6)
    assert timing.repetitions == len(micros)
    widest = (max(micros) - min(micros)) * 1e-6 / timing.seconds
    assert 0 <= timing.spread <= widest * (1 + 1e-9)


@pytest.mark.parametrize(
    ("text", "device", "same"),
    [
        ("A100-80GB SXM (DGX/NVSwitch)", "a100-80gb", True),
        ("A100-80GB PCIe (NVLink bridge pairs)", "a100-80gb", False),
        ("A100 SXM", "a100-80gb", False),  # there is one of 40 GB
        (GPU, "a100-80gb", True),
        ("H100 SXM", "h100-sxm", True),
        ("L40S-48GB", "l4", False),
        ("GB200 NVL4", "b200", False),
    ],
)
def test_names_of_gpus(text: str, device: str, same: bool) -> None:
    assert is_gpu(text, device) == same


def test_the_header_says_how_many_ranks_ran() -> None:
    text = log(hosts=("a",) * 8 + ("b",) * 8)
    assert world_of_log(text, ranks=None, nodes=None, source="x") == (16, 2)
    assert world_of_log(text, ranks=16, nodes=2, source="x") == (16, 2)
    with pytest.raises(ValueError, match=r"x:3: nodes is 1, but the log lists 2"):
        world_of_log(text, ranks=16, nodes=1, source="x")
    assert world_of_log("", ranks=8, nodes=1, source="x") == (8, 1)
    both = r"lists no ranks; legal: .*; give both --ranks N and --nodes K"
    with pytest.raises(ValueError, match=both):
        world_of_log("", ranks=8, nodes=None, source="x")


COMMAND = ["profile", "--cluster", "dgx-a100:2"]


def test_a_log_needs_no_model(in_a_folder: Path, capsys: Captured) -> None:
    (in_a_folder / "run.txt").write_text("".join(log(hosts=()).splitlines(keepends=True)[1:]))
    asked = ["--import", "run.txt", "--ranks", "8", "--nodes", "1", "--collective", "all_gather"]
    said = json.loads(printed(capsys, *COMMAND, *asked, "--json"))
    assert (said["taken"], said["sources"]) == (2, ["run.txt"])
    assert list(said["skipped"].values()) == [2]  # in place
    assert loaded().collective("all_gather", MIB, 8, 8) is not None


def test_a_table_says_what_it_took_and_left(in_a_folder: Path, capsys: Captured) -> None:
    rows = (
        "lab,all_reduce,A100-80GB SXM,2,8,16,NVLink,HDR,1048576,nccl-tests size,90,1,1,high\n"
        "lab,all_to_all,A100-80GB SXM,1,8,8,NVLink,,1024,per-rank send buffer,50,1,1,high\n"
        "lab,all_reduce,H100 SXM,2,8,16,NVLink,NDR,1048576,nccl-tests size,60,1,1,high\n"
    )
    (in_a_folder / "table.csv").write_text(TABLE + rows)
    said = printed(capsys, *COMMAND, "--import", "table.csv")
    assert "2 measurements taken in from table.csv" in said
    assert "1 left out: not of a100-80gb" in said and "source: lab (HDR)" in said
    found = loaded().collective("all_to_all", 8 * 1024, 8, 8)
    assert found == (pytest.approx(50e-6), MEASURED)


OTHER_ROW = "lab,all_reduce,H100 SXM,2,8,16,NVLink,NDR,1024,nccl-tests size,60,1,1,high\n"


@pytest.mark.parametrize(
    ("name", "text", "more", "message"),
    [
        ("a.log", log().replace("100.0", "fast"), (), "a.log:12: column 6 (time) is 'fast'; legal"),
        ("a.log", log(), ("--ranks", "4"), "a.log:3: ranks is 4, but the log lists 8"),
        ("a.log", log(gpu="My"), (), "of device 'My'; legal: device 'a100-80gb', as the cluster"),
        ("a.log", log() + log(program="all_gather_perf"), (), "of all_gather and all_reduce;"),
        ("a.log", log(program="x_perf"), (), "doesn't say which collective it measured"),
        ("a.log", log(), ("--collective", "all_gather"), "but the log is of 'all_reduce'"),
        ("a.csv", TABLE + OTHER_ROW, (), "none of 1 rows holds for cluster 'dgx-a100' (1 not of"),
        ("a.csv", TABLE + OTHER_ROW.replace("60", "-1"), (), "a.csv:2: time_us is '-1'; legal"),
        ("a.csv", TABLE + 'lab,"open', (), "a.csv:2: not a row of a CSV file"),
        ("a.csv", TABLE, ("--nodes", "2"), "describe an nccl-tests log; legal: with .log, .txt"),
        ("a.json", "{", (), "a.json: line 1 is not JSON"),
    ],
)
def test_a_refused_file_is_one_message(
    in_a_folder: Path, capsys: Captured, name: str, text: str, more: tuple[str, ...], message: str
) -> None:
    (in_a_folder / name).write_text(text)
    said = failed(capsys, [*COMMAND, "--import", name, *more])
    assert said.startswith("error: ") and said.count("\n") == 2 and message in said
    assert load_profile(PAIR) is None


def test_what_cannot_be_imported_is_an_error(in_a_folder: Path, capsys: Captured) -> None:
    (in_a_folder / "a.log").write_text(log())
    for arguments, says in (
        ([*COMMAND, "--import", "none.log"], "none.log"),
        (["profile", "--cluster", "local-host", "--import", "a.log"], "'local-host' runs gloo"),
        (COMMAND, "a model and --batch are missing; legal: MODEL --batch N, or --import FILE"),
    ):
        assert says in failed(capsys, arguments)

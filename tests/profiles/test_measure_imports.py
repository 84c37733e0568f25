"""Logs and tables of others: read to SI, full tensors, and refused by file, line and column."""

from pathlib import Path

import pytest

from meshwright.profiles.measure.imports import (
    CollectiveRow,
    GemmRow,
    read_collectives_csv,
    read_gemm_csv,
    read_nccl_tests,
)

HEAD = """\
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 2097152 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid   4242 on     node-a device  0 [0x07] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   4243 on     node-a device  1 [0x0a] NVIDIA H100 80GB HBM3
#
#       size    count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#        (B) (elements)                     (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
"""
LINES = """\
           0        0  float    sum    -1   5.31   0.00   0.00      0   5.00   0.00   0.00      0
     1048576   262144  float    sum    -1  45.10  23.25  23.25      0  44.00  23.83  23.83    N/A
     2097152   524288  float    sum    -1  51.13  41.01  41.01      0  50.00  41.94  41.94    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 32.5
"""
COLLECTIVES = (
    "source,collective,gpu,nodes,gpus_per_node,n_gpus,intra_link,inter_link,size_bytes,"
    "size_convention,time_us,algbw_GBps,busbw_GBps,trust\n"
)
GEMM = "source,gpu,dtype,kind,m,n,k,groups,tflops,mem_bw_GBps,framework,trust\n"
PROGRAMS = {
    "all_reduce_perf": ("all_reduce", 1), "all_gather_perf": ("all_gather", 1),
    "reduce_scatter_perf": ("reduce_scatter", 1), "broadcast_perf": ("broadcast", 1),
    "sendrecv_perf": ("p2p", 1),
    "alltoall_perf": ("all_to_all", 4),  # its sizes are those of one rank's buffer
}  # fmt: skip


class TestNcclTests:
    def test_two_rows_per_line(self) -> None:
        rows = read_nccl_tests(
            HEAD + LINES, ranks=2, nodes=1, source="run.log", collective="all_reduce"
        )
        common = {"collective": "all_reduce", "n_gpus": 2, "nodes": 1, "source": "run.log"}
        gpu = "NVIDIA H100 80GB HBM3"
        assert rows == [
            CollectiveRow(**common, size_bytes=size, time_s=time_s, gpu=gpu, in_place=in_place)
            for size, time_s, in_place in (
                (2**20, pytest.approx(45.10e-6), False),
                (2**20, pytest.approx(44e-6), True),
                (2**21, pytest.approx(51.13e-6), False),
                (2**21, pytest.approx(50e-6), True),
            )
        ]

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_the_program_tells_the_collective(self, program: str) -> None:
        collective, factor = PROGRAMS[program]
        text = f"# Collective test starting: {program}\n{HEAD}{LINES}"
        rows = read_nccl_tests(text, ranks=4, nodes=2, source="run.log")
        assert {row.collective for row in rows} == {collective}
        assert rows[0].size_bytes == factor * 2**20

    def test_older_logs_and_impossible_groups(self) -> None:
        text = "1048576 262144 float sum 45.1 23.25 23.25 2e-7 44.0 23.83 23.83 2e-7"
        rows = read_nccl_tests(text, ranks=2, nodes=1, source="old.log", collective="all_reduce")
        assert [row.time_s for row in rows] == pytest.approx([45.1e-6, 44e-6])
        with pytest.raises(ValueError, match=r"run.log: 2 ranks on 4 nodes; legal"):
            read_nccl_tests(LINES, ranks=2, nodes=4, source="run.log")
        with pytest.raises(ValueError, match=r"collective is 'gather'; legal: all_reduce"):
            read_nccl_tests(LINES, ranks=2, nodes=1, source="run.log", collective="gather")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (HEAD + LINES, "doesn't say which collective it measured; .*pass collective="),
            ("all_reduce_perf\n" + HEAD, "run.log: no line of an nccl-tests table in 8 lines"),
            (
                "all_reduce_perf\n1024 256 float sum -1 fast 1 1 0 5 1 1 0",
                r"run.log:2: column 6 \(time\) is 'fast'; legal: a finite number above 0",
            ),
            ("all_reduce_perf\n1024 256 float sum -1 5", "run.log:2: 6 columns; legal: 12 or 13"),
        ],
    )
    def test_what_cannot_be_read_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_nccl_tests(text, ranks=2, nodes=1, source="run.log")


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


BAD = [
    (
        COLLECTIVES,
        "a,gather,A,1,4,4,,,1,full buffer,1,,,",
        "collective is 'gather'; legal: all_red",
    ),
    (COLLECTIVES, "a,p2p,A,1,4,four,,,1,full buffer,1,,,", "n_gpus is 'four'; legal: a whole"),
    (COLLECTIVES, "a,p2p,A,1,4,4,,,x,full buffer,1,,,", "size_bytes is 'x'; legal: a finite"),
    (COLLECTIVES, "a,p2p,A,1,4,4,,,1,full buffer,nan,,,", "time_us is 'nan'"),
    (COLLECTIVES, "a,p2p,A,1,4,4,,,1,half of it,1,,,", "size_convention is 'half of it'; legal"),
    (COLLECTIVES, "a,p2p,A", "the row ends before nodes"),
    (GEMM, "a,V,fp16,mm,16,,64,,80,,,", r"of m, n and k only \['m', 'k'\]; legal: all three"),
    (GEMM, "a,V,fp16,mm,16,1.5,64,,80,,,", "n is '1.5'; legal: a whole number"),
    (GEMM, "a,V,fp16,mm,16,16,16,,0,,,", "tflops is '0'; legal: a finite number above 0"),
    (GEMM, "a,V,fp16,mm,16,16,16,-1,8,,,", "groups is '-1'"),
]


class TestTables:
    def test_collectives(self, tmp_path: Path) -> None:
        path = table(
            tmp_path,
            COLLECTIVES
            + "one,all_reduce,A100,1,4,4,NVLink,,1024,nccl-tests size,50,1,1,high\n"
            + "two,all_to_all,V100,2,2,4,NVLink,EDR,1024,per-rank send buffer,80,1,1,high\n"
            + "three,all_reduce,V100,2,8,16,NVLink,EDR,,nccl-tests size,,,48,low\n",
        )
        one, two = read_collectives_csv(path)
        assert one == CollectiveRow(
            collective="all_reduce", n_gpus=4, nodes=1, size_bytes=1024,
            time_s=pytest.approx(50e-6), source="one", gpu="A100",
        )  # fmt: skip
        assert two == CollectiveRow(
            collective="all_to_all", n_gpus=4, nodes=2, size_bytes=4 * 1024,
            time_s=pytest.approx(80e-6), source="two", gpu="V100", inter_link="EDR",
        )  # fmt: skip

    def test_products(self, tmp_path: Path) -> None:
        path = table(
            tmp_path,
            GEMM
            + "a,V100,fp16,mm,16,32,64,,80.5,,torch,high\n"
            + "a,A100,bf16,bmm,16,32,64,128,227,,torch,high\n"
            + "b,L4,bf16,best square,,,,,66,235,torch,medium\n",
        )
        rows = read_gemm_csv(path)
        assert [row.shape for row in rows] == [(16, 32, 64), (16, 32, 64), None]
        assert [row.groups for row in rows] == [1, 128, 1]
        assert rows[0] == GemmRow(
            gpu="V100", dtype="fp16", shape=(16, 32, 64), groups=1, flops_per_s=80.5e12, source="a"
        )

    def test_bad_rows_name_line_and_column(self, tmp_path: Path) -> None:
        for head, row, message in BAD:
            read = read_gemm_csv if head == GEMM else read_collectives_csv
            with pytest.raises(ValueError, match=f"table.csv:2: {message}"):
                read(table(tmp_path, f"{head}{row}\n"))

    def test_a_table_without_a_needed_column(self, tmp_path: Path) -> None:
        path = table(tmp_path, "source,collective\na,b\n")
        with pytest.raises(ValueError, match=r"table.csv:1: no column gpu, nodes, n_gpus"):
            read_collectives_csv(path)

"""Rehearsals as on the cluster's device: what is done otherwise on GPUs is run, and mistakes found.

The oracle of the stand-in is the CPU: where a GPU does the same, the two logs are equal.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright import Cluster, Overrides, auto_parallelize, leaf
from meshwright.executor import devices, stand_in
from meshwright.executor.checkpoint import checkpoint, handover
from meshwright.executor.lowering import backend_of
from meshwright.executor.parameters import weight_gather
from meshwright.executor.ranks import launch
from meshwright.executor.rehearsal import Event, Kind, Recorder, Rehearsal, rehearse
from meshwright.executor.resharding import reshard
from meshwright.executor.runtime import Runtime
from meshwright.executor.stages import CheckedPlan
from meshwright.executor.stages import batches as batches_module
from meshwright.executor.stages import stage as stage_module
from meshwright.executor.stand_in import ORDER
from meshwright.executor.transfers.transfer import Channel
from tests.executor.stand_in.device_scenarios import eight_bits_by_device, offloaded, timed
from tests.helpers.tiers import second_tier, tiered
from tests.models.models import CASES, adamw
from tests.parity.parity_cells import Cell, plan_of

rehearsing = importlib.import_module("meshwright.executor.rehearsal.steps")

GPU, CPU = "nccl", "gloo"
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
PIPELINE, SHARDED = "mlp pp2xdp2 1f1b m4 zero1", "mlp dp2 1f1b m2 zero3"
DROPOUT = "gpt2_dropout 1 1f1b m2"


def run(line: str, backend: str = GPU, optimizer: MakeOptimizer = adamw) -> Rehearsal:
    cell = Cell.parse(line)
    case, (plan, of) = CASES[cell.case], plan_of(cell)
    example = case.batch(cell.rows, 0)
    checked = CheckedPlan.of(plan, of.graph, of.table)

    def batch() -> Any:
        return pytree.tree_map(torch.empty_like, example)

    return rehearse(checked, case.model(), batch, optimizer, backend=backend)


@cache
def rehearsed(line: str, backend: str = GPU) -> Rehearsal:
    return run(line, backend)


def events(found: Rehearsal, kind: Kind) -> list[Event]:
    return [e for log in found.logs.values() for e in log.events if e.kind is kind]


# --- as on GPUs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    tiered(
        [PIPELINE, SHARDED, "llama pp2xdp2 zb_v m4", "gpt2_tied dp2 1f1b m2 zero2 bf16"],
        (PIPELINE, SHARDED).__contains__,
        "a pipeline with ZeRO, and shards",
    ),
)
def test_plans_match(line: str) -> None:
    found = rehearsed(line)
    assert found.mismatches == ()
    assert not any("ranks as such" in why for why in found.left_out)


def test_messages_are_those_of_cpu_ranks() -> None:
    """But for the groups: each edge has one of its own, as NCCL matches messages by order."""
    ours, theirs = (rehearsed(PIPELINE, backend) for backend in (GPU, CPU))
    for rank, log in ours.logs.items():
        other = theirs.logs[rank]
        sent = [[e for e in x.events if e.peer is not None] for x in (log, other)]
        assert [(e.kind, e.payload, e.peer) for e in sent[0]] == [
            (e.kind, e.payload, e.peer) for e in sent[1]
        ]
        assert {e.group[0] for e in sent[0]} != {e.group[0] for e in sent[1]}


def test_gradients_are_scattered_by_the_collective() -> None:
    """Which gloo does in twice the bytes, so that there they are exchanged and summed."""
    names = [
        {e.operation for e in events(rehearsed(PIPELINE, backend), Kind.COLLECTIVE)}
        for backend in (GPU, CPU)
    ]
    assert "_reduce_scatter_base_" in names[0] - names[1]
    assert "alltoall_base_" in names[1] - names[0]


def test_collectives_of_fully_shard_have_streams() -> None:
    streams: dict[str, set[str]] = {}
    for event in events(rehearsed(SHARDED), Kind.COLLECTIVE):
        if event.dtype == "int64":  # digests of batches, which ranks compare
            continue
        streams.setdefault(event.operation, set()).add(event.stream)
    gathers, scatters = streams["_allgather_base_"], streams["_reduce_scatter_base_"]
    assert len(gathers) == len(scatters) == 1
    assert gathers != scatters
    assert "" not in gathers | scatters
    assert streams["broadcast_"] == {""}
    assert {e.stream for e in events(rehearsed(SHARDED, CPU), Kind.COLLECTIVE)} == {""}


KERNELS = {"bf16": "flash_attention", "fp32": "efficient_attention"}


@pytest.mark.parametrize(
    "precision", tiered(KERNELS, "bf16".__eq__, "the kernel of what is trained most")
)
def test_attention_is_the_kernel_of_gpus(precision: str) -> None:
    kernel = KERNELS[precision]
    log = rehearsed(f"gpt2_untied 1 1f1b m2 {precision}").logs[0]
    names = {name for name in log.flops if "attention" in name}
    assert names == {f"aten._scaled_dot_product_{kernel}{half}" for half in ("", "_backward")}
    other = rehearsed(f"gpt2_untied 1 1f1b m2 {precision}", CPU).logs[0]
    assert sum(log.flops.values()) == sum(other.flops.values())


def test_optimizers_may_be_fused() -> None:
    fused = run(SHARDED, optimizer=partial(torch.optim.AdamW, fused=True))
    assert fused.mismatches == ()
    plain = run(SHARDED, optimizer=torch.optim.AdamW)
    for rank, log in fused.logs.items():
        kinds = [x.peak_by_kind["optimizer states"] for x in (log, plain.logs[rank])]
        assert kinds[0] > kinds[1]  # the steps lie on the device, too


class Noisy(nn.Module):
    """A leaf that multiplies, under autocast, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)
        self.noise = leaf(nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1), nn.Dropout(0.1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.noise(self.first(x))).mean()


def run_noisy(cluster: Cluster) -> Rehearsal:
    with torch.device("meta"):
        net = Noisy()
    result = auto_parallelize(
        net,
        cluster,
        example_inputs={"x": torch.zeros(64, 16)},
        global_batch_size=64,
        precision="bf16",
        overrides=Overrides(tp=1, num_microbatches=2),
        profile=False,
    )
    return result.rehearse()


def test_a_clusters_gpus_are_the_default() -> None:
    """And a leaf with dropout draws from the generators of host and device."""
    stand_in.module().seeds.clear()
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=1)
    found, other = run_noisy(cluster), run_noisy(Cluster.local(8, "cpu", measure=False))
    assert found.mismatches == ()
    assert stand_in.module().seeds
    flops = [sum(x.logs[0].flops.values()) for x in (found, other)]
    assert flops[0] == flops[1] > 0


def test_the_process_is_left_as_it_was() -> None:
    """Training on the CPU goes on; the stand-in is nobody else's accelerator."""
    rehearsed(SHARDED)
    assert not torch.accelerator.is_available()
    assert not dist.is_initialized()
    net = nn.Linear(3, 1)
    net(torch.ones(2, 3)).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
    assert run(PIPELINE, CPU).mismatches == ()


def test_a_process_with_a_gpu_rehearses_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, stand_in.NAME, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device, why = stand_in.device_for(GPU)
    assert device == devices.HOST
    assert "as CPU ranks: this process has a GPU" in why
    assert stand_in.device_for(CPU) == (devices.HOST, "")


# --- mistakes are found ---------------------------------------------------------------------------


def _posted_on_host(self: Channel, post: Any = Channel.post) -> Any:
    device, self.device = self.device, devices.HOST
    try:
        return post(self)
    finally:
        self.device = device


HOST_FAULTS = {
    "random states": (DROPOUT, stage_module, "to_device", lambda x, device: x, "forward"),
    "rows of the batch": (
        PIPELINE, batches_module.Batches, "_moved", lambda self, name, x: x, "forward"
    ),
    "what is received": (PIPELINE, Channel, "post", _posted_on_host, "recv_ of"),
    "what is gathered": (
        "mlp dp2 1f1b m2 zero2", weight_gather, "all_gather_flat",
        lambda part, *rest: reshard.all_gather_flat(part.cpu(), *rest), "_allgather_base_ of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", HOST_FAULTS)
def test_a_tensor_left_on_the_host_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, owner, name, instead, said = HOST_FAULTS[fault]
    monkeypatch.setattr(owner, name, instead)
    run(line, CPU)  # where the two devices are one
    with pytest.raises(ValueError, match="left on another device") as error:
        run(line)
    assert said in str(error.value)
    assert "rank 0" in str(error.value) or "rank 1" in str(error.value)


class _Unawaited:
    """A work that nobody waits for."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, *_: Any) -> None: ...


def _started_only(start: Any, *args: Any, **options: Any) -> Any:
    out, work = start(*args, **options)
    return out, _Unawaited(work)


def _put_together(self: Channel, posted: Any, finish: Any = Channel.finish) -> Any:
    return finish(self, [(_Unawaited(work), part, piece) for work, part, piece in posted])


WAIT_FAULTS = {
    "gathered weights": (
        "mlp dp2 1f1b m2 zero2", weight_gather, "all_gather_flat",
        partial(_started_only, reshard.all_gather_flat),
    ),
    "received activations": (PIPELINE, Channel, "finish", _put_together),
    "streams of fully_shard": (SHARDED, stand_in.Stream, "wait_event", lambda self, event: None),
}  # fmt: skip


@pytest.mark.parametrize("fault", WAIT_FAULTS)
def test_a_wait_left_out_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, owner, name, instead = WAIT_FAULTS[fault]
    monkeypatch.setattr(owner, name, instead)
    found = run(line)
    assert {m.proof for m in found.mismatches} == {"streams"}
    assert all("without waiting for it" in m.text for m in found.mismatches)


# --- what depends on the device -------------------------------------------------------------------


def _saved(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in the background, up to the writing."""
    written: list[Any] = []

    def save(runtime: Runtime, *_: Any, **__: Any) -> None:
        checkpoint.save(runtime, folder, asynchronous=True).wait()

    with monkeypatch.context() as patch:
        patch.setattr(rehearsing, "run_steps", save)
        patch.setattr(checkpoint, "_write", lambda tensors, *_, **__: written.append(tensors))
        run("mlp 1 1f1b m2", backend)
    assert written
    assert all(
        chunks.local.device == devices.HOST
        for tensors in written
        for named in tensors.values()
        for chunks in named.values()
    )


def _handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a fused optimizer under another plan: where it steps them, its steps, too."""
    found: list[torch.device] = []

    def take_over(runtime: Runtime, _: Any, optimizer: MakeOptimizer, *__: Any, **___: Any) -> None:
        left = handover.Handover(
            before=runtime,
            states={
                p.fqn: handover.Kept(
                    group=0, values={"step": torch.ones(()), "exp_avg": torch.empty(p.shape)}
                )
                for p in runtime.stage_parameters
            },
            like_parameters=frozenset({"exp_avg"}),
        )
        taking = optimizer(list(runtime.parameters()))
        handover.take_over(runtime, left, taking)
        found.extend(x.device for state in taking.state.values() for x in state.values())

    with monkeypatch.context() as patch:
        patch.setattr(rehearsing, "run_steps", take_over)
        for line, where in (("zero1", stand_in.NAME), ("zero1 host100", "cpu")):
            found.clear()
            run(f"mlp dp2 1f1b m2 {line}", optimizer=partial(torch.optim.AdamW, fused=True))
            assert {device.type for device in found} == {where}


def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a run over NCCL, up to the search for the store, where there are two GPUs."""
    chosen: list[int] = []
    with monkeypatch.context() as patch:
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
            patch.setenv(name, value)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "set_device", chosen.append)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(RuntimeError, match="local rank 1 finds 1 GPUs"):
            launch.start("nccl")
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.delenv("MASTER_ADDR", raising=False)
        patch.setattr(sys, "excepthook", sys.excepthook)  # which a start replaces
        with pytest.raises(RuntimeError, match="MASTER_"):
            launch.start("nccl")
        assert chosen == [1]
        assert launch.device_here() == torch.device("cuda", 1)
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        assert launch.device_here() == torch.device("cuda", 1)
        patch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
        assert launch.device_here() == devices.HOST


def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    own = sys.modules[backend_of.__module__]
    with monkeypatch.context() as patch:
        patch.setattr(own, "has_triton", lambda: False)
        patch.setattr(own, "get_cpp_compiler", lambda: "c++")
        assert backend_of(True, "cpu") == own.DEFAULT
        with pytest.raises(RuntimeError, match="Triton on cuda"):
            backend_of(True, "cuda")


OFFLOADED = (
    "mlp dp2 1f1b m2 bf16 weights100 host100",
    *(f"mlp dp2 1f1b m2 {line} host100" for line in ("zero2 bf16", "zero3", "nvme100")),
    "gpt2_tied dp2 1f1b m2 zero3 full away100",
)
OTHER_WAYS = second_tier("the copies to host memory and back, on a plan with weights there, too")


@pytest.mark.parametrize(
    "scenario",
    [
        *(_handed_over, _launched, _compiled, eight_bits_by_device),
        partial(offloaded, run, OFFLOADED[:1]),
        pytest.param(partial(offloaded, run, OFFLOADED), marks=OTHER_WAYS),
    ],
)
def test_what_the_device_decides(
    scenario: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario(monkeypatch)


@pytest.mark.parametrize("backend", [GPU, CPU])
def test_what_is_read_of_a_device(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(stand_in.device_for(backend)[0])
    _saved(tmp_path, backend, monkeypatch)
    assert run(f"{PIPELINE} pointwise", backend).mismatches == ()


def test_the_recorder_counts_one_device() -> None:
    device = stand_in.device_for(GPU)[0]
    recorder = Recorder(device)
    with stand_in.standing_in(), FakeTensorMode(), recorder:
        kept = torch.empty(100, device=device), torch.empty(1000)
        recorder.memory.begin()
    assert len(kept) == 2 and recorder.log(0).peak_bytes == 400 and ORDER.races == {}

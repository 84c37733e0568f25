"""Rehearsals as on the cluster's device: what is done otherwise on GPUs is run, and mistakes found.

The oracle of the stand-in is the CPU: where a GPU does the same, the two logs are equal. What is
answered without torch's dispatcher is what torch answers.
"""

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright import Cluster, Overrides, leaf
from meshwright.executor import devices, stand_in, states_in_files
from meshwright.executor.backward import eight_bits
from meshwright.executor.checkpoint import checkpoint, handover
from meshwright.executor.files.chunks import LocalChunks
from meshwright.executor.host_memory import Aside, fill
from meshwright.executor.host_values import with_values
from meshwright.executor.parameters import block_weights, parameters, whole_of
from meshwright.executor.ranks import launch
from meshwright.executor.rehearsal import Event, Kind, Recorder, Rehearsal, rehearse
from meshwright.executor.resharding import reshard
from meshwright.executor.runtime import Runtime
from meshwright.executor.runtime.timeline import Stopwatch
from meshwright.executor.stages import Phase
from meshwright.executor.stages import batches as batches_module
from meshwright.executor.stages import stage as stage_module
from meshwright.executor.stand_in import NOT_KNOWN, ORDER, Key, KnownFakes, Parts, parts_on_demand
from meshwright.executor.transfers import Channel
from tests.executor.rehearsal.rehearsal_runs import checked
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import planned
from tests.models.models import adamw

rehearsing = importlib.import_module("meshwright.executor.rehearsal.steps")

GPU, CPU = "nccl", "gloo"
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
PIPELINE, SHARDED = "mlp pp2xdp2 1f1b m4 zero1", "mlp dp2 1f1b m2 zero3"
DROPOUT = "gpt2_dropout 1 1f1b m2"


def run(line: str, backend: str = GPU, optimizer: MakeOptimizer = adamw) -> Rehearsal:
    of = checked(line)
    return rehearse(of.checked, of.case.model(), of.batch, optimizer, backend=backend)


@cache
def rehearsed(line: str, backend: str = GPU) -> Rehearsal:
    return run(line, backend)


def events(found: Rehearsal, kind: Kind) -> list[Event]:
    return [e for log in found.logs.values() for e in log.events if e.kind is kind]


# --- as on GPUs -----------------------------------------------------------------------------------


LINES = (PIPELINE, SHARDED, "llama pp2xdp2 zb_v m4", "gpt2_tied dp2 1f1b m2 zero2 bf16")


@pytest.mark.parametrize(
    "line", tiered(LINES, LINES[:2].__contains__, "a pipeline with ZeRO, and shards")
)
def test_plans_match(line: str) -> None:
    found = rehearsed(line)
    assert found.mismatches == ()
    assert not any("ranks as such" in why for why in found.left_out)


@second_tier("plans that match over NCCL are kept; real CPU ranks do what is rehearsed")
def test_messages_are_those_of_cpu_ranks() -> None:
    """But for the groups: each edge has one of its own, as NCCL matches messages by order."""
    ours, theirs = (rehearsed(PIPELINE, backend) for backend in (GPU, CPU))
    for rank in ours.logs:
        sent = [[e for e in x.logs[rank].events if e.peer is not None] for x in (ours, theirs)]
        mine, other = ([(e.kind, e.payload, e.peer) for e in events] for events in sent)
        assert mine == other
        assert {e.group[0] for e in sent[0]} != {e.group[0] for e in sent[1]}


@second_tier("plans that match over NCCL are kept; real CPU ranks do what is rehearsed")
def test_gradients_are_scattered_by_the_collective() -> None:
    """Which gloo does in twice the bytes, so that there they are exchanged and summed."""
    names = [
        {e.operation for e in events(rehearsed(PIPELINE, backend), Kind.COLLECTIVE)}
        for backend in (GPU, CPU)
    ]
    assert "_reduce_scatter_base_" in names[0] - names[1]
    assert "alltoall_base_" in names[1] - names[0]


@second_tier("a wait for these streams that is left out is found in the change tier")
def test_collectives_of_fully_shard_have_streams() -> None:
    streams: dict[str, set[str]] = defaultdict(set)
    for event in events(rehearsed(SHARDED), Kind.COLLECTIVE):
        if event.dtype != "int64":  # digests of batches, which ranks compare
            streams[event.operation].add(event.stream)
    gathers, scatters = streams["_allgather_base_"], streams["_reduce_scatter_base_"]
    assert len(gathers) == len(scatters) == 1
    assert gathers != scatters
    assert "" not in gathers | scatters
    assert streams["broadcast_"] == {""}
    assert {e.stream for e in events(rehearsed(SHARDED, CPU), Kind.COLLECTIVE)} == {""}


KERNELS = {"bf16": "flash_attention", "fp32": "efficient_attention"}
TRAINED = "the kernel of what is trained most"


@pytest.mark.parametrize("precision", tiered(KERNELS, "bf16".__eq__, TRAINED))
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
    for rank, log in fused.logs.items():
        kinds = [x.peak_by_kind["optimizer states"] for x in (log, rehearsed(SHARDED).logs[rank])]
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
    given = {"example_inputs": {"x": torch.zeros(64, 16)}, "loss_fn": None, "profile": False}
    given |= {"precision": "bf16", "overrides": Overrides(tp=1, num_microbatches=2)}
    return planned(net, cluster=cluster, global_batch_size=64, **given).rehearse()


@second_tier("rehearsals that are told their backend are kept")
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
    assert net.weight.grad is not None and net.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
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
        "mlp dp2 1f1b m2 zero2", block_weights, "all_gather_flat",
        lambda part, *rest: reshard.all_gather_flat(part.cpu(), *rest), "_allgather_base_ of",
    ),
}  # fmt: skip


FIRST_FAULTS = {"rows of the batch", "what is gathered"}
LIKE_THEM = "one in a forward and one in a collective are kept"


@pytest.mark.parametrize("fault", tiered(HOST_FAULTS, FIRST_FAULTS.__contains__, LIKE_THEM))
def test_a_tensor_left_on_the_host_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, owner, name, instead, said = HOST_FAULTS[fault]
    monkeypatch.setattr(owner, name, instead)
    run(line, CPU)  # where the two devices are one
    with pytest.raises(ValueError, match="left on another device") as error:
        run(line)
    assert said in str(error.value)
    assert "rank 0" in str(error.value) or "rank 1" in str(error.value)


def _unawaited(work: Any) -> Any:
    """A work that nobody waits for."""
    return SimpleNamespace(work=work, wait=lambda *_: None)


def _started_only(start: Any, *args: Any, **options: Any) -> Any:
    out, work = start(*args, **options)
    return out, _unawaited(work)


def _put_together(self: Channel, posted: Any, finish: Any = Channel.finish) -> Any:
    return finish(self, [(_unawaited(work), part, piece) for work, part, piece in posted])


WAIT_FAULTS = {
    "gathered weights": (
        "mlp dp2 1f1b m2 zero2", block_weights, "all_gather_flat",
        partial(_started_only, reshard.all_gather_flat),
    ),
    "received activations": (PIPELINE, Channel, "finish", _put_together),
    "streams of fully_shard": (SHARDED, stand_in.Stream, "wait_event", lambda self, event: None),
}  # fmt: skip


FIRST_WAITS = {"gathered weights", "streams of fully_shard"}
WAITS = "our waits for weights, and torch's own, are kept"


@pytest.mark.parametrize("fault", tiered(WAIT_FAULTS, FIRST_WAITS.__contains__, WAITS))
def test_a_wait_left_out_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, owner, name, instead = WAIT_FAULTS[fault]
    monkeypatch.setattr(owner, name, instead)
    found = run(line)
    assert {m.proof for m in found.mismatches} == {"streams"}
    assert all("without waiting for it" in m.text for m in found.mismatches)


# --- what depends on the device -------------------------------------------------------------------


def _timed(device: torch.device) -> None:
    """Clocks, generators and chunks."""
    with stand_in.standing_in(), FakeTensorMode():
        watch = Stopwatch(device)
        watch(Phase.REDUCE, lambda: None)
        ((what, began, ended),) = watch.read()
        assert what is Phase.REDUCE
        assert began <= ended
        ((_, seconds),) = watch.durations()
        assert seconds >= 0
        with devices.seeded(device, 5):
            assert torch.initial_seed() == 5
        devices.random_states(device)()
        chunks = LocalChunks.of(torch.empty(4, device=device))
        assert chunks.copied().local.device == devices.HOST


def test_units_of_8_bit_products_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units for 8-bit products by device."""
    gpu = torch.device("cuda", 0)
    assert eight_bits.has_units(stand_in.device_for("nccl")[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert eight_bits.has_units(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not eight_bits.has_units(gpu)
    assert eight_bits.formats(gpu, by="tensor")[0] == torch.float8_e4m3fn
    mi300 = SimpleNamespace(gcnArchName="gfx942")
    monkeypatch.setattr(torch.version, "hip", "6")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mi300)
    assert eight_bits.has_units(gpu)
    assert eight_bits.formats(gpu, by="tensor")[0] == torch.float8_e4m3fnuz


OFFLOADED = (
    "mlp dp2 1f1b m2 bf16 weights100 host100",
    *(f"mlp dp2 1f1b m2 {line} host100" for line in ("zero2 bf16", "zero3", "nvme100")),
    "gpt2_tied dp2 1f1b m2 zero3 full away100",
)


@pytest.mark.parametrize(
    "lines", [OFFLOADED[:1], pytest.param(OFFLOADED, marks=second_tier("copies of other plans"))]
)
def test_copies_to_host_memory_and_back(
    lines: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States in host memory: whole weights and parts of them, cast on the way and as they are.
    Weights of blocks, activations there; states in files."""
    with monkeypatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 2 * torch.get_num_threads())
        patch.setattr(torch, "set_num_threads", lambda count: None)
        for line in lines:
            assert run(line).mismatches == ()
    there: list[torch.device] = []

    def gather(runtime: Any, *_: Any, **__: Any) -> None:
        found = (p.api.detach() for p in runtime.stage_parameters)
        there.extend(device for x in found for device in (x.device, whole_of(x).device))

    with monkeypatch.context() as patch:
        patch.setattr(rehearsing, "run_steps", gather)
        run("mlp dp2 1f1b m2 zero1 host100")
    assert [device.type for device in there[:2]] == ["cpu", stand_in.NAME]
    device = stand_in.device_for("nccl")[0]
    with stand_in.standing_in(), FakeTensorMode(), torch.no_grad():
        aside = Aside(device)
        with aside.entered():
            leaf = torch.empty(4, device=device)
            fill(leaf, torch.empty(4))
        aside.wait(aside.mark())
        waits = SimpleNamespace(hosted=True, gradient=torch.empty(4, device=device))
        parameters._to_host([waits], device)  # type: ignore[list-item]
        assert waits.gradient.device == devices.HOST
        with monkeypatch.context() as patch:  # fake tensors lie in no file
            patch.setattr(states_in_files, "lies_in_file", lambda x: True)
            patch.setattr(states_in_files, "let_go", lambda x: None)
            mapped = torch.empty(4)
            staging = states_in_files.Staging()
            staging.last = aside.mark()
            (copy,) = staging.bring([mapped], device)
        assert copy is not mapped and copy.device == devices.HOST
        assert staging.last is None


def _saved(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in the background, up to the writing."""
    written: list[Any] = []

    def save(runtime: Runtime, *_: Any, **__: Any) -> None:
        checkpoint.save(runtime, folder, asynchronous=True).wait()

    with monkeypatch.context() as patch:
        patch.setattr(rehearsing, "run_steps", save)
        patch.setattr(checkpoint, "write", lambda tensors, *_, **__: written.append(tensors))
        run("mlp 1 1f1b m2", backend)
    (tensors,) = written
    found = [chunks.local.device for chunks in tensors.values()]
    assert found and set(found) == {devices.HOST}


def test_states_are_handed_over_to_where_they_are_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a fused optimizer under another plan: where it steps them, its steps, too."""
    found: list[torch.device] = []

    def take_over(runtime: Runtime, _: Any, optimizer: MakeOptimizer, *__: Any, **___: Any) -> None:
        values = {
            p.fqn: {"step": torch.ones(()), "exp_avg": torch.empty(p.shape)}
            for p in runtime.stage_parameters
        }
        left = handover.Handover(
            before=runtime,
            states={fqn: handover.Kept(group=0, values=found) for fqn, found in values.items()},
            like_parameters=frozenset({"exp_avg"}),
        )
        taking = optimizer(list(runtime.parameters()))
        handover.take_over(runtime, left, taking)
        found.extend(x.device for state in taking.state.values() for x in state.values())

    monkeypatch.setattr(rehearsing, "run_steps", take_over)
    for line, where in (("zero1", stand_in.NAME), ("zero1 host100", "cpu")):
        found.clear()
        run(f"mlp dp2 1f1b m2 {line}", optimizer=partial(torch.optim.AdamW, fused=True))
        assert {device.type for device in found} == {where}


def test_ranks_start_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a run over NCCL, up to the search for the store, where there are two GPUs."""
    chosen: list[int] = []
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="local rank 1 finds 1 GPUs"):
        launch.start("nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a start replaces
    with pytest.raises(RuntimeError, match="MASTER_"):
        launch.start("nccl")
    assert chosen == [1]
    assert launch.device_here() == torch.device("cuda", 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    assert launch.device_here() == torch.device("cuda", 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    assert launch.device_here() == devices.HOST


@pytest.mark.parametrize(
    "backend", tiered([GPU, CPU], GPU.__eq__, "trained ranks of all tests read a CPU's")
)
def test_what_is_read_of_a_device(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _timed(stand_in.device_for(backend)[0])
    _saved(tmp_path, backend, monkeypatch)
    assert run(f"{PIPELINE} pointwise", backend).mismatches == ()


def test_the_recorder_counts_one_device() -> None:
    device = stand_in.device_for(GPU)[0]
    recorder = Recorder(device)
    with stand_in.standing_in(), FakeTensorMode(), recorder:
        kept = torch.empty(100, device=device), torch.empty(1000)
        recorder.memory.begin()
    assert len(kept) == 2 and recorder.log(0).peak_bytes == 400 and ORDER.races == {}


# --- known answers --------------------------------------------------------------------------------


_CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "of two": lambda x: x + x.clone(),
    "view": lambda x: x[2:].t(),
    "in place": lambda x: x.clone().add_(1),
    "tuple": lambda x: x.max(dim=0),
    "dtype": lambda x: x.to(torch.bfloat16),
    "made": lambda x: torch.empty(x.shape[0], 3),
    "product": lambda x: x.t() @ x,
}


class _Answering(TorchDispatchMode):
    def __init__(self, fakes: KnownFakes) -> None:
        super().__init__()
        self.fakes, self.known = fakes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self.fakes.key(func, args, kwargs or {})
        assert key is not None
        found = self.fakes.known(key, args)
        self.known += found is not NOT_KNOWN
        return self.fakes.worked_out(key, args, kwargs or {}) if found is NOT_KNOWN else found


def _looks(x: torch.Tensor, given: torch.Tensor) -> tuple[Any, ...]:
    own = x.untyped_storage()._cdata == given.untyped_storage()._cdata
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad, own


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES.keys())
def test_answers_as_torch_does(case: Callable[[torch.Tensor], Any]) -> None:
    entries: dict[Key, Any] = {}
    for _ in range(2):  # the entries serve another rank's mode
        with KnownFakes(entries) as fakes:
            x = torch.empty(4, 6)
            made = case(x)
            with _Answering(fakes) as answering:
                again = [case(x) for _ in range(3)][-1]
        tensors = zip(*(y if isinstance(y, tuple) else (y,) for y in (made, again)), strict=True)
        assert all(_looks(a, x) == _looks(b, x) for a, b in tensors)
        assert answering.known > 0


def test_the_gradient_of_a_known_view_reaches_its_base() -> None:
    with KnownFakes({}) as fakes, _Answering(fakes) as answering:
        for _ in range(3):
            x = torch.empty(4, 6, requires_grad=True)
            x[1:].sum().backward()
    assert answering.known > 0
    assert x.grad is not None and x.grad.shape == x.shape


def test_keys_are_of_what_has_no_values_and_tell_the_same_tensor_twice_from_two_alike() -> None:
    """What is made while the mode is off has some."""
    add, arange = torch.ops.aten.add.Tensor, torch.ops.aten.arange.default
    with KnownFakes({}) as fakes:
        x = torch.tensor(3)  # a constant, whose value torch knows
        assert fakes.key(add, (x, 1), {}) is None
        assert fakes.key(add, (object(), 1), {}) is None
        assert fakes.key(arange, (4,), {}) is not None
        with with_values():
            assert fakes.key(arange, (4,), {}) is None
        x, y = torch.empty(4), torch.empty(4)
        assert fakes.key(add, (x, x), {}) != fakes.key(add, (x, y), {})
        assert fakes.key(add, (x, y), {}) == fakes.key(add, (y, x), {})
        assert fakes.key(add, (x, 1), {}) != fakes.key(add, (x, 1.0), {})


def test_parts_are_those_of_fully_shard_and_made_on_demand_inside_the_context_alone() -> None:
    for length, count, dim in product((0, 1, 5, 8, 9, 100), (1, 2, 3, 8), (0, 1)):
        whole = torch.arange(length * 2).view((length, 2) if dim == 0 else (2, length))
        cut = _fsdp_common._chunk_with_empty(whole, count, dim)
        parts = Parts(whole, count, dim)
        assert len(parts) == len(cut)
        for own, theirs in zip(parts, cut, strict=True):
            assert own.shape == theirs.shape
            assert torch.equal(own, theirs)
            assert own.untyped_storage().data_ptr() in (theirs.untyped_storage().data_ptr(), 0)
    cut = _fsdp_param._chunk_with_empty
    with parts_on_demand():
        assert isinstance(_fsdp_param._chunk_with_empty(torch.empty(4), 2, dim=0), Parts)
    assert _fsdp_param._chunk_with_empty is cut

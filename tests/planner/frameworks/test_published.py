"""Configurations that repositories and papers publish: what they say, and that a step of theirs is
priced as the rows of published measurements are."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from meshwright.costmodel.operators import Problem
from meshwright.planner.frameworks import FORMATS, exported, read_configuration
from meshwright.planner.plan import InfeasibleError
from meshwright.planner.search import Search
from scripts.experts.rows import later_rows, published_rows
from scripts.published.frameworks import Unpriced
from scripts.published.predict import evaluate, traced
from scripts.published.rows import read_row
from scripts.published.setup import Setup, make_plan
from tests.helpers.tiers import second_tier

LAUNCH = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
NATIVE = """
distributed_type: FSDP
enable_cpu_affinity: false
num_processes: 8
fsdp_config:
  fsdp_activation_checkpointing: {again}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
parallelism_config:
  parallelism_config_cp_size: {cp}
  parallelism_config_dp_replicate_size: {replicas}
  parallelism_config_dp_shard_size: {shards}
  parallelism_config_tp_size: {tp}
"""
AXOLOTL = """
{{"zero_optimization": {zero}, {more}
 "bf16": {{"enabled": {bf16}}}, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
 "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
 "wall_clock_breakdown": false}}
"""
MEGATRON = "--{} --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --clip-grad 1.0 --lr 6e-5"

# address, licence, file and devices -> values; facts of the files, typed again
PUBLISHED: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "axolotl deepspeed_configs/zero3_bf16.json, Apache-2.0": ("a.json", AXOLOTL.format(
        zero='{"stage": 3, "overlap_comm": true, "contiguous_gradients": true, '
        '"sub_group_size": 0, "reduce_bucket_size": "auto", "prefetch_bucket_size": "auto", '
        '"max_live_parameters": 0, "param_persistence_threshold": "auto", "max_reuse_distance": 0, '
        '"gather_16bit_weights_on_model_save": true}', more="", bf16="true"),
        8, {"zero": 3, "dp": 8, "precision": "bf16", "microbatch_size": 8}),
    "axolotl deepspeed_configs/zero1.json, Apache-2.0": ("a.json", AXOLOTL.format(
        zero='{"stage": 1, "overlap_comm": true}', bf16='"auto"',
        more='"fp16": {"enabled": "auto", "auto_cast": false, "loss_scale": 0, "hysteresis": 2}, '
        '"optimizer": {"type": "AdamW", "params": {"lr": "auto"}},'),
        8, {"zero": 1, "precision": None, "optimizer": "adamw_fused"}),
    "axolotl deepspeed_configs/zero3_bf16_cpuoffload_all.json, Apache-2.0": (
        "a.json", AXOLOTL.format(
            zero='{"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}, '
            '"offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true}',
            more='"zero_force_ds_cpu_optimizer": false, "zero_allow_untested_optimizer": true,',
            bf16="true"),
        4, {"zero": 3, "offload": {"optimizer": 1.0}}),
    "axolotl deepspeed_configs/zero2_torch_compile.json, Apache-2.0": ("a.json", AXOLOTL.format(
        zero='{"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": true}',
        more='"compile": {"disable": false, "backend": "inductor"},', bf16='"auto"'),
        8, {"zero": 2, "offload": {"optimizer": 1.0}}),
    "alignment-handbook recipes/accelerate_configs/fsdp.yaml, Apache-2.0": ("a.yaml", LAUNCH + """
distributed_type: FSDP
num_processes: 8
fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_backward_prefetch: BACKWARD_PRE,
  fsdp_cpu_ram_efficient_loading: true, fsdp_forward_prefetch: true, fsdp_offload_params: false,
  fsdp_sharding_strategy: FULL_SHARD, fsdp_state_dict_type: SHARDED_STATE_DICT,
  fsdp_sync_module_states: true, fsdp_use_orig_params: true}
""", 8, {"zero": 3, "dp": 8, "precision": "bf16"}),
    "alignment-handbook recipes/accelerate_configs/deepspeed_zero3.yaml, Apache-2.0": (
        "a.yaml", LAUNCH + """
distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config: {deepspeed_multinode_launcher: standard, offload_optimizer_device: cpu,
  offload_param_device: cpu, zero3_init_flag: true, zero3_save_16bit_model: true, zero_stage: 3}
""", 2, {"zero": 3, "offload": {"optimizer": 1.0}}),
    "alignment-handbook recipes/accelerate_configs/multi_gpu.yaml, Apache-2.0": (
        "a.yaml", LAUNCH + "distributed_type: MULTI_GPU\ngpu_ids: all\nnum_processes: 16\n",
        16, {"zero": 0, "dp": 16, "microbatch_size": 4}),
    "accelerate examples/torch_native_parallelism/configs/tp_hsdp.yaml, Apache-2.0": (
        "a.yaml", LAUNCH + NATIVE.format(again="false", cp=1, replicas=2, shards=2, tp=2),
        8, {"dp": 4, "dp_shard": 2, "tp": 2, "zero": 3, "recompute": "none"}),
    "accelerate examples/torch_native_parallelism/configs/cp.yaml, Apache-2.0": (
        "a.yaml", LAUNCH + NATIVE.format(again="true", cp=8, replicas=1, shards=1, tp=1),
        8, {"dp": 1, "cp": 8, "zero": 3, "recompute": "full", "cp_kind": "all_gather"}),
    "accelerate examples/torch_native_parallelism/configs/nd.yaml, Apache-2.0": (
        "a.yaml", LAUNCH + NATIVE.format(again="false", cp=4, replicas=1, shards=2, tp=1),
        8, {"dp": 2, "cp": 4, "zero": 3}),
    "torchtitan configs/llama3_70b-8xb200-8k.toml, BSD-3-Clause": ("a.toml", """
[job]
description = "Llama 3 70B training"
[model]
flavor = "70B"
converters = []
[training]
local_batch_size = 6
seq_len = 8192
max_norm = 1.0
steps = 1000
dtype = "bfloat16"
mixed_precision_reduce = "bfloat16"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = "full"
selective_ac_option = "op"
[optimizer]
implementation = "fused"
[compile]
enable = true
components = ["model", "loss"]
""", 8, {"zero": 3, "dp": 8, "precision": "bf16_pure", "recompute": "full",
         "global_batch_size": 48, "compiled": True}),
    "Megatron-LM examples/gpt3/train_gpt3_175b_distributed.sh, BSD-3-Clause": (
        "a.args", MEGATRON.format(
            "num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
            "--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 "
            "--fp16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"),
        1024, {"tp": 8, "pp": 16, "dp": 8, "num_microbatches": 192, "precision": "fp16",
               "zero": 0, "schedule": "1f1b"}),
    "Megatron-LM examples/llama/train_llama3_8b_h100_fp8.sh, BSD-3-Clause": (
        "a.args", MEGATRON.format(
            "num-layers 32 --micro-batch-size 1 --global-batch-size 128 --bf16 "
            "--grad-reduce-in-bf16 --cross-entropy-loss-fusion --fp8-format hybrid "
            "--fp8-amax-history-len 1024 --tensor-model-parallel-size 1 --context-parallel-size 1 "
            "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather"),
        8, {"dp": 8, "num_microbatches": 16, "precision": "fp8", "zero": 1}),
    "Megatron-LM examples/mixtral/train_mixtral_8x7b_distributed.sh, BSD-3-Clause": (
        "a.args", MEGATRON.format(
            "num-layers 2 --num-experts 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
            "--micro-batch-size 1 --global-batch-size 4 --tensor-model-parallel-size 1 "
            "--pipeline-model-parallel-size 1 --expert-model-parallel-size 2 "
            "--use-distributed-optimizer --sequence-parallel"),
        2, {"ep": 2, "dp": 2, "zero": 1, "num_microbatches": 2}),
}  # fmt: skip


@pytest.mark.parametrize("address", PUBLISHED)
def test_a_published_file_says_its_values(address: str, tmp_path: Path) -> None:
    name, text, devices, values = PUBLISHED[address]
    (tmp_path / name).write_text(text)
    rows = 64 if "json" in name or "yaml" in name else None
    found = read_configuration(tmp_path / name, devices, global_batch_size=rows)
    assert {key: found.values.get(key) for key in values} == values


# --- prices --------------------------------------------------------------------------------------

FORMAT_OF = {
    "megatron": "megatron", "torchtitan": "torchtitan", "fsdp": "accelerate",
    "deepspeed": "deepspeed",
}  # fmt: skip
MOST_DEVICES = 256
ROWS = 12  # of different software, with and without a pipeline, a tensor axis
EQUAL, NEAR = 0.01, 0.2


def _setups() -> list[Setup]:
    """The first row of each software, number of pipeline stages and tensor axis."""
    found: dict[tuple[Any, ...], Setup] = {}
    for row in (*later_rows(), *published_rows()):
        try:
            setup = read_row(row)
        except Unpriced:
            continue
        name, open_ = setup.framework.target.name, not (setup.micro_batch and setup.chunks)
        axis_free = name != "fsdp" or setup.tp == setup.cp == setup.pp == 1
        small = setup.cluster.num_devices <= MOST_DEVICES and setup.dims.experts < 2
        if name in FORMAT_OF and axis_free and small and not open_:
            found.setdefault((name, setup.pp, setup.tp > 1, setup.sharing.zero), setup)
    return [*found.values()][:ROWS]


@second_tier("values of published files stay")
def test_what_is_imported_is_priced_as_published_rows_are() -> None:
    """The search finds the shardings, which rows have by rules of Megatron."""
    gaps = []
    for setup in _setups():
        graph, factors = traced(setup.dims, setup.precision)
        found = exported(make_plan(setup, graph), FORMATS[FORMAT_OF[setup.framework.target.name]])
        if {each.what for each in found.lost} - {"shardings"}:
            continue
        problem = Problem(
            graph=graph, factors=factors, cluster=setup.cluster, precision=setup.precision,
            target=setup.framework.target,
        )  # fmt: skip
        overrides = found.configuration.overrides(graph)
        try:
            result = Search(problem, setup.global_batch, overrides, memory_margin=0.0).run()
        except InfeasibleError:  # neither does the row's fit, by its price
            assert any(evaluate(setup).prediction.shortfall_bytes(setup.cluster))
            continue
        gaps.append(result.best.step_time_s / evaluate(setup).prediction.step_time_s - 1)
    assert len(gaps) >= ROWS // 2
    assert statistics.median(map(abs, gaps)) <= EQUAL and max(map(abs, gaps)) <= NEAR, gaps

"""Configurations of other software, read: the values they say, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.frameworks import ConfigurationError, read_configuration
from meshwright.planner.frameworks.configuration import Shares

ZERO = {"stage": 3, "overlap_comm": True}
DEEPSPEED = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True}, "zero_optimization": ZERO,
}  # fmt: skip
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: {again}
  fsdp_activation_checkpointing: true
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""
ARGUMENTS = {
    "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "bf16": True, "gradient_checkpointing": True, "fsdp": "full_shard auto_wrap",
    "optim": "adamw_torch", "learning_rate": 1e-4,
}  # fmt: skip
MEGATRON = """
# of a recipe
--num-layers 32 --hidden-size 4096 --swiglu \\
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
--micro-batch-size 1 --global-batch-size 16 --bf16
--use-distributed-optimizer --overlap-grad-reduce
"""
BRIDGE = """
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  pipeline_model_parallel_layout: "E,(t|)*3tL"
train: {micro_batch_size: 1, global_batch_size: 16}
ddp: {use_distributed_optimizer: true}
"""
TITAN = """
from torchtitan.trainer import Trainer

def base():
    return Trainer.Config(
        hf_assets_path="./assets", training=TrainingConfig(local_batch_size=4, seq_len=2048),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1, tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(), optimizer=default_adamw(lr=8e-4),
    )

def small():
    config = base()
    config.training.local_batch_size = 2
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    return config
"""
OTHER_TITAN = """
def other():
    config = base()
    config.parallelism = ParallelismConfig(data_parallel_shard_degree=-1)
    config.training.enable_cpu_offload = True
    config.activation_checkpoint = SelectiveAC.Config()
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config())
    config.model_spec = model_registry("8B", converters=[MXFP8LinearConverter.Config()])
    return config
"""
OLD_TITAN = """
[training]
local_batch_size = 2
[parallelism]
tensor_parallel_degree = 2
context_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


def written(folder: Path, name: str, content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name.partition(":")[0]).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "content", "target", "values"),
    [
        ("ds.json", DEEPSPEED, "deepspeed",
         {"zero": 3, "dp": 8, "microbatch_size": 2, "num_microbatches": 4, "precision": "bf16"}),
        ("ds.json", DEEPSPEED | {"train_batch_size": "auto"}, "deepspeed",
         {"global_batch_size": 64}),
        ("ds.json", {"train_micro_batch_size_per_gpu": 1, "zero_optimization": ZERO | {
            "zero_quantized_weights": True, "zero_hpz_partition_size": 2}},
         "deepspeed", {"quantized": "weights", "hpz": 2, "precision": "fp32"}),
        ("ds.json", DEEPSPEED | {"zero_optimization": {
            "stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
            "offload_param": {"device": "cpu"}}},
         "eager", {"offload": {"optimizer": 1.0}}),  # all that it does below stage 3
        ("ds.json", DEEPSPEED | {"zero_optimization": {"stage": 2, "offload_param": {
            "device": "cpu"}}}, "deepspeed", {"offload": None}),
        ("ds.json", DEEPSPEED | {"optimizer": {"type": "SGD"}}, "deepspeed", {"optimizer": "sgd"}),
        ("ds.json", {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2},
                     "sequence_parallel_size": 2, "optimizer": {"type": "AdamW", "params": {}}},
         "deepspeed", {"tp": 2, "cp": 2, "cp_kind": "ulysses", "dp": 2, "microbatch_size": 2}),
        ("a.yaml", ACCELERATE.format(again="true"), "torchtitan",
         {"zero": 3, "dp": 4, "dp_shard": 2, "tp": 2, "recompute": "full"}),
        ("a.yaml", ACCELERATE.format(again="false"), "torchtitan", {"zero": 2}),
        ("args.json", ARGUMENTS, "fsdp",
         {"zero": 3, "global_batch_size": 64, "recompute": "full", "optimizer": "adamw"}),
        ("m.args", MEGATRON, "megatron",
         {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "num_microbatches": 8, "schedule": "1f1b",
          "optimizer": "adamw_fused"}),
        ("m.sh", MEGATRON + "--recompute-granularity full --recompute-method block "
         "--recompute-num-layers 3 --num-layers-per-virtual-pipeline-stage 4", "megatron",
         {"recompute": ("full", 3), "virtual_stages": 4, "schedule": "interleaved_1f1b"}),
        ("b.yml", BRIDGE, "megatron", {"layers": [1, 1, 1, 1], "virtual_stages": 2, "zero": 1}),
        ("t.py:base", TITAN, "torchtitan",
         {"tp": 2, "dp": 4, "zero": 3, "recompute": "full", "global_batch_size": 16}),
        ("t.py:small", TITAN, "torchtitan",
         {"pp": 2, "virtual_stages": 2, "zero": 2, "microbatch_size": 1, "num_microbatches": 2}),
        ("t.toml", OLD_TITAN, "torchtitan", {"cp": 2, "recompute": "alternate", "dp": 2}),
        ("t.toml", OLD_TITAN.replace('"op"', '"2"'), "torchtitan",
         {"recompute": ("full", (1, 2))}),
        ("t.toml", OLD_TITAN.replace('selective_ac_option = "op"', ""), "torchtitan",
         {"recompute": ("full", (1, 2))}),
        ("t.py:other", TITAN + OTHER_TITAN, "eager",
         {"tp": 1, "dp": 8, "recompute": "alternate", "chunked_loss": 8,
          "offload": {"optimizer": 1.0}}),
        ("b.yml", "model: {tensor_model_parallel_size: 2}\ntrain: {global_batch_size: 16}\n",
         "megatron", {"zero": 1, "precision": "bf16"}),
        ("b.yml", BRIDGE + "mixed_precision: bf16_with_mxfp8_mixed\n", "megatron",
         {"precision": "mxfp8"}),
        ("b.yml", BRIDGE + "mixed_precision: {bf16: true, fp8: hybrid, fp8_recipe: tensorwise}\n"
         "dist: {use_megatron_fsdp: true}\n", "megatron", {"precision": "fp8", "zero": 0}),
        ("m.args", MEGATRON + "--num-virtual-stages-per-pipeline-rank 2 "
         "--decoder-first-pipeline-num-layers 12", "megatron",
         {"layers": Shares(first=12, chunks=2), "virtual_stages": 2}),
        ("m.args", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
         "--num-distributed-optimizer-instances 4 --micro-batch-size 1", "megatron",
         {"zero": 3, "dp_shard": 2, "precision": "fp32"}),
        ("m.args", MEGATRON + "--fp4-format e2m1", "megatron", {"precision": "nvfp4"}),
        ("a.yaml", ACCELERATE.format(again="SHARD_GRAD_OP").replace("version: 2", "version: 1")
         .replace("tp_size: 2", "tp_size: 1").replace("shard_size: 2", "shard_size: 4")
         + "dynamo_config: {dynamo_backend: INDUCTOR}\n",
         "fsdp-compiled", {"zero": 3, "compiled": True}),
        ("args.json", ARGUMENTS | {"torch_compile_mode": "default", "optim": "sgd"},
         "fsdp-compiled", {"compiled": True, "optimizer": "sgd"}),
    ],
)  # fmt: skip
def test_a_file_says_its_values(
    tmp_path: Path, name: str, content: Any, target: str, values: dict[str, Any]
) -> None:
    rows = 64 if name == "a.yaml" else None
    found = read_configuration(written(tmp_path, name, content), 8, global_batch_size=rows)
    assert found.target == target
    assert {key: found.values.get(key) for key in values} == values
    dp, m = found.values["dp"], found.values["num_microbatches"]
    assert found.values["global_batch_size"] == dp * m * found.values["microbatch_size"]


def test_what_has_no_bearing_is_named(tmp_path: Path) -> None:
    found = read_configuration(written(tmp_path, "args.json", ARGUMENTS), 8)
    assert set(found.idle) == {"output_dir", "learning_rate"}
    config = DEEPSPEED | {"train_batch_size": "auto", "gradient_clipping": 1.0}
    found = read_configuration(written(tmp_path, "ds.json", config), 8)
    assert found.left == ("train_batch_size",)
    assert "gradient_clipping" in found.idle and "recompute" in found.taken and not found.habits
    plain = read_configuration(written(tmp_path, "ds.json", DEEPSPEED), 8)
    assert "clips gradients at norm 1.0" in plain.habits[0]
    found = read_configuration(written(tmp_path, "ds.json", config), 8)
    run_again = {"recompute": "full"}
    found = read_configuration(written(tmp_path, "ds.json", config), 8, script=run_again)
    assert found.values["recompute"] == "full" and not found.taken


def test_options_of_what_does_not_run_do_nothing(tmp_path: Path) -> None:
    beside = (
        "fsdp_config:\n  fsdp_activation_checkpointing: true\n  fsdp_offload_params: true\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    )
    for kind, again in (("FSDP", "full"), ("MULTI_GPU", "none")):
        path = written(tmp_path, "a.yaml", f"distributed_type: {kind}\n{beside}")
        found = read_configuration(path, 8, global_batch_size=64)
        assert found.values["recompute"] == again
        assert bool(found.values.get("offload")) == (kind == "FSDP")


def test_sections_without_keys_and_calls_of_hydra_say_nothing(tmp_path: Path) -> None:
    plain = {**DEEPSPEED, "zero_optimization": {}}
    assert read_configuration(written(tmp_path, "ds.json", plain), 8).values["zero"] == 0
    text = """model:
  _target_: a.Provider
  pipeline_model_parallel_size: 2
  pipeline_model_parallel_layout: [[embedding, decoder], [decoder, decoder, loss]]
train: {micro_batch_size: 1, global_batch_size: 8}
"""
    found = read_configuration(written(tmp_path, "b.yaml", text), 8)
    assert found.values["layers"] == [1, 2] and found.idle == ("model._target_",)


@pytest.mark.parametrize(
    ("counts", "rule", "layers"),
    [
        ([3, 3, 3, 3, 3, 3, 3, 3], Shares(first=6, chunks=2), 24),  # 3 + 3 on each rank
        ([2, 3, 3, 2, 3, 3], Shares(first=4, chunks=2), 16),
        ([1, 2, 2, 2, 2, 2, 2, 1], Shares(less=(1, 1), chunks=2), 14),
        ([8, 9, 8, 7], Shares(less=(1, 1)), 32),
        ([1, 7, 6, 2], Shares(first=1, last=2), 16),
    ],
)
def test_layers_are_shared_out_by_rank(counts: list[int], rule: Shares, layers: int) -> None:
    assert rule.counts(layers, len(counts)) == counts and sum(counts) == layers


def test_what_a_file_does_in_its_software_is_said(tmp_path: Path) -> None:
    text = TITAN + OTHER_TITAN
    found = read_configuration(written(tmp_path, "t.py:other", text), 8)
    assert found.unplanned == ("model_spec.converters",)
    tp = {
        "tensor_parallel": {"autotp_size": 2},
        "gradient_clipping": 1.0,
        "sequence_parallel_size": 2,
    }
    found = read_configuration(written(tmp_path, "ds.json", {"train_batch_size": 8, **tp}), 8)
    assert "counts rows 2 times" in found.habits[0]
    assert "has to pass an mpu" in found.habits[1]
    found = read_configuration(written(tmp_path, "b.yml", BRIDGE), 8)
    silent = "bf16, context_parallel_size, expert_model_parallel_size, recompute_granularity"
    assert found.habits[-1].endswith(f"as the file is silent of {silent}")


def test_a_function_is_read_with_what_it_is_given(tmp_path: Path) -> None:
    """As what is exported is used: `planned(base())`."""
    text = (
        TITAN
        + """
def planned(base):
    base.training.local_batch_size = 8
    return base

def mine():
    return planned(small())
"""
    )
    found = read_configuration(written(tmp_path, "t.py:mine", text), 8).values
    assert (found["pp"], found["tp"], found["num_microbatches"]) == (2, 2, 8)


def arguments(**more: Any) -> dict[str, Any]:
    return {**ARGUMENTS, "gradient_checkpointing": False, **more}


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}}, {"zero": 3}),
        ({"fsdp": "shard_grad_op"}, {"zero": 2}),
        ({"fsdp": "shard_grad_op", "fsdp_config": {"version": 1}}, {"zero": 3}),
        ({"fsdp": "full_shard offload", "fsdp_config": {"cpu_offload": False}}, {"offload": None}),
        ({"fsdp": "full_shard offload"}, {"offload": {"optimizer": 1.0}}),
        ({"fsdp": "", "fsdp_config": {"activation_checkpointing": True}}, {"recompute": "none"}),
        ({"fsdp_config": {"activation_checkpointing": True}}, {"recompute": "full"}),
        ({"gradient_checkpointing": True,
          "gradient_checkpointing_kwargs": {"every_n_layers": 2}}, {"recompute": ("full", (0, 2))}),
        ({"gradient_checkpointing": True,
          "activation_checkpointing_kwargs": {"use_reentrant": False}}, {"recompute": "full"}),
    ],
)  # fmt: skip
def test_keys_of_fsdp_stand_over_its_words(
    tmp_path: Path, given: dict[str, Any], values: dict[str, Any]
) -> None:
    found = read_configuration(written(tmp_path, "args.json", arguments(**given)), 8).values
    assert {key: found.get(key) for key in values} == values


SPLIT_UNDER_DEEPSPEED = """
distributed_type: DEEPSPEED
num_processes: 8
deepspeed_config: {zero_stage: 3}
parallelism_config: {parallelism_config_sp_size: 2, parallelism_config_dp_replicate_size: 4}
"""


def test_deepspeed_divides_states_among_all_ranks(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", SPLIT_UNDER_DEEPSPEED)
    found = read_configuration(path, 8, global_batch_size=64).values
    assert (found["dp"], found["cp"], found["cp_kind"]) == (4, 2, "ulysses")
    assert found.get("dp_shard") is None
    mesh = {"train_batch_size": 8, "sequence_parallel_size": 2, "data_parallel_size": 4}
    read = read_configuration(written(tmp_path, "ds.json", mesh | {
        "zero_optimization": {"stage": 3}}), 8)  # fmt: skip
    assert read.values["dp_shard"] == 4 and "no gradient is added up" in read.habits[-1]


REFUSED = [
    ("ds.json", DEEPSPEED | {"zero_optimization": {"stage": "2"}}, "stage='2'; legal: 0, 1, 2, 3"),
    ("ds.json", DEEPSPEED | {"zero_optimization": {"stage": [2]}}, "legal: 0, 1, 2, 3"),
    ("ds.json", DEEPSPEED | {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
     "legal: none at stage 0"),
    ("a.yaml", ACCELERATE.format(again="true").replace("TRANSFORMER_BASED", "SIZE_BASED"),
     "SIZE_BASED_WRAP'; legal: TRANSFORMER_BASED_WRAP"),
    ("a.yaml", ACCELERATE.format(again="true").replace("version: 2", "version: 1"),
     "tp_size=2; legal: 1 but under FSDP, version 2"),
    ("args.json", ARGUMENTS | {"fsdp_config": "fsdp.json"}, "write what the file says"),
    ("args.json", ARGUMENTS | {"fsdp": "no_shard"}, "legal: full_shard, shard_grad_op"),
    ("args.json", ARGUMENTS | {"gradient_checkpointing_kwargs": {"offload": True}},
     "what layers keep stays on the device"),
    ("t.py:small", TITAN.replace("    config = base()", "    config = base()\n    p = config.x"),
     "names a part of config"),
    ("t.py:small", TITAN.replace("    config = base()", "    config = base()\n    a.x = b.y = 1"),
     "sets several things at once"),
    ("t.py:small", TITAN.replace("    config = base()", "    config = base()\n    a.x = 1"),
     "sets an attribute of a, which is not returned"),
    ("ds.json", DEEPSPEED | {"zero_optimization": {
        "stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
     "ratio=0.5; legal: 1.0 below stage 3"),
    ("ds.json", DEEPSPEED | {"zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "nvme"}}}, "price it with cpu"),
    ("ds.json", DEEPSPEED | {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
     "send the optimizer's states there, too"),
    ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
     "  offload_param_device: cpu\n  offload_optimizer_device: none\n",
     "send the optimizer's states there, too"),
    ("a.yaml", ACCELERATE.format(again="true").replace("tp_size", "sp_size"),
     "1 but under DEEPSPEED, which alone runs it"),
    ("args.json", ARGUMENTS | {"parallelism_config": {"tp_size": 2}}, "parallelism_config.tp_size"),
    ("t.py:base", TITAN.replace("    return T", "    setattr(x, 'y', 1)\n    return T", 1),
     "is no assignment"),
    ("t.toml", OLD_TITAN.replace('"op"', '"ops"'), "legal: op, or a number from 1"),
    ("b.yml", BRIDGE + "mixed_precision: bf16_mixd\n", "legal: bf16_mixed, fp16_mixed"),
    ("ds.json", DEEPSPEED | {"zero_optimization": {"stge": 3}}, "may be 'zero_optimization.stage'"),
    ("ds.json", DEEPSPEED | {"bf16_enabled": True}, "has 'bf16_enabled', which deepspeed"),
    ("ds.json", DEEPSPEED | {"train_batch_size": 65},
     "microbatch_size=2 × num_microbatches=4 × dp=8 = 64, not global_batch_size=65"),
    ("ds.json", DEEPSPEED | {"optimizer": {"type": "OneBitAdam"}}, "legal: AdamW, Adam,"),
    ("ds.json", DEEPSPEED | {"fp16": {"enabled": True}}, "legal: one of the two"),
    ("ds.json", DEEPSPEED | {"train_micro_batch_size_per_gpu": "2"},
     "microbatch_size='2'; legal: an integer"),
    ("ds.json", '{"zero_optimization": {}, "zero_optimization": {}}', "is there twice"),
    ("ds.json", DEEPSPEED | {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
     "has 'zero_optimization.mics_shard_size', which deepspeed 0.19.8 has not"),
    ("ds.json", [1], "is no mapping"),
    ("ds.json", {"steps": 3}, "is of no software that is known by its keys"),
    ("ds.ini", DEEPSPEED, "ends with '.ini'"),
    ("a.yaml", ACCELERATE.format(again="maybe"), "fsdp_reshard_after_forward='maybe'"),
    ("a.yaml", ACCELERATE.format(again="true").replace("processes: 8", "processes: 4"),
     "is for 4 processes, and the cluster has 8 devices"),
    ("a.yaml", ACCELERATE.format(again="true").replace("tp_size: 2", "tp_size: 4"),
     "dp=4 × cp=1 × tp=4 × pp=1 = 16, and the cluster has 8 devices"),
    ("a.yaml", ACCELERATE.format(again="true").replace("tp_size", "tpp_size"), "tpp_size"),
    ("a.yaml", ACCELERATE.format(again="true").replace("version: 2", "version: 1").replace(
        "  fsdp_reshard_after_forward: true\n", "  fsdp_sharding_strategy: HYBRID_SHARD\n"),
     "fsdp_sharding_strategy='HYBRID_SHARD'; legal: FULL_SHARD"),
    ("a.yaml", "distributed_type: " + "[" * 60000, "has too many brackets"),
    ("args.json", ARGUMENTS | {"fsdp": "ful_shard"}, "legal: full_shard, shard_grad_op"),
    ("args.json", ARGUMENTS | {"bf16": "perhaps"}, "bf16='perhaps'; legal: true, false"),
    ("m.args", MEGATRON + "-tp 2", "has '-tp' behind --overlap_grad_reduce"),
    ("m.args", MEGATRON + "--recompute-granularity full --recompute-method block "
     "--recompute-num-layers x", "recompute_num_layers='x'; legal: from 1"),
    ("t.py:base", TITAN.replace("    return T", "    if True:\n        pass\n    return T", 1),
     "is no assignment"),
    ("t.toml", OLD_TITAN.replace("[parallelism]", 'dtype = "float16"\n[parallelism]'),
     "training.dtype='float16'; legal: bfloat16, float32"),
    ("a.yaml", "distributed_type: &x FSDP\n", "line 1 has an anchor, an alias or a tag"),
    ("a.yaml", "distributed_type: !!python/object/apply:os.system ['true']\n", "line 1 has an"),
    ("a.yaml", "distributed_type: FSDP\ndistributed_type: NO\n", "'distributed_type' twice"),
    ("a.yaml", "distributed_type: MEGATRON_LM\n", "the flags of Megatron-LM themselves"),
    ("args.json", ARGUMENTS | {"deepspeed": "ds.json"}, "give DeepSpeed's file"),
    ("args.json", ARGUMENTS | {"per_gpu_batch": 1}, "'per_gpu_batch'"),
    ("m.args", MEGATRON + "--save $(rm -rf x)", "line 7 has what a shell would work on"),
    ("m.args", MEGATRON + "--save $HOME", "line 7 has what a shell would work on"),
    ("m.args", MEGATRON + "--tensor-parallel 2", "'tensor_parallel'"),
    ("m.args", MEGATRON + "--pipeline-model-parallel-layout 'E|ttmL'", "multi-token prediction"),
    ("m.args", MEGATRON + "--recompute-granularity full", "legal: uniform, block"),
    ("m.args", "python train.py --bf16", "begins with 'python'"),
    ("t.py:base", TITAN.replace("return Trainer.Config(", "return llama3_8b("),
     "line 5 begins with llama3_8b()"),
    ("b.yaml", "model:\n  pipeline_model_parallel_size: 2\n"
     "  pipeline_model_parallel_layout: [[embedding, decoder], [decoder, head]]\n",
     "lists of embedding, decoder, loss, mtp, one a stage"),
    ("t.py", TITAN, "has the functions base, small"),
    ("t.py:large", TITAN, "has no function 'large'"),
    ("t.py:base", TITAN.replace("batch_size=4", "batch_size=len(x)"), "nothing of the file is run"),
    ("t.py:base", TITAN.replace("FullAC", "OwnAC"), "legal: FullAC, SelectiveAC, None"),
    ("t.py:base", "def base(:", "t.py:base: "),
    ("t.toml", OLD_TITAN + "[parallelism]", "t.toml: "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_says_no_plan_is_refused(tmp_path: Path, name: str, content: Any, says: str) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(ConfigurationError) as caught:
        read_configuration(path, 8, global_batch_size=None if "ds" in name else 64)
    assert says in str(caught.value) and caught.value.legal and caught.value.way_out


def test_arguments_of_transformers_are_read_as_it_writes_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4,
        fsdp="full_shard", fsdp_config={"fsdp_reshard_after_forward": False},
    )  # fmt: skip
    found = read_configuration(written(tmp_path, "args.json", arguments.to_json_string()), 8)
    assert found.format == "transformers" and found.values["microbatch_size"] == 4
    assert found.values["zero"] == 2


def test_rows_are_said_once(tmp_path: Path) -> None:
    path = written(tmp_path, "ds.json", DEEPSPEED)
    with pytest.raises(ConfigurationError, match=r"is 64, and --batch says 32"):
        read_configuration(path, 8, global_batch_size=32)
    path = written(tmp_path, "a.yaml", ACCELERATE.format(again="true"))
    with pytest.raises(ConfigurationError, match=r"says no batch.*--batch"):
        read_configuration(path, 8)
    with pytest.raises(ConfigurationError, match=r"zero beside it=1; legal: microbatch_size"):
        read_configuration(path, 8, script={"zero": 1})

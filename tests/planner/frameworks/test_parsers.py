"""What is exported, read by the software's own parser: it says what was meant."""

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from meshwright.planner.frameworks import FORMATS, exported
from meshwright.planner.plan import Plan
from tests.helpers.tiers import second_tier
from tests.planner.frameworks.test_exporting import MADE

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-exports/bin/python"
PLANS = 3

pytestmark = [
    second_tier("round trips through our own reader stay (test_exporting)"),
    pytest.mark.skipif(not PYTHON.exists(), reason="scripts/setup_exports was not run"),
]


def parsed(name: str, file: Path, ranks: int) -> dict[str, Any]:
    command = [str(PYTHON), "-m", "scripts.exports.parsers", name, str(file), str(ranks)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def of_deepspeed(plan: Plan) -> dict[str, Any]:
    stage = plan.stages[0]
    states, files = (stage.offload.get(part, 0) for part in ("optimizer", "nvme"))
    return {
        "global_batch_size": plan.global_batch_size * stage.tp,  # counted on each of its ranks
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_rows // stage.dp, "zero": stage.zero,
        "hpz": stage.hpz or 1, "weights": stage.quantized in ("weights", "both"),
        "gradients": stage.quantized in ("gradients", "both"), "bf16": True,
        "away": "nvme" if files else "cpu" if states else "none",
    }  # fmt: skip


def of_accelerate(plan: Plan) -> dict[str, Any]:
    stage = plan.stages[0]
    shards = stage.shards // stage.cp if stage.zero else 1
    found = {
        "fsdp": bool(stage.zero), "precision": {"fp32": "no"}.get(plan.precision, plan.precision),
        "replicas": stage.dp // shards, "shards": shards, "tp": stage.tp, "cp": stage.cp,
    }  # fmt: skip
    if stage.zero:
        found["reshard"] = str(stage.zero == 3).lower()
        found["recompute"] = str("full" in stage.policies).lower()
    return found


def of_transformers(plan: Plan) -> dict[str, Any]:
    stage = plan.stages[0]
    return {
        "microbatch_size": plan.microbatch_rows // stage.dp,
        "num_microbatches": plan.num_microbatches, "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16", "recompute": "full" in stage.policies,
        "fsdp": bool(stage.zero), "reshard": stage.zero == 3,
    }  # fmt: skip


def of_torchtitan(plan: Plan) -> dict[str, Any]:
    stage, pp = plan.stages[0], len(plan.devices)
    policy = {"none": "NoneType", "full": "FullAC", "alternate": "SelectiveAC"}[stage.policies[-1]
              if len(plan.stages) > 1 else stage.policies[1]]  # fmt: skip
    rows = plan.microbatch_rows // stage.dp
    shards = stage.shards if stage.zero else 1
    return {
        "checkpoint": policy,
        "axes.tensor_parallel_degree": stage.tp, "axes.pipeline_parallel_degree": pp,
        "axes.data_parallel_shard_degree": shards,
        "axes.data_parallel_replicate_degree": stage.dp // shards,
        "training.global_batch_size": plan.global_batch_size,
        "training.local_batch_size": rows * (plan.num_microbatches if pp > 1 else 1),
    }  # fmt: skip


def of_megatron(plan: Plan) -> dict[str, Any]:
    stage = plan.stages[0]
    policy = {*stage.policies} - {"none"}
    return {
        "tp": stage.tp, "pp": len(plan.devices), "recompute": next(iter(policy), None),
    }  # fmt: skip


MEANT = {
    "deepspeed": of_deepspeed, "accelerate": of_accelerate, "transformers": of_transformers,
    "torchtitan": of_torchtitan, "megatron": of_megatron,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(PLANS))
@pytest.mark.parametrize("name", MEANT)
def test_the_software_reads_what_was_meant(name: str, seed: int, tmp_path: Path) -> None:
    plan = MADE[name](Random(f"parsed {name} {seed}"))
    made = exported(plan, FORMATS[name])
    (tmp_path / made.file).write_text(made.text)
    found = parsed(name, tmp_path / made.file, plan.num_ranks)
    flat = {**found, **{f"{at}.{key}": value for at in ("axes", "training")
                        for key, value in found.get(at, {}).items()}}  # fmt: skip
    meant = MEANT[name](plan)
    assert {key: flat[key] for key in meant} == meant


def test_the_flags_are_megatrons(tmp_path: Path) -> None:
    """Those that no dataclass of megatron-core has are of arguments.py."""
    of_arguments = {"micro_batch_size", "global_batch_size", "use_distributed_optimizer",
                    "use_tp_pp_dp_mapping", "overlap_grad_reduce", "fp8_format",
                    "num_virtual_stages_per_pipeline_rank"}  # fmt: skip
    plan = MADE["megatron"](Random("flags 1"))
    made = exported(plan, FORMATS["megatron"])
    (tmp_path / made.file).write_text(made.text)
    found = parsed("megatron", tmp_path / made.file, plan.num_ranks)
    assert set(found["elsewhere"]) <= of_arguments

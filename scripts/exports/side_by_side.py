"""A configuration run by its own software and by the plan that it means here: losses side by side.

    python -m scripts.exports.side_by_side

Two ranks on gloo; the other software is that of `scripts/setup_exports`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THEIRS = ROOT / ".venv-exports/bin/python"
TIMEOUT_S = 600
DEEPSPEED = {
    "train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0,
}  # fmt: skip
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: "no"
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
"""
CASES = {
    **{f"deepspeed zero {stage}": ("deepspeed", "ds_config.json", json.dumps(
        DEEPSPEED | {"zero_optimization": {"stage": stage}})) for stage in (0, 1, 2, 3)},
    "accelerate": ("accelerate", "accelerate.yaml", ACCELERATE),
}  # fmt: skip


def losses(python: str | Path, kind: str, config: Path) -> list[float]:
    """Losses of two ranks. Raises RuntimeError with what they said."""
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-m", "scripts.exports.worker", kind, str(config)], env=environment, cwd=ROOT,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    if done.returncode or not found:
        raise RuntimeError(done.stderr[-3000:])
    return [float(line.split()[1]) for line in found]


def compared(name: str, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of a case: by its software, and by ours."""
    kind, file, text = CASES[name]
    (folder / file).write_text(text)
    return losses(THEIRS, kind, folder / file), losses(sys.executable, "ours", folder / file)


def main() -> None:
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours = compared(name, Path(folder))
        said = [" ".join(f"{value:.5f}" for value in values) for values in (theirs, ours)]
        print(f"{name:18} theirs {said[0]}   ours {said[1]}", flush=True)


if __name__ == "__main__":
    main()

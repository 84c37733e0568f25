"""Reports that several tests look at."""

from functools import cache

import torch
import transformers

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.planner.report import Report
from tests.helpers.tiny import net, planned

LENGTH, ROWS = 1024, 32


@cache
def report_of_axes() -> Report:
    """Of a small Llama on 8 GPUs, by a plan with data, tensor and pipeline parallelism."""
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = (
            transformers.LlamaForCausalLM(config),
            torch.empty(4, LENGTH, dtype=torch.int64),
        )
    return auto_parallelize(
        model,
        Cluster.from_catalog("dgx-a100", num_nodes=1),
        example_inputs={"input_ids": ids, "labels": ids},
        global_batch_size=ROWS,
        overrides=Overrides(pp=2, tp=2, recompute="full"),
        profile=False,
    ).report


@cache
def rehearsed_report() -> Report:
    """Of a tiny net on 4 CPU ranks, with pipeline and data parallelism, after its rehearsal."""
    overrides = Overrides(pp=2, tp=1, num_microbatches=2)
    result = planned(net(), 4, overrides=overrides, profile=False)
    assert result.rehearse().ok
    return result.report

# torchtitan 0.3.0
from torchtitan.distributed.activation_checkpoint import FullAC


def planned(base):
    """A `Trainer.Config` of a model, as planned."""
    base.training.global_batch_size = 16
    base.training.local_batch_size = 8
    base.parallelism.pipeline_parallel_degree = 2
    base.parallelism.pipeline_parallel_microbatch_size = 2
    base.parallelism.pipeline_parallel_schedule_csv = ""
    base.parallelism.pipeline_parallel_layers_per_stage = None
    base.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    base.parallelism.module_fqns_per_model_part = [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2", "layers.3"],
        ["layers.4", "layers.5"],
        ["layers.6", "layers.7", "norm", "lm_head"],
    ]
    base.parallelism.data_parallel_replicate_degree = 1
    base.parallelism.data_parallel_shard_degree = 2
    base.parallelism.fsdp_reshard_after_forward = "never"
    base.parallelism.tensor_parallel_degree = 2
    base.parallelism.context_parallel_degree = 1
    base.parallelism.expert_parallel_degree = 1
    base.training.dtype = "float32"
    base.training.mixed_precision_param = "bfloat16"
    base.training.enable_cpu_offload = False
    base.training.disable_cuda_graphs = True
    base.compile.enable = False
    base.activation_checkpoint = FullAC.Config()
    return base

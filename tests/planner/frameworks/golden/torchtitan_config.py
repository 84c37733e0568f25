# torchtitan 0.3.0
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC


def planned(base):
    """A `Trainer.Config` of a model, as planned."""
    base.training = TrainingConfig(
        global_batch_size=16,
        local_batch_size=8,
        dtype="float32",
        mixed_precision_param="bfloat16",
    )
    base.parallelism = ParallelismConfig(
        pipeline_parallel_degree=2,
        pipeline_parallel_microbatch_size=2,
        pipeline_parallel_schedule="Interleaved1F1B",
        module_fqns_per_model_part=[
            ["tok_embeddings", "layers.0"],
            ["layers.1", "layers.2", "layers.3"],
            ["layers.4", "layers.5"],
            ["layers.6", "layers.7", "norm", "lm_head"],
        ],
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=2,
        fsdp_reshard_after_forward="never",
        tensor_parallel_degree=2,
        context_parallel_degree=1,
        expert_parallel_degree=1,
    )
    base.activation_checkpoint = FullAC.Config()
    return base

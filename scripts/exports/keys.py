"""Names of other software's options, of which `planner/frameworks/keys.json` is made.

    .venv-exports/bin/python -m scripts.exports.keys > planner/frameworks/keys.json

Fields of megatron-core's dataclasses and of transformers' `TrainingArguments`; the flags that
Megatron-LM's `training/arguments.py` spells out, which no wheel has, are listed here.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from importlib.util import find_spec
from pathlib import Path

CONFIGS = (
    "model_parallel_config.py",
    "transformer/transformer_config.py",
    "distributed/distributed_data_parallel_config.py",
    "optimizer/optimizer_config.py",
)
SPELLED_OUT = """
    accumulate_allreduce_grads_in_fp32 adam_beta1 adam_beta2 adam_eps add_qkv_bias
    align_grad_reduce apply_layernorm_1p apply_query_key_layer_scaling async_save
    attention_backend attention_dropout attention_softmax_in_fp32 auto_detect_ckpt_format
    bert_no_binary_head bucket_size calculate_per_token_loss
    check_weight_hash_across_dp_replicas_interval ckpt_format ckpt_fully_parallel_load
    ckpt_fully_parallel_save clip_grad cross_entropy_fusion_impl cross_entropy_loss_fusion
    cuda_graph_impl cuda_graph_scope cuda_graph_warmup_steps data_args_path data_cache_path
    data_path dataloader_type ddp_average_in_collective ddp_bucket_size ddp_num_buckets
    decoder_seq_length decoupled_lr decoupled_min_lr disable_bias_linear
    disable_tp_comm_overlap_ag disable_tp_comm_overlap_rs dist_ckpt_format distributed_backend
    distributed_timeout_minutes distributed_timeout_seconds_after_init empty_unused_memory_level
    enable_experimental encoder_seq_length end_weight_decay eod_mask_loss eval_interval
    eval_iters exit_duration_in_mins exit_interval exit_on_missing_checkpoint exp_avg_dtype
    exp_avg_sq_dtype ffn_hidden_size finetune fp8_amax_compute_algo fp8_amax_history_len
    fp8_format fp8_param_gather grad_reduce_in_bf16 group_query_attention hidden_dropout
    hidden_size high_priority_stream_groups hysteresis init_method_std initial_loss_scale
    kv_channels kv_lora_rank load local_rank log_interval log_interval_seconds
    log_memory_to_tensorboard log_params_norm log_progress log_throughput
    log_timers_to_tensorboard loss_scale loss_scale_window lr lr_decay_iters lr_decay_samples
    lr_decay_style lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters
    lr_wsd_decay_style main_grads_dtype main_params_dtype make_vocab_size_divisible_by manual_gc
    manual_gc_interval master_addr master_port max_position_embeddings merge_file min_loss_scale
    min_lr mock_data moe_aux_loss_coeff moe_enable_deepep moe_ffn_hidden_size moe_grouped_gemm
    moe_layer_freq moe_permute_fusion moe_router_dtype moe_router_load_balancing_type
    moe_router_topk moe_shared_expert_intermediate_size moe_token_dispatcher_type
    moe_z_loss_coeff mtp_loss_scaling_factor mtp_num_layers multi_latent_attention
    nccl_communicator_config_path nccl_ub nnodes no_async_tensor_model_parallel_allreduce
    no_bias_dropout_fusion no_bias_gelu_fusion no_bias_swiglu_fusion
    no_check_for_nan_in_loss_and_grad no_create_attention_mask_in_dataloader
    no_gradient_accumulation_fusion no_load_optim no_load_rng no_masked_softmax_fusion
    no_mmap_bin_files no_overlap_p2p_communication no_position_embedding no_rope_freq
    no_rope_fusion no_save_optim no_save_rng node_rank norm_epsilon normalization nproc_per_node
    num_attention_heads num_dataset_builder_threads num_experts num_query_groups num_workers
    overlap_p2p_communication override_opt_param_scheduler per_split_data_args_path
    position_embedding_type profile profile_ranks profile_step_end profile_step_start
    q_lora_rank qk_head_dim qk_layernorm qk_pos_emb_head_dim rampup_batch_size rank
    recompute_vision reset_attention_mask reset_position_ids rotary_base rotary_interleaved
    rotary_percent rotary_seq_len_interpolation_factor save save_interval seed seq_length sft
    split squared_relu start_weight_decay swiglu te_rng_tracker tensorboard_dir
    tensorboard_queue_size test_data_path tiktoken_pattern timing_log_level timing_log_option
    tokenizer_model tokenizer_type tp_comm_overlap tp_comm_overlap_cfg train_data_path
    train_iters train_samples transformer_impl untie_embeddings_and_output_weights
    use_checkpoint_args use_checkpoint_opt_param_scheduler use_cpu_initialization use_dist_ckpt
    use_flash_attn use_legacy_models use_mcore_models use_precision_aware_optimizer
    use_pytorch_profiler use_rope_scaling use_rotary_position_embeddings use_sharp v_head_dim
    valid_data_path vocab_file vocab_size wandb_entity wandb_exp_name wandb_project
    wandb_save_dir weight_decay weight_decay_incr_style world_size
"""


def fields_in(file: Path) -> set[str]:
    """Annotated names of the classes of a file, which is not imported."""
    classes = (
        node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)
    )
    return {
        node.target.id
        for cls in classes
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def main() -> None:
    """Print the names as JSON."""
    import transformers

    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    core = Path(spec.origin).parent
    megatron = {*SPELLED_OUT.split()}.union(*(fields_in(core / name) for name in CONFIGS))
    arguments = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    json.dump(
        {"megatron": sorted(megatron), "transformers": sorted(arguments)}, sys.stdout, indent=0
    )
    print()


if __name__ == "__main__":
    main()

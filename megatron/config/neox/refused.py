"""GPT-NeoX keys without effect here, and keys that are refused unless they have a value that changes nothing."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """Why a key is refused."""

    # Values that change nothing. null, empty ones and dictionaries with enabled: false never do.
    inert: tuple[Any, ...]
    rule: str  # what holds here
    fix: str  # the advice

    def accepts(self, value: Any) -> bool:
        """Whether `value` changes nothing."""
        if value is None or value in ([], {}, ""):
            return True
        if isinstance(value, dict):
            return value.get("enabled") is False
        if isinstance(value, str):
            value = value.lower()
        return any(value == inert and isinstance(value, bool) == isinstance(inert, bool) for inert in self.inert)


def _later(what: str, fix: str, *inert: Any) -> Refusal:
    return Refusal(inert, f"not available yet: {what}", fix)


NO_TUNER = Refusal((), "there is no autotuner", "remove it: deepy config layers shows what each layer costs")
OFF = "set it to false or remove it"
OBSOLETE = "removed from DeepSpeed"

REFUSED: dict[str, Refusal] = {
    "deepspeed": Refusal((True,), "GPT-NeoX refuses it too unless it is true", "remove it"),
    "data_impl": Refusal(
        ("mmap", "infer"), "token files are .bin/.idx pairs of the mmap kind", "tokenize the text again"
    ),
    "eod_mask_loss": Refusal(
        (False,),
        "GPT-NeoX's eod_mask_loss masks the token after an end of document, which is not available",
        "set it to false, or take data.mask_loss_at_eod, which masks the end-of-document token itself",
    ),
    "curriculum_learning": Refusal((), f"{OBSOLETE}: the curriculum over sequence lengths", "remove it"),
    "data_efficiency": _later("DeepSpeed's data efficiency library", "remove it"),
    "opt_pos_emb_offset": _later("learned positions with an offset", "set it to 0", 0),
    "use_qk_layernorm": Refusal(
        (False,),
        "GPT-NeoX normalises over all heads of a tensor parallel rank with one weight for queries and keys, "
        "so the model depends on the layout",
        "take the native model.attention.qk_norm: head (Qwen3) or full (OLMo-2)",
    ),
    "soft_prompt_tuning": Refusal((), "soft prompts are not available (GPT-NeoX fails with them too)", "remove it"),
    "sparse_attention": Refusal(
        (), "block-sparse attention is not available", "remove it: sliding_window_width is available"
    ),
    "save_base_shapes": Refusal(
        (False,), "shapes of a base model are not needed: model.parametrization.base_width says the same", OFF
    ),
    "coord_check": Refusal((False,), "a coordinate check is a command, not a way of training", OFF),
    "te_fp8_mha": Refusal((False,), "FP8 is not available (GPT-NeoX fails with it too)", OFF),
    "elasticity": Refusal((), f"{OBSOLETE}: elasticity", "remove it: a run resumes on any number of ranks"),
    "compression_training": Refusal((), f"{OBSOLETE}: compression", "remove it"),
    "autotuning": NO_TUNER,
    "autotuning_run": NO_TUNER,
    "no_load_optim": Refusal(
        (False,),
        "GPT-NeoX does not train with it: it takes an optimizer with learning rate 0",
        "to start from only the weights set finetune: true",
    ),
    "use_checkpoint_lr_scheduler": Refusal(
        (False,), "the learning rate is a function of only this configuration", "copy the schedule from the checkpoint"
    ),
}

# Names that GPT-NeoX once had, or that its files have although it knows no such key. The first ones are still read.
RETIRED_READ: dict[str, Any] = {"gas": None, "mlp_type": None, "save_interval": None}
RETIRED: dict[str, str] = {
    "warmup_iters": "set warmup to the fraction warmup_iters / lr_decay_iters, or schedule.warmup_steps natively",
    "decay_lr_to": "set min_lr to the learning rate itself",
    "attention_type": "remove it: num_kv_heads says how many key/value heads there are",
    "autotuning_config": "remove it: deepy config layers shows what each layer costs",
    "zero_allow_untested_optimizer": "put it into deepspeed_extra_args",
    "train_data_path": "take train_data_paths, a list",
    "launcher_args": "remove it: environment variables go to launch.environment natively",
    "context_parallel_size": "set parallel.context natively",
}


# Reason -> keys.
REASONS = {
    "set by GPT-NeoX itself, which overwrites what a file says": (
        "config_files user_script git_hash local_rank rank world_size adlr_autoresume_object iteration do_train "
        "do_valid do_test curriculum_seqlen padded_vocab_size tokenizer head_size ffn_dim is_pipe_parallel zero_stage "
        "zero_reduce_scatter zero_contiguous_gradients zero_reduce_bucket_size zero_allgather_bucket_size batch_size "
        "optimizer_type lr dynamic_loss_scale tensorboard_writer comet_experiment"
    ),
    "GPT-NeoX never reads it": (
        "lazy_mpu_init onnx_safe short_seq_prob adlr_autoresume_interval deepscale deepscale_config "
        "num_unique_layers param_sharing_style use_bias_in_norms deepspeed_activation_checkpointing amp clip_grad "
        "loss_scale loss_scale_window hysteresis min_scale moe_lbl_in_fp32 mup_attn_temp mup_output_temp "
        "te_fp8_margin no_save_optim weight_server_port"
    ),
    "a choice of kernel, with the same result": (
        "use_flashattn_swiglu bias_dropout_fusion layernorm_fusion rmsnorm_fusion rope_fusion "
        "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion fused_kernels_build_path "
        "te_columnparallel te_rowparallel te_layernorm_mlp te_mha"
    ),
    "softmax and loss are computed in fp32 always, and sums over tensor parallel ranks differ only by rounding": (
        "apply_query_key_layer_scaling attention_softmax_in_fp32 fp16_lm_cross_entropy fp32_allreduce"
    ),
    "weights are a function of the seed and their name": "use_cpu_initialization",
    "the head is cut by vocabulary always": "output_layer_parallelism",
    "rotary tables are never saved": "rotary_save_freqs_buffer",
    "recomputation keeps only each block's input": (
        "partition_activations contiguous_checkpointing checkpoint_in_cpu synchronize_each_layer profile_backward "
        "activation_checkpointing"
    ),
    "token files are read as they are needed, and sample orders are kept in data.cache": "mmap_warmup use_shared_fs",
    "bits_per_byte is among the validation metrics always": "char_level_ppl",
    "the backend follows from the device": "distributed_backend",
    "launchers are recognised by themselves": "deepspeed_mpi deepspeed_slurm no_ssh_check",
    "said where the job is submitted": "comment account",
    "runs stop on signals and resume by themselves": "adlr_autoresume",
    "the learning rate is a function of only this configuration": "override_lr_scheduler",
    "only OneBitAdam reads it": "scheduler",
    "randomness has no state that is saved": "no_save_rng no_load_rng",
    "the engine scales and sums gradients the same way on every layout": (
        "prescale_gradients gradient_predivide_factor sparse_gradients"
    ),
    "uploads are cut by the storage library": "s3_chunk_size",
    "checkpoints carry checksums": "checkpoint_validation_with_forward_pass",
    "checkpoints are not written by DeepSpeed": "checkpoint",
    "step times are in the metrics": "wall_clock_breakdown steps_per_print",
    "nothing here reads it": "dump_state",
    "logs go to the run's directory": "log_dir memory_profiling_path",
    "the gradient norm is logged always, the others are not": (
        "log_param_norm log_grad_norm log_grad_pct_zeros log_optimizer_states log_gradient_noise_scale "
        "gradient_noise_scale_n_batches gradient_noise_scale_cpu_offload"
    ),
    "metrics go to JSON lines, TensorBoard and W&B, not to Comet": (
        "use_comet comet_workspace comet_project comet_experiment_name comet_tags comet_others"
    ),
    "rank 0 logs": "wandb_init_all_ranks",
    "generate.py has its own options": (
        "text_gen_type precompute_model_name temperature top_k top_p maximum_tokens return_logits prompt_end "
        "sample_input_file sample_output_file num_samples recompute"
    ),
    "evaluate.py writes to the run's directory, or to its --output": "eval_results_prefix",
    "kernels of the mamba mixer are chosen by what is installed": (
        "mamba_selective_scan_fusion mamba_causal_conv_fusion mamba_inner_func_fusion"
    ),
    "no layer reads it: RWKV is not translated": "dim_att",
    "no layer reads it: attention is global or flash": "sparsity_config gmlp_attn_dim",
    "no layer reads it: FP8 is off": "te_fp8_format te_fp8_wgrad te_fp8_amax_history_len te_fp8_amax_compute_algo",
    "scalenorm is not available": "scalenorm_epsilon",
    "the base model's width is a native key, model.parametrization.base_width": "base_shapes_file mup_width_scale",
    "pos_emb is not rpe": "rpe_num_buckets rpe_max_distance mup_rp_embedding_mult",
}

NO_EFFECT: dict[str, str] = {name: reason for reason, names in REASONS.items() for name in names.split()}

"""Arguments of LLaMA-Factory and of transformers' trainer under it, as YAML or on a command line, and accelerate's
YAML files. Defaults are those of transformers' TrainingArguments."""
from .finish import finish_llamafactory
from .rows import Default, Source, cannot, none, other, same, take
from .shared_rows import SECOND_FILE

_LAYERS = SECOND_FILE + ": name it in the same call of import_config"
_DATA = "text becomes shards before training: data/prepare_text.py, then --train-data"
_LOG = "every step is a record of log-file at full precision"
_PYTHON = "for Python programs, of which none runs during training"
_TE = "history of 16 and max, which LLaMA-Factory fixes for Transformer Engine, are our defaults too"

LLAMAFACTORY_ROWS = [
    same("fp8", "true", "fp8-recipe", "delayed", _TE, keep="fp8"),
    other("fp8", "off is our default", when="false"),
    other("fp8_backend", "there is one backend here; fp8-recipe delayed is what te does with LLaMA-Factory", when="te",
          keep="backend"),
    same("fp8_backend", "torchao", "fp8-recipe", "tensorwise", "torchao scales by the tensor as it is (LLaMA-Factory: "
         "per row); tensorwise has one factor a tensor", keep="backend"),
    other("fp8_backend", "one of the seven errors, see below", when="auto", error=4, keep="backend"),
    cannot("fp8_backend", "there is one backend here", keep="backend"),
    same("fp8_enable_fsdp_float8_all_gather", "true", "param-comm-dtype", "fp8", "weights travel in FP8"),
    other("fp8_enable_fsdp_float8_all_gather", "off is our default", when="false"),
    other("deepspeed accelerate_config", _LAYERS, error=7, keep="second"),
    other("fsdp fsdp_config", "sharding is zero 1: a part of masters and moments on each GPU", error=7),

    take("model_name_or_path", "", "text", keep="model"),
    other("tokenizer_name_or_path", "--tokenizer copies it into every checkpoint"),
    other("stage", "training on the next token; sft differs only in what the loss counts", when="pt"),
    other("stage", "data/prepare_chat.py writes shards in which the assistant's words count, and what ends them",
          when="sft"),
    cannot("stage", "there is training on the next token only"),
    other("do_train", "that is what the executables do"),
    other("do_eval do_predict", "--valid-data evaluates during training"),
    other("finetuning_type", "all parameters are trained", when="full"),
    cannot("finetuning_type lora_* use_dora use_rslora pissa_* freeze_* use_galore galore_* use_badam badam_* "
           "quantization_*", "all parameters are trained in full"),
    same("neat_packing", "true", "reset-attention-mask", True, "attention stays within a document; the "
         "sidecars of the shards name the separator"),
    other("dataset dataset_dir template max_samples preprocessing_num_workers overwrite_cache tokenized_path "
          "streaming train_on_prompt mask_history buffer_size mix_strategy interleave_probs packing neat_packing "
          "eval_dataset preprocessing_batch_size", _DATA),
    take("cutoff_len", "seq-length", "integer", "sequences are filled to the full length here (packing)"),
    take("val_size", "", "number", "split the validation shards off with data/prepare_text.py --valid-fraction, and "
         "name them with --valid-data", keep="val_size"),
    take("output_dir", "save", "text"),
    other("overwrite_output_dir", "checkpoints never overwrite each other; --resume auto goes on from the newest"),
    same("resume_from_checkpoint", "true", "resume", "auto"),
    other("resume_from_checkpoint", "off is our default", when="null false"),
    cannot("resume_from_checkpoint", "state of another trainer cannot be resumed; model_name_or_path loads weights"),

    take("per_device_train_batch_size", "micro-batch-size", "integer"),
    other("per_device_eval_batch_size", "evaluation uses micro-batch-size, in the memory of training"),
    take("gradient_accumulation_steps", "", "integer", keep="accumulation",
         fact="global-batch-size = micro-batch-size x accumulation x ranks"),
    take("learning_rate", "lr", "number"),
    take("num_train_epochs", "epochs", "number"),
    other("max_steps", "-1 leaves the length to num_train_epochs", when="-1"),
    take("max_steps", "train-iters", "integer", "it wins over num_train_epochs", keep="max_steps"),
    take("lr_scheduler_type", "lr-decay-style", "lower", when="cosine linear constant"),
    same("lr_scheduler_type", "constant_with_warmup", "lr-decay-style", "constant"),
    same("lr_scheduler_type", "cosine_with_min_lr", "lr-decay-style", "cosine"),
    same("lr_scheduler_type", "warmup_stable_decay", "lr-decay-style", "wsd"),
    cannot("lr_scheduler_type", "there are cosine, linear, constant and wsd"),
    take("lr_scheduler_kwargs.min_lr", "min-lr", "number"),
    take("lr_scheduler_kwargs.num_decay_steps", "lr-wsd-decay-iters", "integer"),
    cannot("lr_scheduler_kwargs lr_scheduler_kwargs.*", "min-lr and lr-wsd-decay-iters are what there is"),
    take("warmup_steps", "lr-warmup-iters", "integer"),
    take("warmup_ratio", "", "number", keep="warmup_fraction", fact="lr-warmup-iters = that share of the run"),
    take("weight_decay", "weight-decay", "number"),
    take("adam_beta1", "adam-beta1", "number"),
    take("adam_beta2", "adam-beta2", "number"),
    take("adam_epsilon", "adam-eps", "number"),
    take("max_grad_norm", "clip-grad", "number"),
    other("optim", "AdamW is the optimizer, one kernel", when="adamw_torch adamw_torch_fused adamw_hf "
          "adamw_apex_fused"),
    cannot("optim", "AdamW is the only optimizer"),
    take("seed data_seed", "seed", "integer"),

    same("bf16", "true", "dtype", "bf16"),
    other("bf16 fp16", "dtype bf16 is our default", when="false"),
    cannot("fp16", "there is no FP16: dtype bf16 has FP32's range", weak={"dtype": "bf16"}),
    other("pure_bf16", "masters are FP32; grad-dtype and moment-dtype bf16 save memory"),
    none("tf32", "it is for matmuls of FP32 operands, and the linears run in BF16 or FP8"),
    same("gradient_checkpointing", "true", "recompute", "block", "norm-act costs less time if memory allows"),
    other("gradient_checkpointing", "recompute none is our default", when="false"),
    other("disable_gradient_checkpointing", "recompute says it"),
    other("gradient_checkpointing_kwargs* use_reentrant_gc", "recompute repeats a block in the same kernels, equal "
          "bits"),
    other("flash_attn use_sdpa attn_implementation", "there is one attention kernel, without a matrix of scores"),
    other("enable_liger_kernel use_unsloth use_unsloth_gc torch_compile* use_cache", "fused kernels are all there is"),
    cannot("rope_scaling", "rope-scaling-factor is the llama3 rule; the model's directory sets it"),
    cannot("neftune_noise_alpha label_smoothing_factor", "the loss is plain cross-entropy"),
    cannot("sequence_parallel_size sequence_parallel_mode", "sequences are not cut over ranks"),
    other("ddp_* local_rank ddp_timeout", "comm-timeout and overlap are the like of it"),
    take("logging_steps", "log-interval", "integer", "of lines on the screen; the log file has every step"),
    take("save_steps", "save-interval", "integer"),
    take("save_total_limit", "keep", "integer"),
    take("eval_steps", "eval-interval", "integer"),
    other("save_strategy eval_strategy evaluation_strategy logging_strategy", "save-interval, eval-interval and "
          "log-interval count steps"),
    other("save_only_model save_safetensors", "a checkpoint is a Hugging Face model and the state to resume"),
    other("report_to run_name logging_dir plot_loss logging_first_step include_num_input_tokens_seen "
          "include_tokens_per_second project", _LOG),
    other("dataloader_* remove_unused_columns group_by_length", "the loader reads shards directly, in an order that "
          "depends on the seed alone"),
    other("trust_remote_code cache_dir hub_* push_to_hub hf_hub_token low_cpu_mem_usage ray_* disable_tqdm "
          "print_param_status", _PYTHON),
    other("full_determinism", "a run repeats itself to the bit on the same number of ranks"),
    other("load_best_model_at_end metric_for_best_model greater_is_better", "all checkpoints stay, or the newest keep"),
]

LLAMAFACTORY = Source("a LLaMA-Factory configuration", LLAMAFACTORY_ROWS,
                      "model_name_or_path finetuning_type template cutoff_len per_device_train_batch_size "
                      "gradient_accumulation_steps learning_rate output_dir fp8_backend num_train_epochs",
                      [Default("lr", 5e-5), Default("lr-decay-style", "linear"), Default("min-lr", 0),
                       Default("lr-warmup-iters", 0), Default("weight-decay", 0),
                       Default("adam-beta2", 0.999), Default("seed", 42), Default("micro-batch-size", 8),
                       Default("epochs", 3, unless="train-iters"), Default("save-interval", 500)],
                      finish_llamafactory)

ACCELERATE_ROWS = [
    same("mixed_precision", "fp8", "fp8-recipe", "delayed", keep="fp8"),
    same("mixed_precision", "bf16", "dtype", "bf16"),
    same("mixed_precision", "no", "dtype", "fp32"),
    cannot("mixed_precision", "dtype is bf16 or fp32", weak={"dtype": "bf16"}),
    other("fp8_config.backend", "there is one backend here; its recipe is fp8-recipe delayed", when="te",
          keep="backend"),
    same("fp8_config.backend", "torchao ao", "fp8-recipe", "tensorwise", "torchao scales by the tensor as it is",
         keep="backend"),
    other("fp8_config.backend", "one of the seven errors, see below", when="auto null", error=4, keep="backend"),
    cannot("fp8_config.backend", "MS-AMP's FP8 optimizer states are not here; moment-dtype bf16 is", keep="backend"),
    take("fp8_config.fp8_format", "fp8-format", "lower", when="hybrid e4m3"),
    cannot("fp8_config.fp8_format", "there are e4m3 and hybrid: no hardware multiplies E5M2 by E5M2"),
    take("fp8_config.margin", "fp8-margin", "integer"),
    none("fp8_config.interval", "Transformer Engine has ignored it since 1.8: factors are new every step"),
    take("fp8_config.amax_history_length fp8_config.amax_history_len", "fp8-amax-history-len", "integer", "counts "
         "optimizer steps here, micro-batches there"),
    take("fp8_config.amax_compute_algorithm fp8_config.amax_compute_algo", "fp8-amax-compute-algo", "lower",
         when="max most_recent"),
    cannot("fp8_config.override_linear_precision", "all three matmuls of a linear run alike; bf16-linears takes whole "
           "linears out", when="true"),
    other("fp8_config.override_linear_precision fp8_config.use_autocast_during_eval fp8_config.opt_level "
          "fp8_config.use_during_eval", "evaluation runs the same forward pass as training"),
    take("deepspeed_config.zero_stage", "zero", "integer", when="0 1"),
    other("deepspeed_config.zero_stage", "ZeRO-1 is what there is; --dry-run has the memory", when="2 3",
          sets={"zero": 1}),
    take("deepspeed_config.gradient_accumulation_steps gradient_accumulation_steps", "", "integer", keep="accumulation",
         fact="global-batch-size = micro-batch-size x accumulation x ranks"),
    take("deepspeed_config.gradient_clipping", "clip-grad", "number"),
    other("deepspeed_config.offload_optimizer_device deepspeed_config.offload_param_device",
          "nothing is offloaded here either", when="none"),
    cannot("deepspeed_config.offload_*", "nothing is kept in host memory; --dry-run says what a GPU needs"),
    other("deepspeed_config.deepspeed_config_file", _LAYERS, error=7),
    other("deepspeed_config.zero3_* deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_*",
          "weights are whole on every GPU; ranks are started through MPI"),
    other("fsdp_config.* parallelism_config.*", "sharding is zero 1: a part of masters and moments on each GPU"),
    take("num_processes", "", "integer", keep="ranks", fact="ranks: scripts/launch/launch_mpi.sh -np N"),
    other("num_machines machine_rank main_process_* rdzv_backend same_network compute_environment distributed_type "
          "gpu_ids main_training_function debug downcast_bf16 tpu_* use_cpu enable_cpu_affinity mpirun_config.* "
          "dynamo_config.* ipex_config.*", "ranks find each other through MPI: scripts/launch/launch_mpi.sh or Slurm"),
]

ACCELERATE = Source("an accelerate configuration", ACCELERATE_ROWS, "compute_environment distributed_type "
                    "mixed_precision fp8_config* deepspeed_config* num_processes machine_rank "
                    "main_training_function downcast_bf16",
                    [Default("fp8-amax-history-len", 1024), Default("fp8-amax-compute-algo", "most_recent")],
                    finish_llamafactory)

"""DeepSpeed's JSON files. DeepSpeed shards the optimizer; a model and its data come from the program around it."""
from .finish import finish_deepspeed
from .rows import Source, cannot, none, other, same, take

_AUTO = "\"auto\" is filled in by the trainer around DeepSpeed: import its file or script in the same call"
_ZERO = "collectives of ZeRO-1 here: reduce to the owner, gather weights"
_OFFLOAD = "nothing is kept in host memory or on disk; --dry-run says what a GPU needs"
_LOSS_SCALE = "FP16's loss scaling, which FP8 with factors of its own does not need and DeepSpeed does not do for it"

ROWS = [
    other("*", _AUTO, when="auto"),
    none("fp8.enabled", "DeepSpeed has no FP8 and ignores the section", when="false", error=1),
    none("fp8.enabled", "DeepSpeed has no FP8 and ignores the section; what was meant is written as fp8-recipe delayed",
         weak={"fp8-recipe": "delayed"}, error=1),
    none("fp8.loss_scale* fp8.initial_scale_power fp8.hysteresis fp8.min_loss_scale fp8.auto_cast "
         "fp8.consecutive_hysteresis", _LOSS_SCALE, error=1),
    none("fp8 fp8.*", "DeepSpeed has no FP8 and ignores the section", error=1),
    take("data_types.grad_accum_dtype", "grad-dtype", "lower", when="fp32", error=2),
    take("data_types.grad_accum_dtype", "grad-dtype", "lower", when="bf16"),
    cannot("data_types.grad_accum_dtype", "grad-dtype is fp32 or bf16"),
    other("communication_data_type", "half the bytes, and sums in FP32 all the same", when="fp32",
          sets={"grad-comm-dtype": "bf16"}, error=3),
    same("communication_data_type", "bf16 bfp16", "grad-comm-dtype", "bf16"),
    cannot("communication_data_type", "grad-comm-dtype is fp32, bf16 or fp8; FP16 lacks the range of gradients"),
    other("seq_parallel_communication_data_type", "sequences are not cut over ranks"),

    take("train_batch_size", "global-batch-size", "integer"),
    take("train_micro_batch_size_per_gpu", "micro-batch-size", "integer"),
    take("gradient_accumulation_steps", "", "integer", keep="accumulation",
         fact="global-batch-size = micro-batch-size x accumulation x ranks"),
    take("gradient_clipping", "clip-grad", "number"),
    other("prescale_gradients gradient_predivide_factor sparse_gradients", "gradients are summed in FP32 and divided "
          "once"),
    none("zero_allow_untested_optimizer", "it silences a question of DeepSpeed's"),
    none("zero_force_ds_cpu_optimizer", "it acts with offload only"),

    other("bf16.enabled fp16.enabled", "one of them off says nothing about the other; dtype is bf16", when="false"),
    same("bf16.enabled", "true", "dtype", "bf16"),
    cannot("fp16.enabled", "there is no FP16: dtype bf16 has FP32's range", weak={"dtype": "bf16"}),
    other("bf16.immediate_grad_update bf16.bf16_master_weights_and_grads bf16.*", "masters are FP32, gradients are "
          "accumulated in grad-dtype"),
    none("fp16.* amp amp.*", "they act with FP16 switched on, and bf16 needs no loss scaling"),

    take("zero_optimization.stage", "zero", "integer", when="0 1"),
    other("zero_optimization.stage", "ZeRO-1 is what there is: gradients and weights are whole on every GPU; --dry-run "
          "has the memory", when="2 3", sets={"zero": 1}),
    cannot("zero_optimization.stage", "zero is 0 or 1"),
    same("zero_optimization.overlap_comm", "true", "overlap", "on"),
    other("zero_optimization.overlap_comm", "equal bits, and off only serves to measure what overlap hides",
          when="false", sets={"overlap": "on"}),
    take("zero_optimization.reduce_bucket_size", "", "number", keep="bucket",
         fact="elements; bucket-mb counts 10^6 bytes of FP32"),
    other("zero_optimization.allgather_bucket_size", "bucket-mb is for both directions"),
    other("zero_optimization.allgather_partitions zero_optimization.reduce_scatter", _ZERO),
    other("zero_optimization.contiguous_gradients zero_optimization.round_robin_gradients "
          "zero_optimization.zero_hpz_partition_size zero_optimization.sub_group_size "
          "zero_optimization.use_multi_rank_bucket_allreduce", "memory is planned once, gradients lie in one block, "
          "cut by parameter"),
    other("zero_optimization.offload_optimizer.device zero_optimization.offload_param.device",
          "nothing is offloaded here either", when="none"),
    cannot("zero_optimization.offload_* zero_optimization.cpu_offload*", _OFFLOAD),
    other("zero_optimization.stage3_* zero_optimization.gather_16bit_weights_on_model_save "
          "zero_optimization.ignore_unused_parameters", "for stage 3 of ZeRO; weights are whole on every GPU here"),
    cannot("zero_optimization.zero_quantized_*", "grad-comm-dtype fp8 is the like of it: say so if you want it"),
    none("zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint",
         "a checkpoint goes on with any number of ranks anyway"),
    other("communication_* zero_optimization.*communication*", "NCCL's own affair"),

    other("optimizer.type", "AdamW is the optimizer", when="adam adamw fusedadam"),
    cannot("optimizer.type", "AdamW is the only optimizer"),
    take("optimizer.params.lr", "lr", "number"),
    take("optimizer.params.weight_decay", "weight-decay", "number"),
    take("optimizer.params.eps", "adam-eps", "number"),
    take("optimizer.params.betas", "", "words", keep="betas", fact="adam-beta1 and adam-beta2"),
    other("optimizer.params.torch_adam optimizer.params.adam_w_mode optimizer.params.bias_correction",
          "AdamW with bias correction, one kernel"),
    same("scheduler.type", "warmupdecaylr", "lr-decay-style", "linear"),
    same("scheduler.type", "warmupcosinelr", "lr-decay-style", "cosine"),
    same("scheduler.type", "warmuplr", "lr-decay-style", "constant"),
    cannot("scheduler.type", "there are cosine, linear, constant and wsd"),
    take("scheduler.params.warmup_max_lr", "lr", "number"),
    other("scheduler.params.warmup_min_lr", "the warm-up starts from 0", when="0 0.0"),
    cannot("scheduler.params.warmup_min_lr", "the warm-up starts from 0"),
    take("scheduler.params.warmup_num_steps", "lr-warmup-iters", "integer"),
    take("scheduler.params.total_num_steps", "train-iters", "integer"),
    other("scheduler.params.warmup_type", "linear here too", when="linear"),
    cannot("scheduler.params.warmup_type", "the warm-up is linear (DeepSpeed's default is log)"),
    take("scheduler.params.cos_min_ratio", "", "number", keep="min_ratio", fact="min-lr = lr x ratio"),

    take("steps_per_print", "log-interval", "integer", "of lines on the screen; the log file has every step"),
    other("wall_clock_breakdown memory_breakdown dump_state flops_profiler.* comms_logger.* tensorboard.* wandb.* "
          "csv_monitor.*", "every step is a record of log-file; --profile FIRST:LAST opens a profiler's window"),
    other("activation_checkpointing.*", "recompute block or norm-act; the model's own code decides in DeepSpeed, too"),
    other("checkpoint.* load_universal_checkpoint", "a checkpoint is written by all ranks and goes on with any number"),
    cannot("elasticity.* autotuning.* compression_training.* sparse_attention* data_efficiency.* "
           "curriculum_learning.* aio.* pipeline.* tensor_parallel.* hybrid_engine.*", "there is no such thing here"),
    other("compile.*", "kernels are compiled before the run"),
    other("graph_harvesting dataloader_drop_last disable_allgather", "for DeepSpeed's own loop"),
    take("seed", "seed", "integer"),
]

DEEPSPEED = Source("a DeepSpeed configuration", ROWS, "zero_optimization* train_micro_batch_size_per_gpu "
                   "train_batch_size gradient_clipping bf16.enabled fp16.enabled fp8.enabled "
                   "zero_allow_untested_optimizer communication_data_type data_types*", [], finish_deepspeed)

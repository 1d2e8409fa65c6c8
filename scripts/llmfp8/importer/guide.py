"""The YAML keys of guides that put Transformer Engine into a GPT-2 training script: use_fp8 with its fp8_* keys, the
shape in GPT-2's own names."""
from .finish import finish_guide
from .rows import Source, cannot, none, other, same, take
from .shared_rows import SECOND_FILE

_LOG = "every step is a record of log-file at full precision"
_DATA = "text becomes shards before training: data/prepare_text.py, then --train-data"

ROWS = [
    same("use_fp8", "true", "fp8-recipe", "delayed", keep="fp8"),
    same("use_fp8", "false", "fp8-recipe", "none"),
    take("fp8_recipe", "fp8-recipe", "lower", when="none delayed tensorwise blockwise", keep="fp8"),
    take("fp8_format", "fp8-format", "lower", when="hybrid e4m3"),
    cannot("fp8_format", "e5m2 alone is recommended against NaN, but Transformer Engine refuses to train in it and no "
           "hardware multiplies E5M2 by E5M2; hybrid has E5M2 where range is needed, in gradients", when="e5m2"),
    cannot("fp8_format", "there are hybrid and e4m3"),
    take("fp8_margin", "fp8-margin", "integer", "more of it saturates less and flushes more to zero; it costs no time, "
         "and no value of it makes or cures NaN"),
    take("fp8_interval", "fp8-interval", "integer", when="1"),
    none("fp8_interval", "Transformer Engine has ignored it since 1.8, so no run ever got faster by it; our "
         "--fp8-interval does act, and new factors cost microseconds"),
    take("fp8_amax_history_len", "fp8-amax-history-len", "integer", "counts optimizer steps here, micro-batches there: "
         "divide by the accumulation for the same span"),
    take("fp8_amax_compute_algo", "fp8-amax-compute-algo", "lower", when="max most_recent"),
    cannot("fp8_amax_compute_algo", "there are max and most_recent"),

    take("n_layer num_layers", "num-layers", "integer"),
    take("n_embd hidden_size", "hidden-size", "integer"),
    take("n_head num_heads", "num-attention-heads", "integer"),
    take("n_kv_head num_kv_heads", "num-query-groups", "integer"),
    take("n_inner", "ffn-hidden-size", "integer"),
    take("n_positions block_size", "max-position-embeddings", "integer"),
    take("seq_length sequence_length max_length", "seq-length", "integer"),
    other("vocab_size", "padded by hand for FP8; here vocab-size is the true 50257, stored rows are padded to 50304",
          when="50264 50272 50304"),
    take("vocab_size", "vocab-size", "integer"),
    same("use_rmsnorm", "true", "normalization", "RMSNorm"),
    same("use_rope", "true", "position-embedding-type", "rope"),
    same("use_qk_norm", "true", "qk-layernorm", True),
    same("use_swiglu", "true", "activation", "swiglu"),
    same("bias", "false", "disable-bias-linear", True),
    other("use_rmsnorm use_rope use_qk_norm use_swiglu bias", "that is the preset's", when="true false"),
    other("dropout", "no dropout here either", when="0 0.0"),
    cannot("dropout", "there is no dropout"),
    other("use_pytorch_sdpa use_flash_attention use_te_attention attention_backend", "there is one attention kernel, "
          "without a matrix of scores"),
    other("torch_compile compile compile_mode", "kernels are compiled before the run"),

    take("model_name model", "", "text", keep="model"),
    take("batch_size micro_batch_size", "micro-batch-size", "integer"),
    cannot("max_batch_size min_batch_size adaptive_batch_size", "micro-batch-size is fixed; --dry-run says which one "
           "fits, and rampup-batch-size grows the global batch"),
    take("effective_batch_size global_batch_size", "global-batch-size", "integer"),
    take("gradient_accumulation_steps grad_accum grad_accum_steps", "", "integer", keep="accumulation",
         fact="global-batch-size = micro-batch-size x accumulation x ranks"),
    take("learning_rate lr", "lr", "number"),
    take("min_lr min_learning_rate", "min-lr", "number"),
    take("weight_decay", "weight-decay", "number"),
    take("beta1 adam_beta1", "adam-beta1", "number"),
    take("beta2 adam_beta2", "adam-beta2", "number"),
    take("max_grad_norm grad_clip", "clip-grad", "number"),
    take("warmup_steps warmup_iters", "lr-warmup-iters", "integer"),
    take("max_steps max_iters", "train-iters", "integer", keep="max_steps"),
    take("num_epochs epochs", "epochs", "number"),
    take("lr_scheduler lr_schedule", "lr-decay-style", "lower", when="cosine linear constant wsd"),
    take("seed", "seed", "integer"),
    same("gradient_checkpointing", "true", "recompute", "block"),
    other("gradient_checkpointing", "recompute none is our default", when="false"),
    same("dtype precision mixed_precision", "bf16 bfloat16", "dtype", "bf16"),
    same("dtype precision mixed_precision", "fp32 float32", "dtype", "fp32"),
    cannot("dtype precision mixed_precision", "dtype is bf16 or fp32", weak={"dtype": "bf16"}),
    other("optimizer", "AdamW is the optimizer", when="adamw"),
    cannot("optimizer", "AdamW is the only optimizer"),
    other("dataset dataset_name data_dir tokenizer num_workers", _DATA),
    other("use_wandb wandb_* log_dir", _LOG),
    take("log_interval logging_steps", "log-interval", "integer",
         "of lines on the screen; the log file has every step"),
    take("eval_interval eval_steps", "eval-interval", "integer"),
    take("eval_iters", "eval-iters", "integer"),
    take("output_dir out_dir checkpoint_dir", "save", "text"),
    take("save_interval save_steps checkpoint_interval", "save-interval", "integer"),
    other("config", SECOND_FILE + ": name it in the same call of import_config", error=7),
    other("device", "chosen when the trainer was built"),
]

GUIDE = Source("a configuration of a GPT-2 guide", ROWS, "use_fp8 fp8_margin fp8_interval fp8_amax_history_len "
               "fp8_amax_compute_algo fp8_format n_layer n_head n_embd use_wandb torch_compile use_flash_attention "
               "max_batch_size", [], finish_guide)

// YAML keys of guides that put Transformer Engine into a GPT-2 training script, with the shape in GPT-2's own names.
R"json([
  {"keys": "use_fp8", "read": "flag", "when": "true", "same": "false", "keep": "fp8", "weak": {"fp8-recipe": "delayed"},
    "say": "use --fp8-recipe int8-forward, delayed, tensorwise or blockwise"},
  {"take": {"n_positions block_size": "max-position-embeddings"}},
  {"keys": "vocab_size", "when": "50264 50272 50304",
    "other": "padded by hand for FP8; here vocab-size is the true 50257, stored rows are padded to 50304"},
  {"keys": "use_rmsnorm", "take": "normalization", "value": "RMSNorm", "when": "true", "same": "false"},
  {"keys": "use_rope", "take": "position-embedding-type", "value": "rope", "when": "true", "same": "false"},
  {"keys": "use_qk_norm", "take": "qk-layernorm", "value": true, "when": "true", "same": "false"},
  {"keys": "use_swiglu", "take": "activation", "value": "swiglu", "when": "true", "same": "false"},
  {"keys": "bias", "take": "linear-bias", "value": "none", "when": "false", "same": "true"},
  {"keys": "model_name model", "keep": "model"},
  {"keys": "max_batch_size min_batch_size adaptive_batch_size",
    "cannot": "micro-batch-size is fixed; --dry-run says which one fits, and rampup-batch-size grows the global batch"}
])json"

// Names of nanoGPT's configuration files (config/*.py), which its command line takes as well.
R"json([
  {"keys": "eval_only", "same": "false", "cannot": "the executables always train; --train-iters 1 evaluates first"},
  {"keys": "always_save_checkpoint", "same": "true",
    "cannot": "checkpoints are written every save-interval steps, whatever the loss"},
  {"keys": "init_from", "when": "resume",
    "cannot": "a checkpoint of nanoGPT cannot be read; --resume auto continues one of ours"},
  {"keys": "init_from", "same": "scratch", "say": "use --model NAME for the shape and --load DIR for weights"},
  {"keys": "bias", "take": "linear-bias", "value": {"true": "all", "false": "none"},
    "fact": "of linears; LayerNorm has its bias in any case"},
  {"keys": "decay_lr", "take": "lr-decay-style", "value": {"true": "cosine", "false": "constant"}},
  {"keys": "backend", "other": "NCCL, started by MPI"}
])json"

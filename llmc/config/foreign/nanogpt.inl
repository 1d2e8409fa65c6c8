// Names of nanoGPT's configuration files (config/*.py), which its command line takes as well.
R"json([
  {"take": {"block_size": "seq-length"}},
  {"keys": "eval_only", "same": "false", "cannot": "the executables always train; --train-iters 1 evaluates first"},
  {"keys": "always_save_checkpoint", "same": "true",
    "cannot": "checkpoints are written every save-interval steps, whatever the loss"},
  {"keys": "init_from", "when": "resume",
    "cannot": "a checkpoint of nanoGPT cannot be read; --resume auto continues one of ours"},
  {"keys": "init_from", "same": "scratch", "keep": "model"},
  {"keys": "dataset", "keep": "dataset", "fact": "data/DATASET/train.bin and val.bin"},
  {"keys": "gradient_accumulation_steps", "read": "integer", "keep": "all_accumulation",
    "fact": "of all ranks together in nanoGPT: global-batch-size = batch_size x this"},
  {"keys": "bias", "take": "linear-bias", "value": {"true": "all", "false": "none"},
    "fact": "of linears; LayerNorm has its bias in any case"},
  {"keys": "decay_lr", "take": "lr-decay-style", "value": {"true": "cosine", "false": "constant"}},
  {"keys": "lr_decay_iters", "read": "integer", "keep": "decay_iters",
    "fact": "the rate decays until the last step of the run"},
  {"keys": "backend", "other": "NCCL, started by MPI"}
])json"

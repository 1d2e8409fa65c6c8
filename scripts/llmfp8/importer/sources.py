"""The kinds of input, with the defaults of each trainer that differ from ours."""
from .finish import (finish_deepspeed, finish_guide, finish_llamafactory, finish_llmc, finish_megatron, finish_nanogpt,
                     finish_torchtitan)
from .rows import Default, Source


def defaults(values):
    """{option: value}; of "option unless other", the default is not written if the other is set."""
    return [Default(*key.partition(" unless ")[::2], value) for key, value in values.items()]


DEEPSPEED = Source("a DeepSpeed configuration", "deepspeed", finish_deepspeed,
                   "zero_optimization* train_micro_batch_size_per_gpu train_batch_size gradient_clipping bf16.enabled "
                   "fp16.enabled fp8.enabled zero_allow_untested_optimizer communication_data_type data_types*")
MEGATRON = Source("a Megatron-LM argument script", "megatron", finish_megatron,
                  "num-layers num-attention-heads hidden-size tensor-model-parallel-size micro-batch-size train-iters "
                  "use-mcore-models swiglu use-distributed-optimizer fp8-recipe fp8-format data-path",
                  defaults({"normalization": "LayerNorm", "position-embedding-type": "learned_absolute",
                            "activation": "gelu", "linear-bias": "all", "untie-embeddings-and-output-weights": False,
                            "rotary-base": 10000, "dtype": "fp32", "lr-decay-style": "linear", "min-lr": 0,
                            "lr-warmup-iters": 0, "weight-decay": 0.01, "adam-beta2": 0.999, "eval-interval": 1000,
                            "eval-iters": 100, "fp8-amax-history-len": 1, "fp8-amax-compute-algo": "most_recent"}),
                  "--fp8-format")
# LLaMA-Factory's arguments, which are those of transformers' Trainer, with its defaults.
LLAMAFACTORY = Source("a LLaMA-Factory configuration", "llamafactory", finish_llamafactory,
                      "model_name_or_path finetuning_type template cutoff_len per_device_train_batch_size "
                      "gradient_accumulation_steps learning_rate output_dir fp8_backend num_train_epochs",
                      defaults({"lr": 5e-5, "lr-decay-style": "linear", "min-lr": 0, "lr-warmup-iters": 0,
                                "weight-decay": 0, "adam-beta2": 0.999, "seed": 42, "micro-batch-size": 8,
                                "epochs unless train-iters": 3, "save-interval": 500}), "fp8: true")
ACCELERATE = Source("an accelerate configuration", "accelerate", finish_llamafactory,
                    "compute_environment distributed_type mixed_precision fp8_config* deepspeed_config* num_processes "
                    "machine_rank main_training_function downcast_bf16",
                    defaults({"fp8-amax-history-len": 1024, "fp8-amax-compute-algo": "most_recent"}),
                    "mixed_precision: fp8")
GUIDE = Source("a configuration of a GPT-2 guide", "guide", finish_guide,
               "use_fp8 fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_format n_layer n_head "
               "n_embd use_wandb torch_compile use_flash_attention max_batch_size", fp8_switch="use_fp8: true")
TORCHTITAN = Source("a torchtitan configuration", "torchtitan", finish_torchtitan,
                    "job.* model.flavor training.* optimizer.lr lr_scheduler.* parallelism.* activation_checkpoint.* "
                    "float8.* quantize.linear.float8.*",
                    defaults({"lr": 8e-4, "lr-warmup-iters": 200, "lr-decay-style": "linear", "micro-batch-size": 8,
                              "seq-length": 2048, "train-iters": 10000, "save-interval": 500, "log-interval": 10}),
                    'converters = ["float8"]')
LLMC = Source("llm.c's options", "llmc", finish_llmc, "-i -j -e -o -b -t -d -x -l -u -q -c -v -s -g -y -z",
              defaults({"lr": 3e-4, "weight-decay": 0, "micro-batch-size": 4, "seq-length": 1024, "eval-interval": 20,
                        "eval-iters": 20, "save-interval": 0, "epochs unless train-iters": 1}))
NANOGPT = Source("a nanoGPT configuration", "nanogpt", finish_nanogpt,
                 "out_dir eval_interval eval_iters init_from dataset gradient_accumulation_steps batch_size block_size "
                 "n_layer n_head n_embd learning_rate max_iters lr_decay_iters warmup_iters",
                 defaults({"lr": 6e-4, "min-lr": 6e-5, "lr-warmup-iters": 2000, "train-iters": 600000,
                           "micro-batch-size": 12, "seq-length": 1024, "num-layers": 12, "num-attention-heads": 12,
                           "hidden-size": 768, "linear-bias": "none", "eval-interval": 2000, "eval-iters": 200,
                           "seed": 1337, "save": "out"}))
SOURCES = [DEEPSPEED, MEGATRON, LLAMAFACTORY, ACCELERATE, GUIDE, TORCHTITAN, LLMC, NANOGPT]

"""Arguments of LLaMA-Factory (and of transformers' Trainer), as YAML or on a command line, and accelerate's YAML files,
with the defaults of transformers' TrainingArguments."""
from .finish import finish_llamafactory
from .rows import Default, Source, read_rows

LLAMAFACTORY = Source("a LLaMA-Factory configuration", read_rows("llamafactory"),
                      "model_name_or_path finetuning_type template cutoff_len per_device_train_batch_size "
                      "gradient_accumulation_steps learning_rate output_dir fp8_backend num_train_epochs",
                      [Default("lr", 5e-5), Default("lr-decay-style", "linear"), Default("min-lr", 0),
                       Default("lr-warmup-iters", 0), Default("weight-decay", 0),
                       Default("adam-beta2", 0.999), Default("seed", 42), Default("micro-batch-size", 8),
                       Default("epochs", 3, unless="train-iters"), Default("save-interval", 500)],
                      finish_llamafactory, "fp8: true")

ACCELERATE = Source("an accelerate configuration", read_rows("accelerate"),
                    "compute_environment distributed_type "
                    "mixed_precision fp8_config* deepspeed_config* num_processes machine_rank "
                    "main_training_function downcast_bf16",
                    [Default("fp8-amax-history-len", 1024), Default("fp8-amax-compute-algo", "most_recent")],
                    finish_llamafactory, "mixed_precision: fp8")

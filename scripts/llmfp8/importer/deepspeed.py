"""DeepSpeed's JSON files, which have neither model nor data."""
from .finish import finish_deepspeed
from .rows import Source, read_rows

DEEPSPEED = Source("a DeepSpeed configuration", read_rows("deepspeed"),
                   "zero_optimization* train_micro_batch_size_per_gpu "
                   "train_batch_size gradient_clipping bf16.enabled fp16.enabled fp8.enabled "
                   "zero_allow_untested_optimizer communication_data_type data_types*", [], finish_deepspeed)

"""YAML keys of guides that add Transformer Engine to a GPT-2 training script: use_fp8, fp8_*, and GPT-2's names of the
shape."""
from .finish import finish_guide
from .rows import Source, read_rows

GUIDE = Source("a configuration of a GPT-2 guide", read_rows("guide"),
               "use_fp8 fp8_margin fp8_interval fp8_amax_history_len "
               "fp8_amax_compute_algo fp8_format n_layer n_head n_embd use_wandb torch_compile use_flash_attention "
               "max_batch_size", [], finish_guide, "use_fp8: true")

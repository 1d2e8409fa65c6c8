"""nanoGPT's config/*.py files, with the defaults of its train.py."""
from .finish import finish_nanogpt
from .rows import Default, Source, read_rows

NANOGPT = Source("a nanoGPT configuration", read_rows("nanogpt"),
                 "out_dir eval_interval eval_iters init_from dataset gradient_accumulation_steps batch_size block_size "
                 "n_layer n_head n_embd learning_rate max_iters lr_decay_iters warmup_iters",
                 [Default("lr", 6e-4), Default("min-lr", 6e-5), Default("lr-warmup-iters", 2000),
                  Default("train-iters", 600000), Default("micro-batch-size", 12), Default("seq-length", 1024),
                  Default("num-layers", 12), Default("num-attention-heads", 12), Default("hidden-size", 768),
                  Default("linear-bias", "none"), Default("eval-interval", 2000), Default("eval-iters", 200),
                  Default("seed", 1337), Default("save", "out")], finish_nanogpt)

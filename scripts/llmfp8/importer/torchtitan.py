"""torchtitan's TOML files and command line, with the defaults of its JobConfig."""
from .finish import finish_torchtitan
from .rows import Default, Source, read_rows

TORCHTITAN = Source("a torchtitan configuration", read_rows("torchtitan"),
                    "job.* model.flavor training.* optimizer.lr lr_scheduler.* parallelism.* activation_checkpoint.* "
                    "float8.* quantize.linear.float8.*",
                    [Default("lr", 8e-4), Default("lr-warmup-iters", 200), Default("lr-decay-style", "linear"),
                     Default("micro-batch-size", 8), Default("seq-length", 2048), Default("train-iters", 10000),
                     Default("save-interval", 500), Default("log-interval", 10)],
                    finish_torchtitan, 'converters = ["float8"]')

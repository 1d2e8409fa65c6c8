"""llm.c's options in a launch script, with the defaults of train_gpt2.cu."""
from .finish import finish_llmc
from .rows import Default, Source, read_rows

LLMC = Source("llm.c's options", read_rows("llmc"), "-i -j -e -o -b -t -d -x -l -u -q -c -v -s -g -y -z",
              [Default("lr", 3e-4), Default("weight-decay", 0), Default("micro-batch-size", 4),
               Default("seq-length", 1024),
               Default("eval-interval", 20), Default("eval-iters", 20), Default("save-interval", 0),
               Default("epochs", 1, unless="train-iters")], finish_llmc)

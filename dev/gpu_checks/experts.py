"""After a change of mixtures of experts or of expert parallelism, on --ranks (2) ranks, on text: experts, and so ranks,
have different numbers of rows. Runs whose ranks share the experts must have the losses and the gradient norms of
the same ranks with all experts each, and equal bits when repeated, without overlap, without copy engines and with
recomputation."""
from logs import Log, differences

# A small Qwen3-MoE, of 128 experts as in the large ones, with weights of 1.5 times the usual deviation.
MODEL = ["train_llama", "--model", "qwen3-30B-A3B", "--num-layers", "4", "--hidden-size", "1024",
         "--num-attention-heads", "16", "--init-method-std", "0.03", "--vocab-size", "512", "--seq-length", "2048"]
# Name, options, and the allowed difference from the loss and norm without expert parallelism, due to the order of sums
# and to the rounding of the sums that travel.
RECIPES = (("bf16", [], 1e-2), ("blockwise", ["--fp8-recipe", "blockwise"], 2e-2))
# Options and environment that must not change the results.
WAYS = (("again", [], {}), ("no-overlap", ["--overlap", "off"], {}), ("no-copy-engines", [], {"NCCL_CTA_POLICY": "0"}),
        ("norm-act", ["--recompute", "norm-act"], {}), ("block", ["--recompute", "block"], {}))


def losses(check):
    count = check.options.ranks
    common = ["--train-iters", "5", "--lr", "1e-4", "--micro-batch-size", "1", "--global-batch-size", str(2 * count),
              "--gemm-search", "off"]
    share = ["--expert-parallel", str(count)]
    for name, options, near in RECIPES:
        whole = Log(check.train(f"{name}-whole", count, *MODEL, *common, *options))
        first = Log(check.train(name, count, *MODEL, *common, *options, *share))
        far = {key: max(first.far_from(whole, key).values(), key=lambda x: (x != x, x))
               for key in ("loss", "grad_norm")}
        others = [Log(check.train(f"{name}-{way}", count, *MODEL, *common, *options, *share, *change, **environment))
                  for way, change, environment in WAYS]
        differ = [text for text in (differences(first, other) for other in others) if text]
        print(*differ, f"{name}: losses within {far['loss']:.2g} and gradient norms within {far['grad_norm']:.2g} of "
                       f"those without expert parallelism; {len(others) - len(differ)} of {len(others)} runs equal to "
                       "the bit", sep="\n", flush=True)
        if differ or not all(x <= near for x in far.values()):   # also if one is not a number
            check.fail(f"{name}: " + ("not equal to the bit" if differ else f"losses or norms {far} away"))


def run(check):
    check.make("train_llama")
    check.describe_gpus()
    losses(check)

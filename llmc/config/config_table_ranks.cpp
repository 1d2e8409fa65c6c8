// The options of distributed runs.
#include "llmc/config/config_table.h"

void add_ranks(std::vector<OptionRow>& rows) {
    add_rows(rows, OptionGroup::kRanks, {
        {.name = "ranks", .value = integer(AT(ranks), 0, 1 << 16),
         .help = "number of ranks; plan (--dry-run) plans for this number, and a run on another number is refused; 0: "
                 "as many as were started", .on_resume = kSilent},
        {.name = "context-parallel", .value = integer(AT(context_parallel), 1, 1 << 12),
         .help = "number of neighbouring ranks among which each sequence is split; attention exchanges heads. It must "
                 "divide --num-attention-heads, --seq-length and the number of ranks", .changes = MayChange::kRounding},
        {.name = "expert-parallel", .value = integer(AT(expert_parallel), 1, 8),
         .help = "number of neighbouring ranks among which the experts of each layer are divided; each takes the "
                 "tokens of all. 1, 2, 4 or 8; it must divide --num-experts, the number of ranks and --zero-group",
         .changes = MayChange::kRounding},
        {.name = "zero", .value = integer(AT(zero), 0, 3),
         .help = "ZeRO stage; 1: each rank owns a shard of the master weights and moments; 2: and of the gradients, "
                 "which are reduced in every micro-batch; 3: and of the weights, which are gathered layer by layer in "
                 "every pass; 0: every rank has all of them", .on_resume = kSilent, .changes = MayChange::kRounding,
         .ranks_only = true},
        {.name = "zero-group", .value = integer(AT(zero_group), 0, 1 << 16),
         .help = "--zero shards within groups of N neighbouring ranks, for example the ranks of a node, and each group "
                 "has all shards; 0: one group of all ranks", .on_resume = kSilent, .changes = MayChange::kRounding,
         .ranks_only = true},
        {.name = "bucket-mb", .value = number(AT(bucket_mb), {.low = 0, .high = 1e6}),
         .help = "size of a gradient bucket, which is reduced as one message, in 10^6 bytes of FP32; no parameter is "
                 "split between buckets; 0: 256, or with --zero 3 whole layers", .changes = MayChange::kRounding,
         .ranks_only = true},
        {.name = "overlap", .value = choice<bool>(AT(overlap), {{"on", true}, {"off", false}}),
         .help = "overlap the reduction of gradients with the backward pass and the all-gather of weights with the "
                 "forward pass; results are equal to the bit", .on_resume = kSilent, .ranks_only = true},
        {.name = "grad-shard-dtype",
         .value = choice<Dtype>(AT(grad_shard_dtype), {{"bf16", Dtype::kBf16}, {"fp32", Dtype::kFp32}}),
         .help = "dtype of a rank's shard of the gradients with --zero 2 and 3; the gradients of each micro-batch are "
                 "added to it in FP32; bf16 saves 2 bytes per parameter of the shard and rounds in every micro-batch",
         .ranks_only = true},
        {.name = "grad-comm-dtype",
         .value = choice<Dtype>(AT(grad_comm_dtype), {{"fp32", Dtype::kFp32}, {"bf16", Dtype::kBf16},
                                {"fp8", Dtype::kE4m3}}),
         .help = "communication dtype of gradients, which are always added in FP32; fp8: E4M3 with a scale for each "
                 "128 values, for linear layers only",
         .derive = [](Config& c, const Given&) { c.grad_comm_dtype = c.grad_dtype; }, .derived = "that of --grad-dtype",
         .ranks_only = true},
        {.name = "comm-timeout", .value = number(AT(comm_timeout), {.low = 0, .high = 1e9}),
         .help = "seconds without progress of a rank after which all ranks end with exit code 6 and a hang report; ten "
                 "times as long until the first step is done and while files are read or written; 0: no limit",
         .fallback = "60", .on_resume = kSilent, .ranks_only = true},
    });
}

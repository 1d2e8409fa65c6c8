// The token inputs of micro-batches in host memory.
#pragma once
#include <cstdint>
#include <utility>

#include "llmc/config/config.h"

// Learned positions that restart need their rows sorted by position, too.
inline bool sorts_positions(const Config& config) {
    return config.reset_position_ids && config.shape.position == PositionEmbedding::kLearned;
}
// FP8 attention applies rope to whole sequences.
inline bool needs_whole_positions(const Config& config) {
    return config.reset_position_ids && config.fp8_attention && config.context_parallel > 1;
}
// The number of int32 inputs of a rank for `sequences`: token, target and order of each token of its parts; with
// --reset-attention-mask, start and end of the document of each token of the whole sequences; with --reset-position-ids
// the position of each token of its parts, maybe the order by positions, and maybe the positions of whole sequences.
inline int64_t input_elems(const Config& config, int64_t sequences) {
    const int64_t of_part = 3 + config.reset_position_ids + sorts_positions(config);
    const int64_t of_whole = 2 * config.reset_attention_mask + needs_whole_positions(config);
    return sequences * (of_part * config.part_length() + of_whole * config.seq_length);
}

// Token inputs of (micro-batches of) B sequences in pinned host memory; null in the rehearsal. T: part_length().
struct HostInputs {
    int32_t* tokens = nullptr;           // (micro_batches, B*T)
    int32_t* targets = nullptr;
    int32_t* order = nullptr;            // rows sorted by token, see EmbeddingBackwardArgs; null: no backward follows
    int32_t* documents = nullptr;        // (micro_batches, 2, B, whole T), see AttentionForwardArgs; null: one document
                                         // per sequence
    int32_t* positions = nullptr;        // (micro_batches, B*T) within documents; null: they do not restart
    int32_t* position_order = nullptr;   // (micro_batches, B*T) rows sorted by them; null: not needed
    int32_t* whole_positions = nullptr;  // (micro_batches, B, whole T); null: not needed

    // The inputs of the micro-batch that begins after `tokens_before` tokens of this rank's parts; `ranks` ranks share
    // a sequence.
    HostInputs after(int64_t tokens_before, int64_t ranks) const {
        auto at = [](int32_t* p, int64_t n) { return p ? p + n : p; };
        const int64_t n = tokens_before;
        return {at(tokens, n), at(targets, n), at(order, n), at(documents, 2 * n * ranks), at(positions, n),
                at(position_order, n), at(whole_positions, n * ranks)};
    }
};

// The places of the inputs of `sequences` in memory of input_elems(config, sequences).
inline HostInputs inputs_in(const Config& config, int32_t* memory, int64_t sequences) {
    const int64_t of_parts = sequences * config.part_length(), of_whole = sequences * config.seq_length;
    const auto next = [&memory](bool exists, int64_t n) {
        return exists ? std::exchange(memory, memory + n) : nullptr;
    };
    return {.tokens = next(true, of_parts), .targets = next(true, of_parts), .order = next(true, of_parts),
            .documents = next(config.reset_attention_mask, 2 * of_whole),
            .positions = next(config.reset_position_ids, of_parts),
            .position_order = next(sorts_positions(config), of_parts),
            .whole_positions = next(needs_whole_positions(config), of_whole)};
}

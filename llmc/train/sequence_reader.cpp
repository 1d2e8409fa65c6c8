#include "llmc/train/sequence_reader.h"

namespace {

int64_t count_targets(const int32_t* targets, int64_t n) { return n - std::count(targets, targets + n, kIgnoreIndex); }

}  // namespace

SequenceReader::SequenceReader(const Config& config, const World& context)
    : B_(config.micro_batch_size), T_(config.seq_length), vocab_size_(config.shape.vocab_size), context_(context),
      tokens_(static_cast<size_t>(B_ * T_)), targets_(tokens_.size()), positions_(tokens_.size()),
      starts_(tokens_.size()) {}

SequenceReader::Counted SequenceReader::read(const DataLoader& loader, int64_t first, const HostInputs& to) {
    for (int64_t b = 0; b < B_; b++)
        loader.read(first + b, tokens_.data() + b * T_, targets_.data() + b * T_, starts_.data() + b * T_);
    return set(tokens_.data(), targets_.data(), starts_.data(), to);
}

SequenceReader::Counted SequenceReader::set(const int32_t* tokens, const int32_t* targets, const uint8_t* starts,
                                            const HostInputs& to) {
    const int64_t N = B_ * T_ / context_.ranks;
    take_part(tokens, B_, T_, context_, to.tokens);
    take_part(targets, B_, T_, context_, to.targets);
    if (to.order) sort_rows_by_token(to.tokens, N, vocab_size_, to.order, scratch_);
    if (to.documents) mark_documents(starts, B_, T_, to.documents);
    if (to.positions) {
        int32_t* const whole = to.whole_positions ? to.whole_positions : positions_.data();
        restart_positions(starts, B_, T_, whole);
        take_part(whole, B_, T_, context_, to.positions);
    }
    if (to.position_order) sort_rows_by_token(to.positions, N, T_, to.position_order, scratch_);
    return {.part = count_targets(to.targets, N), .whole = count_targets(targets, B_ * T_)};
}

void SequenceReader::read_ignored(const DataLoader& loader, int64_t first, const HostInputs& to) {
    read(loader, first, to);
    std::fill_n(to.targets, B_ * T_ / context_.ranks, kIgnoreIndex);
}

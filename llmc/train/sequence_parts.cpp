#include "llmc/train/sequence_parts.h"

#include <algorithm>

SequenceReader::SequenceReader(const Config& config, const World& context)
    : B_(config.micro_batch_size), T_(config.seq_length), context_(context),
      tokens_(static_cast<size_t>(B_ * T_)), targets_(tokens_.size()) {}

SequenceReader::Counted SequenceReader::read(const DataLoader& loader, int64_t first, const Target& to) {
    Counted counted;
    for (int64_t b = 0; b < B_; b++)
        counted.whole += loader.read(first + b, tokens_.data() + b * T_, targets_.data() + b * T_);
    take_part(tokens_.data(), B_, T_, context_, to.tokens);
    take_part(targets_.data(), B_, T_, context_, to.targets);
    const int64_t N = B_ * T_ / context_.ranks;
    counted.part = N - std::count(to.targets, to.targets + N, kIgnoreIndex);
    if (to.documents) mark_documents(tokens_.data(), B_, T_, loader.separator(), to.documents);
    return counted;
}

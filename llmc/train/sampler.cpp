#include "llmc/train/sampler.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/rng.h"
#include "llmc/fault/heartbeat.h"

namespace {

constexpr int64_t kLengthUnit = 128;

}  // namespace

int64_t padded_length(int64_t tokens, int64_t max_seq, int64_t ranks) {
    const int64_t unit = kLengthUnit * ranks;
    return std::min(round_up(tokens, unit), max_seq);
}

Sampler::Sampler(const ModelConfig& shape, Dtype dtype, int64_t max_seq, Decoder& decoder, Fp8State& fp8, Comm& context,
                 Arena& arena)
    : max_seq_(max_seq), decoder_(decoder), fp8_(fp8), context_(context),
      row_(arena.take(Purpose::kInputs, dtype, shape.padded_vocab())),
      logits_(static_cast<size_t>(shape.vocab_size)) {}

void Sampler::next_logits(Ctx& ctx, const std::vector<int32_t>& text, const SamplerMemory& memory) {
    const int64_t length = std::min<int64_t>(static_cast<int64_t>(text.size()), max_seq_);
    const int64_t T = padded_length(length, max_seq_, context_.world().ranks), part = T / context_.world().ranks;
    if (!ctx.rehearsal) {
        // The causal mask hides the padding after the last token.
        std::vector<int32_t> whole(static_cast<size_t>(T));
        std::copy(text.end() - length, text.end(), whole.begin());
        std::copy_n(whole.begin() + context_.world().rank * part, part, memory.host_tokens);
    }
    device::copy_to_device(ctx, memory.device_tokens, memory.host_tokens, part * dtype_bytes(Dtype::kInt32));
    // The text is one document even if it contains separators, which only the loader knows.
    const DeviceBatch batch{.tokens = memory.device_tokens, .targets = nullptr, .token_order = nullptr,
                            .bad_tokens = memory.bad_tokens, .documents = nullptr, .B = 1, .T = part};
    fp8_.begin_micro_batch(ctx, 0, Fp8Phase::kEvaluation);
    decoder_.forward(ctx, batch, false);
    decoder_.logits_row(ctx, batch, (length - 1) % part, row_);   // on one of the ranks, the row of the last token
    std::string mine(static_cast<size_t>(row_.bytes()), '\0');
    device::copy_to_host(ctx, mine.data(), row_.data, row_.bytes());
    device::synchronize(ctx);
    const std::string owner = context_.gather(mine)[static_cast<size_t>((length - 1) / part)];
    for (size_t v = 0; v < logits_.size(); v++) {
        logits_[v] = row_.dtype == Dtype::kBf16 ? static_cast<float>(reinterpret_cast<const bf16*>(owner.data())[v])
                                                : reinterpret_cast<const float*>(owner.data())[v];
        logits_[v] = static_cast<float>(decoder_.logit_of(double{logits_[v]}));
    }
}

std::vector<int32_t> Sampler::continue_text(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                            uint64_t stream, const SamplerMemory& memory,
                                            const std::function<bool()>& stopped) {
    CHECK(!prompt.empty(), "an empty prompt");
    const uint64_t key = rng_key(sampling.seed, "sample");
    std::vector<int32_t> text = prompt;
    for (int64_t i = 0; i < sampling.tokens && !stopped(); i++) {
        post_progress();
        next_logits(ctx, text, memory);
        if (std::any_of(logits_.begin(), logits_.end(), [](float x) { return !(x < INFINITY); }))
            FAIL(kExitDiverged, "token %lld of the text: the model's logits are not finite: its weights are damaged, "
                 "or training has diverged", ll(std::ssize(text)) + 1);
        const double u = philox(key, stream, static_cast<uint64_t>(i)).word[0] * 0x1p-32;
        text.push_back(sample_token(logits_, sampling.temperature, u, sampling.top_k));
        if (std::count(sampling.eos.begin(), sampling.eos.end(), text.back()) > 0) break;
    }
    return text;
}

int32_t sample_token(const std::vector<float>& logits, double temperature, double u, int64_t top_k) {
    const auto largest = std::max_element(logits.begin(), logits.end());
    const auto likeliest = static_cast<int32_t>(largest - logits.begin());
    if (temperature <= 0) return likeliest;
    // The smallest logit that may be drawn, and how many of the logits equal to it may be.
    float least = -INFINITY;
    auto equals = static_cast<int64_t>(logits.size());
    if (top_k > 0 && top_k < equals) {
        std::vector<float> sorted = logits;
        std::nth_element(sorted.begin(), sorted.begin() + (top_k - 1), sorted.end(), std::greater<float>());
        least = sorted[static_cast<size_t>(top_k - 1)];
        equals = top_k - std::count_if(logits.begin(), logits.end(), [&](float x) { return x > least; });
    }
    std::vector<double> weights(logits.size(), 0);
    double total = 0;
    for (size_t v = 0; v < logits.size(); v++) {
        if (logits[v] > least || (logits[v] == least && equals-- > 0))
            total += weights[v] = std::exp((static_cast<double>(logits[v]) - *largest) / temperature);
    }
    double rest = u * total;
    for (size_t v = 0; v < logits.size(); v++)
        if ((rest -= weights[v]) < 0) return static_cast<int32_t>(v);
    return likeliest;
}

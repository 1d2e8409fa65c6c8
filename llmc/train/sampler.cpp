#include "llmc/train/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "llmc/base/rng.h"
#include "llmc/fault/heartbeat.h"

namespace {

constexpr int64_t kLengthUnit = 128;

// The smallest logit that may be drawn, and how many of the logits equal to it may be drawn.
struct Cut {
    float least;
    int64_t equals;
};

Cut top_k_cut(const std::vector<float>& logits, int64_t k) {
    if (k <= 0 || k >= static_cast<int64_t>(logits.size())) return {-INFINITY, static_cast<int64_t>(logits.size())};
    std::vector<float> sorted = logits;
    std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<float>());
    const float least = sorted[static_cast<size_t>(k - 1)];
    return {least, k - std::count_if(logits.begin(), logits.end(), [&](float x) { return x > least; })};
}

// Returns the cut that keeps the fewest of the largest `logits` whose weights add up to at least `mass`.
template <typename Weight> Cut top_p_cut(std::vector<float>& logits, double mass, Weight&& weight) {
    std::make_heap(logits.begin(), logits.end());
    Cut cut{INFINITY, 0};
    for (auto end = logits.end(); end != logits.begin() && (cut.equals == 0 || mass > 0); --end) {
        std::pop_heap(logits.begin(), end);
        const float next = end[-1];
        cut = {next, next == cut.least ? cut.equals + 1 : 1};
        mass -= weight(next);
    }
    return cut;
}

}  // namespace

int64_t padded_length(int64_t tokens, int64_t max_seq, int64_t ranks) {
    const int64_t unit = kLengthUnit * ranks;
    return std::min(round_up(tokens, unit), max_seq);
}

Sampler::Sampler(const ModelConfig& shape, Dtype dtype, int64_t max_seq, Decoder& decoder, Fp8State& fp8, Comm& context,
                 Arena& arena)
    : max_seq_(max_seq), decoder_(decoder), fp8_(fp8), context_(context),
      row_(arena.take(Purpose::kInputs, dtype, shape.padded_vocab())), raw_(static_cast<size_t>(row_.bytes())),
      logits_(static_cast<size_t>(shape.vocab_size)) {}

void Sampler::next_logits(Ctx& ctx, const std::vector<int32_t>& text, int64_t T, const SamplerMemory& memory) {
    const int64_t length = std::min<int64_t>(static_cast<int64_t>(text.size()), T), part = T / context_.world().ranks;
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
    device::copy_to_host(ctx, raw_.data(), row_.data, row_.bytes());
    device::synchronize(ctx);
    const std::string mine(raw_.data(), raw_.size());
    const std::string owner = context_.gather(mine)[static_cast<size_t>((length - 1) / part)];
    std::copy(owner.begin(), owner.end(), raw_.begin());
    widen_logits(raw_.data(), row_.dtype, logits_);
}

std::vector<int32_t> Sampler::continue_text(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                            uint64_t stream, const SamplerMemory& memory,
                                            const std::function<bool()>& stopped) {
    CHECK(!prompt.empty(), "an empty prompt");
    const int64_t T = padded_length(static_cast<int64_t>(prompt.size()) + sampling.tokens, max_seq_,
                                    context_.world().ranks);
    std::vector<int32_t> text = prompt;
    text.reserve(prompt.size() + static_cast<size_t>(sampling.tokens));
    for (int64_t i = 0; i < sampling.tokens && !stopped(); i++) {
        post_progress();
        next_logits(ctx, text, T, memory);
        text.push_back(draw_token(logits_, sampling, stream, i));
    }
    return text;
}

void widen_logits(const char* raw, Dtype dtype, std::vector<float>& logits) {
    for (size_t v = 0; v < logits.size(); v++) {
        logits[v] = dtype == Dtype::kBf16 ? static_cast<float>(reinterpret_cast<const bf16*>(raw)[v])
                                          : reinterpret_cast<const float*>(raw)[v];
    }
}

int32_t draw_token(const std::vector<float>& logits, const Sampling& sampling, uint64_t text, int64_t number) {
    const double u = philox(rng_key(sampling.seed, "sample"), text, static_cast<uint64_t>(number)).word[0] * 0x1p-32;
    return sample_token(logits, sampling.temperature, u, sampling.top_k, sampling.top_p);
}

int32_t sample_token(const std::vector<float>& logits, double temperature, double u, int64_t top_k, double top_p) {
    const auto largest = std::max_element(logits.begin(), logits.end());
    const auto likeliest = static_cast<int32_t>(largest - logits.begin());
    if (temperature <= 0) return likeliest;
    Cut cut = top_k_cut(logits, top_k);
    auto weight = [&](float x) { return std::exp((static_cast<double>(x) - *largest) / temperature); };
    std::vector<double> weights(logits.size(), -1);   // computed when first needed; -1: not yet
    // Calls use(index, weight) for each logit that may be drawn, until it returns true.
    auto walk = [&](auto&& use) {
        int64_t equals = cut.equals;
        for (size_t v = 0; v < logits.size(); v++) {
            if (logits[v] < cut.least || (logits[v] == cut.least && equals-- <= 0)) continue;
            if (weights[v] < 0) weights[v] = weight(logits[v]);
            if (use(static_cast<int32_t>(v), weights[v])) return static_cast<int32_t>(v);
        }
        return likeliest;
    };
    auto sum_weights = [&] {
        double total = 0;
        walk([&](int32_t, double w) { return total += w, false; });
        return total;
    };
    double total = sum_weights();
    if (top_p < 1) {
        std::vector<float> left;
        walk([&](int32_t v, double) { return left.push_back(logits[static_cast<size_t>(v)]), false; });
        cut = top_p_cut(left, top_p * total, weight);
        total = sum_weights();
    }
    double rest = u * total;
    return walk([&](int32_t, double w) { return (rest -= w) < 0; });
}

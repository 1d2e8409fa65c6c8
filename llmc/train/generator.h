// Text generation with a cache of keys and values: one forward pass over a prompt (prefill), then passes with one row
// for each text that is not finished (decode). A text that ends makes room for the next prompt.
//
// A text does not depend on the others: on the CPU a Sampler generates the same text, no matter which texts are decoded
// together. On a GPU a matmul may round differently for another number of rows (in steps of kRowUnit). With FP8 in
// tensorwise scaling the amax spans all rows of a pass, so texts differ from a Sampler's and depend on each other.
#pragma once
#include <algorithm>
#include <functional>

#include "llmc/train/sampler.h"

class Generator {
public:
    struct Limits {
        int64_t texts = 1;       // decoded together
        int64_t prompt = 1;      // tokens of the longest prompt
        int64_t positions = 1;   // of the longest text
    };
    // FP8 matmuls need multiples of this many rows, and on a GPU every new number of rows takes a search for matmul
    // algorithms.
    static constexpr int64_t kRowUnit = 16;
    static int64_t padded(int64_t rows) { return round_up(rows, kRowUnit); }
    // Rows of the largest pass. The decoder must have this as max_seq, and at least limits.positions as positions().
    static int64_t max_rows(const Limits& limits) { return padded(std::max(limits.prompt, limits.texts)); }
    static int64_t pinned_bytes(const Limits& limits) { return kInputs * max_rows(limits) * 4; }

    // Allocates cache, inputs and logits from the arena. Owns none of its arguments.
    Generator(const ModelConfig& shape, Dtype dtype, const Limits& limits, Decoder& decoder, Fp8State& fp8,
              Arena& arena);

    // Runs the largest prefill and decode, for the memory plan.
    void rehearse(Ctx& ctx);

    // Called with each text, the prompt included, in the order of the prompts; false ends the generation.
    using Done = std::function<bool(const std::vector<int32_t>& text)>;
    // Continues the prompts (at least one token each). A text ends with sampling.tokens tokens or with one of `eos`,
    // which is part of it. Random numbers are keyed by (seed, number of the prompt, token number). pinned: host memory
    // of pinned_bytes. Blocking; ends early if a stop is requested, with the texts as they are then.
    void run(Ctx& ctx, const std::vector<std::vector<int32_t>>& prompts, const Sampling& sampling,
             const std::vector<int32_t>& eos, void* pinned, const Done& done);

    struct Times {
        int64_t prefill_tokens = 0, decode_tokens = 0, decode_steps = 0;   // a decode step gives a token to each text
        double prefill_s = 0, decode_s = 0;   // including the drawing of tokens
    };
    const Times& times() const { return times_; }

private:
    enum Input { kTokens, kSlots, kPositions, kInputs };
    struct Text {
        size_t number;   // of the prompt
        std::vector<int32_t> tokens;
        int64_t generated;
        int32_t slot;
        bool ended = false;
    };

    DeviceBatch upload(Ctx& ctx, int64_t rows, bool decode, int64_t longest);
    int32_t* host(Input input, int64_t rows) const { return pinned_ ? pinned_ + input * rows : nullptr; }
    int64_t rows_for(const Ctx& ctx, int64_t rows) const;
    void download(Ctx& ctx, const Tensor& logits);
    void prefill(Ctx& ctx, const std::vector<int32_t>& prompt, int32_t slot);
    void decode(Ctx& ctx, const std::vector<Text>& texts);
    void extend(Text& text, int64_t row) const;

    const Limits limits_;
    Decoder& decoder_;
    Fp8State& fp8_;
    CachedRows cached_;
    Tensor inputs_, bad_tokens_, logits_;   // (kInputs, rows) int32; int32; (padded texts, Vp) T
    std::vector<char> raw_;                 // logits on the host
    const size_t vocab_;
    int32_t* pinned_ = nullptr;
    Sampling sampling_;
    std::vector<int32_t> eos_;
    Times times_;
};

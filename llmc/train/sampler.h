// Text that a model goes on with: samples during training and `generate`. No token's keys and values are kept: every
// token is a forward pass over the whole text, in memory that training has anyway.
#pragma once
#include <cstdint>
#include <vector>

#include "llmc/model/decoder.h"
#include "llmc/model/fp8_state.h"

struct Sampling {
    int64_t tokens = 0;       // to add
    double temperature = 0;   // 0: the likeliest
    int64_t top_k = 0;        // draw among the so many likeliest; 0: all
    uint64_t seed = 0;
};

// What a forward pass over one text is given and leaves; device memory is the caller's.
struct SamplerMemory {
    int32_t* device_tokens = nullptr;   // (max_seq)
    int32_t* bad_tokens = nullptr;      // device, (1)
    int32_t* host_tokens = nullptr;     // (max_seq), pinned; null while rehearsing
};

class Sampler {
public:
    // Takes a row of logits from the arena. max_seq: what a forward pass holds; nothing else is owned.
    Sampler(const ModelConfig& shape, Dtype dtype, int64_t max_seq, Decoder& decoder, Fp8State& fp8, Arena& arena);

    // The prompt (at least one token) and what follows it. Draws are keyed by (seed, stream, place). Text that grows
    // beyond max_seq is seen by its last max_seq tokens. Blocking; ends early when a stop is wanted.
    std::vector<int32_t> continue_text(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                       uint64_t stream, const SamplerMemory& memory);

private:
    void next_logits(Ctx& ctx, const std::vector<int32_t>& text, int64_t T, const SamplerMemory& memory);

    const int64_t max_seq_;
    Decoder& decoder_;
    Fp8State& fp8_;
    Tensor row_;                    // (Vp) working type, on the device
    std::vector<char> raw_;         // the same on the host
    std::vector<float> logits_;     // (V)
};

// Index drawn from softmax(logits / temperature) with u uniform in [0, 1); temperature 0 takes the largest. top_k > 0:
// among that many largest, of equal ones those of lower index.
int32_t sample_token(const std::vector<float>& logits, double temperature, double u, int64_t top_k = 0);

// Tokens of a forward pass over a text of so many: few different lengths, because every one is a set of matmul shapes.
int64_t padded_length(int64_t tokens, int64_t max_seq);

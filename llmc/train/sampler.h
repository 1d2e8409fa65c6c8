// Samples of text, during training in its memory and for `generate`. Every token takes a forward pass over the whole
// text: no keys and values are kept.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "llmc/model/decoder.h"
#include "llmc/model/parameters/fp8_state.h"
#include "llmc/parallel/comm/comm.h"

struct Sampling {
    int64_t tokens = 0;               // to generate
    double temperature = 0;           // 0: greedy
    int64_t top_k = 0;                // 0: all
    uint64_t seed = 0;
    std::vector<int32_t> eos = {};    // a text ends with the first of them that is generated
};

// The caller's memory for the inputs of a forward pass.
struct SamplerMemory {
    int32_t* device_tokens = nullptr;   // (max_seq)
    int32_t* bad_tokens = nullptr;      // device, (1)
    int32_t* host_tokens = nullptr;     // (max_seq), pinned; null while rehearsing
};

class Sampler {
public:
    // Allocates a row of logits from the arena. Owns none of its arguments. context: the ranks that share a sequence.
    Sampler(const ModelConfig& shape, Dtype dtype, int64_t max_seq, Decoder& decoder, Fp8State& fp8, Comm& context,
            Arena& arena);

    // Returns the prompt (at least one token) and its continuation. Random numbers are keyed by (seed, stream, token
    // number). The model sees the last max_seq tokens. Blocking; ends early once stopped() is true. Exit 4 if a logit
    // is not finite, as with weights that are not.
    // All ranks of a context group make the same call and get the same text.
    std::vector<int32_t> continue_text(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                       uint64_t stream, const SamplerMemory& memory,
                                       const std::function<bool()>& stopped);

private:
    void next_logits(Ctx& ctx, const std::vector<int32_t>& text, const SamplerMemory& memory);

    const int64_t max_seq_;
    Decoder& decoder_;
    Fp8State& fp8_;
    Comm& context_;
    Tensor row_;                  // (Vp) working type, on the device
    std::vector<float> logits_;   // (V), the same
};

// Draws an index from softmax(logits / temperature) with u uniform in [0, 1); temperature 0 takes the largest. top_k >
// 0: only from the top_k largest, with ties resolved to lower indices.
int32_t sample_token(const std::vector<float>& logits, double temperature, double u, int64_t top_k = 0);

// The length of a forward pass over a text of `tokens`, split among `ranks`. There are few different lengths, because
// each has its own matmul shapes.
int64_t padded_length(int64_t tokens, int64_t max_seq, int64_t ranks = 1);

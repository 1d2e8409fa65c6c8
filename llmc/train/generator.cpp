#include "llmc/train/generator.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "llmc/base/check.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/fault/shutdown.h"

namespace {

// Adds the time until its end to *seconds.
class Stopwatch {
public:
    explicit Stopwatch(double* seconds) : seconds_(seconds) {}
    ~Stopwatch() { *seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
    Stopwatch(const Stopwatch&) = delete;

private:
    double* const seconds_;
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

Generator::Generator(const ModelConfig& shape, Dtype dtype, const Limits& limits, Decoder& decoder, Fp8State& fp8,
                     Arena& arena)
    : limits_(limits), decoder_(decoder), fp8_(fp8),
      inputs_(arena.take(Purpose::kInputs, Dtype::kInt32, kInputs * max_rows(limits))),
      bad_tokens_(arena.take(Purpose::kInputs, Dtype::kInt32, 1)),
      logits_(arena.take(Purpose::kInputs, dtype, padded(limits.texts) * shape.padded_vocab())),
      vocab_(static_cast<size_t>(shape.vocab_size)) {
    const int64_t width = 2 * shape.num_query_groups * shape.kv_channels;
    cached_.capacity = limits.positions;
    for (int64_t l = 0; l < shape.num_layers; l++)
        cached_.layers.push_back(arena.take(Purpose::kActivations, dtype, limits.texts * limits.positions * width));
}

int64_t Generator::rows_for(const Ctx& ctx, int64_t rows) const {
    return ctx.sm > 0 || ctx.rehearsal || fp8_.on() ? padded(rows) : rows;
}

void Generator::download(Ctx& ctx, const Tensor& logits) {
    if (!ctx.rehearsal) raw_.resize(static_cast<size_t>(logits.bytes()));
    device::copy_to_host(ctx, raw_.data(), logits.data, logits.bytes());
    device::synchronize(ctx);
}

// Appends padding to the rows that the host has written, and copies them to the device.
DeviceBatch Generator::upload(Ctx& ctx, int64_t rows, bool decode, int64_t longest) {
    const int64_t N = rows_for(ctx, rows);
    int32_t* const device = static_cast<int32_t*>(inputs_.data);
    for (int64_t n = rows; n < N && !ctx.rehearsal; n++)
        host(kTokens, N)[n] = host(kSlots, N)[n] = 0, host(kPositions, N)[n] = -1;
    device::copy_to_device(ctx, device, pinned_, kInputs * N * dtype_bytes(Dtype::kInt32));
    cached_.slots = device + kSlots * N;
    cached_.positions = device + kPositions * N;
    cached_.decode = decode;
    cached_.longest = longest;
    fp8_.begin_micro_batch(ctx, 0, Fp8Phase::kEvaluation);
    return {.tokens = device, .targets = nullptr, .token_order = nullptr,
            .bad_tokens = static_cast<int32_t*>(bad_tokens_.data), .documents = nullptr, .B = decode ? N : 1,
            .T = decode ? 1 : N, .cached = &cached_};
}

void Generator::prefill(Ctx& ctx, const std::vector<int32_t>& prompt, int32_t slot) {
    const int64_t length = static_cast<int64_t>(prompt.size()), N = rows_for(ctx, length);
    for (int64_t n = 0; n < length && !ctx.rehearsal; n++) {
        host(kTokens, N)[n] = prompt[static_cast<size_t>(n)];
        host(kSlots, N)[n] = slot;
        host(kPositions, N)[n] = static_cast<int32_t>(n);
    }
    const DeviceBatch batch = upload(ctx, length, false, 0);
    decoder_.forward(ctx, batch, false);
    const Tensor row = logits_.slice(0, logits_.elems / padded(limits_.texts));
    decoder_.logits_row(ctx, batch, length - 1, row);
    download(ctx, row);
    times_.prefill_tokens += length;
}

// Runs the last token of each text. The rows of raw_ are then the logits of the texts.
void Generator::decode(Ctx& ctx, const std::vector<Text>& texts) {
    const int64_t rows = static_cast<int64_t>(texts.size()), N = rows_for(ctx, rows);
    int64_t longest = ctx.rehearsal ? limits_.positions : 0;
    for (int64_t n = 0; n < rows && !ctx.rehearsal; n++) {
        const Text& text = texts[static_cast<size_t>(n)];
        const auto length = static_cast<int64_t>(text.tokens.size());
        host(kTokens, N)[n] = text.tokens.back();
        host(kSlots, N)[n] = text.slot;
        host(kPositions, N)[n] = static_cast<int32_t>(length - 1);
        longest = std::max(longest, length);
    }
    const DeviceBatch batch = upload(ctx, rows, true, longest);
    decoder_.forward(ctx, batch, false);
    const int64_t row_elems = logits_.elems / padded(limits_.texts);
    decoder_.logits_all(ctx, logits_.slice(0, N * row_elems), N);
    download(ctx, logits_.slice(0, rows * row_elems));
    times_.decode_tokens += rows;
    times_.decode_steps++;
}

// Draws the next token of a text from a row of raw_. May be called for several texts at once.
void Generator::extend(Text& text, int64_t row) const {
    const int64_t bytes = logits_.bytes() / padded(limits_.texts);
    std::vector<float> logits(vocab_);
    widen_logits(raw_.data() + row * bytes, logits_.dtype, logits);
    text.tokens.push_back(draw_token(logits, sampling_, text.number, text.generated++));
    text.ended = text.generated == sampling_.tokens
                 || std::find(eos_.begin(), eos_.end(), text.tokens.back()) != eos_.end();
}

void Generator::rehearse(Ctx& ctx) {
    CHECK(ctx.rehearsal, "a rehearsal on a device that runs");
    prefill(ctx, std::vector<int32_t>(static_cast<size_t>(limits_.prompt)), 0);
    decode(ctx, std::vector<Text>(static_cast<size_t>(limits_.texts)));
    times_ = {};
}

void Generator::run(Ctx& ctx, const std::vector<std::vector<int32_t>>& prompts, const Sampling& sampling,
                    const std::vector<int32_t>& eos, void* pinned, const Done& done) {
    sampling_ = sampling, eos_ = eos, pinned_ = static_cast<int32_t*>(pinned);
    device::fill_bytes(ctx, bad_tokens_.data, 0, bad_tokens_.bytes());
    std::vector<int32_t> free_slots;
    for (auto slot = static_cast<int32_t>(limits_.texts); slot-- > 0;) free_slots.push_back(slot);
    std::vector<Text> active;
    std::map<size_t, std::vector<int32_t>> ended;   // texts that wait for an earlier text to end
    size_t begun = 0, given = 0;
    // Takes texts out of `active`, all or those that have ended; false if no more are wanted.
    auto retire = [&](bool all) {
        for (const Text& text : active)
            if (all || text.ended) ended[text.number] = text.tokens, free_slots.push_back(text.slot);
        std::erase_if(active, [&](const Text& text) { return all || text.ended; });
        for (; ended.count(given); ended.erase(given++))
            if (!done(ended[given])) return false;
        return true;
    };
    while (!stop_wanted()) {
        post_progress();
        if (begun < prompts.size() && !free_slots.empty()) {
            CHECK(!prompts[begun].empty(), "an empty prompt");
            const Stopwatch stopwatch(&times_.prefill_s);
            active.push_back({.number = begun, .tokens = prompts[begun], .generated = 0, .slot = free_slots.back()});
            free_slots.pop_back();
            prefill(ctx, prompts[begun++], active.back().slot);
            extend(active.back(), 0);
        } else if (!active.empty()) {
            const Stopwatch stopwatch(&times_.decode_s);
            decode(ctx, active);
#pragma omp parallel for schedule(dynamic, 1)
            for (size_t n = 0; n < active.size(); n++) extend(active[n], static_cast<int64_t>(n));
        } else {
            break;
        }
        if (!retire(false)) return;
    }
    retire(true);
}

#include "llmc/commands/command.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>

#include "llmc/base/system/standard_streams.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/huggingface/model_extras.h"
#include "llmc/checkpoint/load.h"
#include "llmc/config/prompt.h"
#include "llmc/fault/shutdown.h"
#include "llmc/ops/owned.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/train/log/run_log.h"
#include "llmc/train/sampler.h"

namespace {

// A model to load: `path` itself, or its newest undamaged checkpoint if it is a folder of checkpoints.
struct FoundModel {
    std::string path, directory;
    std::vector<std::string> skipped;   // newer checkpoints that are damaged, with the reason
};
// Exit 5 if all checkpoints in the folder are damaged.
FoundModel find_model(const std::string& path) {
    if (is_regular_file(path + "/config.json") || !is_directory(path)) return {path, path, {}};
    const std::vector<int64_t> steps = checkpoint_steps(path);
    if (steps.empty()) require_undamaged(path, "config.json");
    REQUIRE(!steps.empty(), "--load %s: has neither a config.json nor checkpoints; name a model or the --save of a run",
            path.c_str());
    FoundModel found{.path = path, .directory = "", .skipped = {}};
    for (auto step = steps.rbegin(); step != steps.rend(); step++) {
        found.directory = path + "/" + step_directory_name(*step);
        std::string damage = is_directory(found.directory) ? model_damage(found.directory, "config.json")
                                                           : "it is not a directory";
        if (damage.empty() && !is_regular_file(found.directory + "/config.json")) damage = "config.json is missing";
        if (damage.empty()) damage = model_damage(found.directory, "model");   // the weights and their index
        if (damage.empty()) return found;
        found.skipped.push_back(found.directory + ": " + damage);
    }
    FAIL(kExitNoCheckpoint, "no usable model at %s; take another checkpoint, or remove its manifest.json if files "
         "were changed on purpose", list_text(found.skipped, "; ").c_str());
}

// Weights in the working dtype, without training state.
class InferenceStore : public ParamStore {
public:
    InferenceStore(const Config& config, const FlatLayout& layout, Arena& arena)
        : all(arena.take(Purpose::kWeights, config.dtype, layout.flat_elems())), layout_(layout) {}

    void before_layer(Ctx&, int, Pass) override {}
    void after_layer(Ctx&, int, Pass) override {}
    Tensor weight(int param) const override { return layout_.view(all, param); }
    Tensor grad(int) const override { return {}; }

    const Tensor all;

private:
    const FlatLayout& layout_;
};

// Weights, buffers, decoder and sampler; constructed twice, first to measure the memory.
class Model {
public:
    // longest: tokens of the text.
    Model(const Config& config, const ParamTable& table, int64_t longest, Arena& arena)
        : table_(table), layout_(table, {}, INT64_MAX), fp8_(config, {}, layout_, false, arena),
          store_(config, layout_, arena), max_seq_(padded_length(longest, config.shape.max_positions)),
          decoder_(config.shape, table_, {.max_seq = max_seq_, .dtype = config.dtype, .forward_only = true},
                   arena, store_, fp8_),
          comm_(open_single()), sampler_(config.shape, config.dtype, max_seq_, decoder_, fp8_, *comm_, arena),
          inputs_(arena.take(Purpose::kInputs, Dtype::kInt32, max_seq_ + 1)) {}

    void load(Ctx& ctx, const Config& config) {
        device::fill_bytes(ctx, store_.all.data, 0, store_.all.bytes());
        decoder_.upload_constants(ctx);
        StateAccess access;   // the masters of load_hf_weights are rounded and not kept
        std::vector<bf16> rounded;
        access.write = [&](StateKind, int index, int64_t begin, int64_t count, const void* host) {
            const Tensor to = store_.weight(index).slice(begin, count);
            const auto* values = static_cast<const float*>(host);
            rounded.resize(static_cast<size_t>(count));
            std::transform(values, values + count, rounded.begin(), [](float x) { return bf16(x); });
            device::copy_to_device(ctx, to.data, config.dtype == Dtype::kBf16 ? static_cast<const void*>(rounded.data())
                                                                              : values, to.bytes());
            device::synchronize(ctx);
        };
        load_hf_weights(config.load, config.shape, table_, access, *open_single());
    }

    // host_tokens: pinned memory of host_bytes(), null while rehearsing.
    std::vector<int32_t> continue_text(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                       void* host_tokens) {
        auto* const tokens = static_cast<int32_t*>(inputs_.data);
        return sampler_.continue_text(ctx, prompt, sampling, 0,
                                      {.device_tokens = tokens, .bad_tokens = tokens + max_seq_,
                                       .host_tokens = static_cast<int32_t*>(host_tokens)}, stop_wanted);
    }
    int64_t host_bytes() const { return max_seq_ * dtype_bytes(Dtype::kInt32); }

private:
    const ParamTable& table_;
    const FlatLayout layout_;
    Fp8State fp8_;
    InferenceStore store_;
    const int64_t max_seq_;
    Decoder decoder_;
    const std::unique_ptr<Comm> comm_;
    Sampler sampler_;
    const Tensor inputs_;   // (max_seq + 1): the tokens, and the count of those outside the vocabulary
};

// Device memory of a Model, by rehearsal of the longest forward pass.
int64_t planned_bytes(const Config& config, const ParamTable& table, int64_t longest) {
    Ctx ctx;
    ctx.rehearsal = true;
    Arena arena;
    Model(config, table, longest, arena)
        .continue_text(ctx, std::vector<int32_t>(static_cast<size_t>(longest)), {.tokens = 1}, nullptr);
    return arena.peak_bytes();
}

void print(const std::vector<int32_t>& text, bool bytes) {
    std::string line = tokens_text(text, bytes);
    if (isatty(STDOUT_FILENO)) line = screen_text(line);
    line += '\n';
    std::fwrite(line.data(), 1, line.size(), stdout);
    const int error = flush_stdout();
    if (error != 0 && error != EPIPE) FAIL(kExitDisk, "standard output cannot be written: %s", std::strerror(error));
}

// Closes the device at the end, also after an Error.
struct OpenDevice {
    Ctx ctx;
    explicit OpenDevice(int index) { device::device_open(ctx, index); }
    ~OpenDevice() { device::device_close(ctx); }
};

int generate(const FoundModel& files, Config config) {
    config.load = files.directory;
    const bool bytes = is_bytes(tokenizer_vocabulary(config.load), config.shape.vocab_size);
    const std::vector<int32_t> prompt = read_prompt(config, bytes, config.shape.max_positions, "the model's positions");
    REQUIRE(!prompt.empty(), "generate needs a prompt: --prompt '1 2 3', token ids, or text of a vocabulary of bytes");
    const Sampling sampling{.tokens = config.sample_tokens, .temperature = config.temperature, .top_k = config.top_k,
                            .seed = config.seed, .eos = eos_token_ids(config.load)};
    const int64_t given = static_cast<int64_t>(prompt.size()), longest = given + sampling.tokens;
    const ParamTable table = make_param_table(config.shape);
    const int64_t needed = planned_bytes(config, table, longest);
    OpenDevice device(0);
    device::gemm_set_search(device.ctx, false);   // a search takes longer than generating a text, and its results vary
    const int64_t free_bytes = device::device_free_bytes();
    REQUIRE(needed <= free_bytes, "generate needs %.2f GiB of device memory for a text of %lld tokens, and %.2f GiB "
            "are free: lower --sample-tokens", gib(needed), ll(longest), gib(free_bytes));
    const DevicePtr<> memory(device::device_alloc(needed));
    Arena arena(memory.get(), needed);
    Model model(config, table, longest, arena);
    const PinnedPtr<> host_tokens(device::pinned_alloc(model.host_bytes()));
    model.load(device.ctx, config);
    for (const std::string& damage : files.skipped)
        std::fprintf(stderr, "note: skipped checkpoint: %s\n", message_line(damage).c_str());
    std::fprintf(stderr, "weights: %s\n", message_line(config.load).c_str());
    const auto start = std::chrono::steady_clock::now();
    const std::vector<int32_t> text = model.continue_text(device.ctx, prompt, sampling, host_tokens.get());
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    print(text, prints_bytes(config, bytes));
    const int64_t tokens = static_cast<int64_t>(text.size()) - given;
    std::fprintf(stderr, "generated: %s in %.3f s, %.1f tokens/s\n", count_text(tokens, "token").c_str(), seconds,
                 static_cast<double>(tokens) / seconds);
    return kExitOk;
}

}  // namespace

Job parse_generate(const Invocation& call, Comm&) {
    auto model = std::make_shared<FoundModel>();   // looked for once, since that reads the weights
    const Machine machine{.gpu = device::device_info(-1).toolkit != "", .ranks = 1,
                          .read_shape = [model](const std::string& directory) {
                              if (model->path != directory) *model = find_model(directory);
                              return model_config_from_hf(model->directory);
                          }};
    ParsedConfig parsed = parse_generate_config(static_cast<int>(call.words.size()), call.words.data(), call.family,
                                                machine);
    if (!parsed.help) return [model, config = std::move(parsed.config)] { return generate(*model, config); };
    std::printf("%s", parsed.text.c_str());
    return {};
}

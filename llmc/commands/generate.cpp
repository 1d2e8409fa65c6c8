#include "llmc/commands/generate.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "llmc/base/standard_streams.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/hf_config.h"
#include "llmc/checkpoint/load.h"
#include "llmc/config/prompts.h"
#include "llmc/parallel/comm.h"
#include "llmc/train/log.h"
#include "llmc/train/sampler.h"

namespace {

using Prompts = std::vector<std::vector<int32_t>>;

int64_t longest_text(const Prompts& prompts, const Config& config) {
    size_t longest = 0;
    for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
    return static_cast<int64_t>(longest) + config.sample_tokens;
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

// The buffers and the decoder for one text; constructed twice, first to measure the memory.
class Model {
public:
    Model(const Config& config, const ParamTable& table, Arena& arena)
        : table_(table), layout_(table, {}, INT64_MAX), fp8_(config, {}, layout_, false, arena),
          store_(config, layout_, arena),
          tokens_(arena.take(Purpose::kInputs, Dtype::kInt32, config.seq_length)),
          bad_tokens_(arena.take(Purpose::kInputs, Dtype::kInt32, 1)),
          decoder_(config.shape, table_, {.max_batch = 1, .max_seq = config.seq_length, .dtype = config.dtype,
                                          .recompute = Recompute::kBlock, .fuse_gelu = false, .fp8_attention = false},
                   arena, store_, fp8_),
          sampler_(config.shape, config.dtype, config.seq_length, decoder_, fp8_, arena) {}

    void load(Ctx& ctx, const Config& config) {
        device::fill_bytes(ctx, store_.all.data, 0, store_.all.bytes());
        device::fill_bytes(ctx, bad_tokens_.data, 0, bad_tokens_.bytes());
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

    std::vector<int32_t> continue_text(Ctx& ctx, const std::vector<int32_t>& prompt, const Sampling& sampling,
                                       uint64_t stream, int32_t* host_tokens) {
        return sampler_.continue_text(ctx, prompt, sampling, stream,
                                      {.device_tokens = static_cast<int32_t*>(tokens_.data),
                                       .bad_tokens = static_cast<int32_t*>(bad_tokens_.data),
                                       .host_tokens = host_tokens});
    }

private:
    const ParamTable& table_;
    const FlatLayout layout_;
    Fp8State fp8_;
    InferenceStore store_;
    const Tensor tokens_, bad_tokens_;
    Decoder decoder_;
    Sampler sampler_;
};

// Device memory of a Model, by rehearsal.
int64_t planned_bytes(const Config& config, const ParamTable& table) {
    Ctx ctx;
    ctx.rehearsal = true;
    Arena arena;
    Model(config, table, arena)
        .continue_text(ctx, std::vector<int32_t>(static_cast<size_t>(config.seq_length)), {.tokens = 1}, 0, nullptr);
    return arena.peak_bytes();
}

// Returns false if nobody reads standard output any more.
bool print(const std::vector<int32_t>& text, TokenForm form) {
    std::string line = tokens_text(text, form);
    if (isatty(STDOUT_FILENO)) line = screen_text(line);
    line += '\n';
    std::fwrite(line.data(), 1, line.size(), stdout);
    const int error = flush_stdout();
    if (error != 0 && error != EPIPE) FAIL(kExitDisk, "standard output cannot be written: %s", std::strerror(error));
    return error == 0;
}

// Frees memory and closes the device at the end, also after an Error.
struct OpenDevice {
    Ctx ctx;
    void* memory = nullptr;
    void* pinned = nullptr;
    explicit OpenDevice(int index) { device::device_open(ctx, index); }
    ~OpenDevice() {
        if (pinned) device::pinned_free(pinned);
        if (memory) device::device_free(memory);
        device::device_close(ctx);
    }
};

int generate(const FoundModel& files, Config config) {
    config.load = files.directory;
    const int64_t limit = config.shape.max_positions;
    const Prompts prompts = read_prompts(config, limit, "the model's positions", true);
    REQUIRE(!prompts.empty(), "generate needs a prompt: --prompt-ids '1 2 3', --prompt-bytes TEXT or --prompts FILE");
    const TokenForm form = token_form(config);
    config.seq_length = padded_length(longest_text(prompts, config), limit);
    config.micro_batch_size = 1;
    const ParamTable table = make_param_table(config.shape);
    const int64_t bytes = planned_bytes(config, table);
    OpenDevice device(0);
    device::gemm_set_search(device.ctx, false);   // a search takes longer than a text, and its results vary
    device.memory = device::device_alloc(bytes);
    device.pinned = device::pinned_alloc(config.seq_length * dtype_bytes(Dtype::kInt32));
    Arena arena(device.memory, bytes);
    Model model(config, table, arena);
    model.load(device.ctx, config);
    for (const std::string& damage : files.skipped)
        std::fprintf(stderr, "note: skipped checkpoint: %s\n", message_line(damage).c_str());
    std::fprintf(stderr, "weights: %s\n", message_line(config.load).c_str());
    const Sampling sampling{.tokens = config.sample_tokens, .temperature = config.temperature, .top_k = config.top_k,
                            .seed = config.seed};
    auto* const tokens = static_cast<int32_t*>(device.pinned);
    for (size_t i = 0; i < prompts.size(); i++)
        if (!print(model.continue_text(device.ctx, prompts[i], sampling, i, tokens), form)) break;
    return kExitOk;
}

}  // namespace

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
                                                           : "it is no directory";
        if (damage.empty() && !is_regular_file(found.directory + "/config.json")) damage = "config.json is missing";
        if (damage.empty()) damage = model_damage(found.directory, "model");   // the weights and their index
        if (damage.empty()) return found;
        found.skipped.push_back(found.directory + ": " + damage);
    }
    std::string all;
    for (const std::string& line : found.skipped) all += (all.empty() ? "" : "; ") + line;
    FAIL(kExitNoCheckpoint, "no usable model at %s; take another checkpoint, or remove its manifest.json if files "
         "were changed on purpose", all.c_str());
}

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

#include "llmc/commands/generate.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "llmc/base/system/standard_streams.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/huggingface/hf_tokens.h"
#include "llmc/checkpoint/load.h"
#include "llmc/config/prompts.h"
#include "llmc/ops/owned.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/train/generator.h"
#include "llmc/train/log/run_log.h"

namespace {

using Prompts = std::vector<std::vector<int32_t>>;

Generator::Limits limits_of(const Prompts& prompts, const Config& config) {
    Generator::Limits limits{.texts = std::min(config.inference_max_requests, static_cast<int64_t>(prompts.size()))};
    for (const auto& prompt : prompts) limits.prompt = std::max(limits.prompt, static_cast<int64_t>(prompt.size()));
    limits.positions = limits.prompt + config.sample_tokens;
    return limits;
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

// Weights, buffers, decoder and generator; constructed twice, first to measure the memory.
class Model {
public:
    Model(const Config& config, const ParamTable& table, const Generator::Limits& limits, Arena& arena)
        : table_(table), layout_(table, {}, INT64_MAX), fp8_(config, {}, layout_, false, arena),
          store_(config, layout_, arena),
          decoder_(config.shape, table_, {.max_batch = 1, .max_seq = Generator::max_rows(limits),
                                          .max_positions = limits.positions, .dtype = config.dtype,
                                          .recompute = Recompute::kBlock, .fp8_attention = false},
                   arena, store_, fp8_),
          generator_(config.shape, config.dtype, limits, decoder_, fp8_, arena) {}

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

    Generator& generator() { return generator_; }

private:
    const ParamTable& table_;
    const FlatLayout layout_;
    Fp8State fp8_;
    InferenceStore store_;
    Decoder decoder_;
    Generator generator_;
};

// Device memory of a Model, by rehearsal.
int64_t planned_bytes(const Config& config, const ParamTable& table, const Generator::Limits& limits) {
    Ctx ctx;
    ctx.rehearsal = true;
    Arena arena;
    Model(config, table, limits, arena).generator().rehearse(ctx);
    return arena.peak_bytes();
}

void require_memory(int64_t bytes, const Generator::Limits& limits) {
    const int64_t free_bytes = device::device_free_bytes();
    REQUIRE(bytes <= free_bytes, "generate needs %.2f GiB of device memory for %s of %lld tokens at once, and %.2f GiB "
            "are free: lower --inference-max-requests or --sample-tokens", gib(bytes),
            count_text(limits.texts, "text").c_str(), ll(limits.positions), gib(free_bytes));
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

// Closes the device at the end, also after an Error.
struct OpenDevice {
    Ctx ctx;
    explicit OpenDevice(int index) { device::device_open(ctx, index); }
    ~OpenDevice() { device::device_close(ctx); }
};

void report(const Generator::Times& t) {
    auto per_second = [](int64_t tokens, double seconds) {
        return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
    };
    std::fprintf(stderr, "prefill: %s in %.3f s, %.1f tokens/s\n", count_text(t.prefill_tokens, "token").c_str(),
                 t.prefill_s, per_second(t.prefill_tokens, t.prefill_s));
    if (t.decode_steps > 0)
        std::fprintf(stderr, "decode: %s in %.3f s, %.1f tokens/s, %.2f ms per token of a text\n",
                     count_text(t.decode_tokens, "token").c_str(), t.decode_s,
                     per_second(t.decode_tokens, t.decode_s), t.decode_s / static_cast<double>(t.decode_steps) * 1e3);
}

int generate(const FoundModel& files, Config config) {
    config.load = files.directory;
    const Prompts prompts = read_prompts(config, config.shape.max_positions, "the model's positions", true);
    REQUIRE(!prompts.empty(), "generate needs a prompt: --prompt-ids '1 2 3', --prompt-bytes TEXT or --prompts FILE");
    const TokenForm form = token_form(config);
    std::vector<int32_t> eos = read_stop_ids(config);
    if (!config.ignore_eos)
        for (int32_t id : eos_token_ids(config.load)) eos.push_back(id);
    const Generator::Limits limits = limits_of(prompts, config);
    const ParamTable table = make_param_table(config.shape);
    const int64_t bytes = planned_bytes(config, table, limits);
    OpenDevice device(0);
    device::gemm_set_search(device.ctx, false);   // a search takes longer than generating a text, and its results vary
    require_memory(bytes, limits);
    const DevicePtr<> memory(device::device_alloc(bytes));
    const PinnedPtr<> pinned(device::pinned_alloc(Generator::pinned_bytes(limits)));
    Arena arena(memory.get(), bytes);
    Model model(config, table, limits, arena);
    model.load(device.ctx, config);
    for (const std::string& damage : files.skipped)
        std::fprintf(stderr, "note: skipped checkpoint: %s\n", message_line(damage).c_str());
    std::fprintf(stderr, "weights: %s\n", message_line(config.load).c_str());
    const Sampling sampling{.tokens = config.sample_tokens, .temperature = config.temperature, .top_k = config.top_k,
                            .top_p = config.top_p, .seed = config.seed};
    model.generator().run(device.ctx, prompts, sampling, eos, pinned.get(),
                        [&](const std::vector<int32_t>& text) { return print(text, form); });
    report(model.generator().times());
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
                                                           : "it is not a directory";
        if (damage.empty() && !is_regular_file(found.directory + "/config.json")) damage = "config.json is missing";
        if (damage.empty()) damage = model_damage(found.directory, "model");   // the weights and their index
        if (damage.empty()) return found;
        found.skipped.push_back(found.directory + ": " + damage);
    }
    FAIL(kExitNoCheckpoint, "no usable model at %s; take another checkpoint, or remove its manifest.json if files "
         "were changed on purpose", list_text(found.skipped, "; ").c_str());
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

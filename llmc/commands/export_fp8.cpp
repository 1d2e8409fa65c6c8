#include "llmc/commands/export_fp8.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "llmc/base/fp8.h"
#include "llmc/base/json_object.h"
#include "llmc/base/text.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/huggingface/hf_code.h"
#include "llmc/checkpoint/huggingface/hf_tensors.h"
#include "llmc/checkpoint/load.h"
#include "llmc/commands/generate.h"
#include "llmc/config/config_table.h"
#include "llmc/ops/ops.h"
#include "llmc/perf/fp8_speedup.h"

namespace {

using Ordered = nlohmann::ordered_json;   // keeps the order of config.json
namespace fs = std::filesystem;

constexpr int64_t kBlock = 128, kCopyBytes = int64_t{1} << 26;
constexpr const char* kWeight = ".weight";

std::string module_of(const std::string& tensor) { return tensor.substr(0, tensor.rfind('.')); }

// The run of a checkpoint: its options, and which linears ran in FP8.
struct SavedRun {
    nlohmann::json state;
    Config config;
    ParamTable table;
    Fp8Plan plan;
    std::map<int, const LinearPlan*> fp8;   // by the number of the weight's parameter
};

// Sets every option that the run had; the model's shape is in config.json.
Config saved_config(const nlohmann::json& options, const std::string& directory) {
    Config config;
    for (const OptionRow& row : option_table()) {
        const auto found = options.find(row.name);
        REQUIRE(found == options.end() || row.value.set(config, *found),
                "%s/state.json: \"%s\" has a value that no run can have had", directory.c_str(), row.name);
    }
    config.shape = model_config_from_hf(directory);
    return config;
}

SavedRun read_run(const std::string& directory) {
    REQUIRE(is_regular_file(directory + "/state.json"),
            "export-fp8 --load %s: has no state.json: name a checkpoint of a run in FP8, with its optimizer state",
            directory.c_str());
    for (const char* prefix : {"config.json", "state.json", "model", state_row(StateKind::kMaster).file})
        require_undamaged(directory, prefix);
    SavedRun run;
    run.state = read_json_object(directory + "/state.json", kMaxStateBytes);
    run.config = saved_config(run.state.at("config"), directory);
    REQUIRE(run.config.fp8_recipe != Fp8Recipe::kNone, "export-fp8 --load %s: its run was not in FP8",
            directory.c_str());
    const HfClass reader = hf_class(run.config.shape);
    REQUIRE(reader == HfClass::kLlama || reader == HfClass::kQwen3,
            "export-fp8 --load %s: neither transformers nor vLLM reads FP8 weights of %s, only of Llama's and Qwen3's "
            "shapes", directory.c_str(), reader == HfClass::kGpt2 ? "GPT-2, which has no nn.Linear" : "this shape");
    run.table = make_param_table(run.config.shape);
    run.plan = fp8_plan_of(run.config, run.table);
    for (const LinearPlan& linear : run.plan.linears)
        if (linear.fp8) run.fp8[linear.weight] = &linear;
    return run;
}

// The scale with which delayed scaling casts a weight.
float saved_scale(const SavedRun& run, const std::string& directory, const LinearPlan& linear) {
    const auto& tensors = run.state.at("fp8").at("tensors");
    const auto found = tensors.find(linear.name + kWeight);
    REQUIRE(found != tensors.end(), "%s/state.json has no scale of %s.weight, which by the run's options was in FP8",
            directory.c_str(), linear.name.c_str());
    return std::bit_cast<float>(found->at("quant_mul_bits").get<uint32_t>());
}

// A weight as the run's matmuls read it.
struct QuantizedWeight {
    int64_t rows = 0, cols = 0;
    Granularity granularity = Granularity::kTensor;
    std::vector<uint8_t> codes;        // (rows, cols) E4M3
    std::vector<float> scale_inv;      // see Granularity

    float scale_inv_at(int64_t row, int64_t col) const {
        if (granularity == Granularity::kTensor) return scale_inv[0];
        const int64_t stride = round_up(ceil_div(cols, kBlock), 4);
        return scale_inv[static_cast<size_t>(row / kBlock * stride + col / kBlock)];
    }
    float value(int64_t row, int64_t col) const {
        return from_fp8(Dtype::kE4m3, codes[static_cast<size_t>(row * cols + col)]) * scale_inv_at(row, col);
    }
};

QuantizedWeight quantize_master(const SavedRun& run, const std::string& directory, const LinearPlan& linear,
                                const SafetensorsReader& masters) {
    const Param& param = run.table.params[static_cast<size_t>(linear.weight)];
    const RecipeRow& row = run.plan.row();
    std::vector<float> master(static_cast<size_t>(param.elems()));
    const SafetensorsView& view = masters.tensor(param.name);
    REQUIRE(view.dtype == "F32" && view.elems() == param.elems(), "%s: the masters of %s do not fit the model",
            directory.c_str(), param.name.c_str());
    CHECK(read_as_fp32(view, 0, param.elems(), master.data()), "masters of %s", param.name.c_str());
    QuantizedWeight weight{.rows = param.rows, .cols = param.cols, .granularity = row.weight,
                           .codes = std::vector<uint8_t>(master.size()),
                           .scale_inv = std::vector<float>(static_cast<size_t>(
                               scale_inv_elems(row.weight, param.rows, param.cols)))};
    Ctx ctx;
    ScaleEntry entry{.scale_inv = 1, .scale = 1, .amax_bits = 0, .step_amax_bits = 0};
    const Tensor in{master.data(), Dtype::kFp32, param.elems()};
    if (row.history) entry.scale = saved_scale(run, directory, linear);
    else if (row.weight == Granularity::kTensor) cpu::amax(ctx, {.entry = &entry, .in = in});
    QuantOut quant{.rowwise = {weight.codes.data(), Dtype::kE4m3, param.elems()}, .granularity = row.weight,
                   .scaling = row.scaling, .entry = &entry};
    if (row.weight != Granularity::kTensor)
        quant.rowwise_scale_inv = {weight.scale_inv.data(), Dtype::kFp32,
                                   static_cast<int64_t>(weight.scale_inv.size())};
    cpu::quantize(ctx, {.quant = quant, .in = in, .N = param.rows, .C = param.cols});
    if (row.weight == Granularity::kTensor) weight.scale_inv[0] = entry.scale_inv;
    return weight;
}

// Whether readers accept a parameter in FP8: if it holds several matrices (q, k and v, or gate and up), all of them.
bool fits_readers(const Param& param, Granularity granularity) {
    if (granularity == Granularity::kTensor) return true;
    return param.cols % kBlock == 0 && std::all_of(param.hf.begin(), param.hf.end(), [](const HfPart& part) {
        return part.row_begin % kBlock == 0 && part.rows % kBlock == 0;
    });
}

// The tensors of the export: those of the checkpoint, and after every weight in FP8 its scale_inv.
struct Content {
    std::vector<HfTensor> tensors;
    std::vector<std::string> bf16_modules;   // linears that readers must load as BF16
    int64_t fp8_linears = 0, kept = 0;       // kept: of those that ran in FP8, exported in BF16
};

Content content_of(const SavedRun& run) {
    const Granularity granularity = run.plan.row().weight;
    const bool blocks = granularity != Granularity::kTensor;
    Content content;
    std::set<int> linears;   // parameters that are weights of linears
    for (const LinearPlan& linear : run.plan.linears) linears.insert(linear.weight);
    std::set<int> seen;
    for (HfTensor& tensor : hf_tensors(run.table, Dtype::kBf16)) {
        const bool fp8 = run.fp8.count(tensor.param) > 0, first = seen.insert(tensor.param).second;
        const bool head = tensor.param == run.table.head;
        const bool fits = !head && fits_readers(run.table.params[static_cast<size_t>(tensor.param)], granularity);
        if (fp8 && fits) {
            HfTensor scale = tensor;
            scale.entry.name = module_of(tensor.entry.name) + (blocks ? ".weight_scale_inv" : ".weight_scale");
            scale.entry.dtype = Dtype::kFp32;
            scale.entry.shape = {1};
            if (blocks) scale.entry.shape = {ceil_div(tensor.part.rows, kBlock),
                                             ceil_div(tensor.entry.shape[1], kBlock)};
            tensor.entry.dtype = Dtype::kE4m3;
            content.fp8_linears += first;
            content.tensors.push_back(std::move(tensor));
            content.tensors.push_back(std::move(scale));
            continue;
        }
        content.kept += fp8 && first;
        if (linears.count(tensor.param) && !head) content.bf16_modules.push_back(module_of(tensor.entry.name));
        content.tensors.push_back(std::move(tensor));
    }
    content.bf16_modules.push_back("lm_head");   // also if it is tied to the embedding
    return content;
}

Ordered quantization_config(const SavedRun& run, const Content& content) {
    // Sources: config.json of DeepSeek-V3; transformers' FineGrainedFP8Config. vLLM's Fp8Config calls the list
    // ignored_layers.
    if (run.plan.row().weight != Granularity::kTensor)
        return {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"},
                {"weight_block_size", {kBlock, kBlock}}, {"modules_to_not_convert", content.bf16_modules},
                {"ignored_layers", content.bf16_modules}};
    // Source: compressed-tensors' QuantizationConfig, which transformers and vLLM read. Activations get a scale per
    // token at inference.
    auto arguments = [](const char* strategy, bool dynamic) {
        return Ordered{{"num_bits", 8}, {"type", "float"}, {"symmetric", true}, {"strategy", strategy},
                    {"dynamic", dynamic}};
    };
    return {{"quant_method", "compressed-tensors"}, {"format", "float-quantized"},
            {"quantization_status", "compressed"}, {"ignore", content.bf16_modules},
            {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", arguments("tensor", false)},
                                            {"input_activations", arguments("token", true)}}}}}};
}

// Writes the data of one tensor.
class TensorWriter {
public:
    TensorWriter(const SavedRun& run, const std::string& directory)
        : run_(run), directory_(directory), files_(directory),
          masters_(directory + "/" + state_row(StateKind::kMaster).file) {}

    void write(const HfTensor& tensor, OutputFile& out) {
        const auto fp8 = run_.fp8.find(tensor.param);
        if (fp8 == run_.fp8.end() || tensor.param == run_.table.head) return copy(tensor, out);
        if (param_ != tensor.param) weight_ = quantize_master(run_, directory_, *fp8->second, masters_);
        param_ = tensor.param;
        const int64_t begin = tensor.part.row_begin, rows = tensor.part.rows;
        const uint8_t* const codes = weight_.codes.data() + begin * weight_.cols;
        if (tensor.entry.dtype == Dtype::kE4m3) out.write(codes, rows * weight_.cols);
        else if (tensor.entry.dtype == Dtype::kFp32) write_scales(begin, rows, out);
        else write_values(begin, rows, out);
    }

private:
    // Copies a tensor without changing its dtype.
    void copy(const HfTensor& tensor, OutputFile& out) const {
        const auto found = files_.tensors().find(tensor.entry.name);
        REQUIRE(found != files_.tensors().end() && found->second.view->bytes == tensor.entry.bytes(),
                "%s: tensor %s is missing or does not fit the model", directory_.c_str(), tensor.entry.name.c_str());
        const SafetensorsView& view = *found->second.view;
        std::vector<char> block(static_cast<size_t>(std::min(kCopyBytes, view.bytes)));
        for (int64_t done = 0; done < view.bytes; done += kCopyBytes) {
            const int64_t bytes = std::min(kCopyBytes, view.bytes - done);
            view.read(done, bytes, block.data());
            out.write(block.data(), bytes);
        }
    }
    void write_scales(int64_t begin, int64_t rows, OutputFile& out) const {
        const bool blocks = weight_.granularity != Granularity::kTensor;
        std::vector<float> scales;
        for (int64_t row = begin; row < begin + (blocks ? rows : 1); row += kBlock)
            for (int64_t col = 0; col < (blocks ? weight_.cols : 1); col += kBlock)
                scales.push_back(weight_.scale_inv_at(row, col));
        out.write(scales.data(), static_cast<int64_t>(scales.size() * sizeof(float)));
    }
    void write_values(int64_t begin, int64_t rows, OutputFile& out) const {
        std::vector<bf16> line(static_cast<size_t>(weight_.cols));
        for (int64_t row = begin; row < begin + rows; row++) {
            for (int64_t col = 0; col < weight_.cols; col++) {
                const float value = weight_.value(row, col);
                const bf16 rounded(value);
                CHECK(static_cast<float>(rounded) == value, "%g is not a BF16 number", static_cast<double>(value));
                line[static_cast<size_t>(col)] = rounded;
            }
            out.write(line.data(), weight_.cols * int64_t{sizeof(bf16)});
        }
    }

    const SavedRun& run_;
    const std::string& directory_;
    const HfModelFiles files_;
    const SafetensorsReader masters_;
    int param_ = -1;
    QuantizedWeight weight_;   // of param_
};

void write_model(const SavedRun& run, const std::string& directory, const Content& content, int64_t max_part_bytes,
                 StagedDirectory& staged) {
    TensorWriter writer(run, directory);
    const auto parts = split_parts(content.tensors, max_part_bytes);
    for (size_t i = 0; i < parts.size(); i++) {
        const std::string name = part_file_name(i, parts.size());
        OutputFile out(staged.path(name));
        const std::string header = safetensors_header(entries_of(parts[i]));
        out.write(header.data(), static_cast<int64_t>(header.size()));
        for (const HfTensor& tensor : parts[i]) writer.write(tensor, out);
        out.close();
        staged.add(name, {out.bytes(), {{0, out.bytes(), 0, out.xxh3()}}});
    }
    if (parts.size() > 1) staged.write_text("model.safetensors.index.json", part_index_json(parts));
}

struct ExportOptions {
    std::string load, out;
    bool help = false;
};

ExportOptions export_options(const std::vector<std::string>& words) {
    ExportOptions options;
    read_command_options(words, {"export-fp8", {{"--load", &options.load}, {"--out", &options.out}},
                                 {{"--help", &options.help}}});
    REQUIRE(options.help || (!options.load.empty() && !options.out.empty()),
            "export-fp8 needs --load CHECKPOINT and --out DIR");
    return options;
}

std::string help_text(const std::string& family) {
    return "usage: train_" + family + " export-fp8 --load CHECKPOINT --out DIR\n\n"
           "Writes the model of a checkpoint with the FP8 weights that its run trained with, for transformers and\n"
           "vLLM. Blockwise runs get DeepSeek-V3's layout, delayed and tensorwise runs that of compressed-tensors.\n\n"
           "  --load PATH   a checkpoint of a run in FP8, or the --save of one: its newest checkpoint\n"
           "  --out DIR     a new folder; tokenizer and other files of the checkpoint are copied to it\n";
}

}  // namespace

std::string export_fp8(const std::string& checkpoint, const std::string& out, int64_t max_part_bytes) {
    REQUIRE(!path_exists(out), "--out %s: exists already: name a new folder", out.c_str());
    const SavedRun run = read_run(checkpoint);
    const Content content = content_of(run);
    REQUIRE(content.fp8_linears > 0, "export-fp8 --load %s: no reader takes any of its linears in FP8: their sides are "
            "no multiples of %lld", checkpoint.c_str(), ll(kBlock));
    Ordered config = Ordered::parse(read_text_file(checkpoint + "/config.json", kMaxStateBytes));
    config["quantization_config"] = quantization_config(run, content);

    const fs::path place = fs::absolute(out).lexically_normal();
    const fs::path folder = place.has_filename() ? place : place.parent_path();   // without a last slash
    make_directories(folder.parent_path().string());
    StagedDirectory staged(folder.parent_path().string(), folder.filename().string(), {});
    write_model(run, checkpoint, content, max_part_bytes, staged);
    staged.write_text("config.json", config.dump(2) + "\n");
    std::vector<ModelFile> others = hf_code(run.config.shape);
    for (ModelFile& file : read_model_extras(checkpoint, "").files) others.push_back(std::move(file));
    for (const ModelFile& file : others) staged.write_text(file.name, file.bytes);
    const std::string path = staged.commit();

    std::string text = strf("%s: %s of %zu in FP8 (%s)\n", path.c_str(),
                            count_text(content.fp8_linears, "linear").c_str(), run.plan.linears.size(),
                            run.plan.row().name);
    if (content.kept > 0)
        text += strf("note: %s that ran in FP8: exported in BF16, since readers take neither an FP8 head nor sides "
                     "that are no multiple of %lld\n", count_text(content.kept, "linear").c_str(), ll(kBlock));
    return text;
}

Job parse_export_fp8(const Invocation& call, Comm&) {
    const ExportOptions options = export_options({call.words.begin() + 1, call.words.end()});
    if (options.help) {
        std::printf("%s", help_text(call.family).c_str());
        return {};
    }
    return [options] {
        const FoundModel model = find_model(options.load);
        for (const std::string& damage : model.skipped)
            std::fprintf(stderr, "note: skipped checkpoint: %s\n", damage.c_str());
        std::printf("%s", export_fp8(model.directory, options.out, kMaxPartBytes).c_str());
        return kExitOk;
    };
}

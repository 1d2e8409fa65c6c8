// export-fp8 against the FP8 weights that the run has in memory: codes and scales are equal to the bit, for every
// recipe, with shapes that readers support and shapes that they do not.
#include "tests/support/checkpoint_test.h"
#include "tests/support/fp8_model_test.h"

#include <set>

#include "llmc/base/fp8.h"
#include "llmc/commands/export_fp8.h"

namespace fs = std::filesystem;
using namespace checkpoint_test;

namespace {

// q, k and v begin at multiples of 128; ffn says whether gate and up do.
ModelConfig shape_of(int64_t ffn) {
    ModelConfig shape = fp8_shapes()[1];
    shape.hidden_size = 256;
    shape.ffn_hidden_size = ffn;
    shape.num_attention_heads = 4;
    shape.num_query_groups = 2;
    shape.kv_channels = 64;
    return shape;
}

Config config_of(int64_t ffn, Fp8Recipe recipe) {
    Config config = fp8_config(shape_of(ffn), recipe);
    config.model = "llama-tiny";
    config.lr = 0.02;
    config.bf16_linears = {"1.down"};
    config.fp8_lm_head = true;
    return config;
}

std::string save_of(TestModel& model, const std::string& root, int64_t step) {
    CheckpointRequest request = request_of(root, step);
    auto state = nlohmann::json::parse(request.state_json);
    Config config = model.config;   // and the options that only a run has
    config.log_interval = config.train_iters = 1;
    state["config"] = nlohmann::json::parse(config_to_json(config));
    state["fp8"] = nlohmann::json::parse(state_text(model));
    state["samples"] = model.config.global_batch_size * step;
    request.state_json = state.dump();
    return save_checkpoint(request, model.config.shape, model.table, model.trainer->state_access(model.ctx));
}

// The scale_inv of the trainer's weight at an element.
float scale_inv_of(TestModel& model, const Fp8Linear& linear, int64_t row, int64_t col) {
    const std::vector<char> bytes = raw(model, linear.weight.scale_inv);
    const auto* scales = reinterpret_cast<const float*>(bytes.data());
    if (linear.weight.granularity == Granularity::kTensor) return scales[0];
    return scales[row / 128 * (((linear.in + 127) / 128 + 3) / 4 * 4) + col / 128];
}

// Compares a part of a weight, exported in FP8, with the trainer's; returns the number of scales.
int64_t check_fp8(TestModel& model, const Fp8Linear& linear, const HfPart& part, const HfModelFiles& files) {
    const std::string module = part.name.substr(0, part.name.rfind('.'));
    const bool blocks = linear.weight.granularity != Granularity::kTensor;
    const SafetensorsView& codes = *files.tensors().at(part.name).view;
    const SafetensorsView& scales =
        *files.tensors().at(module + (blocks ? ".weight_scale_inv" : ".weight_scale")).view;
    CHECK(codes.dtype == "F8_E4M3");
    CHECK(codes.shape == std::vector<int64_t>{part.rows, linear.in});
    CHECK(scales.dtype == "F32");
    const int64_t down = blocks ? (part.rows + 127) / 128 : 1, across = blocks ? (linear.in + 127) / 128 : 1;
    CHECK(scales.shape == (blocks ? std::vector<int64_t>{down, across} : std::vector<int64_t>{1}));
    const std::vector<char> own = raw(model, linear.weight.data);
    CHECK(codes.content() == std::string(own.data() + part.row_begin * linear.in,
                                         static_cast<size_t>(part.rows * linear.in)));
    std::vector<float> found(static_cast<size_t>(scales.elems()));
    scales.read(0, scales.bytes, found.data());
    for (int64_t i = 0; i < down; i++)
        for (int64_t j = 0; j < across; j++)
            CHECK(found[static_cast<size_t>(i * across + j)]
                  == scale_inv_of(model, linear, part.row_begin + i * 128, j * 128));
    return down * across;
}

// A part in BF16 whose values are those of the trainer's FP8 weight.
void check_kept(TestModel& model, const Fp8Linear& linear, const HfPart& part, const HfModelFiles& files) {
    const SafetensorsView& view = *files.tensors().at(part.name).view;
    REQUIRE(view.dtype == "BF16");
    std::vector<float> found(static_cast<size_t>(view.elems()));
    REQUIRE(read_as_fp32(view, 0, view.elems(), found.data()));
    const std::vector<char> own = raw(model, linear.weight.data);
    int64_t wrong = 0;
    for (int64_t i = 0; i < view.elems(); i++) {
        const int64_t row = part.row_begin + i / linear.in, col = i % linear.in;
        const auto code = static_cast<uint8_t>(own[static_cast<size_t>(row * linear.in + col)]);
        wrong += found[static_cast<size_t>(i)] != from_fp8(Dtype::kE4m3, code) * scale_inv_of(model, linear, row, col);
    }
    CHECK(wrong == 0);
}

nlohmann::json quantization_of(const std::string& directory) {
    return nlohmann::json::parse(slurp(directory + "/config.json")).at("quantization_config");
}

std::string refusal_of(const std::string& checkpoint, const std::string& out, int exit_code) {
    try {
        export_fp8(checkpoint, out, kMaxPartBytes);
        return "";
    } catch (const Error& error) {
        CHECK(error.exit_code == exit_code);
        return error.what();
    }
}

}  // namespace

TEST_CASE("export-fp8: codes and scales are those of the run, and some layers stay in BF16") {
    for (const int64_t ffn : {384, 144}) {
        for (const Fp8Recipe recipe : kFp8Recipes) {
            CAPTURE(ffn);
            CAPTURE(static_cast<int>(recipe));
            TempDir dir;
            TestModel model(config_of(ffn, recipe));
            for (uint64_t i = 0; i < 3; i++) {
                model.set_random_batch(4, 50 + i);
                model.step();
                CHECK(model.result.skip == 0);
            }
            const std::string checkpoint = save_of(model, dir / "run", 3), out = dir / "model";
            spill(checkpoint + "/tokenizer.json", "{\"a\": 1}");
            const std::string said = export_fp8(checkpoint, out, kMaxPartBytes);
            const HfModelFiles files(out), before(checkpoint);
            const bool blocks = recipe == Fp8Recipe::kBlockwise;
            std::set<std::string> kept;
            int64_t scales = 0, fp8 = 0;
            for (const HfTensor& tensor : hf_tensors(model.table, Dtype::kBf16)) {
                CAPTURE(tensor.entry.name);
                const Fp8Linear* linear = model.trainer->fp8().linear_of_param(tensor.param);
                const bool fits = !blocks || ffn % 128 == 0 || tensor.entry.name.find("mlp") == std::string::npos;
                if (linear && tensor.param != model.table.head && fits) {
                    scales += check_fp8(model, *linear, tensor.part, files);
                    fp8++;
                    continue;
                }
                if (linear && tensor.param != model.table.head) check_kept(model, *linear, tensor.part, files);
                else CHECK(files.tensors().at(tensor.entry.name).view->content()
                           == before.tensors().at(tensor.entry.name).view->content());
                if (tensor.entry.name.find("proj") != std::string::npos || tensor.param == model.table.head)
                    kept.insert(tensor.entry.name.substr(0, tensor.entry.name.rfind('.')));
            }
            CHECK(fp8 == (blocks && ffn == 144 ? 8 : 13));   // of 14: 1.down is in BF16
            CHECK(files.tensors().size() == before.tensors().size() + static_cast<size_t>(fp8));
            CHECK(scales > 0);
            const auto quantization = quantization_of(out);
            const auto listed = quantization.at(blocks ? "modules_to_not_convert" : "ignore");
            CHECK(std::set<std::string>(listed.begin(), listed.end()) == kept);
            CHECK(kept.count("model.layers.1.mlp.down_proj") == 1);
            CHECK(kept.count("lm_head") == 1);
            if (blocks) {
                CHECK(quantization.at("quant_method") == "fp8");
                CHECK(quantization.at("fmt") == "e4m3");
                CHECK(quantization.at("activation_scheme") == "dynamic");
                CHECK(quantization.at("weight_block_size") == nlohmann::json{128, 128});
                CHECK(quantization.at("ignored_layers") == listed);
            } else {
                CHECK(quantization.at("quant_method") == "compressed-tensors");
                CHECK(quantization.at("format") == "float-quantized");
                CHECK(quantization.at("config_groups").at("group_0").at("weights").at("strategy") == "tensor");
            }
            // The head ran in FP8, too.
            check_contains(said, {strf("%d linears of 9 in FP8 (%s)", blocks && ffn == 144 ? 4 : 7,
                                       recipe_row(recipe).name),
                                  strf("%d linear", blocks && ffn == 144 ? 4 : 1)});
            CHECK(slurp(out + "/tokenizer.json") == "{\"a\": 1}");
            CHECK_FALSE(fs::exists(out + "/state.json"));
            CHECK_FALSE(fs::exists(out + "/optimizer"));

            // Split into files of at most 100 kB the weights are the same; a step later they differ.
            export_fp8(checkpoint, dir / "parts", 100000);
            const HfModelFiles parts(dir / "parts");
            CHECK_FALSE(fs::exists((dir / "parts") + "/model.safetensors"));
            for (const auto& [name, found] : files.tensors())
                CHECK(parts.tensors().at(name).view->content() == found.view->content());
            model.step();
            export_fp8(save_of(model, dir / "run", 4), dir / "later", kMaxPartBytes);
            const HfModelFiles later(dir / "later");
            CHECK(later.tensors().at("model.layers.0.self_attn.q_proj.weight").view->content()
                  != files.tensors().at("model.layers.0.self_attn.q_proj.weight").view->content());
        }
    }
}

TEST_CASE("export-fp8: checkpoints without FP8 weights that a reader could use are refused") {
    TempDir dir;
    auto saved = [&](const Config& config, const std::string& name) {
        TestModel model(config);
        model.set_random_batch(4, 50);
        model.step();
        return save_of(model, dir / name, 1);
    };
    const std::string good = saved(config_of(384, Fp8Recipe::kBlockwise), "good");
    check_contains(refusal_of(good, dir / "good", kExitBadInput), {"--out ", "exists already"});
    Config bf16 = config_of(384, Fp8Recipe::kNone);
    bf16.bf16_linears = {}, bf16.fp8_lm_head = false;
    check_contains(refusal_of(saved(bf16, "bf16"), dir / "x", kExitBadInput), {"its run was not in FP8"});
    Config gpt2 = fp8_config(fp8_shapes()[0], Fp8Recipe::kDelayed);
    gpt2.model = "gpt2-tiny";
    check_contains(refusal_of(saved(gpt2, "gpt2"), dir / "x", kExitBadInput), {"GPT-2, which has no nn.Linear"});
    Config small = fp8_config(fp8_shapes()[1], Fp8Recipe::kBlockwise);
    small.model = "llama-tiny";
    check_contains(refusal_of(saved(small, "small"), dir / "x", kExitBadInput), {"no multiples of 128"});
    fs::remove(good + "/state.json");
    check_contains(refusal_of(good, dir / "x", kExitBadInput), {"has no state.json"});
    // A weight that is in FP8 according to the options but has no scale; a damaged master.
    Config delayed = config_of(384, Fp8Recipe::kDelayed);
    const std::string other = saved(delayed, "delayed");
    std::string masters = slurp(other + "/optimizer/master.safetensors");
    masters[masters.size() - 5] ^= 1;
    spill(other + "/optimizer/master.safetensors", masters);
    check_contains(refusal_of(other, dir / "x", kExitNoCheckpoint), {"optimizer/master.safetensors"});
    CHECK_FALSE(fs::exists(dir / "x"));
}

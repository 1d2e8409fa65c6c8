// The kernels that a training step launches. Small runs of the recipes must take the fast paths that docs/ names. Every
// kernel of llmc/cuda must run in one of them or be listed with a reason, so that one that no run reaches is found.
#include <cuda_runtime.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "llmc/cuda/common.h"
#include "tests/gpu/gpu_tensor.h"
#include "tests/support/fp8_model_test.h"

namespace fast_paths_test {

namespace {

using Kernels = std::map<std::string, std::set<std::string>>;   // by operation, the mangled names

// The kernels in a graph. Those of cuBLASLt, which the runtime cannot name, are "library".
void add_kernels(cudaGraph_t graph, std::set<std::string>& names) {
    size_t count = 0;
    CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
    for (cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type;
        CUDA_CHECK(cudaGraphNodeGetType(node, &type));
        if (type != cudaGraphNodeTypeKernel) continue;
        cudaKernelNodeParams params{};
        const char* name = nullptr;
        const bool known = cudaGraphKernelNodeGetParams(node, &params) == cudaSuccess
                           && cudaFuncGetName(&name, params.func) == cudaSuccess;
        names.insert(known && name ? name : "library");
        (void)cudaGetLastError();
    }
}

// While it exists, executes each operation and captures it a second time, into a graph that is not launched.
struct Capture {
    Kernels kernels;
    Capture() {
        around_operations = [this](Ctx& ctx, const char* name, const std::function<void()>& run) {
            run();
            cudaGraph_t graph = nullptr;
            CUDA_CHECK(cudaStreamBeginCapture(cuda::stream_of(ctx), cudaStreamCaptureModeRelaxed));
            run();
            CUDA_CHECK(cudaStreamEndCapture(cuda::stream_of(ctx), &graph));
            add_kernels(graph, kernels[name]);
            CUDA_CHECK(cudaGraphDestroy(graph));
        };
    }
    ~Capture() { around_operations = nullptr; }
    Capture(const Capture&) = delete;
};

// A mangled name has the length of each identifier before it.
bool is(const std::string& mangled, const std::string& kernel) {
    return mangled.find(std::to_string(kernel.size()) + kernel) != std::string::npos;
}
bool launches(const std::set<std::string>& names, const std::string& kernel) {
    return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return is(name, kernel); });
}

ModelConfig llama_128() {
    ModelConfig c = tiny_llama();
    c.hidden_size = 256, c.ffn_hidden_size = 384, c.num_attention_heads = 2, c.num_query_groups = 1;
    c.kv_channels = 128, c.vocab_size = 500, c.max_positions = 128;
    return c;
}
ModelConfig qwen_128() {
    ModelConfig c = llama_128();
    c.qk_norm = true;
    return c;
}
ModelConfig olmo2_128() {
    ModelConfig c = qwen_128();
    c.num_query_groups = 2, c.qk_norm_whole = true, c.norm_place = NormPlace::kPost;
    return c;
}
ModelConfig gemma_128() {
    ModelConfig c = qwen_128();
    c.gemma = true, c.norm_place = NormPlace::kBoth, c.activation = Activation::kGeglu;
    return c;
}
ModelConfig sinks_128() {
    ModelConfig c = llama_128();
    c.attention_sinks = true;
    return c;
}
ModelConfig moe_128() {
    ModelConfig c = qwen_128();
    c.num_experts = 8;
    return c;
}
ModelConfig olmoe_128() {
    ModelConfig c = moe_128();
    c.hidden_size = 384, c.num_attention_heads = c.num_query_groups = 3, c.qk_norm_whole = true;
    return c;
}
ModelConfig gpt_oss_128() {
    ModelConfig c = llama_128();
    c.num_experts = 8, c.activation = Activation::kClampedSwiglu, c.linear_bias = LinearBias::kAll;
    c.attention_sinks = true;
    return c;
}
ModelConfig shared_moe_128() {
    ModelConfig c = moe_128();
    c.shared_experts = 1;
    return c;
}
ModelConfig gpt2_64(int64_t hidden) {
    ModelConfig c = tiny_gpt2();
    c.hidden_size = hidden, c.ffn_hidden_size = 2 * hidden, c.num_attention_heads = c.num_query_groups = hidden / 64;
    c.kv_channels = 64, c.vocab_size = 500, c.max_positions = 128;
    return c;
}

struct Expected {
    const char* operation;
    const char* kernel;
    bool launched = true;
};
constexpr const char* kTile = "quantize_tile_kernel";   // a pass that quantizes, or records an amax
const std::vector<Expected> kWgmma = {{"attention_forward", "attention_forward_sm90_kernel"},
                                      {"attention_backward", "attention_backward_fused_sm90_kernel"},
                                      {"attention_backward", kTile, false}};
// In one pass: with delayed scaling and with blocks the cast, with current scaling the amax.
const std::vector<Expected> kDelayedLlama = {{"rmsnorm_forward", "norm_forward_quantize_kernel"},
                                             {"rmsnorm_forward", kTile, false},
                                             {"rmsnorm_backward", "norm_backward_quantize_kernel"},
                                             {"rmsnorm_backward", kTile, false}, {"rope_backward", "rope_rows_kernel"},
                                             {"rope_backward", kTile, false}, {"activation_forward", kTile},
                                             {"activation_forward", "gated_forward_kernel", false},
                                             {"activation_backward", kTile},
                                             {"activation_backward", "gated_backward_kernel", false}};
const std::vector<Expected> kTensorwiseLlama = {{"rmsnorm_forward", "norm_forward_kernel"},
                                                {"rmsnorm_forward", kTile, false}, {"rmsnorm_backward", kTile, false},
                                                {"rope_backward", "rope_kernel"}, {"rope_backward", kTile, false},
                                                {"activation_forward", "gated_forward_kernel", false},
                                                {"activation_backward", "gated_backward_kernel", false},
                                                {"quantize", kTile}};
const std::vector<Expected> kBlockwiseLlama = {{"activation_forward", "gated_forward_kernel", false},
                                               {"activation_backward", "gated_backward_kernel", false},
                                               {"gemm", "gemm_fp8_blockwise_sm90_kernel"}};
const std::vector<Expected> kInt8Llama = {{"gemm", "gemm_int8_sm90_kernel"}, {"quantize_int8", "quantize_int8_kernel"},
                                          {"transpose_int8", "transpose_int8_kernel"},
                                          {"rmsnorm_forward", "norm_forward_quantize_kernel"}};
const std::vector<Expected> kFp8Attention = {{"attention_forward", "attention_forward_fp8_sm90_kernel"},
                                             {"quantize_heads", "quantize_heads_kernel"}};
const std::vector<Expected> kBiasSums = {{"activation_backward", "bias_backward_kernel", false},
                                         {"layernorm_backward", "bias_backward_kernel", false},
                                         {"layernorm_backward", kTile, false}};
const std::vector<Expected> kSeveralWarps = {{"layernorm_forward", "norm_forward_quantize_kernel"},
                                         {"layernorm_forward", kTile, false}};

struct Run {
    const char* name;
    ModelConfig shape;
    Fp8Recipe recipe;
    std::vector<Expected> expected;
    bool fp8_attention = false;
    OptimizerKind optimizer = OptimizerKind::kAdamW;
};
const std::vector<Run>& runs() {
    static const std::vector<Run> all = {
        {"llama, BF16", llama_128(), Fp8Recipe::kNone, kWgmma},
        {"llama, delayed", llama_128(), Fp8Recipe::kDelayed, kDelayedLlama},
        {"llama, tensorwise", llama_128(), Fp8Recipe::kTensorwise, kTensorwiseLlama},
        {"llama, blockwise", llama_128(), Fp8Recipe::kBlockwise, kBlockwiseLlama},
        {"llama, INT8 forward", llama_128(), Fp8Recipe::kInt8Forward, kInt8Llama},
        {"llama, FP8 attention", llama_128(), Fp8Recipe::kDelayed, kFp8Attention, true},
        {"qwen, delayed", qwen_128(), Fp8Recipe::kDelayed, {{"qk_norm_backward", "qk_norm_backward_kernel"}}},
        {"olmo2, BF16", olmo2_128(), Fp8Recipe::kNone, {{"rmsnorm_forward", "norm_forward_kernel"}}},
        {"olmo2, delayed", olmo2_128(), Fp8Recipe::kDelayed, {{"rmsnorm_backward", "norm_backward_quantize_kernel"}}},
        {"olmo2, blockwise", olmo2_128(), Fp8Recipe::kBlockwise, {{"quantize", kTile}}},
        {"gemma, delayed", gemma_128(), Fp8Recipe::kDelayed, {{"rmsnorm_forward", "norm_forward_quantize_kernel"},
                                                              {"activation_forward", kTile}}},
        {"llama with sinks", sinks_128(), Fp8Recipe::kNone,
         {{"attention_backward", "attention_sinks_backward_kernel"}}},
        {"gpt2, BF16", gpt2_64(128), Fp8Recipe::kNone, kBiasSums},
        {"gpt2, delayed, 1280 columns", gpt2_64(1280), Fp8Recipe::kDelayed, kSeveralWarps},
        {"moe, BF16", moe_128(), Fp8Recipe::kNone,
         {{"grouped_gemm", "gemm_bf16_sm90_kernel"}, {"combine_rows", "combine_rows_kernel"}}},
        {"moe, qk-norm over all heads", olmoe_128(), Fp8Recipe::kNone,
         {{"qk_norm_forward", "norm_forward_kernel"}, {"qk_norm_backward", "norm_backward_kernel"}}},
        {"moe, shared experts", shared_moe_128(), Fp8Recipe::kNone, {{"router_bias", "router_bias_kernel"}}},
        {"gpt-oss", gpt_oss_128(), Fp8Recipe::kNone, {{"expert_bias_backward", "expert_bias_backward_kernel"}}},
        {"moe, blockwise", moe_128(), Fp8Recipe::kBlockwise,
         {{"grouped_gemm", "gemm_fp8_blockwise_sm90_kernel"}, {"transpose_scaled", "transpose_scaled_kernel"},
          {"quantize", "quantize_matrices_kernel"},
          {"expert_activation_forward", kTile, false}, {"expert_activation_backward", kTile, false}}},
        {"llama, Muon", llama_128(), Fp8Recipe::kNone, {{"muon_update", "muon_update_kernel"}}, false,
         OptimizerKind::kMuon},
    };
    return all;
}

// Kernels that the runs above need not launch, and where they run.
const std::map<std::string, std::string>& elsewhere() {
    const std::string other_gpu = "other devices", shape = "head dims or widths of no model that docs/ measures",
                      fp32 = "FP32", ranks = "several ranks";
    static const std::map<std::string, std::string> all = {
        {"attention_forward_mma_kernel", other_gpu}, {"attention_backward_key_mma_kernel", other_gpu},
        {"attention_backward_query_mma_kernel", other_gpu}, {"attention_forward_plain_kernel", shape},
        {"attention_backward_key_plain_kernel", shape}, {"attention_backward_query_plain_kernel", shape},
        {"attention_backward_queries_sm90_kernel", shape},
        {"classifier_loop_kernel", shape}, {"classifier_losses_kernel", "evaluation"},
        {"norm_forward_loop_kernel", shape}, {"norm_backward_loop_kernel", shape},
        {"norm_backward_columns_kernel", shape}, {"qk_norm_forward_loop_kernel", shape},
        {"qk_norm_backward_loop_kernel", shape}, {"qk_norm_backward_columns_kernel", shape},
        {"activation_backward_kernel", fp32}, {"bias_backward_kernel", fp32}, {"split_heads_kernel", ranks},
        {"join_heads_kernel", ranks}, {"quantize_chunks_kernel", ranks}, {"cast_kernel", ranks},
        {"sum_ranks_kernel", ranks}, {"compare_sums_kernel", ranks}, {"block_amax_kernel", ranks},
        {"block_scales_kernel", ranks}, {"fp8_scales_kernel", ranks}, {"quantize_run_kernel", ranks},
        {"transpose_bytes_kernel", ranks}, {"count_scales_kernel", "--fp8-stats-interval"}, {"row_amax_kernel", ranks},
        {"quantize_int8_run_kernel", ranks}, {"row_scales_kernel", ranks}, {"adamw_fp8_kernel", "--moment-dtype fp8"},
        {"muon_momentum_fp8_kernel", "--moment-dtype fp8"},
        {"dlogits_residual_kernel", "--fp8-lm-head"},
        {"gemm_bf16_sm90_kernel", "larger matrices of Muon, and experts"},
    };
    return all;
}

// Makes every plan of blocks name the custom kernel; a call that it does not support would be an error.
void choose_custom_kernel(Ctx& ctx) {
    std::string plans = cuda::gemm_export_plans(ctx);
    const std::regex library(R"(("a_granularity":1,[^}]*"custom":)false)");
    CHECK_EQ(cuda::gemm_import_plans(ctx, std::regex_replace(plans, library, "$1true")), "");
}

Kernels kernels_of(const Run& run) {
    Config config = tiny_config(run.shape, Dtype::kBf16, 1, 128);
    config.optimizer = run.optimizer, config.fp8_recipe = run.recipe;
    config.fp8_format = run.recipe == Fp8Recipe::kBlockwise ? Fp8Format::kE4m3 : Fp8Format::kHybrid;
    config.fp8_attention = run.fp8_attention, config.ema = 0.9;
    if (run.optimizer == OptimizerKind::kMuon) config.muon_beta2 = 0.95, config.qk_clip = 100;
    Capture capture;
    TestModel model(config);
    model.set_random_batch(1, 3);
    model.step();   // the first step of delayed scaling calibrates
    if (run.recipe == Fp8Recipe::kBlockwise) choose_custom_kernel(model.ctx);
    Kernels first = std::exchange(capture.kernels, {});
    model.step();
    for (const Expected& e : run.expected) {
        const std::set<std::string>& launched = capture.kernels[e.operation];
        CHECK_MESSAGE(!launched.empty(), run.name, ": no ", e.operation);
        CHECK_MESSAGE(launches(launched, e.kernel) == e.launched, run.name, ": ", e.operation, " ",
                      e.launched ? "does not launch " : "launches ", e.kernel);
    }
    for (const auto& [operation, names] : capture.kernels) first[operation].insert(names.begin(), names.end());
    return first;
}

// The names of all kernels in llmc/cuda.
std::set<std::string> kernels_in_source() {
    std::set<std::string> names;
    const std::regex kernel(R"(__global__[^;{]*?\b(\w+_kernel)\s*\()");
    for (const auto& file : std::filesystem::directory_iterator("llmc/cuda")) {
        std::stringstream text;
        text << std::ifstream(file.path()).rdbuf();
        const std::string source = text.str();
        for (std::sregex_iterator at(source.begin(), source.end(), kernel), end; at != end; ++at)
            names.insert((*at)[1]);
    }
    return names;
}

}  // namespace

TEST_CASE("gpu fast paths: runs of each recipe take theirs, and every kernel runs somewhere") {
    if (!cuda::kSm90aCode || op_test::gpu().sm != 90) return;
    std::set<std::string> launched;
    for (const Run& run : runs())
        for (const auto& [operation, names] : kernels_of(run)) launched.insert(names.begin(), names.end());
    const std::set<std::string> all = kernels_in_source();
    CHECK_GT(all.size(), 40);
    for (const std::string& kernel : all) {
        const bool listed = elsewhere().count(kernel) > 0;
        CHECK_MESSAGE((listed || launches(launched, kernel)), kernel, " never runs");
    }
    for (const auto& [kernel, reason] : elsewhere())
        CHECK_MESSAGE(all.count(kernel) == 1, kernel, " is listed and does not exist");
}

}  // namespace fast_paths_test

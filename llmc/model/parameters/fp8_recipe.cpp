#include "llmc/model/parameters/fp8_recipe.h"

#include <algorithm>

namespace {

constexpr int64_t kAlignment = 16;   // elements: cuBLASLt requires leading dimensions in multiples of 16 bytes
constexpr int64_t kBlockRowAlignment = 4;   // rows of x: the same rule for its block scales

// Scales of blocks.
constexpr RecipeRow blockwise(Fp8Recipe recipe, const char* name, bool bf16_wgrad) {
    return {.recipe = recipe, .name = name, .x = Granularity::kBlock1x128, .weight = Granularity::kBlock128x128,
            .dy = Granularity::kBlock1x128, .dy_format = Dtype::kE4m3, .fast_accumulation = false, .min_sm = 90,
            .min_cublaslt = 120900, .bf16_wgrad = bf16_wgrad};
}

constexpr RecipeRow kRecipes[] = {
    {.recipe = Fp8Recipe::kDelayed, .name = "delayed", .scaling = Scaling::kDelayed, .history = true},
    {.recipe = Fp8Recipe::kTensorwise, .name = "tensorwise"},
    blockwise(Fp8Recipe::kBlockwise, "blockwise", false),
    blockwise(Fp8Recipe::kBlockwiseBf16Wgrad, "blockwise-bf16-wgrad", true),
    {.recipe = Fp8Recipe::kInt8Forward, .name = "int8-forward", .scaling = Scaling::kDelayed, .history = true,
     .min_sm = 90, .int8_forward = true},
};

// ---- which linears run in FP8 ----

LinearPlan linear_of(const ParamTable& table, int layer, LinearKind kind, int weight) {
    const Param& p = table.params[static_cast<size_t>(weight)];
    const char* name = linear_kind_name(kind);
    return {.name = kind == LinearKind::kHead ? name : strf("%d.%s", layer, name), .layer = layer, .kind = kind,
            .weight = weight, .in = p.cols, .out = p.rows / p.experts, .experts = p.experts,
            .of_experts = p.experts > 1, .fp8 = true, .reason = ""};
}

void keep_in_bf16(LinearPlan& linear, const std::string& reason) {
    if (linear.fp8) linear.reason = reason;
    linear.fp8 = false;
}

void keep_first_and_last(const Config& c, Fp8Plan& plan) {
    if (!c.first_last_layers_bf16) return;
    const int64_t end = c.shape.num_layers - c.num_layers_at_end_in_bf16;
    for (LinearPlan& linear : plan.linears)
        if (linear.kind != LinearKind::kHead && (linear.layer < c.num_layers_at_start_in_bf16 || linear.layer >= end))
            keep_in_bf16(linear, "--first-last-layers-bf16");
}

// Whether `text` matches `pattern`, where * matches any text.
bool matches(const char* pattern, const char* text) {
    if (*pattern == '*') return matches(pattern + 1, text) || (*text && matches(pattern, text + 1));
    return *pattern == *text && (!*text || matches(pattern + 1, text + 1));
}

// A pattern that names no linear, or only linears that stay in BF16 anyway, is an error.
void keep_by_pattern(const Config& c, Fp8Plan& plan) {
    const std::vector<LinearPlan> before = plan.linears;
    for (const std::string& pattern : c.bf16_linears) {
        bool changes = false;
        const LinearPlan* known = nullptr;
        for (size_t i = 0; i < before.size(); i++) {
            if (!matches(pattern.c_str(), before[i].name.c_str())) continue;
            REQUIRE(!c.fp8_lm_head || before[i].kind != LinearKind::kHead,
                    "--fp8-lm-head has no effect: --bf16-linears %s keeps the head in BF16", pattern.c_str());
            known = &before[i];
            changes = changes || before[i].fp8;
            keep_in_bf16(plan.linears[i], "--bf16-linears " + pattern);
        }
        REQUIRE(known, "--bf16-linears %s names no linear: they are LAYER.qkv, LAYER.proj, LAYER.up, LAYER.down with "
                "layers 0 to %lld, and head; * matches any text", pattern.c_str(), ll(c.shape.num_layers - 1));
        REQUIRE(changes, "--bf16-linears %s has no effect: %s is in BF16 already (%s)", pattern.c_str(),
                known->name.c_str(), known->reason.c_str());
    }
}

void keep_where_fp8_loses(const Config& c, Fp8Plan& plan, const Fp8SpeedupOf& speedup_of) {
    if (c.fp8_min_speedup == 0) return;
    CHECK(speedup_of, "--fp8-min-speedup without a prediction");
    for (LinearPlan& linear : plan.linears) {
        if (!linear.fp8) continue;
        const double speedup = speedup_of(c, plan, linear);
        if (speedup < c.fp8_min_speedup)
            keep_in_bf16(linear, strf("predicted speedup %.2f < --fp8-min-speedup %g", speedup, c.fp8_min_speedup));
    }
}

// ---- checks ----

// "0-2, 5"
std::string ranges_text(const std::vector<int>& layers) {
    std::string text;
    for (size_t i = 0; i < layers.size();) {
        size_t last = i;
        while (last + 1 < layers.size() && layers[last + 1] == layers[last] + 1) last++;
        text += strf("%s%d", text.empty() ? "" : ", ", layers[i]);
        if (last > i) text += strf("-%d", layers[last]);
        i = last + 1;
    }
    return text;
}

// The forward matmul contracts over in-features.
int64_t in_alignment(const Fp8Plan& plan, const LinearPlan& linear) {
    return plan.int8_forward() && linear.fp8_forward() ? kTurnedColumns : kAlignment;
}

// The weight gradient contracts over tokens, the input gradient over out-features.
void require_alignment(const Config& c, const Fp8Plan& plan) {
    const int64_t tokens = c.micro_batch_size * c.part_length();
    std::vector<std::string> wrong;
    if (tokens % kAlignment != 0)
        wrong.push_back(strf("tokens %lld x %lld = %lld (--micro-batch-size x --seq-length%s)", ll(c.micro_batch_size),
                             ll(c.part_length()), ll(tokens), c.context_parallel > 1 ? " / --context-parallel" : ""));
    REQUIRE(c.context_parallel == 1 || plan.row().x == Granularity::kTensor || c.part_length() % kScaleBlock == 0,
            "--fp8-recipe %s with --context-parallel %lld: parts of %lld tokens (--seq-length %lld) are no multiple of "
            "%lld, the tokens of a block", plan.row().name, ll(c.context_parallel), ll(c.part_length()),
            ll(c.seq_length), ll(kScaleBlock));
    for (LinearKind kind : {LinearKind::kQkv, LinearKind::kProj, LinearKind::kUp, LinearKind::kDown,
                            LinearKind::kHead}) {
        std::vector<int> layers;
        const LinearPlan* found = nullptr;   // linears of one kind have the same shape
        for (const LinearPlan& linear : plan.linears) {
            if (!linear.fp8 || linear.kind != kind) continue;
            if (linear.in % in_alignment(plan, linear) == 0 && linear.out % kAlignment == 0) continue;
            found = &linear;
            layers.push_back(linear.layer);
        }
        if (!found) continue;
        std::string text = linear_kind_name(kind);
        if (kind != LinearKind::kHead) text += " of layers " + ranges_text(layers);
        text += ":";
        const int64_t needed = in_alignment(plan, *found);
        if (found->in % needed != 0) text += strf(" in-features %lld", ll(found->in));
        if (found->in % needed != 0 && needed != kAlignment) text += strf(" (in INT8: of %lld)", ll(needed));
        if (found->out % kAlignment != 0) text += strf(" out-features %lld", ll(found->out));
        wrong.push_back(text);
    }
    REQUIRE(wrong.empty(), "--fp8-recipe %s: an FP8 matmul needs tokens, in-features and out-features that are "
            "multiples of %lld, but these are not: %s (--bf16-linears keeps single linears in BF16)", plan.row().name,
            ll(kAlignment), list_text(wrong, "; ").c_str());
}

// The chunks of an FP8 head are quantized one by one, so each must have whole scale blocks of tokens for the weight
// gradient.
void require_chunks_fit(const Config& c, const Fp8Plan& plan) {
    const int64_t unit = plan.row().x == Granularity::kTensor ? kAlignment : kScaleBlock;
    REQUIRE(!plan.linears.back().fp8 || c.loss_chunk % unit == 0, "--loss-chunk %lld with an LM head in FP8 "
            "(--fp8-lm-head) and --fp8-recipe %s must be a multiple of %lld", ll(c.loss_chunk), plan.row().name,
            ll(unit));
}

// The kernel for weight gradients of experts counts the blocks of their rows in 14 bits and its tiles in 18, see
// kItemBits there. Rows of an expert begin a block.
void require_expert_gradients_fit(const Config& c, const Fp8Plan& plan) {
    constexpr int64_t kBlocks = 1 << 14, kTiles = 1 << 18, kTile = 256;
    const int64_t rows = c.micro_batch_size * c.part_length() * c.expert_rows_of_token();
    const bool parallel = c.expert_parallel > 1;
    const std::string experts = parallel ? strf("with --expert-parallel %lld ", ll(c.expert_parallel)) : "";
    for (const LinearPlan& linear : plan.linears) {
        if (!linear.fp8 || !linear.of_experts || plan.row().bf16_wgrad) continue;
        const int64_t here = linear.experts / c.expert_parallel, most = (kBlocks - here) * kScaleBlock - 1;
        REQUIRE(rows <= most, "--fp8-recipe %s: FP8 weight gradients are of at most %lld rows of the experts of a "
                "rank, and %s--micro-batch-size %lld x %lld tokens have up to %lld: lower --micro-batch-size%s, raise "
                "--context-parallel, or give --fp8-recipe blockwise-bf16-wgrad", plan.row().name, ll(most),
                experts.c_str(), ll(c.micro_batch_size), ll(c.part_length()), ll(rows),
                parallel ? " or --moe-capacity" : "");
        const int64_t tiles = here * ceil_div(linear.out, kTile) * ceil_div(linear.in, kTile);
        REQUIRE(tiles < kTiles, "--fp8-recipe %s: FP8 weight gradients of the %lld experts of a rank, %lld x %lld in "
                "%s, have %lld tiles of %lld x %lld, and fewer than %lld are supported: raise --expert-parallel, or "
                "give --fp8-recipe blockwise-bf16-wgrad", plan.row().name, ll(here), ll(linear.out), ll(linear.in),
                linear.name.c_str(), ll(tiles), ll(kTile), ll(kTile), ll(kTiles));
    }
}

// Sampling runs one sequence at a time, whatever the size of the micro-batch.
void require_samples_fit(const Config& c, const Fp8Plan& plan) {
    const bool fit = plan.row().x == Granularity::kTensor || c.part_length() % kBlockRowAlignment == 0;
    REQUIRE(fit || c.sample_every == 0, "--fp8-recipe %s with --sample-every: an FP8 matmul of one sequence needs "
            "--seq-length in multiples of %lld, not %lld", plan.row().name, ll(kBlockRowAlignment), ll(c.seq_length));
}

void require_any_fp8(const Fp8Plan& plan) {
    if (plan.fp8_linears() > 0) return;
    std::vector<std::string> reasons;
    for (const LinearPlan& linear : plan.linears)
        if (std::find(reasons.begin(), reasons.end(), linear.reason) == reasons.end()) reasons.push_back(linear.reason);
    FAIL(kExitBadInput, "--fp8-recipe %s has no effect: no linear is left to run in FP8 (%s)", plan.row().name,
         list_text(reasons, "; ").c_str());
}

std::string version_text(int64_t version) {
    return strf("%lld.%lld.%lld", ll(version / 10000), ll(version / 100 % 100), ll(version % 100));
}

// ---- text ----

const char* format_name(Dtype format) { return format == Dtype::kE5m2 ? "E5M2" : "E4M3"; }

std::string scales_text(const Fp8Plan& plan, const Config& c) {
    if (plan.recipe == Fp8Recipe::kTensorwise) return "one scale per tensor, from its current amax";
    if (is_blockwise(plan.recipe))
        return "one power-of-two scale per 1x128 block of x and dy and per 128x128 block of w, from its amax";
    const bool recent = c.fp8_amax_compute_algo == AmaxAlgo::kMostRecent;
    const std::string amax = recent ? "amax of the latest optimizer step"
                                    : strf("largest amax of the last %lld optimizer steps", ll(c.fp8_amax_history_len));
    return strf("one scale per tensor, from the %s (the history counts steps, not micro-batches), margin %lld, new "
                "scales every %s", amax.c_str(), ll(c.fp8_margin),
                c.fp8_interval == 1 ? "step" : strf("%lld steps", ll(c.fp8_interval)).c_str());
}

// The precision of a layer's linears: "qkv up in FP8 | proj down in BF16 (why)".
std::string precision_text(const LinearPlan* linears) {
    std::string fp8;
    std::vector<std::pair<std::string, std::string>> bf16;   // reason, names
    for (int k = 0; k < kLinearsPerLayer; k++) {
        const std::string name = linear_kind_name(linears[k].kind);
        if (linears[k].fp8) {
            fp8 += (fp8.empty() ? "" : " ") + name;
            continue;
        }
        auto known = std::find_if(bf16.begin(), bf16.end(), [&](auto& b) { return b.first == linears[k].reason; });
        if (known == bf16.end()) bf16.emplace_back(linears[k].reason, name);
        else known->second += " " + name;
    }
    std::string text = fp8.empty() ? "" : fp8 + " in FP8";
    for (const auto& [reason, names] : bf16)
        text += (text.empty() ? "" : " | ") + names + " in BF16 (" + reason + ")";
    return text;
}

std::string labelled(const std::string& label, const std::string& text) {
    return strf("  %-15s %s\n", label.c_str(), text.c_str());
}

// The different precision_texts, each with "layer 0" or "layers 1-3", the layers that have it.
std::vector<std::pair<std::string, std::string>> kinds_of_layers(const Fp8Plan& plan) {
    std::vector<std::pair<std::string, std::vector<int>>> kinds;
    for (size_t i = 0; i + kLinearsPerLayer < plan.linears.size(); i += kLinearsPerLayer) {
        const std::string text = precision_text(&plan.linears[i]);
        auto known = std::find_if(kinds.begin(), kinds.end(), [&](auto& k) { return k.first == text; });
        if (known == kinds.end()) known = kinds.insert(kinds.end(), {text, {}});
        known->second.push_back(plan.linears[i].layer);
    }
    std::vector<std::pair<std::string, std::string>> named;
    for (const auto& [text, layers] : kinds)
        named.emplace_back((layers.size() == 1 ? "layer " : "layers ") + ranges_text(layers), text);
    return named;
}

// Names the recipe that suits trained weights best, unless it is this one or cannot run them.
std::string advice_text(const Fp8Plan& plan, const Config& config) {
    const bool turns = std::all_of(plan.linears.begin(), plan.linears.end(), [](const LinearPlan& linear) {
        return !linear.fp8_forward() || linear.in % kTurnedColumns == 0;
    });
    if (config.load.empty() || plan.int8_forward() || !turns) return "";
    return labelled("with --load", "SmolLM2-135M lost a fifth as much with --fp8-recipe int8-forward "
                                   "(docs/fp8.md, Which recipe)");
}

std::string layers_text(const Fp8Plan& plan) {
    std::string text;
    for (const auto& [layers, precision] : kinds_of_layers(plan)) text += labelled(layers, precision);
    const LinearPlan& head = plan.linears.back();
    return text + labelled("head", head.fp8 ? "backward in FP8 | forward in BF16" : "BF16 (" + head.reason + ")");
}

}  // namespace

std::span<const RecipeRow> recipe_rows() { return kRecipes; }

const RecipeRow& recipe_row(Fp8Recipe recipe) {
    for (const RecipeRow& row : kRecipes)
        if (row.recipe == recipe) return row;
    FAIL(kExitBug, "FP8 recipe %d has no row", static_cast<int>(recipe));
}

const char* linear_kind_name(LinearKind kind) {
    constexpr const char* kNames[] = {"qkv", "proj", "up", "down", "head"};
    return kNames[static_cast<int>(kind)];
}

const char* fp8_role_name(Fp8Role role) {
    constexpr const char* kNames[kFp8Roles] = {"x", "dy", "weight"};
    return kNames[static_cast<int>(role)];
}

int64_t Fp8Plan::fp8_linears() const {
    return std::count_if(linears.begin(), linears.end(), [](const LinearPlan& l) { return l.fp8; });
}

Fp8Plan Fp8Plan::in_bf16() const {
    Fp8Plan plan{.linears = linears};
    for (LinearPlan& linear : plan.linears) {
        linear.fp8_elsewhere = linear.fp8_forward();
        keep_in_bf16(linear, "steps in BF16");
    }
    return plan;
}

Fp8Plan make_fp8_plan(const Config& config, const ParamTable& table, const Fp8SpeedupOf& speedup_of) {
    Fp8Plan plan;
    plan.recipe = config.fp8_recipe;
    for (size_t l = 0; l < table.layers.size(); l++) {
        const LayerParams& p = table.layers[l];
        const int weights[kLinearsPerLayer] = {p.qkv_weight, p.proj_weight, p.up_weight, p.down_weight};
        for (int k = 0; k < kLinearsPerLayer; k++)
            plan.linears.push_back(linear_of(table, static_cast<int>(l), static_cast<LinearKind>(k), weights[k]));
    }
    plan.linears.push_back(linear_of(table, static_cast<int>(table.layers.size()), LinearKind::kHead, table.head));
    if (!plan.on()) {
        for (LinearPlan& linear : plan.linears) keep_in_bf16(linear, "--fp8-recipe none");
        return plan;
    }
    plan.dy_format = config.fp8_format == Fp8Format::kE4m3 ? Dtype::kE4m3 : Dtype::kE5m2;
    plan.fast_fprop = plan.row().fast_accumulation && !plan.int8_forward() && config.fp8_fast_accum != FastAccum::kNone;
    plan.fast_backward = plan.row().fast_accumulation && config.fp8_fast_accum == FastAccum::kAll;
    if (!config.fp8_lm_head) keep_in_bf16(plan.linears.back(), "no --fp8-lm-head");
    keep_first_and_last(config, plan);
    keep_by_pattern(config, plan);
    require_alignment(config, plan);
    require_chunks_fit(config, plan);
    keep_where_fp8_loses(config, plan, speedup_of);
    require_any_fp8(plan);
    require_samples_fit(config, plan);
    require_expert_gradients_fit(config, plan);
    return plan;
}

std::string fp8_device_error(const Fp8Plan& plan, const DeviceInfo& device) {
    if (!plan.on() || device.sm == 0) return "";
    const RecipeRow& row = plan.row();
    std::vector<std::string> wrong;
    auto need = [&](bool holds, const std::string& text) {
        if (!holds) wrong.push_back(text);
    };
    // Later architectures have other block formats instead of 1x128 and 128x128, and no wgmma for INT8.
    const bool exactly = row.x != Granularity::kTensor || row.int8_forward;
    need(exactly ? device.sm == row.min_sm : device.sm >= row.min_sm,
         strf("needs compute capability %d.%d%s, found %d.%d", row.min_sm / 10, row.min_sm % 10,
              exactly ? "" : " or newer", device.sm / 10, device.sm % 10));
    need(device.cublaslt_version >= row.min_cublaslt,
         strf("needs cuBLASLt %s or newer, found %s", version_text(row.min_cublaslt).c_str(),
              version_text(device.cublaslt_version).c_str()));
    need(!row.int8_forward || device.sm != row.min_sm || device.sm90a_code,
         "this build has no code for sm_90a, which its kernels need: make ARCH=90a");
    // The major versions.
    const int driver = std::atoi(device.driver.c_str()), toolkit = std::atoi(device.toolkit.c_str());
    need(driver >= toolkit, strf("needs a driver for CUDA %d.0 or newer, found one for %s", toolkit,
                                 device.driver.empty() ? "none" : device.driver.c_str()));
    if (wrong.empty()) return "";
    return strf("--fp8-recipe %s on %s: ", row.name, device.name.c_str()) + list_text(wrong, "; ");
}

std::string fp8_attention_error(const DeviceInfo& device) {
    if (device.sm == 0 || (device.sm == 90 && device.sm90a_code)) return "";
    if (device.sm == 90)
        return strf("--fp8-attention on %s: this build has no code for sm_90a, which its kernels need: make ARCH=90a",
                    device.name.c_str());
    return strf("--fp8-attention on %s: its kernels are for compute capability 9.0, found %d.%d", device.name.c_str(),
                device.sm / 10, device.sm % 10);
}

std::string fp8_linears_text(const Fp8Plan& plan) {
    std::string text;
    for (const auto& [layers, precision] : kinds_of_layers(plan)) text += layers + ": " + precision + "; ";
    return text + "head " + (plan.linears.back().fp8 ? "FP8 in backward" : "BF16");
}

std::string fp8_plan_text(const Fp8Plan& plan, const Config& config) {
    if (!plan.on()) return "";
    auto matmul = [&](const char* pass, const char* a, Dtype a_format, const char* b, Dtype b_format, bool fast) {
        return labelled(pass, strf("%s %s by %s %s, %s accumulation", a, format_name(a_format), b,
                                   format_name(b_format), fast ? "fast" : "precise"));
    };
    return strf("FP8               %s: %s\n", plan.row().name, scales_text(plan, config).c_str())
           + (plan.int8_forward() ? labelled("fprop", "x INT8 by w INT8, turned in groups of 64, a scale per row")
                                  : matmul("fprop", "x", plan.x_format, "w", plan.weight_format, plan.fast_fprop))
           + matmul("dgrad", "dy", plan.dy_format, "w", plan.weight_format, plan.fast_backward)
           + (plan.row().bf16_wgrad ? labelled("wgrad", "dy BF16 by x BF16")
                                    : matmul("wgrad", "dy", plan.dy_format, "x", plan.x_format, plan.fast_backward))
           + layers_text(plan) + advice_text(plan, config)
           + labelled("always BF16", config.fp8_attention
                                         ? "embedding, norms, residual stream, softmax, loss, and attention but "
                                           "for QK^T (INT8) and PV (E4M3) of its forward"
                                         : "embedding, norms, residual stream, attention, softmax and loss");
}

// The table of FP8 recipes, and the plan of a run: which linears run in FP8, in what formats, and why others do not.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/parameters/params.h"
#include "llmc/ops/ops.h"

// One recipe. Sources: Transformer Engine's delayed, current and block scaling; DeepSeek-V3, arXiv 2412.19437, section
// 3.3, for the block shapes.
struct RecipeRow {
    Fp8Recipe recipe;
    const char* name;               // value of --fp8-recipe
    Scaling scaling = Scaling::kCurrent;
    bool history = false;           // scales follow an amax history
    Granularity x = Granularity::kTensor, weight = Granularity::kTensor, dy = Granularity::kTensor;
    Dtype dy_format = Dtype::kE5m2; // by default; x and weights are E4M3 in every recipe
    bool fast_accumulation = true;  // supported by the matmul
    // Compute capability * 10, and cublasLtGetVersion, 120900 for 12.9.0: cuBLASLt has per-tensor FP8 on 8.9 since 12.1
    // update 1, and block scaling on 9.0 since 12.9.
    int min_sm = 89;
    int64_t min_cublaslt = 120103;
    bool bf16_wgrad = false;        // weight gradients in the working type, for which x and dy stay unquantized, too
    bool int8_forward = false;      // x and w of the forward matmul are INT8 with a scale per row, see ops_int8.h
};
std::span<const RecipeRow> recipe_rows();
const RecipeRow& recipe_row(Fp8Recipe recipe);   // kNone has no row

enum class LinearKind : uint8_t { kQkv, kProj, kUp, kDown, kHead };
inline constexpr int kLinearsPerLayer = 4;
const char* linear_kind_name(LinearKind kind);   // "qkv", "proj", "up", "down", "head"

enum class Fp8Role : uint8_t { kX, kDy, kWeight };
inline constexpr int kFp8Roles = 3;
const char* fp8_role_name(Fp8Role role);   // "x", "dy", "weight"
enum class Fp8Layout : uint8_t { kRowwise, kTransposed };   // see quantized_output.h

// One linear of the model and how it runs.
struct LinearPlan {
    std::string name;            // "3.down", "head"
    int layer = 0;               // num_layers for the head
    LinearKind kind = LinearKind::kQkv;
    int weight = -1;             // number of the parameter in ParamTable
    int64_t in = 0, out = 0;
    int64_t experts = 1;         // Param::experts; in and out are those of one
    bool of_experts = false;     // also where a rank has one of them
    bool fp8 = false;
    std::string reason;          // why it is in BF16: "--first-last-layers-bf16", "--bf16-linears 3.*", ...
    bool fp8_elsewhere = false;  // it is fp8_forward() in other steps of the run, see Fp8Plan::in_bf16

    // The head computes logits in the working type, and only its gradients in FP8.
    bool fp8_forward() const { return fp8 && kind != LinearKind::kHead; }
};

struct Fp8Plan {
    Fp8Recipe recipe = Fp8Recipe::kNone;
    Dtype x_format = Dtype::kE4m3, weight_format = Dtype::kE4m3, dy_format = Dtype::kE5m2;
    bool fast_fprop = false, fast_backward = false;
    std::vector<LinearPlan> linears = {};   // by layer in the order of LinearKind, then the head

    bool on() const { return recipe != Fp8Recipe::kNone; }
    const RecipeRow& row() const { return recipe_row(recipe); }
    int index(int layer, LinearKind kind) const {
        const int within = kind == LinearKind::kHead ? 0 : static_cast<int>(kind);   // the head's layer is num_layers
        return layer * kLinearsPerLayer + within;
    }
    const LinearPlan& linear(int layer, LinearKind kind) const {
        return linears[static_cast<size_t>(index(layer, kind))];
    }
    int64_t fp8_linears() const;
    // The plan of the run's steps in BF16 (fp8_steps). Parameters lie in the same places (FlatLayout) as with this one.
    Fp8Plan in_bf16() const;
    // Of the FP8 operands: in an INT8 forward pass, of the transposed x and weight.
    Dtype format(Fp8Role role) const {
        if (role == Fp8Role::kWeight) return weight_format;
        return role == Fp8Role::kX ? x_format : dy_format;
    }
    bool int8_forward() const { return on() && row().int8_forward; }
    bool is_int8(Fp8Role role, Fp8Layout layout) const {
        return int8_forward() && role != Fp8Role::kDy && layout == Fp8Layout::kRowwise;
    }
    Dtype format(Fp8Role role, Fp8Layout layout) const {
        return is_int8(role, layout) ? Dtype::kInt8 : format(role);
    }
    Granularity granularity(Fp8Role role, Fp8Layout layout) const {
        if (is_int8(role, layout)) return Granularity::kRow;
        if (role == Fp8Role::kWeight) return row().weight;
        return role == Fp8Role::kX ? row().x : row().dy;
    }
};

// Makes the plan of a resolved configuration. Exit 2 if a linear in FP8 has a shape that FP8 matmuls do not support, if
// no linear is left in FP8, or if an option that selects linears has no effect. Tokens, in- and out-features must be
// multiples of 16, in-features of INT8 matmuls of 64; the error names every linear that breaks this rule. With block
// scales, the length of a sampled sequence must be a multiple of 4. speedup_of predicts the speedup of a linear in FP8
// over BF16; only --fp8-min-speedup needs it.
using Fp8SpeedupOf = std::function<double(const Config&, const Fp8Plan&, const LinearPlan&)>;
Fp8Plan make_fp8_plan(const Config& config, const ParamTable& table, const Fp8SpeedupOf& speedup_of = {});

// "" if this device and library can run the recipe, else one line with the versions needed and found. The CPU can run
// every recipe.
std::string fp8_device_error(const Fp8Plan& plan, const DeviceInfo& device);
// The same for --fp8-attention, which any recipe may have.
std::string fp8_attention_error(const DeviceInfo& device);

// Which linears run in FP8: "layers 0-3: qkv proj up down in FP8; head BF16".
std::string fp8_linears_text(const Fp8Plan& plan);

// The lines of a verbose start: recipe, formats, scales; per layer range what runs in FP8, what stays in BF16, and why.
std::string fp8_plan_text(const Fp8Plan& plan, const Config& config);

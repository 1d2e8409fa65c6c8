#include "llmc/checkpoint/saved_state.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <filesystem>

#include "llmc/base/check.h"
#include "llmc/base/json_object.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/config/config.h"
#include "llmc/config/schedule.h"
#include "llmc/model/parameters/fp8_recipe.h"

namespace {

using Json = nlohmann::json;

constexpr int64_t kMost = int64_t{1} << 50;   // no run counts so far; products with a batch stay within 64 bits
constexpr uint32_t kSignBit = 0x80000000;

void check_counts(const JsonFields& state) {
    state.integer("format", 1, 1);
    const int64_t step = state.integer("step", 0, kMost), updates = state.integer("adam_step", 0, kMost),
                  skips = state.integer("skips", 0, kMost);
    if (updates + skips != step)
        state.refuse("adam_step", strf("\"step\" %lld less \"skips\" %lld is needed", ll(step), ll(skips)));
    state.integer("consecutive_skips", 0, skips);
    state.integer("norm_skips", 0, skips);
    if (state.has("moments_begin")) state.integer("moments_begin", 0, updates);
    const Json& norms = state.list("norms");
    for (const Json& norm : norms)
        if (!norm.is_number() || !(norm.get<float>() >= 0) || !std::isfinite(norm.get<float>()))
            state.refuse("norms", "finite norms are needed");
    if (static_cast<int64_t>(norms.size()) > std::min<int64_t>(128, step))
        state.refuse("norms", "at most 128 norms, and one of each step, are needed");
    for (const Json& rows : state.has("expert_load") ? state.list("expert_load") : Json::array())
        if (!rows.is_number() || !(rows.get<double>() >= 0) || !std::isfinite(rows.get<double>()))
            state.refuse("expert_load", "numbers of rows are needed");
    for (const Json& type : state.list("missed"))
        if (type != "eval" && type != "hellaswag" && type != "sample")
            state.refuse("missed", "only \"eval\", \"hellaswag\" and \"sample\" are known");
}

// "samples" counts those of the steps, and those of batches that were ignored because loss masks left no target.
void check_samples(const JsonFields& state, bool may_ignore) {
    const int64_t step = state.integer("step", 0, kMost), samples = state.integer("samples", 0, kMost);
    if (samples < step || (step == 0 && samples > 0 && !may_ignore))
        state.refuse("samples", strf("\"step\" is %lld", ll(step)));
    Config config;
    const JsonFields options = state.child("config");
    const std::string wrong = read_saved_options(options.object.dump(), config);
    REQUIRE(wrong.empty(), "%s: %s", options.where.c_str(), wrong.c_str());
    if (!options.has("global-batch-size")) return;
    const int64_t needed = samples_after(config, step);
    const bool whole = config.rampup_start > 0 || samples % config.global_batch_size == 0;
    if (samples < needed || !whole || (samples > needed && !may_ignore))
        state.refuse("samples", strf("%lld steps by the options in \"config\" take %lld", ll(step), ll(needed)));
}

// Whether batches of this data may be ignored, because loss masks may leave no target.
bool check_data(const JsonFields& data) {
    if (data.has("synthetic")) return data.integer("synthetic", 1, INT32_MAX) < 0;
    bool masked = false;
    for (const Json& json : data.list("shards")) {
        if (!json.is_object()) data.refuse("shards", "a list of objects is needed");
        const JsonFields shard{json, data.where + ": shards"};
        shard.text("name");
        shard.text("fingerprint");
        shard.integer("tokens", 1, INT64_MAX);
        shard.integer("token_bytes", 1, 8);
        masked = shard.boolean("masked") || masked;
    }
    if (data.has("vocabulary")) data.text("vocabulary");
    if (!data.has("blend")) return masked;
    for (const Json& row : data.list("blend")) {
        const bool two = row.is_array() && row.size() == 2;
        if (!two || !row[0].is_number_unsigned() || !row[1].is_number_unsigned())
            data.refuse("blend", "pairs of whole numbers are needed: parts and shards");
    }
    return masked;
}

// Scales and histories of delayed scaling. Its scales are quotients, not powers of two. The scales of the other
// recipes follow from the tensors and are not saved.
void check_histories(const JsonFields& fp8, int64_t step) {
    const int64_t length = fp8.integer("history_len", 1, int64_t{1} << 16);
    fp8.boolean("primed");
    const JsonFields tensors = fp8.child("tensors");
    std::array<int64_t, 2> updates = {-1, -1};   // of weights, and of the others, which calibration updates as well
    for (const auto& [name, ignored] : tensors.object.items()) {
        const JsonFields tensor = tensors.child(name.c_str());
        const auto bits = static_cast<uint32_t>(tensor.integer("quant_mul_bits", 0, UINT32_MAX));
        const float scale = std::bit_cast<float>(bits);
        if (!(scale > 0 && std::isfinite(scale) && std::isfinite(1 / scale)))
            tensor.refuse("quant_mul_bits", strf("the bits of %g: a positive, finite scale is needed",
                                                 static_cast<double>(scale)));
        // Calibration may precede a step.
        const int64_t count = tensor.integer("updates", 0, std::min<int64_t>(2 * (step + 1), INT32_MAX));
        int64_t& others = updates[name.ends_with(".weight") ? 0 : 1];
        if (others >= 0 && count != others) tensor.refuse("updates", strf("tensors before it have %lld", ll(others)));
        others = count;
        const auto history = static_cast<int64_t>(tensor.list("history_bits").size());
        if (history != length)
            FAIL(kExitNoCheckpoint, "%s: \"history_bits\" has %lld numbers, \"history_len\" is %lld",
                 tensor.where.c_str(), ll(history), ll(length));
        tensor.integers("history_bits", 0, kSignBit - 1);   // of amaxes, which have no sign
    }
}

void check_fp8(const JsonFields& fp8, const JsonFields& options, int64_t step) {
    const std::string name = fp8.text("recipe");
    const bool has_bf16 = options.object.value("fp8-first-bf16", Json(0)) != 0
                          || options.object.value("fp8-final-bf16", Json(0)) != 0;   // the step may be in BF16
    if (options.has("fp8-recipe") && options.text("fp8-recipe") != name && !(has_bf16 && name == "none"))
        fp8.refuse("recipe", "\"config\" says otherwise");
    if (name == "none") return;
    const auto rows = recipe_rows();
    const auto found = std::find_if(rows.begin(), rows.end(), [&](const RecipeRow& row) { return name == row.name; });
    if (found == rows.end()) fp8.refuse("recipe", "a recipe of --fp8-recipe is needed");
    for (const char* format : {"x", "dy"})
        if (const std::string type = fp8.text(format); type != "e4m3" && type != "e5m2")
            fp8.refuse(format, "e4m3 or e5m2 is needed");
    if (found->history) check_histories(fp8, step);
}

// The losses that LossWatch compares.
void check_losses(const JsonFields& watch) {
    watch.boolean("above");
    for (const char* name : {"first", "last"})
        for (const Json& loss : watch.list(name))
            if (!loss.is_number() || !std::isfinite(loss.get<double>())) watch.refuse(name, "finite losses are needed");
    const size_t first = watch.list("first").size(), last = watch.list("last").size();
    if (first > 5) watch.refuse("first", "at most 5 losses are needed");
    if (last != std::min<size_t>(first, 3))
        watch.refuse("last", strf("as many losses as in \"first\" are needed, %zu, but at most 3", first));
}

void check_state(const std::string& directory) {
    const Json json = parse_json_object(read_text_file(directory + "/state.json", kMaxStateBytes), "state.json");
    const JsonFields state{json, "state.json"};
    check_counts(state);
    const bool may_ignore = check_data(state.child("train_data"));
    check_samples(state, may_ignore);
    const int64_t step = state.integer("step", 0, kMost);
    check_fp8(state.child("fp8"), state.child("config"), step);
    check_losses(state.child("loss_watch"));
    const JsonFields plans = state.child("gemm_plans");
    plans.text("library");
    for (const Json& plan : plans.list("plans"))
        if (!plan.is_object()) plans.refuse("plans", "a list of objects is needed");
    // The name of a link says nothing.
    const std::filesystem::path path(directory);
    const int64_t named = is_link(directory) ? -1 : step_of_directory(path.filename().string());
    if (named >= 0 && named != step)
        state.refuse("step", strf("the folder is %s: rename it to %s", path.filename().c_str(),
                                  step_directory_name(step).c_str()));
}

}  // namespace

std::string state_damage(const std::string& directory) {
    try {
        check_state(directory);
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

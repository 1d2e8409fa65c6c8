// Predictions of `plan` for --zero: the lowest level that fits, and the memory of 70B parameters on eight GPUs.
#include "tests/support/plan_test.h"

#include <nlohmann/json.hpp>

#include "llmc/commands/plan_report.h"

TEST_CASE("plan: the levels of --zero that fit are proposed") {
    const Words model = {"--model", "llama3-small", "--global-batch-size", "8", "--ranks", "8", "--fp8-recipe",
                         "delayed"};
    const auto at = [&](const char* level) { return planned_config("llama", joined(model, {"--zero", level})); };
    const int64_t bytes[] = {planned(at("0")).arena_bytes, planned(at("1")).arena_bytes, planned(at("2")).arena_bytes,
                             planned(at("3")).arena_bytes};
    for (int i = 0; i < 3; i++) REQUIRE(bytes[i] > bytes[i + 1]);
    const ParamTable table = make_param_table(at("1").shape);
    DeviceInfo found;
    found.name = "NVIDIA B200";
    found.sm = 100;
    // Memory for exactly a level, and one byte less.
    for (int lowest = 1; lowest <= 4; lowest++) {
        found.memory_bytes = lowest < 4 ? bytes[lowest] : bytes[3] - 1;
        for (const char* level : {"0", "1", "2", "3"}) {
            CAPTURE(lowest, level);
            const PlannedRun run{at(level), table, planned(at(level)), found, {}};
            const nlohmann::json memory = nlohmann::json::parse(plan_json(run))["memory"];
            const std::string text = plan_text(run), option = strf("--zero %d", lowest);
            std::string proposed;   // the levels alone that fit
            for (const auto& change : memory.value("changes", nlohmann::json::array()))
                if (change["options"].get<std::string>().size() == option.size() && change["fits"] == true)
                    proposed += change["options"].get<std::string>() + " ";
            const int own = std::atoi(level);
            CHECK(contains(text, "which communicates or copies less") == (lowest < own && own > 1));
            if (own > lowest) CHECK(proposed == option + " ");
            if (own == lowest) CHECK(proposed.empty());
            if (own < lowest && lowest < 4) CHECK(proposed.starts_with(option + " "));
            if (own < lowest && lowest == 4) CHECK(proposed.empty());
        }
    }
    // With one rank there is nothing to shard.
    const Config one = planned_config("llama", {"--model", "llama3-small"});
    const PlannedRun run{one, table, planned(one), found, {}};
    CHECK(!contains(plan_json(run), "--zero"));
}

TEST_CASE("plan: 70B on eight H200 with bf16 moments and shards of gradients") {
    const Words words = {"--model", "llama3.1-70B", "--seq-length", "8192", "--micro-batch-size", "1", "--ranks", "8",
                         "--global-batch-size", "64", "--fp8-recipe", "delayed", "--moment-dtype", "bf16",
                         "--recompute", "block", "--loss-chunk", "2048", "--grad-dtype", "bf16", "--zero"};
    const auto planned_with = [&](const Words& more) { return planned(planned_config("llama", joined(words, more))); };
    const MemoryPlan wide = planned_with({"3"}), plan = planned_with({"3", "--grad-shard-dtype", "bf16"});
    CHECK(plan.arena_bytes <= int64_t{125} << 30);
    CHECK(wide.arena_bytes - plan.arena_bytes == 2 * plan.flat_elems / 8);
    // For a run without these options, the last proposal is the lowest level that fits with all of them.
    const Config plain = planned_config("llama", {"--model", "llama3.1-70B", "--seq-length", "8192", "--ranks", "8",
                                                  "--micro-batch-size", "1", "--global-batch-size", "64"});
    const ParamTable table = make_param_table(plain.shape);
    const PlannedRun run{plain, table, planned(plain), {}, {}};
    const auto last = nlohmann::json::parse(plan_json(run))["memory"]["changes"].back();
    CHECK(last["fits"] == true);
    CHECK(contains(last["options"].get<std::string>(), " --zero 3"));
}

// The host memory that `plan` predicts for loading and saving.
#include "tests/support/plan_test.h"

#include <nlohmann/json.hpp>

#include "llmc/commands/plan_report.h"

TEST_CASE("plan: host memory of one of eight ranks that loads and saves 70B parameters") {
    const Config config = parse("llama", {"--dry-run", "--synthetic-data", "--model", "llama3.1-70B", "--ranks", "8",
                                          "--fp8-recipe", "delayed", "--recompute", "block", "--micro-batch-size", "1",
                                          "--global-batch-size", "8"}).config;
    const ParamTable table = make_param_table(config.shape);
    const MemoryPlan plan = memory_of(config, 8);
    const PlannedRun run{config, table, plan, {}, {}};
    CHECK(plan.host.load_bytes == int64_t{32} << 20);
    CHECK(plan.host.save_bytes == int64_t{32} << 20);
    // Masters and moments in FP32; a rank may hold less of the padding than another.
    const double share = 12.0 * static_cast<double>(table.param_elems) / 8;
    CHECK(static_cast<double>(plan.host.save_async_bytes) >= share);
    CHECK(static_cast<double>(plan.host.save_async_bytes) <= 1.001 * share);
    const nlohmann::json json = nlohmann::json::parse(plan_json(run));
    CHECK(json["memory"]["pinned_host_bytes"] == 0);   // without --save
    CHECK(json["memory"]["host_bytes"]["loading"] == plan.host.load_bytes);
    CHECK(json["memory"]["host_bytes"]["saving"] == plan.host.save_bytes);
    CHECK(json["memory"]["host_bytes"]["saving_async"] == plan.host.save_async_bytes);
    const std::string text = plan_text(run);
    CHECK(contains(text, strf("%lld bytes", static_cast<long long>(plan.host.save_async_bytes))));
    CHECK(contains(text, "33554432 bytes     0.031 GiB, while --load or --resume reads"));
}

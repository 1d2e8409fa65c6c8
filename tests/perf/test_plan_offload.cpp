// Predictions of `plan` for --offload.
#include "tests/support/plan_test.h"

#include <nlohmann/json.hpp>

#include "llmc/commands/plan_report.h"
#include "llmc/perf/step_time.h"

namespace {

const Words kLlama8b = {"--dry-run", "--synthetic-data", "--model", "llama3-8B", "--seq-length", "8192",
                        "--micro-batch-size", "1", "--global-batch-size", "16", "--fp8-recipe", "delayed",
                        "--moment-dtype", "bf16", "--recompute", "block"};

Config with(const Words& more) { return parse("llama", joined(kLlama8b, more)).config; }

}  // namespace

TEST_CASE("plan: offloaded bytes, and the exposed time of their copies") {
    const Config resident = with({});
    const Config state = with({"--offload", "moments,masters"});
    const Config half = with({"--offload", "moments,masters", "--offload-fraction", "0.5"});
    const Config all = with({"--offload", "moments,masters,activations"});
    const MemoryPlan here = planned(resident), away = planned(state), some = planned(half), most = planned(all);
    const auto bytes = [](const MemoryPlan& plan, Purpose purpose) {
        return plan.purpose_bytes[static_cast<size_t>(purpose)];
    };
    // Two moments and a master, for every element of the flat buffers.
    CHECK(away.state_host_bytes == 8 * here.flat_elems);
    CHECK(away.arena_bytes == here.arena_bytes - 8 * here.flat_elems + bytes(away, Purpose::kOffload));
    CHECK(bytes(away, Purpose::kOffload) == doctest::Approx(4 * 128e6).epsilon(0.001));
    CHECK(some.state_host_bytes == 4 * here.flat_elems);
    CHECK(bytes(some, Purpose::kMaster) == 2 * here.flat_elems);
    const MemoryPlan least = planned(with({"--offload", "moments,masters", "--offload-fraction", "1e-17"}));
    CHECK(least.state_host_bytes > 0);   // one unit
    CHECK(least.state_host_bytes < 8192);
    CHECK(some.arena_bytes == away.arena_bytes + 4 * here.flat_elems);
    // Block recompute saves x of 29 of 32 layers in host memory.
    CHECK(most.activation_host_bytes == int64_t{29} * 8192 * 4096 * 2);
    CHECK(most.arena_bytes == away.arena_bytes - most.activation_host_bytes);

    const auto time = [&](const Config& config, const MemoryPlan& plan) {
        return predict_step(config, plan, measured_gpu());
    };
    const auto exposed = [](const StepTime& time) { return time.ms[static_cast<size_t>(StepPart::kHostLink)]; };
    CHECK(time(resident, here).host_link_ms == 0);
    CHECK(exposed(time(resident, here)) == 0);
    CHECK(time(state, away).host_link_ms == doctest::Approx(1e3 * 8 * static_cast<double>(here.flat_elems) / 50e9));
    const double once = exposed(time(state, away));
    CHECK(once > 0.9 * time(state, away).host_link_ms);   // the update itself takes 60 ms
    CHECK(exposed(time(half, some)) < 0.5 * once);        // as much is hidden
    CHECK(exposed(time(all, most)) == doctest::Approx(once));   // all copies of activations are hidden
}

TEST_CASE("plan: a smaller part of the optimizer state that fits is proposed") {
    const auto limited = [](const Words& more) {
        return with(joined({"--gpu", "H100 SXM", "--grad-dtype", "bf16"}, more));
    };
    const auto at = [&](double fraction) {
        return limited({"--offload", "moments,masters", "--offload-fraction", strf("%g", fraction)});
    };
    const Config resident = limited({});
    const ParamTable table = make_param_table(resident.shape);
    const auto changes_of = [&](const Config& config) {
        return nlohmann::json::parse(plan_json({config, table, planned(config), {}, {}}))["memory"].value(
            "changes", nlohmann::json::array());
    };
    // The proposed fraction leaves 2 GiB for the CUDA context and libraries; a fraction smaller by 0.05 would not.
    constexpr auto kBytes = static_cast<int64_t>(77.1 * (1 << 30));
    const double least = 0.35;
    CHECK(planned(at(least)).arena_bytes < kBytes);
    CHECK(planned(at(least - 0.05)).arena_bytes > kBytes);
    const auto of_all = changes_of(at(1));
    REQUIRE(of_all.size() == 1);
    CHECK(of_all[0]["options"] == strf("--offload-fraction %g", least));
    CHECK(of_all[0]["arena_bytes"] == planned(at(least)).arena_bytes);
    CHECK(changes_of(at(least)).empty());
    // For a run that does not fit, offloading is among the proposed changes.
    int found = 0;
    for (const auto& change : changes_of(resident)) {
        const bool half = change["options"] == "--offload moments,masters --offload-fraction 0.5";
        if (!half && change["options"] != "--offload moments,masters") continue;
        found++;
        CHECK(change["arena_bytes"] == planned(at(half ? 0.5 : 1)).arena_bytes);
    }
    CHECK(found == 2);
    // Only the copies for which the update waits are exposed, a part of all copies of the state.
    const auto ms = [&](const Config& config) {
        return predict_step(config, planned(config), *find_gpu("H100 SXM")).total_ms();
    };
    CHECK(ms(at(least)) < 1.05 * ms(resident));
    CHECK(ms(at(1)) > 1.1 * ms(resident));
}

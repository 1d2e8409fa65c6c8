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
    CHECK(some.arena_bytes == away.arena_bytes + 4 * here.flat_elems);
    // Block recompute saves x of 29 of 32 layers in host memory.
    CHECK(most.activation_host_bytes == int64_t{29} * 8192 * 4096 * 2);
    CHECK(most.arena_bytes == away.arena_bytes - most.activation_host_bytes);

    Rates rates = measured_rates();
    const auto time = [&](const Config& config, const MemoryPlan& plan) {
        return predict_step(config, plan, measured_gpu(), rates);
    };
    const auto exposed = [](const StepTime& time) { return time.ms[static_cast<size_t>(StepPart::kHostLink)]; };
    CHECK(time(resident, here).host_link_ms == 0);
    CHECK(exposed(time(resident, here)) == 0);
    CHECK(time(state, away).host_link_ms == doctest::Approx(1e3 * 8 * static_cast<double>(here.flat_elems) / 50e9));
    const double once = exposed(time(state, away));
    CHECK(once > 0.9 * time(state, away).host_link_ms);   // the update itself takes 60 ms
    CHECK(exposed(time(half, some)) < 0.5 * once);        // as much is hidden
    CHECK(exposed(time(all, most)) == doctest::Approx(once));   // all copies of activations are hidden
    rates.host_link = 25e9;   // measured
    CHECK(time(state, away).host_link_ms == doctest::Approx(1e3 * 8 * static_cast<double>(here.flat_elems) / 25e9));
    CHECK(exposed(time(state, away)) > 2 * once);
    rates.host_link = 1e9;    // copies of activations take longer than the layers
    CHECK(exposed(time(all, most)) > exposed(time(state, away)) + 500);
}

TEST_CASE("plan: the least part of the optimizer state that must be offloaded is proposed") {
    const auto limited = [](const Words& more) {
        return with(joined({"--gpu", "H100 SXM", "--grad-dtype", "bf16"}, more));
    };
    const Config resident = limited({}), all = limited({"--offload", "moments,masters"});
    const ParamTable table = make_param_table(all.shape);
    const auto memory_json = [&](const Config& config) {
        return nlohmann::json::parse(plan_json({config, table, planned(config), {}, {}}))["memory"];
    };
    const auto text = [&](const Config& config) { return plan_text({config, table, planned(config), {}, {}}); };
    const double least = memory_json(all)["least_offload_fraction"].get<double>();
    REQUIRE(least > 0);
    REQUIRE(least < 1);
    const auto at = [&](double fraction) {
        return limited({"--offload", "moments,masters", "--offload-fraction", strf("%g", fraction)});
    };
    // The proposed fraction leaves 2 GiB for the CUDA context and libraries; a fraction smaller by 0.05 would not.
    constexpr auto kMost = static_cast<int64_t>(77.1 * (1 << 30));
    CHECK(planned(at(least)).arena_bytes <= kMost);
    CHECK(planned(at(least - 0.05)).arena_bytes > kMost);
    CHECK(contains(text(all), strf("  --offload-fraction %g fits as well, and copies less\n", least)));
    CHECK(!contains(text(at(least)), "fits as well"));
    // For a run that does not fit, offloading is among the proposed changes.
    const std::string options = strf("--offload moments,masters --offload-fraction %g", least);
    bool found = false;
    const nlohmann::json changes = memory_json(resident)["changes"];
    for (const auto& change : changes) {
        if (change["options"] != options) continue;
        found = true;
        CHECK(change["arena_bytes"] == planned(at(least)).arena_bytes);
        CHECK(change["fits"] == true);
    }
    CHECK(found);
    CHECK(!memory_json(resident).contains("least_offload_fraction"));
    // Only the copies for which the update waits are exposed, a part of all copies of the state.
    const auto ms = [&](const Config& config) {
        return predict_step(config, planned(config), *find_gpu("H100 SXM")).total_ms();
    };
    CHECK(ms(at(least)) < 1.05 * ms(resident));
    CHECK(ms(all) > 1.1 * ms(resident));
}

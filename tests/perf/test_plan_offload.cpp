// What `plan` says of --offload.
#include "tests/support/config_test.h"
#include "tests/support/fp8_model_test.h"

#include "llmc/perf/step_time_model.h"

namespace {

const Words kLlama8 = {"--dry-run", "--synthetic-data", "--model", "llama3-8B", "--seq-length", "8192",
                       "--micro-batch-size", "1", "--global-batch-size", "16", "--fp8-recipe", "delayed",
                       "--moment-dtype", "bf16", "--recompute", "block"};

Config with(const Words& more) { return parse("llama", joined(kLlama8, more)).config; }
MemoryPlan planned(const Config& config) { return memory_of(config, 1); }

}  // namespace

TEST_CASE("plan: offloaded bytes, and the time of their copies that nothing hides") {
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
    CHECK(exposed(time(all, most)) == doctest::Approx(once));   // of activations all
    rates.host_link = 25e9;   // measured
    CHECK(time(state, away).host_link_ms == doctest::Approx(1e3 * 8 * static_cast<double>(here.flat_elems) / 25e9));
    CHECK(exposed(time(state, away)) > 2 * once);
    rates.host_link = 1e9;    // copies of activations take longer than the layers
    CHECK(exposed(time(all, most)) > exposed(time(state, away)) + 500);
}

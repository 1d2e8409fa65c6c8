#include "tests/support/doctest.h"

#include <filesystem>
#include <fstream>

#include "llmc/base/system/host.h"
#include "llmc/train/run/run_device.h"
#include "tests/support/files_test.h"

namespace {

constexpr int64_t kGib = int64_t{1} << 30;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("memory limits: the plan must fit into the free memory of the GPU") {
    Config config;
    config.shape.num_layers = 32;
    MemoryPlan plan;
    plan.arena_bytes = 70 * kGib;
    CHECK(gpu_memory_error(config, plan, 70 * kGib) == "");
    const std::string error = gpu_memory_error(config, plan, 70 * kGib - 1);
    CHECK(has(error, "needs 70.00 GiB of device memory and 70.00 GiB are"));
    CHECK(has(error, "--offload moments,masters,activations (see --dry-run)"));
    CHECK(error.find('\n') == std::string::npos);
    config.shape.num_layers = kResidentLayers;   // so few that all activations stay on the device
    CHECK(has(gpu_memory_error(config, plan, 0), "--offload moments,masters (see"));
}

TEST_CASE("memory limits: the pinned memory of the ranks of a host must be available") {
    MemoryPlan plan;
    CHECK(host_memory_error(plan, 8, 0) == "");
    plan.pinned_bytes = 1 * kGib, plan.state_host_bytes = 2 * kGib, plan.activation_host_bytes = 4 * kGib;
    CHECK(host_memory_error(plan, 2, 14 * kGib) == "");
    CHECK(host_memory_error(plan, 2, -1) == "");
    CHECK(has(host_memory_error(plan, 2, 14 * kGib - 1),
              "pins 14.00 GiB of host memory, 7.00 GiB for each of 2 ranks on this host, and 14.00 GiB are available"));
}

TEST_CASE("memory limits: the least memory.max of a cgroup and those around it counts") {
    const files_test::TempDir dir;
    const std::string outer = dir / "outer", inner = outer + "/job/step";
    std::filesystem::create_directories(inner);
    const auto limit = [](const std::string& folder, const char* text) {
        std::ofstream(folder + "/memory.max") << text;
    };
    CHECK(cgroup_memory_limit(inner) == -1);
    CHECK(cgroup_memory_limit("") == -1);
    limit(inner, "max\n");
    CHECK(cgroup_memory_limit(inner) == -1);
    limit(outer, "7000\n");
    CHECK(cgroup_memory_limit(inner) == 7000);
    limit(inner, "8000\n");
    CHECK(cgroup_memory_limit(inner) == 7000);
    limit(inner, "6000\n");
    CHECK(cgroup_memory_limit(inner) == 6000);
    CHECK(cgroup_memory_limit(outer) == 7000);
}

TEST_CASE("memory limits: nothing else is in use on the CPU") {
    CHECK(gpu_bytes_in_use(DeviceInfo{}, std::nullopt) == 0);
}

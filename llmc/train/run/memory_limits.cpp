#include "llmc/train/run/memory_limits.h"

#include "llmc/base/check.h"
#include "llmc/base/system/nvml.h"
#include "llmc/base/text.h"

std::string gpu_memory_error(const Config& config, const MemoryPlan& plan, int64_t free_bytes, int64_t other_bytes) {
    const std::string help = strf("lower --micro-batch-size, or use --recompute norm-act|block-keep-attention|block, "
                                  "--grad-dtype bf16, --moment-dtype bf16, --offload moments,masters%s (see --dry-run)",
                                  config.shape.num_layers > kResidentLayers ? ",activations" : "");
    if (plan.arena_bytes > free_bytes)
        return strf("the run needs %.2f GiB of device memory and %.2f GiB are free: %s", gib(plan.arena_bytes),
                    gib(free_bytes), help.c_str());
    const int64_t all = plan.arena_bytes + other_bytes;
    if (config.gpu_memory_limit == 0 || gib(all) <= config.gpu_memory_limit) return "";
    return strf("--gpu-memory-limit %g: the run needs %.2f GiB of the GPU, %.2f GiB as planned and %.2f GiB for the "
                "CUDA context and libraries: %s", config.gpu_memory_limit, gib(all), gib(plan.arena_bytes),
                gib(other_bytes), help.c_str());
}

std::string host_memory_error(const MemoryPlan& plan, int local_ranks, int64_t available_bytes) {
    const int64_t all = plan.host_bytes() * local_ranks;
    if (available_bytes < 0 || all <= available_bytes) return "";
    return strf("the run pins %.2f GiB of host memory, %.2f GiB for each of %s on this host, and %.2f GiB are "
                "available: offload less (--offload, --offload-fraction), or use --moment-dtype bf16 (see --dry-run)",
                gib(all), gib(plan.host_bytes()), count_text(local_ranks, "rank").c_str(), gib(available_bytes));
}

int64_t gpu_bytes_in_use(const DeviceInfo& device, const std::optional<int64_t>& before) {
    if (device.sm == 0) return 0;
    const std::optional<int64_t> now = gpu_memory_in_use(device.bus);
    return now && before ? *now - *before : device.memory_bytes - device::device_free_bytes();
}

// Whether the planned memory of a run is there, on the GPU and in host memory.
#pragma once
#include <optional>
#include <string>

#include "llmc/train/plan.h"

// Each returns "" or why the run cannot start.
std::string gpu_memory_error(const Config& config, const MemoryPlan& plan, int64_t free_bytes);
// available_bytes: memory of the host, which local_ranks ranks share; below 0: not known.
std::string host_memory_error(const MemoryPlan& plan, int local_ranks, int64_t available_bytes);

// GPU memory that this process has taken since `before` was read; without NVML, all that is in use. 0 on the CPU.
int64_t gpu_bytes_in_use(const DeviceInfo& device, const std::optional<int64_t>& before);

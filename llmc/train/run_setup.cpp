#include "llmc/train/run_setup.h"

#include <algorithm>

#include "llmc/base/check.h"
#include "llmc/base/text.h"
#include "llmc/parallel/gpu_assignment.h"

namespace {

constexpr int kConnectSeconds = 300;   // for the devices of all ranks to connect

}  // namespace

RunDevice::~RunDevice() {
    staging.reset();
    trainer.reset();
    if (arena_memory_) device::device_free(arena_memory_);
    if (opened_) device::device_close(ctx);
}

void RunDevice::open(std::vector<std::string>& notes) {
    info = device::device_info(place_rank(comm_, notes));
    std::string error = fp8_device_error(fp8_plan_, info);
    if (error.empty() && config_.fp8_attention) error = fp8_attention_error(info);
    REQUIRE(error.empty(), "%s", error.c_str());
    device::device_open(ctx, info.index);
    opened_ = true;
    device::gemm_set_search(ctx, config_.gemm_search);
    const std::string connection = comm_.connect(ctx, kConnectSeconds);
    if (!connection.empty()) notes.push_back(connection);
    groups_.emplace(comm_, group_sizes(config_, comm_.world().ranks));
    groups_->connect(ctx, kConnectSeconds);
    plan = plan_memory(config_, table_, fp8_plan_, comm_.world().ranks);
}

void RunDevice::prepare() {
    const int64_t free_bytes = device::device_free_bytes();
    REQUIRE(plan.arena_bytes <= free_bytes,
            "the run needs %.2f GiB of device memory and %.2f GiB are free: lower --micro-batch-size, or use "
            "--recompute norm-act|block-keep-attention|block, --grad-dtype bf16, --moment-dtype bf16 (see --dry-run)",
            static_cast<double>(plan.arena_bytes) / kGiB, static_cast<double>(free_bytes) / kGiB);
    arena_memory_ = device::device_alloc(plan.arena_bytes);
    arena = Arena(arena_memory_, plan.arena_bytes);
    trainer = std::make_unique<Trainer>(config_, table_, fp8_plan_, arena, *groups_);
    staging = std::make_unique<Staging>(config_, *groups_, *trainer);
    device::fill_bytes(ctx, trainer->state(), 0, sizeof(StepState));
    trainer->decoder().upload_constants(ctx);
    // On a GPU this includes the library's workspace; on the CPU the arena's pages are not mapped yet.
    used_bytes = std::max(plan.arena_bytes, free_bytes - device::device_free_bytes());
}

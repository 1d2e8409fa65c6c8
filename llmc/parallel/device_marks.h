// Tracks which of the enqueued collectives a GPU has begun and finished. Before and after each collective, the stream
// copies its number to pinned host memory, where the watchdog reads it without calling any library.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "llmc/fault/heartbeat.h"
#include "llmc/ops/owned.h"

class DeviceMarks {
public:
    explicit DeviceMarks(Ctx& ctx) {
        std::vector<int64_t> numbers(kNumbers);
        for (size_t i = 0; i < numbers.size(); i++) numbers[i] = static_cast<int64_t>(i);
        const auto bytes = static_cast<int64_t>(numbers.size() * sizeof(int64_t));
        numbers_.reset(static_cast<int64_t*>(device::device_alloc(bytes)));
        passed_.reset(static_cast<int64_t*>(device::pinned_alloc(kPlaces * sizeof(int64_t))));
        std::fill_n(passed_.get(), kPlaces, 0);
        device::copy_to_device(ctx, numbers_.get(), numbers.data(), bytes);
        device::synchronize(ctx);
    }

    void begins(Ctx& ctx, int64_t number) { mark(ctx, kBegun, number); }
    void ends(Ctx& ctx, int64_t number) { mark(ctx, kFinished, number); }
    void progress(Ctx& ctx) { mark(ctx, kProgress, ++progress_); }
    void post(Heartbeat& row) {
        const LanePost lane = row.read().lanes[kDeviceLane];
        row.set_finished(kDeviceLane, std::max(lane.finished, passed(kFinished, lane.enqueued)));
        row.set_begun(kDeviceLane, std::max(lane.begun, passed(kBegun, lane.enqueued)));
        const int64_t now = at(kProgress);
        if (now != seen_progress_) row.add_progress();
        seen_progress_ = now;
    }

private:
    enum Place : size_t { kBegun, kFinished, kProgress, kPlaces };
    // More than the collectives of two steps, which may be enqueued at a time: with --zero 3 several hundred for each
    // micro-batch.
    static constexpr int64_t kNumbers = 1 << 16;
    void mark(Ctx& ctx, Place place, int64_t number) {
        device::copy_to_host(ctx, &passed_.get()[place], numbers_.get() + number % kNumbers, sizeof(int64_t));
    }
    int64_t at(Place place) const {
        return std::atomic_ref<int64_t>(passed_.get()[place]).load(std::memory_order_acquire);
    }
    // Pinned memory has numbers modulo kNumbers: returns the latest one up to `enqueued`.
    int64_t passed(Place place, int64_t enqueued) const {
        return enqueued - ((enqueued - at(place)) % kNumbers + kNumbers) % kNumbers;
    }
    DevicePtr<int64_t> numbers_;   // on the device: 0, 1, 2, ..., the source of the copies
    PinnedPtr<int64_t> passed_;    // by Place: the number that was copied last
    int64_t progress_ = 0;        // counted by the main thread
    int64_t seen_progress_ = 0;   // the latest value that the watchdog has seen
};

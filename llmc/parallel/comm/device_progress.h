// Tracks which of the enqueued collectives a GPU has begun and finished. Before and after each collective, the stream
// copies its number to pinned host memory, where the watchdog reads it without calling any library.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "llmc/fault/heartbeat.h"
#include "llmc/ops/owned.h"

class DeviceProgress {
public:
    explicit DeviceProgress(Ctx& ctx) {
        std::vector<int64_t> numbers(kNumbers);
        for (size_t i = 0; i < numbers.size(); i++) numbers[i] = static_cast<int64_t>(i);
        const auto bytes = static_cast<int64_t>(numbers.size() * sizeof(int64_t));
        numbers_.reset(static_cast<int64_t*>(device::device_alloc(bytes)));
        passed_.reset(static_cast<int64_t*>(device::pinned_alloc(kPlaces * sizeof(int64_t))));
        std::fill_n(passed_.get(), kPlaces, 0);
        device::copy_to_device(ctx, numbers_.get(), numbers.data(), bytes);
        device::synchronize(ctx);
    }

    void begin(Ctx& ctx, int64_t number) { pass(ctx, kBegun, number); }
    void finish(Ctx& ctx, int64_t number) { pass(ctx, kFinished, number); }
    void advance(Ctx& ctx) { pass(ctx, kAdvanced, ++advanced_); }   // progress that is no collective
    void post() {
        const CollectiveQueue queue = own_post().device;
        const int64_t finished = std::max(queue.finished, latest(kFinished, queue.enqueued));
        post_device(std::max(queue.begun, latest(kBegun, queue.enqueued)), finished);
        if (const int64_t now = at(kAdvanced); now != seen_) post_progress(), seen_ = now;
    }

private:
    enum Place : size_t { kBegun, kFinished, kAdvanced, kPlaces };
    // More than the collectives of two steps, which may be enqueued at a time: with --zero 3 several hundred for each
    // micro-batch.
    static constexpr int64_t kNumbers = 1 << 16;
    void pass(Ctx& ctx, Place place, int64_t number) {
        device::copy_to_host(ctx, &passed_.get()[place], numbers_.get() + number % kNumbers, sizeof(int64_t));
    }
    int64_t at(Place place) const {
        return std::atomic_ref<int64_t>(passed_.get()[place]).load(std::memory_order_acquire);
    }
    // Pinned memory has numbers modulo kNumbers: returns the latest one up to `enqueued`.
    int64_t latest(Place place, int64_t enqueued) const {
        return enqueued - ((enqueued - at(place)) % kNumbers + kNumbers) % kNumbers;
    }
    DevicePtr<int64_t> numbers_;   // on the device: 0, 1, 2, ..., the source of the copies
    PinnedPtr<int64_t> passed_;    // by Place: the number that was copied last
    int64_t advanced_ = 0;         // counted by the main thread
    int64_t seen_ = 0;             // the latest value that the watchdog has seen
};

// One block of device memory for the whole run. Buffers are taken in a fixed order: permanent ones first, then scratch,
// which is freed at the end of its Scope. The same code runs twice: once to measure the exact size (null base), then on
// the real block. Nothing else allocates device memory after the start.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "llmc/ops/owned.h"

// Purposes of memory: the rows of the memory table.
enum class Purpose {
    kWeights, kGradients, kMaster, kMoments, kEma, kOffload, kActivations, kFp8, kComm, kInputs, kScratch
};
inline constexpr int kPurposes = 11;
const char* purpose_name(Purpose purpose);

class Arena {
public:
    static constexpr int64_t kAlignBytes = 256;

    Arena() = default;                                                // for a rehearsal
    Arena(void* base, int64_t bytes) : base_(base), limit_(bytes) {}  // backed by `bytes` of device memory

    // Takes a buffer that lives as long as the arena; not allowed while scratch is alive.
    Tensor take(Purpose purpose, Dtype dtype, int64_t elems);

    int64_t taken_bytes() const { return permanent_; }   // by take()

    // Within its lifetime take() begins again at `begin`, an earlier taken_bytes(): the buffers are instead of those
    // taken since then, whichever the run uses. Memory is reserved for the larger set.
    class Instead {
    public:
        Instead(Arena& arena, int64_t begin) : arena_(arena) { arena_.used_ = arena_.permanent_ = begin; }
        ~Instead() { arena_.used_ = arena_.permanent_ = arena_.reserved_; }
        Instead(const Instead&) = delete;
        Instead& operator=(const Instead&) = delete;

    private:
        Arena& arena_;
    };

    // Takes pinned host memory that lives as long as the arena; null in a rehearsal.
    char* take_host(int64_t bytes);

    // Begins again: the buffers that are taken from now on are in the memory of those before, whose contents they have
    // where the calls are the same. The same holds for host memory, which is only allocated anew if there was less.
    void restart();

    // Takes scratch that lives until the enclosing Scope ends.
    Tensor scratch(Dtype dtype, int64_t elems);
    // All that scratch is taken from.
    Tensor scratch_memory() const {
        return {static_cast<char*>(base_) + permanent_, Dtype::kE4m3, limit_ - permanent_};
    }

    class Scope {
    public:
        Scope(Ctx& ctx, Arena& arena) : ctx_(ctx), arena_(arena), used_(arena.used_) {}
        ~Scope() { arena_.release(ctx_, used_); }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

    private:
        Ctx& ctx_;
        Arena& arena_;
        int64_t used_;
    };

    bool rehearses() const { return base_ == nullptr; }
    int64_t peak_bytes() const { return peak_; }
    int64_t purpose_bytes(Purpose purpose) const { return purpose_bytes_[static_cast<size_t>(purpose)]; }

    // For tests: fills scratch with NaN bits when its scope ends, so that a later use is noticed.
    void set_poison(bool poison) { poison_ = poison; }
    bool poisons() const { return poison_ && !rehearses(); }

private:
    Tensor bump(Dtype dtype, int64_t elems);
    void release(Ctx& ctx, int64_t used);

    void* base_ = nullptr;
    int64_t limit_ = INT64_MAX;
    int64_t used_ = 0, peak_ = 0, permanent_ = 0;
    int64_t reserved_ = 0;   // the largest that permanent_ was
    bool poison_ = false;
    std::array<int64_t, kPurposes> purpose_bytes_{};
    struct HostMemory {
        PinnedPtr<char> memory;
        int64_t bytes = 0;
    };
    std::vector<HostMemory> host_;
    size_t host_taken_ = 0;   // of them, since the latest restart()
};

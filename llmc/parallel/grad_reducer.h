// Reduces the gradients of a step over the ranks, a bucket at a time: each rank gets the sum of its block, or, with
// --zero 0, all sums. With overlap a bucket travels under the backward of the layers below. One rank exchanges nothing.
#pragma once
#include "llmc/config/config.h"
#include "llmc/ops/ops.h"
#include "llmc/parallel/comm_stream.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/sharded_state.h"

// In what type a bucket of gradients travels.
enum class GradCommDtype : uint8_t { kFp32, kBf16, kFp8 };

// How far gradients that travelled in FP8 are from the same sums in fp32; of one step, and of this rank's blocks.
struct GradCommReport {
    double sums[kParamForms][4];     // see compare_sums: a in fp32, b as it arrived
    Fp8Counts counts[kParamForms];   // of this rank's casts
};

class GradReducer {
public:
    // Nothing is owned. Takes buffers for what is on its way from the arena.
    GradReducer(const Config& config, const ShardedState& state, const Groups& groups, CommStream& stream,
                Arena& arena);
    ~GradReducer();
    GradReducer(const GradReducer&) = delete;
    GradReducer& operator=(const GradReducer&) = delete;

    // The backward that follows is the last one of the step: its layers' gradients are reduced as they get ready.
    // compare: where they travel in FP8, do it in fp32 as well, and report.
    void begin(Ctx& ctx, bool compare);
    void layer_ready(Ctx& ctx, int layer);
    // Makes ctx wait until all are reduced.
    void finish(Ctx& ctx);
    // Sums loss_sum, sum_squares and bad_tokens over the ranks.
    void all_reduce_norm(Ctx& ctx, StepState* state);

    int64_t report_bytes() const { return report_ ? int64_t{sizeof(GradCommReport)} : 0; }
    void copy_report(Ctx& ctx, void* host) const;

private:
    GradCommDtype comm_dtype(const ParamGroup& bucket) const;
    void reduce(Ctx& comm, const ParamGroup& bucket);
    void reduce_bf16(Ctx& comm, const ParamGroup& bucket);
    void reduce_fp8(Ctx& comm, const ParamGroup& bucket);

    const Config& config_;
    const ShardedState& state_;
    const Buckets& buckets_;
    const Groups& groups_;
    CommStream& stream_;

    // Buckets on their way. Each buffer is as long as the largest bucket that needs it.
    Tensor send_, receive_;                                             // in bf16
    Tensor send_codes_, receive_codes_, send_scales_, receive_scales_;   // in FP8
    Tensor exact_, compare_scratch_, report_;                           // the comparison with fp32

    Event* reduced_ = nullptr;   // null where all was on the compute stream
    bool reducing_ = false, comparing_ = false;
    size_t reduced_buckets_ = 0;
};

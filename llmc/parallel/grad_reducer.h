// Reduces the gradients of a step over the ranks, bucket by bucket: each rank gets the sum of its block or, with
// --zero 0, of the whole bucket. With overlap this runs during the backward of the layers below. Does nothing with one
// rank.
#pragma once
#include "llmc/config/config.h"
#include "llmc/ops/ops.h"
#include "llmc/parallel/comm_stream.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/sharded_state.h"

// The communication dtype of a bucket of gradients.
enum class GradCommDtype : uint8_t { kFp32, kBf16, kFp8 };

// Compares the gradients reduced in FP8 with the same sums in fp32, for this rank's blocks in one step.
struct GradCommReport {
    double sums[kParamForms][4];     // see compare_sums: a reduced in fp32, b in FP8
    Fp8Counts counts[kParamForms];   // of this rank's casts
};

class GradReducer {
public:
    // Owns none of its arguments. Allocates communication buffers from the arena.
    GradReducer(const Config& config, const ShardedState& state, const Groups& groups, CommStream& stream,
                Arena& arena);
    ~GradReducer();
    GradReducer(const GradReducer&) = delete;
    GradReducer& operator=(const GradReducer&) = delete;

    // Called before the last backward of the step, from whose layer_ready calls on gradients are reduced. compare:
    // reduces those in FP8 in fp32 as well, and reports the difference.
    void begin(Ctx& ctx, bool compare);
    void layer_ready(Ctx& ctx, int layer);
    // Makes ctx wait until all gradients are reduced.
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

    // Communication buffers, each as long as the largest bucket that needs it.
    Tensor send_, receive_;                                             // in bf16
    Tensor send_codes_, receive_codes_, send_scales_, receive_scales_;   // in FP8
    Tensor exact_, compare_scratch_, report_;                           // the comparison with fp32

    Event* reduced_ = nullptr;   // on the side stream; null without one
    bool reducing_ = false, comparing_ = false;
    size_t reduced_buckets_ = 0;
};

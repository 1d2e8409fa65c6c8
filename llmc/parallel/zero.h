// What the ranks exchange of gradients and weights, a bucket at a time: the sum of a block's gradients goes to the rank
// that owns it, and what that rank made of its masters goes to all (ZeRO-1; Rajbhandari et al., arXiv 1910.02054). With
// overlap the exchange runs on a stream of its own, gradients under the backward of the layers below, weights under the
// forward of the layers before; events alone order the two streams, and the bits are those without overlap. With
// --zero 0 every rank gets all sums and owns everything; one rank exchanges nothing.
#pragma once
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/fp8_state.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"
#include "llmc/parallel/buckets.h"
#include "llmc/parallel/comm.h"
#include "llmc/parallel/comm_timer.h"

// The flat buffers of a rank.
struct FlatState {
    Tensor weights;        // (Buckets::weight_elems) T, of all ranks
    Tensor grads;          // (flat_elems) grad, += of this rank's micro-batches
    Tensor reduced;        // fp32: sums over the ranks of what this rank owns, where grads cannot hold them (bf16)
    Tensor master, m, v;   // of what this rank owns
};

// How a gradient travels.
enum class GradCommDtype : uint8_t { kFp32, kBf16, kFp8 };

// How far gradients that travelled in FP8 are from the same sums in fp32; of one step, and of this rank's blocks.
struct GradCommReport {
    double sums[kBucketKinds][4];     // see compare_sums: a in fp32, b as it arrived
    Fp8Counts counts[kBucketKinds];   // of this rank's casts
};

class Zero {
public:
    // Nothing is owned. Takes buffers for what is on its way from the arena.
    Zero(const Config& config, const ParamTable& table, const Buckets& buckets, const FlatState& state, Comm& comm,
         Fp8State& fp8, Arena& arena);
    ~Zero();
    Zero(const Zero&) = delete;
    Zero& operator=(const Zero&) = delete;

    // What this rank owns, in the order of the flat buffers; of a parameter at most one piece.
    const std::vector<Piece>& pieces() const { return pieces_; }
    // This rank owns some of the masters only.
    bool sharded() const { return sharded_; }
    bool several() const { return buckets_.ranks() > 1; }

    // ---- the step. timer: may be null; how many spans of it a step uses at most.
    void begin_step(CommTimer* timer);
    void end_step() { timer_ = nullptr; }
    int64_t timer_spans() const { return 8 + 4 * static_cast<int64_t>(buckets_.all().size()); }
    // The backward that follows is the last one of the step: its layers' gradients are reduced as they get ready.
    // compare: where they travel in FP8, do it in fp32 as well, and report.
    void reduce_next_backward(Ctx& ctx, bool compare);
    void grads_ready(Ctx& ctx, int layer);
    void finish_reduce(Ctx& ctx);
    // After that: the gradient of a piece, and what of the gradients this rank adds to the norm.
    Tensor reduced(const Piece& piece) const;
    std::vector<Tensor> own_gradients() const;
    // loss_sum, sum_squares, bad_tokens.
    void sum_over_ranks(Ctx& ctx, StepState* state);
    void agree_on_amaxes(Ctx& ctx);
    // Masters, and weights of the working type in this rank's blocks, are new, and the amaxes agreed on and used:
    // brings weights to all ranks and makes the FP8 copies. Those do not change where state->skip, if state is given.
    void publish(Ctx& ctx, const StepState* state);
    // What is given to ctx from now on finds the weights of the layers up to this one.
    void before_layer(Ctx& ctx, int layer);
    void wait_for_weights(Ctx& ctx);

    int64_t report_bytes() const { return report_ ? int64_t{sizeof(GradCommReport)} : 0; }
    void copy_report(Ctx& ctx, void* host) const;

    // Between steps, on every rank: a weight in FP8 alone as bf16, whole, from the masters of all ranks. It lies in the
    // memory of the gradients, until those are cleared.
    void collect_weight(Ctx& ctx, int param);
    Tensor collected_weight(int param) const;
    void forget_collected() { collected_.assign(buckets_.all().size(), false); }

private:
    std::string purpose_text(const char* verb, const Bucket& bucket) const;
    Ctx& comm_stream(Ctx& ctx);
    void follow(Ctx& ctx, Ctx& comm_stream);
    // Runs on `ctx` what keeps the compute stream from computing; on a second stream collectives do not.
    template <typename Collective> void timed(Ctx& ctx, Collective&& collective) {
        const bool counts = timer_ && !ctx.rehearsal && &ctx != &side_;
        if (counts) timer_->begin(ctx);
        collective();
        if (counts) timer_->end(ctx);
    }
    Tensor own_block(const Bucket& bucket, const Tensor& whole) const;
    Tensor own_sum(const Bucket& bucket) const;
    Tensor gradients(const Bucket& bucket) const { return state_.grads.slice(bucket.begin, bucket.elems); }
    Tensor collecting(const Bucket& bucket) const { return {gradients(bucket).data, Dtype::kBf16, bucket.elems}; }
    Tensor master(const Piece& piece) const { return state_.master.slice(piece.shard, piece.elems); }
    void round_masters(Ctx& ctx, int bucket, const Tensor& whole);
    void publish_bucket(Ctx& comm_stream, int bucket, const StepState* state);
    void gather_bytes(Ctx& comm_stream, int bucket);
    GradCommDtype grad_comm_dtype(const Bucket& bucket) const;
    void take_staging(Arena& arena);
    void reduce_bucket(Ctx& comm_stream, const Bucket& bucket);
    void reduce_bf16(Ctx& comm_stream, const Bucket& bucket);
    void reduce_fp8(Ctx& comm_stream, const Bucket& bucket);

    const Config& config_;
    const ParamTable& table_;
    const Buckets& buckets_;
    const FlatState state_;
    Comm& comm_;
    Fp8State& fp8_;
    const bool sharded_, overlap_;
    const std::vector<Piece> pieces_;
    std::vector<std::vector<Piece>> pieces_of_;   // by bucket

    // Buckets on their way. Each buffer is as long as the largest bucket that needs it.
    Tensor rounded_;                 // masters of weights in FP8 alone, bf16
    Tensor send_, receive_;          // gradients in bf16
    Tensor send_codes_, receive_codes_, send_scales_, receive_scales_;   // gradients in FP8
    Tensor exact_, compare_scratch_, report_;   // the comparison with fp32

    Ctx side_;
    bool opened_ = false;
    Event *ready_ = nullptr, *reduced_ = nullptr;
    std::vector<Event*> published_;  // by bucket
    size_t next_weights_;            // first bucket that the compute stream has not waited for
    CommTimer* timer_ = nullptr;
    bool reducing_ = false, comparing_ = false;
    size_t reduced_buckets_ = 0;
    std::vector<bool> collected_;    // by bucket
};

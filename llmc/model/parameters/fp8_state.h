// The FP8 state of a run on the device: scales, amax histories, quantized weights, and how x and dy are quantized.
// Whatever the recipe decides at run time is here and in linear.cpp.
//
// FP8 tensors are numbered: x of every FP8 linear in the order of the model, then dy of each, then the weights. Delayed
// scaling updates once per optimizer step, from the amaxes of all its micro-batches, so a history counts steps.
#pragma once
#include <string>
#include <vector>

#include "llmc/model/parameters/flat_layout.h"
#include "llmc/model/parameters/fp8_linear.h"
#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/model/parameters/layer_buffers.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

// A quantized x or dy of shape (N, C) in the layouts that matmuls read; absent ones are not written.
struct Fp8Layouts {
    Fp8Operand rowwise;      // (N, C)
    Fp8Operand transposed;   // (C, N)
};

enum class Fp8Phase : uint8_t {
    kTraining,
    kCalibration,   // current scaling whatever the recipe; keeps only the amaxes
    kEvaluation,    // records nothing that a step reads
};

// How an x or dy is quantized: by the operation that computes it, in its own pass, or with current scaling by a second
// pass over its result, once the first pass has recorded the amax. Neither writes a rowwise x in INT8:
// ops::quantize_int8 reads the result of the operation.
struct Fp8Passes {
    QuantOut first;         // of the operation
    QuantOut second = {};   // of ops::quantize; empty: the first pass quantizes
};

class Fp8State {
public:
    // Allocates scales, histories and FP8 weights from the arena; nothing if the plan has no FP8 linear. The memory of
    // the rowwise kFp8Linear weights depends on how `ranks` ranks share them:
    //   not sharded (--zero 0, or one rank): all of them, which this rank quantizes from its masters;
    //   sharded: all of them; ranks quantize their shards and all-gather the bytes;
    //   sharded, with layer_buffers (--zero 3): only this rank's shard of each group. The layer buffers have the whole
    //     weights of the layers that run.
    Fp8State(const Config& config, const Fp8Plan& plan, const FlatLayout& layout, bool sharded, Arena& arena,
             const LayerBuffers* layer_buffers = nullptr, int ranks = 1);

    // Null if the linear runs in BF16.
    const Fp8Linear* linear(int layer, LinearKind kind) const;
    const Fp8Linear* linear_of_param(int param) const;
    const Fp8Plan& plan() const { return plan_; }
    bool on() const { return !linears_.empty(); }

    // Empties the histories, sets all scales to 1, and marks delayed scaling as not calibrated. Call it before any
    // other function that runs on the device.
    void initialise(Ctx& ctx);

    // ---- the step
    void begin_step(Ctx& ctx, bool count);   // count: saturated and flushed values of this step, for the report
    void begin_micro_batch(Ctx& ctx, int64_t number, Fp8Phase phase);   // number: in the step, for messages
    // How the x or dy of a linear is quantized into `to`. recomputed: forward has recorded the statistics of the same
    // values, so these passes record nothing.
    Fp8Passes passes(const Fp8Linear& linear, Fp8Role role, const Fp8Layouts& to, bool recomputed) const;
    // Where values of an x or dy are counted that are quantized again; null unless this step counts.
    Fp8Counts* counts(const Fp8Linear& linear, Fp8Role role) const { return counts_of(id(linear, role)); }
    // Adds the block scales of an x or dy of N rows, once quantized, to the report, if this step counts them.
    void count_block_scales(Ctx& ctx, const Fp8Linear& linear, Fp8Role role, const Fp8Layouts& of, int64_t N,
                            bool recomputed) const;
    // Computes new scales from the amaxes of the step; does nothing if state->skip.
    void update(Ctx& ctx, const StepState* state);
    // The words to all-reduce (max) over the ranks before new scales are computed: the entries of all tensors if the
    // recipe has histories, else those of the weights, and the block amaxes. Scales are equal on all ranks, so that
    // only the amaxes change. May be empty. The last `of_parts` are of experts that only some ranks have.
    struct Amaxes {
        uint32_t* values = nullptr;
        int64_t count = 0, of_parts = 0;
    };
    Amaxes amaxes() const;

    // ---- weights. `shard`: elements [begin, begin + n) of a parameter's fp32 master
    // Clears the amaxes of the weights unless state->skip; state may be null.
    void clear_weight_amax(Ctx& ctx, const StepState* state);
    ScaleEntry* weight_entry(int param) const;   // where AdamW records the amax; null if the parameter is not in FP8
    // Records the amax of a shard as AdamW does in a step.
    void record_amax(Ctx& ctx, int param, const Tensor& shard);
    // Records the amaxes of the scale blocks (in INT8, the rows) of a shard, if weights are sharded and scales are per
    // block.
    void record_block_amaxes(Ctx& ctx, int param, int64_t begin, const Tensor& shard);
    // Enters the recorded amaxes into new histories.
    void start_weight_histories(Ctx& ctx);
    // Quantizes a whole weight, given in fp32 or (as gathered) rounded to bf16; both give the same bytes. Does nothing
    // if state->skip; state may be null.
    void quantize_weight(Ctx& ctx, const Fp8Linear& linear, const Tensor& whole, const StepState* state);
    // The same for sharded weights. prepare_shards computes the scales of all weights, quantize_shard quantizes a shard
    // into `bytes`, and transpose_weight transposes a weight after the all-gather, from INT8 to FP8. A skipped step
    // writes the same bytes again.
    void prepare_shards(Ctx& ctx, const StepState* state);
    void quantize_shard(Ctx& ctx, int param, int64_t begin, const Tensor& shard, const Tensor& bytes);
    void transpose_weight(Ctx& ctx, const Fp8Linear& linear);
    // Whether transpose_weight counts values for the report.
    bool counts_transposed_weights() const { return counting_ && plan_.int8_forward(); }
    // Adds the block scales of a gathered weight to the report, if this step counts them.
    bool counts_weight_scales() const { return counting_ && scale_bins_; }
    void count_weight_scales(Ctx& ctx, const Fp8Linear& linear) const;
    // The rowwise kFp8Linear weights, where a group begins at its weight_begin; with layer buffers only this rank's
    // shard of each group, which begins at weight_begin / ranks.
    const Tensor& flat_weights() const { return flat_weights_; }

    // ---- start of a run
    // Delayed scaling has no scales for x and dy yet: the next step begins with a calibration micro-batch.
    bool needs_calibration() const { return on() && plan_.row().history && !calibrated_; }
    void finish_calibration(Ctx& ctx);

    // The state of a recipe with histories that a checkpoint saves, in the order of the tensors. Blocking.
    struct Histories {
        std::vector<float> scales;
        std::vector<int32_t> updates;
        std::vector<uint32_t> amax_bits;   // (tensors, history_len)
        bool calibrated = false;
    };
    Histories histories(Ctx& ctx) const;
    void set_histories(Ctx& ctx, const Histories& histories);
    int64_t history_len() const { return config_.fp8_amax_history_len; }
    const std::vector<std::string>& tensor_names() const { return tensor_names_; }   // "3.down.dy"

    // ---- reports
    struct TensorReport {
        std::string name;   // "3.down.dy"
        Dtype format;
        ScaleEntry entry;
        Fp8Counts counts;   // zeros unless begin_step was called with `count`
        std::vector<uint64_t> scale_bins;   // likewise; see CountScalesArgs. Empty with one scale per tensor.
    };
    int64_t report_bytes() const;   // of pinned host memory
    // Enqueues a copy of scales, counts, the first non-finite event and, if this step counts, the block scales to the
    // host.
    void copy_report(Ctx& ctx, void* host) const;
    std::vector<TensorReport> read_report(const void* host) const;
    // Merges another rank's report of the same step: largest amaxes, sums of counts, earliest event.
    void merge_report(void* host, const void* other) const;
    // "micro-batch 3, 31.down.x" of the first non-finite value, "" if there was none.
    std::string first_nonfinite(const void* host) const;

    // ---- memory of operands, the same for all linears of a role
    // Memory of a (R, K) operand, or of one for each expert, from take(dtype, elems), without scale_inv if there is one
    // scale per tensor.
    template <typename Take>
    Fp8Operand alloc_operand(Fp8Role role, Fp8Layout layout, int64_t R, int64_t K, Take&& take,
                             int64_t experts = 1) const {
        Fp8Operand operand{take(plan_.format(role, layout), experts * R * K), {}, plan_.granularity(role, layout)};
        if (operand.granularity != Granularity::kTensor)
            operand.scale_inv = take(Dtype::kFp32, experts * scale_inv_elems(operand.granularity, R, K));
        return operand;
    }
    // Such memory as the (R, K) operand of one linear: cut to size, with the linear's scale_inv if it is per tensor.
    Fp8Operand operand_of(const Fp8Linear& linear, Fp8Role role, const Fp8Operand& memory, int64_t R, int64_t K,
                          int64_t experts = 1) const;

private:
    int id(const Fp8Linear& linear, Fp8Role role) const {
        return linear.number + static_cast<int>(role) * static_cast<int>(linears_.size());
    }
    Fp8Role role_of(int tensor) const { return static_cast<Fp8Role>(tensor / static_cast<int>(linears_.size())); }
    int tensors() const { return kFp8Roles * static_cast<int>(linears_.size()); }
    int first_weight() const { return static_cast<int>(Fp8Role::kWeight) * static_cast<int>(linears_.size()); }
    // Uses current scaling whatever the recipe, because there are no delayed scales yet.
    bool uncalibrated_pass() const { return phase_ != Fp8Phase::kTraining && needs_calibration(); }
    ScaleEntry* entries() const { return static_cast<ScaleEntry*>(entries_.data); }
    void take_weights(const LinearPlan& linear, const FlatLayout& layout, const LayerBuffers* layer_buffers,
                      Arena& arena);
    int64_t count_blocks(const FlatLayout& layout);
    Fp8Counts* counts_of(int tensor) const;   // null unless this step counts
    // Adds the scales of the blocks of (matrices, R, ...) operands to the report, if this step counts.
    void count_scales(Ctx& ctx, int tensor, const Fp8Operand& operand, int64_t R, int64_t matrices = 1) const;
    uint32_t* block_amaxes_of(const Fp8Linear& linear) const;
    void update_scales(Ctx& ctx, int begin, int count, const StepState* state);
    int step_order(int tensor) const;
    uint32_t event(int tensor) const;

    const Config& config_;
    const Fp8Plan plan_;
    std::vector<Fp8Linear> linears_;
    std::vector<int> by_plan_;       // by linear of the plan: its number in linears_, -1: BF16
    std::vector<std::string> tensor_names_;
    const bool sharded_;             // and some weights are stored in FP8 only
    Tensor entries_, counts_, monitor_;   // ScaleEntry (tensors), Fp8Counts (tensors), uint32 (1)
    Tensor scale_bins_;                 // uint64 (tensors, kScaleBins); only of block scales that are reported
    Tensor block_amaxes_;               // uint32, directly behind entries_: of the blocks or rows of gathered weights
    std::vector<int64_t> first_block_;  // by FP8 linear
    int64_t blocks_of_parts_ = 0;       // see Amaxes; they are the last ones
    Tensor history_, updates_, largest_;
    Tensor flat_weights_;
    Fp8Phase phase_ = Fp8Phase::kTraining;
    bool counting_ = false, calibrated_ = false;
    int64_t micro_batch_ = 0;
};

// The FP8 side of a run on the device: scales, histories, FP8 weights, and the rule by which a tensor becomes an
// operand. Everything the recipe decides at run time is here and in linear.cpp.
//
// FP8 tensors are numbered: x of every FP8 linear in the order of the model, then dy of each, then the weights. One
// update of delayed scaling per optimizer step, over all its micro-batches, so a history counts steps.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "llmc/model/flat_layout.h"
#include "llmc/model/fp8_recipe.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

enum class Fp8Role : uint8_t { kX, kDy, kWeight };
inline constexpr int kFp8Roles = 3;

// A quantised (R, K) matrix as a matmul takes it.
struct Fp8Operand {
    Tensor data;   // (R, K) fp8
    Tensor scale_inv;   // scale_inv
    Granularity granularity = Granularity::kTensor;
};

// What a linear in FP8 has instead of a bf16 weight.
struct Fp8Linear {
    int number = 0;                  // among the FP8 linears
    int param = -1;                  // of the weight
    int64_t in = 0, out = 0;
    Fp8Operand weight;               // (out, in)
    Fp8Operand weight_transposed;    // (in, out)
    bool fast_fprop = false, fast_backward = false;
};

// The copies of an x or dy of shape (N, C); what is absent is not made.
struct Fp8Copies {
    Fp8Operand rowwise;      // (N, C)
    Fp8Operand transposed;   // (C, N)
};

enum class Fp8Phase : uint8_t {
    kTraining,
    kCalibration,      // current scaling whatever the recipe; only the amaxes stay
    kEvaluation,   // records nothing that a step reads
};

// Writes a tensor: its bf16 result to `out` unless that is empty, and what `quant` asks for.
using Producer = std::function<void(Tensor out, const QuantOut& quant)>;

// Where a tensor goes.
struct ProduceArgs {
    const Fp8Linear* linear = nullptr;   // whose operand it becomes; null: bf16 and dbias only
    Fp8Role role = Fp8Role::kX;
    Fp8Copies to;                        // with linear
    Tensor high;                         // (N, C) bf16: the result where it is kept, else working memory
    bool keep_high = false;              // the bf16 result is read by others, too
    bool replay = false;                 // made again by recomputation: records nothing
    int64_t N = 0;
    Tensor dbias, dbias_scratch;         // see QuantOut
};

class Fp8State {
public:
    // Takes scales, histories and FP8 weights from the arena; nothing if the plan has no FP8 linear. gathers_bytes: the
    // weights in FP8 alone are quantized from shards in steps, and their bytes brought together between these.
    Fp8State(const Config& config, const Fp8Plan& plan, const FlatLayout& layout, bool gathers_bytes, Arena& arena);

    // The FP8 side of a linear, null if it runs in BF16.
    const Fp8Linear* linear(int layer, LinearKind kind) const;
    const Fp8Linear* linear_of_param(int param) const;
    const Fp8Plan& plan() const { return plan_; }
    bool on() const { return !linears_.empty(); }

    // Histories empty, scales 1, to be calibrated. Before any other call that runs on the device.
    void initialise(Ctx& ctx);

    // ---- the step
    void begin_step(Ctx& ctx, bool count);   // count: saturated and flushed values of this step, for the report
    void begin_micro_batch(Ctx& ctx, int64_t number, Fp8Phase phase);   // number: in the step, for messages
    // Runs the producer so that the tensor ends up as its linear wants it: one pass for delayed and block scales, a
    // second one that casts for current scaling.
    void produce(Ctx& ctx, const ProduceArgs& args, const Producer& run);
    // New scales from the amaxes of the step. Nothing changes where state->skip.
    void update(Ctx& ctx, const StepState* state);
    // What scales are made of, as words whose maximum over partial results is the result: amaxes, beside which lie
    // scales that are equal anyway. With histories those of all tensors, else those of the weights. May be empty.
    struct Amaxes {
        uint32_t* values = nullptr;
        int64_t count = 0;
    };
    Amaxes amaxes() const;

    // ---- weights, whose masters may come in shards: elements [begin, begin + n) of one, fp32
    // Before the masters of a step, or (null) of a start, are recorded. Nothing changes where state->skip.
    void clear_weight_amax(Ctx& ctx, const StepState* state);
    Fp8Slot* weight_slot(int param) const;   // where AdamW records; null if it is not in FP8
    // What AdamW would have recorded, at the start of a run.
    void record_amax(Ctx& ctx, int param, const Tensor& shard);
    // The amaxes of its blocks, where bytes are gathered and scales are per block; else nothing.
    void record_blocks(Ctx& ctx, int param, int64_t begin, const Tensor& shard);
    // At the start of a run, and fresh: the recorded amaxes are the first entries of the histories.
    void start_weight_histories(Ctx& ctx);
    // Both copies of a weight from the whole of it, fp32 or (as gathered) rounded to bf16: the same bytes. Nothing
    // changes where state->skip, if state is given.
    void quantize_weight(Ctx& ctx, const Fp8Linear& linear, const Tensor& whole, const StepState* state);
    // The same in steps where bytes are gathered: scales of all weights, bytes of shards into flat_weights, there those
    // of the other shards, transposed weights. A skipped step repeats the bytes.
    bool gathers_bytes() const { return gathers_bytes_; }
    void prepare_shards(Ctx& ctx, const StepState* state);
    void quantize_shard(Ctx& ctx, int param, int64_t begin, const Tensor& shard);
    void transpose_weight(Ctx& ctx, const Fp8Linear& linear);
    // Rowwise copies of the weights in FP8 alone, as FlatLayout places them.
    const Tensor& flat_weights() const { return flat_weights_; }

    // ---- start of a run
    // Delayed scaling that has no scales for x and dy yet: the next step runs its first micro-batch twice.
    bool needs_calibration() const { return on() && plan_.row().history && !calibrated_; }
    void finish_calibration(Ctx& ctx);

    // What a run goes on from, of recipes with histories; in the order of the tensors. Blocking.
    struct Histories {
        std::vector<float> scales;
        std::vector<int32_t> updates;
        std::vector<uint32_t> amax_bits;   // history_len of each tensor
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
        Fp8Slot slot;
        Fp8Counts counts;   // zeros unless the step counted
    };
    int64_t report_bytes() const;   // of pinned host memory
    // Copies scales, counts and the first non-finite event to the host; valid once the stream got there.
    void copy_report(Ctx& ctx, void* host) const;
    std::vector<TensorReport> read_report(const void* host) const;
    // Adds another report of the same step: largest amaxes, sums of counts, earliest event.
    void merge_report(void* host, const void* other) const;
    // "micro-batch 3, 31.down.x" of the first non-finite value, "" if there was none.
    std::string first_nonfinite(const void* host) const;

    // ---- memory of operands, the same for all linears of a role
    // A (R, K) operand; take(dtype, elems) hands out memory. The grid is absent where there is one scale.
    template <typename Take> Fp8Operand take_operand(Fp8Role role, int64_t R, int64_t K, Take&& take) const {
        Fp8Operand operand{take(format_of(role), R * K), {}, granularity_of(role)};
        if (operand.granularity != Granularity::kTensor)
            operand.scale_inv = take(Dtype::kFp32, scale_inv_elems(operand.granularity, R, K));
        return operand;
    }
    // Such memory as the (R, K) operand of one linear: cut to size, with the linear's own scale where there is one.
    Fp8Operand operand_of(const Fp8Linear& linear, Fp8Role role, const Fp8Operand& memory, int64_t R, int64_t K) const;

private:
    int id(const Fp8Linear& linear, Fp8Role role) const {
        return linear.number + static_cast<int>(role) * static_cast<int>(linears_.size());
    }
    int tensors() const { return kFp8Roles * static_cast<int>(linears_.size()); }
    int first_weight() const { return static_cast<int>(Fp8Role::kWeight) * static_cast<int>(linears_.size()); }
    // Scales by current scaling whatever the recipe, because there are no others yet.
    bool uncalibrated_pass() const { return phase_ != Fp8Phase::kTraining && needs_calibration(); }
    Fp8Slot* slots() const { return static_cast<Fp8Slot*>(slots_.data); }
    Dtype format_of(Fp8Role role) const;
    Granularity granularity_of(Fp8Role role) const;
    void take_weights(const LinearPlan& linear, const FlatLayout& layout, Arena& arena);
    int64_t count_blocks(const FlatLayout& layout);
    Fp8Counts* counts_of(int tensor) const;   // null unless this step counts
    uint32_t* blocks_of(const Fp8Linear& linear) const;
    QuantOut quant_out(const ProduceArgs& args) const;
    void update_scales(Ctx& ctx, int begin, int count, const StepState* state);
    int step_order(int tensor) const;
    uint32_t event(int tensor) const;

    const Config& config_;
    const Fp8Plan plan_;
    std::vector<Fp8Linear> linears_;
    std::vector<int> by_plan_;       // number of the FP8 linear of each linear of the plan, -1: BF16
    std::vector<std::string> tensor_names_;
    const bool gathers_bytes_;
    Tensor slots_, counts_, monitor_;   // Fp8Slot (tensors), Fp8Counts (tensors), uint32 (1)
    Tensor block_amaxes_;               // directly behind slots_, uint32: of the blocks of weights, where needed
    std::vector<int64_t> first_block_;  // by FP8 linear
    Tensor history_, updates_, largest_;
    Tensor flat_weights_;
    Fp8Phase phase_ = Fp8Phase::kTraining;
    bool counting_ = false, calibrated_ = false;
    int64_t micro_batch_ = 0;
};

// The plan that the state executes: `plan`, except for the linear that --inject bf16:linear=NAME forces to BF16.
Fp8Plan executed_fp8_plan(const Fp8Plan& plan, const std::vector<std::string>& inject);

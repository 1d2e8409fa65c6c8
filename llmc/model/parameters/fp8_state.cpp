#include "llmc/model/parameters/fp8_state.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "llmc/base/fp8.h"
#include "llmc/ops/owned.h"

namespace {

constexpr int64_t kEntryWords = sizeof(ScaleEntry) / 4, kCountWords = sizeof(Fp8Counts) / 4;
constexpr int64_t kBinBytes = kScaleBins * int64_t{sizeof(uint64_t)};   // of a tensor

// Merges values of two reports in unaligned memory. join(mine, theirs) updates each of the `bytes` / sizeof(T) values
// at `to` by the corresponding one at `from`. Both pointers are moved behind these values.
template <typename T, typename Join> void merge_values(char*& to, const char*& from, int64_t bytes, const Join& join) {
    for (const char* const end = from + bytes; from != end; to += sizeof(T), from += sizeof(T)) {
        T mine, theirs;
        std::memcpy(&mine, to, sizeof(T));
        std::memcpy(&theirs, from, sizeof(T));
        join(mine, theirs);
        std::memcpy(to, &mine, sizeof(T));
    }
}

}  // namespace

Fp8State::Fp8State(const Config& config, const Fp8Plan& plan, const FlatLayout& layout, bool sharded,
                   Arena& arena, const LayerBuffers* layer_buffers, int ranks)
    : config_(config), plan_(plan), sharded_(sharded && layout.fp8_elems() > 0) {
    by_plan_.assign(plan_.linears.size(), -1);
    if (!plan_.on()) return;
    const int64_t count = plan_.fp8_linears();
    if (count == 0) return;
    const int64_t all = kFp8Roles * count;
    // The block amaxes are directly behind the entries, so that one all-reduce covers both.
    const int64_t blocks = sharded_ ? count_blocks(layout) : 0;
    const Tensor shared = arena.take(Purpose::kFp8, Dtype::kInt32, all * kEntryWords + blocks);
    entries_ = shared.slice(0, all * kEntryWords);
    block_amaxes_ = shared.slice(all * kEntryWords, blocks);
    counts_ = arena.take(Purpose::kFp8, Dtype::kInt32, all * kCountWords);
    monitor_ = arena.take(Purpose::kFp8, Dtype::kInt32, 1);
    if (plan_.row().x != Granularity::kTensor && config.fp8_stats_interval > 0)
        scale_bins_ = arena.take(Purpose::kFp8, Dtype::kInt32, all * kBinBytes / 4);
    if (plan_.row().history) {
        history_ = arena.take(Purpose::kFp8, Dtype::kFp32, all * config.fp8_amax_history_len);
        updates_ = arena.take(Purpose::kFp8, Dtype::kInt32, all);
        largest_ = arena.take(Purpose::kFp8, Dtype::kFp32, all);
    }
    int64_t elems = 0;
    for (const ParamGroup& group : layout.groups())
        if (group.form == ParamForm::kFp8Linear)
            elems += group.elems / (layer_buffers ? std::max<int64_t>(1, ranks / group.parts) : 1);
    flat_weights_ = arena.take(Purpose::kWeights, plan_.format(Fp8Role::kWeight, Fp8Layout::kRowwise), elems);
    linears_.reserve(static_cast<size_t>(count));
    for (size_t i = 0; i < plan_.linears.size(); i++) {
        if (!plan_.linears[i].fp8) continue;
        by_plan_[i] = static_cast<int>(linears_.size());
        take_weights(plan_.linears[i], layout, layer_buffers, arena);
    }
    for (int role = 0; role < kFp8Roles; role++)
        for (const LinearPlan& linear : plan_.linears)
            if (linear.fp8) tensor_names_.push_back(linear.name + "." + fp8_role_name(static_cast<Fp8Role>(role)));
    // The entry of a weight depends on the total number of linears.
    for (Fp8Linear& linear : linears_) {
        if (linear.weight.data)
            linear.weight = operand_of(linear, Fp8Role::kWeight, linear.weight, linear.out, linear.in, linear.experts);
        linear.weight_transposed =
            operand_of(linear, Fp8Role::kWeight, linear.weight_transposed, linear.in, linear.out, linear.experts);
    }
}

// Counts the scale blocks of the sharded weights, and fills first_block_.
int64_t Fp8State::count_blocks(const FlatLayout& layout) {
    const Granularity granularity = plan_.granularity(Fp8Role::kWeight, Fp8Layout::kRowwise);
    if (granularity == Granularity::kTensor) return 0;
    int64_t blocks = 0;
    for (const bool parts : {false, true}) {
        size_t number = 0;
        for (const LinearPlan& linear : plan_.linears) {
            if (!linear.fp8) continue;
            const ParamGroup& group = layout.group_of(linear.weight);
            first_block_.resize(std::max(first_block_.size(), ++number), -1);
            if (group.form != ParamForm::kFp8Linear || (group.parts > 1) != parts) continue;
            const int64_t more = linear.experts * weight_blocks(granularity, linear);
            first_block_[number - 1] = blocks;
            blocks += more, blocks_of_parts_ += parts ? more : 0;
        }
    }
    return blocks;
}

void Fp8State::take_weights(const LinearPlan& linear, const FlatLayout& layout, const LayerBuffers* layer_buffers,
                            Arena& arena) {
    auto take = [&](Dtype dtype, int64_t elems) { return arena.take(Purpose::kWeights, dtype, elems); };
    // Ranks gather the weight of a head in the working type, which its forward matmul reads: the quantized copy for the
    // backward pass is this rank's own.
    const bool fp8_only = layout.form(linear.weight) == ParamForm::kFp8Linear;
    const ParamGroup& group = layout.group_of(linear.weight);
    const int64_t in_group = layout.offset(linear.weight) - group.begin;
    auto rowwise = [&](Dtype dtype, int64_t elems) {
        if (!fp8_only || dtype == Dtype::kFp32) return take(dtype, elems);   // scales
        if (layer_buffers) return layer_buffers->whole(group).slice(in_group, elems);
        return flat_weights_.slice(group.weight_begin + in_group, elems);
    };
    auto transposed = [&](Dtype dtype, int64_t elems) {
        if (!fp8_only || dtype == Dtype::kFp32 || !layer_buffers) return take(dtype, elems);
        return layer_buffers->transposed(group).slice(in_group, elems);
    };
    linears_.push_back({.number = static_cast<int>(linears_.size()), .param = linear.weight, .in = linear.in,
                        .out = linear.out, .experts = linear.experts, .of_experts = linear.of_experts,
                        .weight = linear.fp8_forward() ? alloc_operand(Fp8Role::kWeight, Fp8Layout::kRowwise,
                                                                       linear.out, linear.in, rowwise, linear.experts)
                                                       : Fp8Operand{},
                        .weight_transposed = alloc_operand(Fp8Role::kWeight, Fp8Layout::kTransposed, linear.in,
                                                           linear.out, transposed, linear.experts),
                        .fast_fprop = plan_.fast_fprop, .fast_backward = plan_.fast_backward,
                        .bf16_wgrad = plan_.row().bf16_wgrad});
}

const Fp8Linear* Fp8State::linear(int layer, LinearKind kind) const {
    if (!on()) return nullptr;
    const int number = by_plan_[static_cast<size_t>(&plan_.linear(layer, kind) - plan_.linears.data())];
    return number < 0 ? nullptr : &linears_[static_cast<size_t>(number)];
}

const Fp8Linear* Fp8State::linear_of_param(int param) const {
    for (const Fp8Linear& linear : linears_)
        if (linear.param == param) return &linear;
    return nullptr;
}

static_assert(offsetof(ScaleEntry, scale_inv) == 0);   // a scale entry's address is that of the scale_inv of its tensor
Fp8Operand Fp8State::operand_of(const Fp8Linear& linear, Fp8Role role, const Fp8Operand& memory, int64_t R,
                                int64_t K, int64_t experts) const {
    const Tensor data = memory.data.slice(0, experts * R * K);
    if (memory.granularity == Granularity::kTensor)
        return {data, {entries() + id(linear, role), Dtype::kFp32, 1}, memory.granularity};
    return {data, memory.scale_inv.slice(0, experts * scale_inv_elems(memory.granularity, R, K)), memory.granularity};
}

Fp8Counts* Fp8State::counts_of(int tensor) const {
    return counting_ ? static_cast<Fp8Counts*>(counts_.data) + tensor : nullptr;
}

void Fp8State::count_scales(Ctx& ctx, int tensor, const Fp8Operand& operand, int64_t R, int64_t matrices) const {
    if (!counting_ || !scale_bins_ || !operand.data) return;
    auto* bins = static_cast<unsigned long long*>(scale_bins_.data) + tensor * kScaleBins;
    ops::count_scales(ctx, {.bins = bins, .codes = operand.data, .scale_inv = operand.scale_inv,
                            .granularity = operand.granularity, .R = R, .K = operand.data.elems / (matrices * R),
                            .matrices = matrices});
}

// ---- the first non-finite value

// Position of a tensor in its micro-batch: x in the order of the model, dy in reverse. The function is its own inverse.
int Fp8State::step_order(int tensor) const {
    const int count = static_cast<int>(linears_.size());
    return role_of(tensor) == Fp8Role::kDy ? 3 * count - 1 - tensor : tensor;
}

uint32_t Fp8State::event(int tensor) const {
    return static_cast<uint32_t>(micro_batch_ * tensors() + step_order(tensor));
}

std::string Fp8State::first_nonfinite(const void* host) const {
    if (!on()) return "";
    uint32_t first;
    std::memcpy(&first, static_cast<const char*>(host) + entries_.bytes() + counts_.bytes(), sizeof first);
    if (first == UINT32_MAX) return "";
    const uint32_t all = static_cast<uint32_t>(tensors());
    const int tensor = step_order(static_cast<int>(first % all));
    return strf("micro-batch %u, %s", first / all, tensor_names_[static_cast<size_t>(tensor)].c_str());
}

// ---- the step

void Fp8State::initialise(Ctx& ctx) {
    if (!on()) return;
    calibrated_ = false;
    device::fill_bytes(ctx, counts_.data, 0, counts_.bytes());
    device::fill_bytes(ctx, monitor_.data, 0xff, monitor_.bytes());
    device::fill_bytes(ctx, flat_weights_.data, 0, flat_weights_.bytes());   // the gaps
    write_out(ctx, entries_, std::vector<ScaleEntry>(static_cast<size_t>(tensors()), {1.0f, 1.0f, 0, 0}));
    if (!plan_.row().history) return;
    device::fill_bytes(ctx, history_.data, 0, history_.bytes());
    device::fill_bytes(ctx, updates_.data, 0, updates_.bytes());
    std::vector<float> largest;
    for (int i = 0; i < tensors(); i++)
        largest.push_back(std::ldexp(fp8_largest(plan_.format(role_of(i))), -static_cast<int>(config_.fp8_margin)));
    write_out(ctx, largest_, largest);
}

void Fp8State::begin_step(Ctx& ctx, bool count) {
    if (!on()) return;
    counting_ = count;
    ops::fp8_clear(ctx, {.entries = entries(), .count = first_weight(), .step = true});
    device::fill_bytes(ctx, monitor_.data, 0xff, monitor_.bytes());
    if (!count) return;
    device::fill_bytes(ctx, counts_.data, 0, counts_.bytes());
    if (scale_bins_) device::fill_bytes(ctx, scale_bins_.data, 0, scale_bins_.bytes());
}

void Fp8State::begin_micro_batch(Ctx& ctx, int64_t number, Fp8Phase phase) {
    if (!on()) return;
    micro_batch_ = number;
    phase_ = phase;
    // With tensorwise current scaling each micro-batch needs its own amaxes; delayed scaling collects them until the
    // update.
    const bool current = plan_.row().scaling == Scaling::kCurrent && plan_.row().x == Granularity::kTensor;
    if (current || uncalibrated_pass()) ops::fp8_clear(ctx, {.entries = entries(), .count = first_weight()});
}

Fp8Passes Fp8State::passes(const Fp8Linear& linear, Fp8Role role, const Fp8Layouts& to, bool recomputed) const {
    const int tensor = id(linear, role);
    const bool trains = phase_ == Fp8Phase::kTraining, records = trains && !recomputed;
    // Of x in an INT8 forward pass the transposed layout alone is in FP8, and a recomputation may write it.
    const bool int8 = plan_.is_int8(role, Fp8Layout::kRowwise);
    const bool counts = int8 ? trains && to.transposed.data : records;
    const Granularity granularity = plan_.granularity(role, Fp8Layout::kTransposed);
    const bool blocks = granularity != Granularity::kTensor;   // blocks have their own scales
    const Scaling per_tensor = uncalibrated_pass() ? Scaling::kCurrent : plan_.row().scaling;
    QuantOut cast{.rowwise = int8 ? Tensor{} : to.rowwise.data,
                  .transposed = to.transposed.data,
                  .granularity = granularity,
                  .scaling = blocks ? Scaling::kDelayed : per_tensor,
                  .entry = entries() + tensor,
                  .rowwise_scale_inv = blocks ? to.rowwise.scale_inv : Tensor{},
                  .transposed_scale_inv = blocks ? to.transposed.scale_inv : Tensor{},
                  .record = records,
                  .counts = counts ? counts_of(tensor) : nullptr,
                  .first_nonfinite = records ? static_cast<uint32_t*>(monitor_.data) : nullptr,
                  .event = event(tensor)};
    // Not all producers also write what they quantize; those of experts do.
    if (linear.bf16_wgrad && !linear.of_experts) return {.first = {}, .second = cast};
    if (cast.scaling == Scaling::kDelayed) return {.first = cast};
    QuantOut amax;
    amax.entry = cast.entry;
    amax.record = !recomputed;   // in every phase: the cast needs it
    amax.first_nonfinite = cast.first_nonfinite;
    amax.event = cast.event;
    cast.record = false;
    cast.first_nonfinite = nullptr;
    return {.first = amax, .second = cast};
}

// The transposed layout, for wgrad, is written once: by forward or by a recomputation.
void Fp8State::count_block_scales(Ctx& ctx, const Fp8Linear& linear, Fp8Role role, const Fp8Layouts& of, int64_t N,
                                  bool recomputed) const {
    if (phase_ != Fp8Phase::kTraining) return;
    if (!recomputed) count_scales(ctx, id(linear, role), of.rowwise, N);
    count_scales(ctx, id(linear, role), of.transposed, of.transposed.data.elems / N);
}

Fp8State::Amaxes Fp8State::amaxes() const {
    if (!on()) return {};
    const int first = plan_.row().history ? 0 : first_weight();
    return {.values = reinterpret_cast<uint32_t*>(entries() + first),
            .count = (tensors() - first) * kEntryWords + block_amaxes_.elems, .of_parts = blocks_of_parts_};
}

void Fp8State::update_scales(Ctx& ctx, int begin, int count, const StepState* state) {
    const int64_t length = config_.fp8_amax_history_len;
    ops::fp8_update(ctx, {.entries = entries() + begin, .history = history_.as<float>() + begin * length,
                          .updates = updates_.as<int32_t>() + begin, .largest = largest_.as<float>() + begin,
                          .count = count, .length = length, .interval = config_.fp8_interval,
                          .most_recent = config_.fp8_amax_compute_algo == AmaxAlgo::kMostRecent, .state = state});
}

void Fp8State::update(Ctx& ctx, const StepState* state) {
    if (on() && plan_.row().history) update_scales(ctx, 0, tensors(), state);
}

void Fp8State::finish_calibration(Ctx& ctx) {
    update_scales(ctx, 0, first_weight(), nullptr);
    if (!ctx.rehearsal) calibrated_ = true;
}

// ---- weights

ScaleEntry* Fp8State::weight_entry(int param) const {
    const Fp8Linear* linear = linear_of_param(param);
    return linear ? entries() + id(*linear, Fp8Role::kWeight) : nullptr;
}

// Null if this weight has no block amaxes to all-reduce.
uint32_t* Fp8State::block_amaxes_of(const Fp8Linear& linear) const {
    if (!block_amaxes_) return nullptr;
    const int64_t first = first_block_[static_cast<size_t>(linear.number)];
    return first < 0 ? nullptr : static_cast<uint32_t*>(block_amaxes_.data) + first;
}

void Fp8State::clear_weight_amax(Ctx& ctx, const StepState* state) {
    if (!on()) return;
    ops::fp8_clear(ctx, {.entries = entries() + first_weight(), .count = tensors() - first_weight(), .step = true,
                         .state = state});
    // The block amaxes are cleared in any case: after a skipped step they are recorded again from the same masters.
    device::fill_bytes(ctx, block_amaxes_.data, 0, block_amaxes_.bytes());
}

void Fp8State::record_amax(Ctx& ctx, int param, const Tensor& shard) {
    if (ScaleEntry* entry = weight_entry(param)) ops::amax(ctx, {.entry = entry, .in = shard});
}

static_assert(kParamAlign % kTurnedColumns == 0);   // shards begin and end at whole groups of turned columns
void Fp8State::record_block_amaxes(Ctx& ctx, int param, int64_t begin, const Tensor& shard) {
    const Fp8Linear* linear = linear_of_param(param);
    uint32_t* const amaxes = linear ? block_amaxes_of(*linear) : nullptr;
    if (!amaxes) return;
    const Granularity granularity = linear->weight.granularity;
    if (granularity == Granularity::kRow)
        return ops::row_amax(ctx, {.amaxes = amaxes, .in = shard, .begin = begin, .R = linear->out, .C = linear->in});
    ops::block_amax(ctx, {.amaxes = amaxes, .in = shard, .begin = begin, .R = linear->out, .C = linear->in,
                          .matrices = linear->experts});
}

void Fp8State::start_weight_histories(Ctx& ctx) {
    if (on() && plan_.row().history) update_scales(ctx, first_weight(), tensors() - first_weight(), nullptr);
}

void Fp8State::quantize_weight(Ctx& ctx, const Fp8Linear& linear, const Tensor& whole, const StepState* state) {
    if (linear.weight.granularity == Granularity::kRow) {
        ops::quantize_int8(ctx, {.out = linear.weight.data, .scale_inv = linear.weight.scale_inv, .in = whole,
                                 .N = linear.out, .C = linear.in, .state = state});
        return transpose_weight(ctx, linear);
    }
    const RecipeRow& row = plan_.row();
    const int tensor = id(linear, Fp8Role::kWeight);
    const bool blocks = row.weight != Granularity::kTensor;
    const QuantOut quant{.rowwise = linear.weight.data,
                         .transposed = linear.weight_transposed.data,
                         .granularity = row.weight,
                         .scaling = row.scaling,
                         .entry = entries() + tensor,
                         .rowwise_scale_inv = blocks ? linear.weight.scale_inv : Tensor{},
                         .transposed_scale_inv = blocks ? linear.weight_transposed.scale_inv : Tensor{},
                         .counts = counts_of(tensor)};
    ops::quantize(ctx, {.quant = quant, .in = whole, .N = linear.out, .C = linear.in, .state = state,
                        .matrices = linear.experts});
    count_weight_scales(ctx, linear);
}

void Fp8State::prepare_shards(Ctx& ctx, const StepState* state) {
    if (!sharded_) return;
    if (!block_amaxes_) {
        ops::fp8_scales(ctx, {.entries = entries() + first_weight(), .count = tensors() - first_weight(),
                               .scaling = plan_.row().scaling, .format = plan_.weight_format, .state = state});
        return;
    }
    for (const Fp8Linear& linear : linears_) {
        if (!block_amaxes_of(linear)) continue;
        if (linear.weight.granularity == Granularity::kRow) {
            ops::row_scales(ctx, {.scale_inv = linear.weight.scale_inv, .amaxes = block_amaxes_of(linear),
                                  .R = linear.out});
            continue;
        }
        ops::block_scales(ctx, {.scale_inv = linear.weight.scale_inv,
                                .transposed_scale_inv = linear.weight_transposed.scale_inv,
                                .amaxes = block_amaxes_of(linear), .R = linear.out, .C = linear.in,
                                .format = plan_.weight_format, .matrices = linear.experts});
    }
}

void Fp8State::quantize_shard(Ctx& ctx, int param, int64_t begin, const Tensor& shard, const Tensor& bytes) {
    const Fp8Linear& linear = *linear_of_param(param);
    const uint32_t* blocks = block_amaxes_of(linear);
    if (linear.weight.granularity == Granularity::kRow)
        return ops::quantize_int8_run(ctx, {.out = bytes, .in = shard, .amaxes = blocks, .begin = begin,
                                            .R = linear.out, .C = linear.in});
    ops::quantize_run(ctx, {.out = bytes, .in = shard, .begin = begin, .R = linear.out, .C = linear.in,
                            .entry = blocks ? nullptr : weight_entry(param), .block_amaxes = blocks,
                            .counts = counts_of(id(linear, Fp8Role::kWeight)), .matrices = linear.experts});
}

void Fp8State::transpose_weight(Ctx& ctx, const Fp8Linear& linear) {
    if (linear.weight.granularity == Granularity::kRow) {
        const int tensor = id(linear, Fp8Role::kWeight);
        return ops::transpose_int8(ctx, {.out = linear.weight_transposed.data, .in = linear.weight.data,
                                         .scale_inv = linear.weight.scale_inv, .entry = entries() + tensor,
                                         .R = linear.out, .C = linear.in, .counts = counts_of(tensor)});
    }
    ops::transpose_bytes(ctx, {.out = linear.weight_transposed.data, .in = linear.weight.data, .R = linear.out,
                               .C = linear.in, .matrices = linear.experts});
}

void Fp8State::count_weight_scales(Ctx& ctx, const Fp8Linear& linear) const {
    const bool whole = static_cast<bool>(linear.weight.data);   // the transpose has the same scales
    count_scales(ctx, id(linear, Fp8Role::kWeight), whole ? linear.weight : linear.weight_transposed,
                 whole ? linear.out : linear.in, linear.experts);
}

// ---- checkpoint

Fp8State::Histories Fp8State::histories(Ctx& ctx) const {
    Histories found{.scales = {}, .updates = read_back<int32_t>(ctx, updates_),
                    .amax_bits = read_back<uint32_t>(ctx, history_), .calibrated = calibrated_};
    for (const ScaleEntry& entry : read_back<ScaleEntry>(ctx, entries_))
        found.scales.push_back(entry.scale);
    return found;
}

void Fp8State::set_histories(Ctx& ctx, const Histories& histories) {
    CHECK(static_cast<int>(histories.updates.size()) == tensors()
          && static_cast<int64_t>(histories.amax_bits.size()) == history_.elems, "histories do not match the FP8 plan");
    std::vector<ScaleEntry> entries;
    for (float scale : histories.scales) entries.push_back({1.0f / scale, scale, 0, 0});
    write_out(ctx, entries_, entries);
    write_out(ctx, history_, histories.amax_bits);
    write_out(ctx, updates_, histories.updates);
    calibrated_ = histories.calibrated;
}

// ---- reports

int64_t Fp8State::report_bytes() const {
    return entries_.bytes() + counts_.bytes() + monitor_.bytes() + scale_bins_.bytes();
}

void Fp8State::copy_report(Ctx& ctx, void* host) const {
    if (!on()) return;
    char* to = static_cast<char*>(host);
    for (const Tensor* part : {&entries_, &counts_, &monitor_}) {
        device::copy_to_host(ctx, to, part->data, part->bytes());
        to += part->bytes();
    }
    if (counting_ && scale_bins_) device::copy_to_host(ctx, to, scale_bins_.data, scale_bins_.bytes());
}

std::vector<Fp8State::TensorReport> Fp8State::read_report(const void* host) const {
    const char* const counts = static_cast<const char*>(host) + entries_.bytes();
    const char* const bins = counts + counts_.bytes() + monitor_.bytes();
    std::vector<TensorReport> reports;
    for (int i = 0; i < tensors(); i++) {
        TensorReport report{tensor_names_[static_cast<size_t>(i)], plan_.format(role_of(i)), {}, {}, {}};
        std::memcpy(&report.entry, static_cast<const ScaleEntry*>(host) + i, sizeof(ScaleEntry));
        std::memcpy(&report.counts, counts + i * int64_t{sizeof(Fp8Counts)}, sizeof(Fp8Counts));
        if (scale_bins_) {
            report.scale_bins.resize(kScaleBins);
            std::memcpy(report.scale_bins.data(), bins + i * kBinBytes, kBinBytes);
        }
        reports.push_back(report);
    }
    return reports;
}

void Fp8State::merge_report(void* host, const void* other) const {
    char* to = static_cast<char*>(host);
    const char* from = static_cast<const char*>(other);
    merge_values<ScaleEntry>(to, from, entries_.bytes(), [](ScaleEntry& mine, const ScaleEntry& theirs) {
        mine.amax_bits = std::max(mine.amax_bits, theirs.amax_bits);
        mine.step_amax_bits = std::max(mine.step_amax_bits, theirs.step_amax_bits);
    });
    merge_values<Fp8Counts>(to, from, counts_.bytes(), [](Fp8Counts& mine, const Fp8Counts& theirs) {
        mine.elems += theirs.elems;
        mine.saturated += theirs.saturated;
        mine.flushed += theirs.flushed;
        mine.nonfinite += theirs.nonfinite;
    });
    merge_values<uint32_t>(to, from, monitor_.bytes(),
                           [](uint32_t& mine, uint32_t theirs) { mine = std::min(mine, theirs); });
    merge_values<uint64_t>(to, from, scale_bins_.bytes(), [](uint64_t& mine, uint64_t theirs) { mine += theirs; });
}

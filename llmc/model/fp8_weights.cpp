// FP8 weights: from whole masters, or in steps from shards of them.
#include "llmc/model/fp8_state.h"

Fp8Slot* Fp8State::weight_slot(int param) const {
    const Fp8Linear* linear = linear_of_param(param);
    return linear ? slots() + id(*linear, Fp8Role::kWeight) : nullptr;
}

// Null where no blocks are shared.
uint32_t* Fp8State::blocks_of(const Fp8Linear& linear) const {
    if (!block_amaxes_) return nullptr;
    const int64_t first = first_block_[static_cast<size_t>(linear.number)];
    return first < 0 ? nullptr : static_cast<uint32_t*>(block_amaxes_.data) + first;
}

void Fp8State::clear_weight_amax(Ctx& ctx, const StepState* state) {
    if (!on()) return;
    ops::fp8_clear(ctx, {.slots = slots() + first_weight(), .count = tensors() - first_weight(), .step = true,
                         .state = state});
    // After a skipped step they are recorded again from the same masters.
    device::fill_bytes(ctx, block_amaxes_.data, 0, block_amaxes_.bytes());
}

void Fp8State::record_amax(Ctx& ctx, int param, const Tensor& shard) {
    if (Fp8Slot* slot = weight_slot(param)) ops::amax(ctx, {.slot = slot, .in = shard});
}

void Fp8State::record_blocks(Ctx& ctx, int param, int64_t begin, const Tensor& shard) {
    const Fp8Linear* linear = linear_of_param(param);
    if (!linear || !blocks_of(*linear)) return;
    ops::block_amax(ctx, {.amaxes = blocks_of(*linear), .in = shard, .begin = begin, .R = linear->out,
                          .C = linear->in});
}

void Fp8State::start_weight_histories(Ctx& ctx) {
    if (on() && plan_.row().history) update_scales(ctx, first_weight(), tensors() - first_weight(), nullptr);
}

void Fp8State::quantize_weight(Ctx& ctx, const Fp8Linear& linear, const Tensor& whole, const StepState* state) {
    const RecipeRow& row = plan_.row();
    const int tensor = id(linear, Fp8Role::kWeight);
    QuantOut quant;
    quant.rowwise = linear.weight.data;
    quant.transposed = linear.weight_transposed.data;
    quant.granularity = row.weight;
    quant.scaling = row.scaling;
    quant.slot = slots() + tensor;
    if (row.weight != Granularity::kTensor) {
        quant.rowwise_scale_inv = linear.weight.scale_inv;
        quant.transposed_scale_inv = linear.weight_transposed.scale_inv;
    }
    quant.counts = counts_of(tensor);
    ops::quantize(ctx, {.quant = quant, .in = whole, .N = linear.out, .C = linear.in, .state = state});
}

void Fp8State::prepare_shards(Ctx& ctx, const StepState* state) {
    if (plan_.row().weight == Granularity::kTensor) {
        ops::fp8_scales(ctx, {.slots = slots() + first_weight(), .count = tensors() - first_weight(),
                               .scaling = plan_.row().scaling, .format = plan_.weight_format, .state = state});
        return;
    }
    for (const Fp8Linear& linear : linears_) {
        if (!blocks_of(linear)) continue;
        ops::block_scales(ctx, {.scale_inv = linear.weight.scale_inv,
                                .transposed_scale_inv = linear.weight_transposed.scale_inv,
                                .amaxes = blocks_of(linear),
                                .R = linear.out,
                                .C = linear.in,
                                .format = plan_.weight_format});
    }
}

void Fp8State::quantize_shard(Ctx& ctx, int param, int64_t begin, const Tensor& shard) {
    const Fp8Linear& linear = *linear_of_param(param);
    const uint32_t* blocks = blocks_of(linear);
    ops::quantize_run(ctx, {.out = linear.weight.data.slice(begin, shard.elems), .in = shard, .begin = begin,
                            .R = linear.out, .C = linear.in, .slot = blocks ? nullptr : weight_slot(param),
                            .block_amaxes = blocks, .counts = counts_of(id(linear, Fp8Role::kWeight))});
}

void Fp8State::transpose_weight(Ctx& ctx, const Fp8Linear& linear) {
    ops::transpose_bytes(ctx, {.out = linear.weight_transposed.data, .in = linear.weight.data, .R = linear.out,
                               .C = linear.in});
}

#include "llmc/model/activation_buffers.h"

ActivationBuffers::ActivationBuffers(ModelContext& model, std::vector<BufferRow> rows, int first_layer, int layers)
    : model_(model), rows_(std::move(rows)), first_layer_(first_layer), layers_(layers) {
    for (size_t r = 0; r < rows_.size(); r++) {
        const bool shared = recomputed(static_cast<int>(r));
        const bool offloaded = model.offload.on() && layers > 1 && !shared;
        std::vector<Buffer> sets;   // that layers share
        for (int set = 0; set < (shared ? 1 : offloaded ? std::min(kResidentLayers, layers) : 0); set++)
            sets.push_back(take(rows_[r], first_layer, layers));
        for (int l = first_layer; l < first_layer + layers; l++)
            buffers_.push_back(shared      ? sets[0]
                               : offloaded ? sets[static_cast<size_t>(l - first_layer) % sets.size()]
                                           : take(rows_[r], l, 1));
        for (int l = first_layer; offloaded && l < first_layer + layers; l++) offload(static_cast<int>(r), l);
    }
}

// Offloads only what this layer saves of the row, because other layers may use the same set in another precision.
void ActivationBuffers::offload(int number, int layer) {
    const BufferRow& r = row(number);
    const Buffer& set = buffer(number, layer);
    const Fp8Linear* linear = r.x_of ? model_.fp8.linear(layer, *r.x_of) : nullptr;
    const bool in_fp8 = linear && !linear->bf16_wgrad;
    if (!in_fp8 || r.others_read) model_.offload.add(layer, set.tensor);
    if (!in_fp8) return;
    model_.offload.add(layer, set.operand.data);
    if (set.operand.granularity != Granularity::kTensor) model_.offload.add(layer, set.operand.scale_inv);
}

bool ActivationBuffers::recomputed(int number) const {
    return model_.options.forward_only || row(number).lifetime.recomputed_under(model_.options.recompute);
}

Dtype ActivationBuffers::dtype_of(Form form) const {
    return form == Form::kStat ? model_.stat : form == Form::kIndex ? Dtype::kInt32 : model_.options.dtype;
}

// The (R, K) operand of N tokens that an FP8 row has.
struct Fp8Place {
    Fp8Layout layout;
    int64_t R, K;
};
static Fp8Place fp8_place(const BufferRow& row, const Fp8Linear& linear, int64_t N) {
    if (row.form == Form::kFp8Transposed) return {Fp8Layout::kTransposed, row.width, N};
    return {Fp8Layout::kRowwise, N * row.width / linear.in, linear.in};
}

// Of the layers that share the buffer, some may run the linear in FP8 and others in BF16.
ActivationBuffers::Buffer ActivationBuffers::take(const BufferRow& row, int first_layer, int layers) {
    if (row.width == 0 || row.lifetime.scratch) return {};
    auto take = [&](Dtype dtype, int64_t elems) { return model_.arena.take(Purpose::kActivations, dtype, elems); };
    const int64_t N = model_.options.max_rows();
    const Fp8Linear* fp8_reads = nullptr;
    bool keep_high = !row.x_of || row.others_read;
    for (int l = first_layer; row.x_of && l < first_layer + layers; l++) {
        const Fp8Linear* linear = model_.fp8.linear(l, *row.x_of);
        if (linear && !linear->bf16_wgrad) fp8_reads = linear;
        else keep_high = true;
    }
    switch (row.form) {
        case Form::kStat:
        case Form::kIndex: return {.tensor = take(dtype_of(row.form), N * row.width), .operand = {}};
        case Form::kWorking:
            return {.tensor = keep_high ? take(model_.options.dtype, N * row.width) : Tensor{}, .operand = {}};
        case Form::kFp8Transposed:
        case Form::kFp8Rowwise: {
            if (!fp8_reads) return {};
            const Fp8Place place = fp8_place(row, *fp8_reads, N);
            return {.tensor = {},
                    .operand = model_.fp8.alloc_operand(Fp8Role::kX, place.layout, place.R, place.K, take)};
        }
    }
    return {};
}

const ActivationBuffers::Buffer& ActivationBuffers::buffer(int row, int layer) const {
    return buffers_[static_cast<size_t>(row * layers_ + layer - first_layer_)];
}

Tensor ActivationBuffers::at(int number, int layer, int64_t N) const {
    const Tensor& tensor = buffer(number, layer).tensor;
    return tensor ? tensor.slice(0, N * row(number).width) : tensor;
}

Tensor ActivationBuffers::scratch(int number, int64_t N) const {
    const BufferRow& r = row(number);
    CHECK(r.lifetime.scratch, "%s is not scratch", r.name);
    return model_.scratch(dtype_of(r.form), N * r.width);
}

Fp8Operand ActivationBuffers::fp8(int number, int layer, int64_t N) const {
    const BufferRow& r = row(number);
    const Fp8Operand& memory = buffer(number, layer).operand;
    const Fp8Linear* linear = memory.data ? model_.fp8.linear(layer, *r.x_of) : nullptr;
    if (!linear) return {};
    const Fp8Place place = fp8_place(r, *linear, N);
    return model_.fp8.operand_of(*linear, Fp8Role::kX, memory, place.R, place.K);
}

LinearOperand ActivationBuffers::x(int working, int fp8, int layer, int64_t N) const {
    LinearOperand x{.unquantized = at(working, layer, N)};
    (row(fp8).form == Form::kFp8Rowwise ? x.fp8.rowwise : x.fp8.transposed) = this->fp8(fp8, layer, N);
    return x;
}

XUsage ActivationBuffers::forward_usage(int fp8_transposed) const {
    return {.rowwise = true, .transposed = model_.training && !recomputed(fp8_transposed), .recomputed = false};
}

// Whether backward recomputes the output of a linear, so that its forward matmul runs twice.
static bool forward_recomputed(LinearKind kind, Recompute recompute) {
    switch (kind) {
        case LinearKind::kQkv:
        case LinearKind::kProj:
        case LinearKind::kUp: return kSavedUnlessBlock.recomputed_under(recompute);
        case LinearKind::kDown:   // backward does not read their outputs
        case LinearKind::kHead: return false;
    }
    return false;
}

int64_t planned_fp8_matmuls(const Fp8Plan& plan, Recompute recompute, int64_t micro_batches, int64_t head_chunks) {
    int64_t matmuls = 0;
    for (const LinearPlan& linear : plan.linears)
        if (linear.fp8)
            matmuls += (plan.row().bf16_wgrad ? 1 : 2) * (linear.fp8_forward() ? 1 : head_chunks)
                       + (!linear.fp8_forward() ? 0 : forward_recomputed(linear.kind, recompute) ? 2 : 1);
    return matmuls * micro_batches;
}

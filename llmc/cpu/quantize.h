// QuantOut on the CPU: an operation first computes its whole bf16 result, which is then quantized.
#pragma once
#include "llmc/cpu/cast_lines.h"
#include "llmc/cpu/gemm_kernel.h"

namespace cpu {

// Fails unless an (N, C) result of type T can be quantized by `quant`.
void check_quant(const char* op, const QuantOut& quant, Dtype T, int64_t N, int64_t C);
// Executes `quant` for x (N, C).
void apply_quant(const QuantOut& quant, const bf16* x, int64_t N, int64_t C);

// The bf16 result of an operation: `out`, or a buffer if `out` is absent.
class QuantResult {
public:
    QuantResult(const char* op, const QuantOut& quant, const Tensor& out, Dtype T, int64_t N, int64_t C)
        : quant_(quant), N_(N), C_(C), tensor_(out) {
        if (quant) check_quant(op, quant, T, N, C);
        if (out || !quant.copies()) return;
        memory_ = make_buffer<bf16>(N * C);
        tensor_ = {memory_.get(), T, N * C};
    }
    const Tensor& tensor() const { return tensor_; }
    void quantize() const {
        if (quant_) apply_quant(quant_, tensor_.as<bf16>(), N_, C_);
    }
    // Fills a result that is unspecified after quantization with NaN, so that no caller relies on it.
    void corrupt() const {
        if (quant_.copies()) std::fill_n(tensor_.as<bf16>(), tensor_.elems, bf16::from_bits(0x7fff));
    }

private:
    const QuantOut& quant_;
    int64_t N_, C_;
    Tensor tensor_;
    Buffer<bf16> memory_;
};

}  // namespace cpu

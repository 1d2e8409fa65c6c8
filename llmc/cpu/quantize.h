// What every producer of the CPU does with its QuantOut: its bf16 result is computed first, whole, and then quantised.
#pragma once
#include "llmc/cpu/cast_lines.h"
#include "llmc/cpu/gemm_kernel.h"

namespace cpu {

// Throws unless `quant` can be done of an (N, C) result of type T.
void check_quant(const char* op, const QuantOut& quant, Dtype T, int64_t N, int64_t C);
// Does all that `quant` asks for of x (N, C).
void apply_quant(const QuantOut& quant, const bf16* x, int64_t N, int64_t C);

// The result of a producer: `out`, or memory of its own if that is absent and only the copies are wanted.
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
    // For what is promised to nobody once it has copies: NaN, so that no caller comes to rely on it.
    void corrupt() const {
        if (quant_.copies()) std::fill_n(tensor_.as<bf16>(), tensor_.elems, bf16::from_bits(0x7fff));
    }

private:
    const QuantOut& quant_;
    int64_t N_, C_;
    Tensor tensor_;
    decltype(make_buffer<bf16>(0)) memory_;
};

}  // namespace cpu

// Speed of clamped_swiglu with and without biases of experts, and of the gradients of biases, at the shape of
// gpt-oss-20B; see memory_bench.h.
//   usage: bench_expert_biases [part of a name]
#include "dev/bench/memory_bench.h"

namespace {

// As many rows as of 8192 tokens with 4 experts each.
const Dims kGptOss = {.N = 4096, .T = 4096, .C = 2880, .F = 2880, .V = 32, .Vp = 32, .NH = 64, .NKV = 8, .HS = 64,
                      .elems = 0};

std::vector<Field> fields(const Dims& d) {
    const int64_t R = d.N * kExperts;
    return {{"in", kB, R * 2 * d.F}, {"out", kB, R * d.F}, {"weights", kF, R}, {"dweights", kF, R},
            {"slots", kI, R, Fill::kOrder}, {"experts", kI, R, Fill::kTokens}, {"bias", kB, d.V * 2 * d.F},
            {"offsets", kI, d.V + 1, Fill::kOffsets}, {"dbias", kF, d.V * 2 * d.F}};
}
template <bool biases> ExpertBias bias_of(const View& v) {
    return biases ? ExpertBias{.values = v("bias"), .experts = v("experts")} : ExpertBias{};
}
template <bool biases> ExpertActivationForwardArgs forward_args(const View& v, const Dims& d) {
    return {.kind = Activation::kClampedSwiglu, .out = v("out"), .in = v("in"), .weights = v("weights"),
            .row_slots = v("slots"), .R = d.N * kExperts, .F = d.F,
            .bias = bias_of<biases>(v)};
}
template <bool biases> ExpertActivationBackwardArgs backward_args(const View& v, const Dims& d) {
    return {.kind = Activation::kClampedSwiglu, .din = v("in"), .dweights = v("dweights"), .dout = v("out"),
            .in = v("in"), .weights = v("weights"), .row_slots = v("slots"), .R = d.N * kExperts, .F = d.F,
            .bias = bias_of<biases>(v)};
}
ExpertBiasBackwardArgs bias_args(const View& v, const Dims& d) {
    return {.dbias = v("dbias"), .dout = v("in"), .offsets = v("offsets"), .E = d.V, .R = d.N * kExperts,
            .C = 2 * d.F};
}

std::vector<Bench> benches() {
    const double RF = static_cast<double>(kGptOss.N * kExperts * kGptOss.F);
    return {bench("expert_activation_forward gpt-oss", kGptOss, fields, cuda::expert_activation_forward,
                  cpu::expert_activation_forward, forward_args<true>, 6 * RF),
            bench("the same without biases, forward", kGptOss, fields, cuda::expert_activation_forward,
                  cpu::expert_activation_forward, forward_args<false>, 6 * RF),
            bench("expert_activation_backward gpt-oss", kGptOss, fields, cuda::expert_activation_backward,
                  cpu::expert_activation_backward, backward_args<true>, 10 * RF),
            bench("the same without biases, backward", kGptOss, fields, cuda::expert_activation_backward,
                  cpu::expert_activation_backward, backward_args<false>, 10 * RF),
            bench("expert_bias_backward gpt-oss", kGptOss, fields, cuda::expert_bias_backward,
                  cpu::expert_bias_backward, bias_args, 4 * RF)};
}

}  // namespace

int main(int argc, char** argv) { return memory_bench_main(argc, argv, "bench_expert_biases", benches()); }

// Histograms of binary exponents. CPU.
#include <array>
#include <atomic>
#include <mutex>

#include "llmc/cpu/quantize.h"

namespace cpu {
namespace {

uint32_t bin_of(uint32_t bits) {
    if (bits == 0) return static_cast<uint32_t>(kZeroValues);
    return std::max(bits >> 23, 1u);
}

}  // namespace

void count_exponents(Ctx&, const CountExponentsArgs& args) {
    CHECK(args.bins && args.amax_bits, "count_exponents: no bins, or no amax");
    const bool wide = args.in.dtype == Dtype::kFp32;
    check_tensor("count_exponents", "in", args.in, wide ? Dtype::kFp32 : Dtype::kBf16, args.in.elems);
    std::mutex adding;
    for_chunks(args.in.elems, [&](int64_t begin, int64_t count) {
        std::array<unsigned long long, kExponentBins> counts{};
        uint32_t amax = 0;
        for (int64_t i = begin; i < begin + count; i++) {
            const bf16 x = wide ? bf16(args.in.as<float>()[i]) : args.in.as<bf16>()[i];
            const uint32_t bits = amax_bits_of(static_cast<float>(x));
            counts[bin_of(bits)]++;
            amax = std::max(amax, bits);
        }
        const std::scoped_lock lock(adding);
        for (size_t e = 0; e < counts.size(); e++) args.bins[e] += counts[e];
        *args.amax_bits = std::max(*args.amax_bits, amax);
    });
}

}  // namespace cpu

// Peak rates for MFU, from NVIDIA's documents: matmuls with FP32 accumulation, without sparsity (figures of data sheets
// with sparsity are halved).
#include "llmc/base/peak_flops.h"

#include <string_view>

namespace {

struct Peak {
    std::string_view name;    // whole name without "NVIDIA "
    double bf16, fp8, fp32;   // TFLOP/s; 0: unsupported, or the sources disagree
};

// Whole names are compared, because slower variants ("H200 NVL", "RTX 4090 D", laptop chips, MIG slices) have the name
// of the faster one as a prefix.
constexpr Peak kPeaks[] = {
    // Hopper architecture whitepaper (H100), GH200 and H200 data sheets (the same GH100 with other memory).
    {"H100 80GB HBM3", 989.4, 1978.9, 66.9},
    {"H200", 989.4, 1978.9, 66.9},
    {"GH200 480GB", 989.4, 1978.9, 66.9},
    {"H100 PCIe", 756.5, 1513.0, 51.2},
    // H100 NVL and H200 NVL data sheets: 1671 and 3341 with sparsity.
    {"H100 NVL", 835.5, 1670.5, 60.0},
    {"H200 NVL", 835.5, 1670.5, 60.0},
    // Blackwell: HGX B200 at 1000 W. Data sheets print 75 and 80 for FP32.
    {"B200", 2250.0, 4500.0, 0},
    // A100 data sheet: equal for both form factors and memories. No FP8.
    {"A100-SXM4-40GB", 312.0, 0, 19.5},
    {"A100-SXM4-80GB", 312.0, 0, 19.5},
    {"A100-PCIE-40GB", 312.0, 0, 19.5},
    {"A100 80GB PCIe", 312.0, 0, 19.5},
    // A10 and L40S data sheets; Ada architecture whitepaper (GeForce tensor cores: half rate with FP32 accumulation).
    {"A10", 125.0, 0, 31.2},
    {"L40S", 362.05, 733.0, 91.6},
    {"GeForce RTX 4090", 165.2, 330.3, 82.6},
};

}  // namespace

double peak_flops(const std::string& device_name, Dtype dtype) {
    std::string_view name = device_name;
    constexpr std::string_view kMaker = "NVIDIA ";
    if (name.substr(0, kMaker.size()) == kMaker) name.remove_prefix(kMaker.size());
    for (const Peak& peak : kPeaks) {
        if (name != peak.name) continue;
        switch (dtype) {
            case Dtype::kBf16: return peak.bf16 * 1e12;
            case Dtype::kE4m3:
            case Dtype::kE5m2: return peak.fp8 * 1e12;
            case Dtype::kFp32: return peak.fp32 * 1e12;
            case Dtype::kFp64:
            case Dtype::kInt32: return 0;
        }
    }
    return 0;
}

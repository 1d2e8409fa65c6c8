#include "llmc/base/gpu.h"

#include <algorithm>
#include <strings.h>

namespace {

// From NVIDIA's documents; figures of data sheets with sparsity are halved. Memory is less than the gigabytes in the
// name; the link is NVLink or PCIe Gen5, with half of the figure for both directions. Whole names are compared, because
// slower variants ("H200 NVL", "RTX 4090 D", laptop chips, MIG slices) have the name of the faster one as a prefix.
constexpr Gpu kGpus[] = {
    // Hopper architecture whitepaper (H100), GH200 and H200 data sheets (the same GH100 with other memory).
    {"H200", 989.4, 1978.9, 66.9, "H200", 139, 4.8, 450},
    {"H100 80GB HBM3", 989.4, 1978.9, 66.9, "H100 SXM", 79.1, 3.35, 450},
    {"GH200 480GB", 989.4, 1978.9, 66.9, "GH200", 94.5, 4.0, 450},
    {"H100 PCIe", 756.5, 1513.0, 51.2, "H100 PCIe", 79.1, 2.0, 64},
    // H100 NVL and H200 NVL data sheets: 1671 and 3341 with sparsity.
    {"H100 NVL", 835.5, 1670.5, 60.0, "H100 NVL", 93, 3.9, 64},
    {"H200 NVL", 835.5, 1670.5, 60.0, "H200 NVL", 139, 4.8, 64},
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

std::string without_maker(const std::string& name) {
    const std::string maker = "NVIDIA ";
    return strncasecmp(name.c_str(), maker.c_str(), maker.size()) == 0 ? name.substr(maker.size()) : name;
}

}  // namespace

double Gpu::peak_flops(Dtype dtype) const {
    switch (dtype) {
        case Dtype::kBf16: return bf16 * 1e12;
        case Dtype::kE4m3:
        case Dtype::kE5m2:
        case Dtype::kInt8: return fp8 * 1e12;   // tensor cores have one rate for all of 8 bits
        case Dtype::kFp32: return fp32 * 1e12;
        case Dtype::kFp64:
        case Dtype::kInt32:
        case Dtype::kUe5m3: return 0;
    }
    return 0;
}

std::span<const Gpu> planned_gpus() {
    static const auto end = std::find_if(std::begin(kGpus), std::end(kGpus), [](const Gpu& gpu) { return !gpu.name; });
    return {std::begin(kGpus), end};
}

const Gpu* find_gpu(const std::string& name) {
    std::string bare = without_maker(name);
    std::replace_if(bare.begin(), bare.end(), [](char c) { return c == '-' || c == '_'; }, ' ');
    for (const Gpu& gpu : planned_gpus())
        if (strcasecmp(bare.c_str(), gpu.name) == 0 || strcasecmp(bare.c_str(), gpu.device) == 0) return &gpu;
    return nullptr;
}

double peak_flops(const std::string& device_name, Dtype dtype) {
    for (const Gpu& gpu : kGpus)
        if (device_name == std::string("NVIDIA ") + gpu.device) return gpu.peak_flops(dtype);
    return 0;
}

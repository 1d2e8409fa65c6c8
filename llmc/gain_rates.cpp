#include "llmc/gain.h"

const char* const kMeasuredOn = "H200";

// NVIDIA H200 (700 W), cuBLASLt 13.1.0.3, driver 580.159, 2026-11-21; the best of the library's first answers, random
// operands, bursts of 0.1 s.
const std::vector<MeasuredGemm>& measured_gemms() {
    constexpr GemmLayout kForward = GemmLayout::kForward, kDgrad = GemmLayout::kDgrad, kWgrad = GemmLayout::kWgrad;
    // pass, M, N, K, {BF16, FP8 with fast, with precise accumulation, with block factors}
    static const std::vector<MeasuredGemm> rows = {
        {kForward, 8192, 6144, 4096, {563.3, 315.0, 358.8, 394.2}},
        {kForward, 8192, 4096, 4096, {405.4, 217.1, 239.6, 269.2}},
        {kForward, 8192, 28672, 4096, {2679.9, 1479.0, 1681.9, 1850.1}},
        {kForward, 8192, 4096, 14336, {1345.6, 756.9, 803.7, 924.2}},
        {kForward, 8192, 128256, 4096, {11774.4, 6661.9, 7510.6, 8220.7}},
        {kForward, 65536, 2304, 768, {343.1, 211.8, 259.1, 289.9}},
        {kForward, 65536, 3072, 768, {456.8, 285.3, 345.5, 386.5}},
        {kForward, 65536, 50304, 768, {7338.8, 4620.2, 5657.8, 6329.7}},
        {kDgrad, 8192, 4096, 28672, {2811.0, 0, 0, 0}},
        {kDgrad, 8192, 14336, 4096, {1411.5, 0, 0, 0}},
        {kDgrad, 8192, 4096, 128256, {12269.6, 0, 0, 0}},
        {kDgrad, 65536, 768, 3072, {459.0, 0, 0, 0}},
        {kDgrad, 65536, 768, 50304, {7427.1, 0, 0, 0}},
        {kWgrad, 6144, 4096, 8192, {605.0, 344.2, 381.4, 514.8}},
        {kWgrad, 4096, 4096, 8192, {407.2, 229.4, 254.3, 343.2}},
        {kWgrad, 28672, 4096, 8192, {2788.6, 1530.7, 1731.9, 2326.7}},
        {kWgrad, 4096, 14336, 8192, {1403.3, 782.2, 874.6, 1180.5}},
        {kWgrad, 2304, 768, 65536, {368.8, 0, 0, 0}},
        {kWgrad, 3072, 768, 65536, {446.9, 0, 0, 0}},
        {kWgrad, 768, 768, 65536, {123.1, 0, 0, 0}},
    };
    return rows;
}

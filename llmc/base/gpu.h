// What data sheets say of GPUs: peak rates for MFU and, of those that can be planned for, memory and bandwidths.
#pragma once
#include <span>
#include <string>

#include "llmc/base/dtype.h"

struct Gpu {
    const char* device;          // CUDA's name without "NVIDIA "
    double bf16, fp8, fp32;      // peak TFLOP/s of matmuls, without sparsity and with FP32 accumulation; fp32 means
                                 // FP32, not TF32; 0: unsupported, or the sources disagree
    const char* name = nullptr;  // for --gpu; null: cannot be planned for, and the rest is unknown
    double memory_gib = 0;       // as CUDA reports it
    double memory_tbps = 0;      // nominal bandwidth
    double link_gbps = 0;        // nominal, to another GPU of the host, one way

    double peak_flops(Dtype dtype) const;   // FLOP/s; 0 if the table does not have it
};

// The GPUs that can be planned for. No other architecture than Hopper is among them, since it would run other kernels.
std::span<const Gpu> planned_gpus();
// Finds one of them by either name, ignoring case; null if it is unknown.
const Gpu* find_gpu(const std::string& name);
// The same for any GPU and the whole name that CUDA reports; 0 if the table does not have it.
double peak_flops(const std::string& device_name, Dtype dtype);

// Peak rates of GPUs, for MFU.
#pragma once
#include <string>

#include "llmc/base/dtype.h"

// Dense matmul peak in FLOP/s of a device (its whole name, as CUDA reports it) for a dtype, without sparsity and
// with FP32 accumulation; fp32 means plain FP32, not TF32. 0 when it is not in the audited table.
double peak_flops(const std::string& device_name, Dtype dtype);

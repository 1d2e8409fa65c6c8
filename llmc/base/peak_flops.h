// Peak rates of GPUs, for MFU.
#pragma once
#include <string>

#include "llmc/base/dtype.h"

// Returns the peak of matmuls in FLOP/s for a device (its name as CUDA reports it) and a dtype, without sparsity and
// with FP32 accumulation; fp32 means FP32, not TF32. 0 if the table does not have it.
double peak_flops(const std::string& device_name, Dtype dtype);

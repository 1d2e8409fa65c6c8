// How long operations take, made from what was measured of kernels, and the GPUs that this is carried over to.
#pragma once
#include <string>
#include <vector>

#include "llmc/perf/rates.h"

// A GPU that can be planned for.
struct Gpu {
    const char* name;            // as --gpu takes it
    const char* device;          // CUDA's name of it without "NVIDIA "
    double memory_gib;           // as CUDA counts
    double memory_tbps;          // nominal bandwidth
    double link_gbps;            // nominal, to another GPU of the host, one way
    bool measured;               // the rates below are its own
};
const std::vector<Gpu>& gpus();
// By either name, capitals or not; null if it is none of them.
const Gpu* find_gpu(const std::string& name);
// The rates were measured on this one.
const Gpu& measured_gpu();

// On the measured GPU. A matmul: measured where the shape was, else a smooth model of size and K, corrected by what was
// measured nearby. Operations without rates, which move next to nothing: at the rate of a copy.
double predicted_gemm_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K);
double predicted_matmul_us(const GemmArgs& args);
double predicted_op_us(const PlannedOp& op, const Rates& rates = measured_rates());

// Of one more kernel: its launch, first loads and last stores; an estimate.
inline constexpr double kKernelUs = 3;
// Bytes a second.
extern const double kCopyRate;        // of a copy, read and written
extern const double kLinkRate;        // that a rank sends to others of its host, in training
extern const double kNetworkRate;     // that a rank sends between hosts
inline constexpr int kRanksPerHost = 8;

// Predicts the time of operations from measured kernels, and lists the GPUs to which the rates are scaled.
#pragma once
#include <string>
#include <vector>

#include "llmc/perf/rates.h"

// A GPU that can be planned for.
struct Gpu {
    const char* name;            // for --gpu
    const char* device;          // CUDA's name without "NVIDIA "
    double memory_gib;           // as CUDA reports it
    double memory_tbps;          // nominal bandwidth
    double link_gbps;            // nominal, to another GPU of the host, one way
};
const std::vector<Gpu>& gpus();
// Finds a GPU by either name, ignoring case; null if it is unknown.
const Gpu* find_gpu(const std::string& name);
// The GPU whose rates are scaled for GPUs that have none.
const Gpu& measured_gpu();

inline double real(int64_t x) { return static_cast<double>(x); }
GemmMode gemm_mode(const GemmArgs& args);

// Times on the GPU of `rates`. A matmul takes the measured time of its shape, or that of a smooth model of the shape,
// corrected by measurements of similar shapes. Operations without rates, all of them small, run at the rate of a copy.
double predicted_gemm_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K,
                         const Rates& rates = measured_rates());
double predicted_matmul_us(const GemmArgs& args, const Rates& rates = measured_rates());
double predicted_op_us(const PlannedOp& op, const Rates& rates = measured_rates());

// Fixed cost of a kernel: its launch, first loads and last stores; an estimate.
inline constexpr double kKernelUs = 3;
// Bytes per second.
extern const double kLinkRate;        // sent by a rank to ranks of the same host, in training
extern const double kHostLinkRate;    // between host and device, each way while both are busy
extern const double kNetworkRate;     // sent by a rank to other hosts
inline constexpr int kRanksPerHost = 8;

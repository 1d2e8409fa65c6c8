// What was measured of kernels, and how it is carried over to other GPUs: the tables behind `plan`. The matmuls' own is
// in gain_rates.cpp.
#pragma once
#include <string>
#include <vector>

#include "llmc/ops/op_cost.h"
#include "llmc/perf/fp8_speedup.h"

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

// One call of a kernel of the kind and mode that moves so many bytes.
struct MeasuredOp {
    OpKind kind;
    OpMode mode;
    Dtype dtype;        // as in PlannedOp
    double mega_elems;  // of the benchmark's shape, and bytes an element as PlannedOp counts them
    double elem_bytes;
    double us;
};
const std::vector<MeasuredOp>& measured_ops();

// Attention of one shape; 0: not measured.
struct MeasuredAttention {
    Dtype dtype;
    int64_t B, NH, T, HS;
    double forward_us, backward_us, fp8_forward_us;
};
using AttentionTable = std::vector<MeasuredAttention>;
const AttentionTable& measured_attention();
// The kernels that the step times of 2026-11-21 were measured with, for tests of predictions against those.
const AttentionTable& earlier_attention();

// On the measured GPU.
double predicted_op_us(const PlannedOp& op, const AttentionTable& attention = measured_attention());
double predicted_matmul_us(const GemmArgs& args);

// Bytes a second.
extern const double kCopyRate;        // of a copy, read and written
extern const double kLinkRate;        // that a rank sends to others of its host, in training
extern const double kNetworkRate;     // that a rank sends between hosts
inline constexpr int kRanksPerHost = 8;

// The two devices. `device` is an alias of the namespace that this build runs on, cpu or cuda. A CUDA build links both,
// so that tests can call either.
#pragma once
#include <cstdint>
#include <string>

#include "llmc/base/dtype.h"

struct Event;        // a point in a device's stream; opaque
struct GemmState;    // cuBLASLt handle, plans, workspace; opaque, null on the CPU
struct StepRecorder; // collects the operations of a rehearsal; see op_cost.h
class OpTimer;       // times operations as they run; see op_timer.h

struct DeviceInfo {
    int index = -1;
    std::string name;             // "NVIDIA H200", "CPU"
    int sm = 0;                   // 90 for compute capability 9.0; 0 on the CPU
    bool sm90a_code = false;      // this build contains code for sm_90a
    int sm_count = 0;             // multiprocessors, or hardware threads on the CPU
    int64_t memory_bytes = 0;     // total
    std::string id, bus;          // UUID "GPU-4a1b..." and PCI address "0000:18:00.0"; empty on the CPU
    std::string driver;           // "13.0", empty without a driver
    std::string toolkit;          // CUDA version compiled against, empty on the CPU
    std::string matmul_library;   // "cuBLASLt 13.1.0.3", or "cpu"
    int64_t cublaslt_version = 0; // major * 10000 + minor * 100 + patch, 0 on the CPU
};

// The first argument of every operation: a stream and its state. Owned by the caller, filled by device_open.
struct Ctx {
    void* stream = nullptr;             // cudaStream_t; on the CPU only tests have streams
    GemmState* gemm = nullptr;          // matmul plans and workspace
    int index = 0;                      // device number
    int sm = 0;                         // compute capability * 10
    int sm_count = 0;
    bool rehearsal = false;             // operations only record their arguments
    StepRecorder* recorder = nullptr;   // filled during a rehearsal, may be null
    int64_t recorded_times = 1;         // how often it counts each operation
    bool in_update = false;             // whether recorded matmuls are the optimizer's
    int64_t fp8_matmuls = 0;            // number executed; see gemm_algorithms.inl
    OpTimer* timer = nullptr;           // null: nothing is timed
    const char* purpose = nullptr;      // purpose of the collectives on this stream, see CollectivePurpose
};

namespace cpu {
#include "llmc/ops/device.inl"
#include "llmc/ops/gemm_algorithms.inl"
}
#ifdef LLMC_CUDA
namespace cuda {
#include "llmc/ops/device.inl"
#include "llmc/ops/gemm_algorithms.inl"
}
namespace device = cuda;
#else
namespace device = cpu;
#endif

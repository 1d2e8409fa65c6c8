// The part of NCCL's C interface that comm_nccl.cpp calls. It has not changed since version 2.13; written down here, it
// needs neither NCCL's header nor its library to build, and the library is opened only when several ranks meet on GPUs.
// tests/gpu/gpu_test_nccl_api.cpp compares it with the header where there is one.
#pragma once
#include <cstddef>
#include <string>

namespace nccl_api {

struct Communicator;   // opaque
struct UniqueId {
    char bytes[128];
};
enum Result : int {
    kSuccess = 0,
    kInvalidArgument = 4,
    kInvalidUsage = 5,
    kRemoteError = 6,
    kInProgress = 7,
};
enum Type : int { kUint8 = 1, kInt32 = 2, kUint32 = 3, kFloat32 = 7, kFloat64 = 8 };
enum Reduction : int { kSum = 0, kMax = 2 };
using Stream = void*;   // cudaStream_t

using Reduce = Result(const void* in, void* out, size_t count, Type, Reduction, Communicator*, Stream);
struct Functions {
    Result (*get_version)(int* version);
    Result (*get_unique_id)(UniqueId* id);
    Result (*comm_init_rank)(Communicator** comm, int ranks, UniqueId id, int rank);
    Result (*comm_destroy)(Communicator*);
    Result (*comm_abort)(Communicator*);
    Result (*comm_get_async_error)(Communicator*, Result* state);
    const char* (*get_error_string)(Result);
    const char* (*get_last_error)(Communicator*);
    Reduce* all_reduce;
    Reduce* reduce_scatter;   // count: of the result
    Result (*all_gather)(const void* in, void* out, size_t in_count, Type, Communicator*, Stream);
    Result (*send)(const void* in, size_t count, Type, int peer, Communicator*, Stream);
    Result (*recv)(void* out, size_t count, Type, int peer, Communicator*, Stream);
    Result (*group_start)();
    Result (*group_end)();
};

// The first one for CUDA 12, that is for Hopper.
inline constexpr int kMinimumVersion = 21602;
inline constexpr const char* kLibrary = "libnccl.so.2";

std::string version_text(int version);   // 21602: "2.16.2"

// Opens `library` and finds the functions. Returns what is wrong and what to do, "" if nothing.
struct Loaded {
    Functions call{};
    int version = 0;
    std::string path;   // where the library lies
};
std::string load(const std::string& library, Loaded& loaded);

}  // namespace nccl_api

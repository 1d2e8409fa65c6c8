// The part of NCCL's C interface that comm_nccl.cpp calls, unchanged since version 2.13. Declaring it here means that
// the build needs neither NCCL's header nor its library; the library is opened only for several ranks on GPUs.
// tests/gpu/gpu_test_nccl_api.cpp compares the declarations with NCCL's header if that is installed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace nccl_api {

struct Communicator;   // opaque
struct Window;         // opaque
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
inline constexpr int kSymmetricWindow = 1;   // memory at equal offsets on all ranks
inline constexpr int64_t kWindowAlignBytes = 4096;   // alignment of the begin of a window
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
    // All null before version 2.28, the first whose all-gather, all-to-all and gather can use copy engines.
    Result (*all_to_all)(const void* in, void* out, size_t block_count, Type, Communicator*, Stream);
    Result (*gather)(const void* in, void* out, size_t in_count, Type, int root, Communicator*, Stream);
    Result (*mem_alloc)(void** memory, size_t bytes);
    Result (*mem_free)(void* memory);
    Result (*window_register)(Communicator*, void* memory, size_t bytes, Window** window, int flags);
    Result (*window_deregister)(Communicator*, Window*);
};

// 2.16.2, the first version for CUDA 12.
inline constexpr int kMinimumVersion = 21602;
inline constexpr int kCopyEngineVersion = 22800;
inline constexpr const char* kLibrary = "libnccl.so.2";

std::string version_text(int version);   // 21602: "2.16.2"

// Opens `library` and looks up the functions. Returns an error with the way out, "" if there is none.
struct Loaded {
    Functions call{};
    int version = 0;
    std::string path;   // of the library
};
std::string load(const std::string& library, Loaded& loaded);

}  // namespace nccl_api

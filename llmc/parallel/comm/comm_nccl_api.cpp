#include "llmc/parallel/comm/comm_nccl_api.h"

#include <dlfcn.h>

#include "llmc/base/check.h"

namespace nccl_api {
namespace {

constexpr const char* kInstall =
    "install NCCL (package libnccl2 of NVIDIA's repository, or pip's nvidia-nccl-cu12 or -cu13 with its lib folder in "
    "LD_LIBRARY_PATH), or start one process";

// Looks up all functions of this version. Returns the name of the first missing one, null if all exist.
const char* find_all(void* library, int version, Functions& call) {
    const char* missing = nullptr;
    const auto find = [&]<typename F>(const char* symbol, F*& function) {
        function = reinterpret_cast<F*>(dlsym(library, symbol));
        if (!function && !missing) missing = symbol;
    };
    find("ncclGetUniqueId", call.get_unique_id), find("ncclCommInitRank", call.comm_init_rank);
    find("ncclCommDestroy", call.comm_destroy), find("ncclCommAbort", call.comm_abort);
    find("ncclCommGetAsyncError", call.comm_get_async_error), find("ncclGetErrorString", call.get_error_string);
    find("ncclGetLastError", call.get_last_error), find("ncclAllReduce", call.all_reduce);
    find("ncclReduceScatter", call.reduce_scatter), find("ncclAllGather", call.all_gather);
    find("ncclSend", call.send), find("ncclRecv", call.recv);
    find("ncclGroupStart", call.group_start), find("ncclGroupEnd", call.group_end);
    if (version < kCopyEngineVersion) return missing;
    find("ncclAlltoAll", call.all_to_all), find("ncclGather", call.gather);
    find("ncclMemAlloc", call.mem_alloc), find("ncclMemFree", call.mem_free);
    find("ncclCommWindowRegister", call.window_register), find("ncclCommWindowDeregister", call.window_deregister);
    return missing;
}

}  // namespace

std::string version_text(int version) {
    // Up to 2.8 the number had one digit fewer.
    if (version < 10000) return strf("%d.%d.%d", version / 1000, version / 100 % 10, version % 100);
    return strf("%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

std::string load(const std::string& library, Loaded& loaded) {
    // Never closed: its threads run until the process ends.
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) return strf("several ranks on GPUs need %s: %s; %s", library.c_str(), dlerror(), kInstall);
    loaded.path = library;
    loaded.call.get_version = reinterpret_cast<Result (*)(int*)>(dlsym(handle, "ncclGetVersion"));
    if (!loaded.call.get_version)
        return strf("%s is not NCCL: it has no ncclGetVersion; %s", library.c_str(), kInstall);
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(loaded.call.get_version), &info) && info.dli_fname)
        loaded.path = info.dli_fname;
    const Result result = loaded.call.get_version(&loaded.version);
    if (result != kSuccess) return strf("%s: ncclGetVersion returns %d", loaded.path.c_str(), int{result});
    if (loaded.version < kMinimumVersion)
        return strf("%s is NCCL %s, and %s or newer is needed: %s", loaded.path.c_str(),
                    version_text(loaded.version).c_str(), version_text(kMinimumVersion).c_str(), kInstall);
    if (const char* name = find_all(handle, loaded.version, loaded.call))
        return strf("%s (NCCL %s) has no %s: %s", loaded.path.c_str(), version_text(loaded.version).c_str(), name,
                    kInstall);
    return "";
}

}  // namespace nccl_api

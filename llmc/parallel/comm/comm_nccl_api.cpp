#include "llmc/parallel/comm/comm_nccl_api.h"

#include <dlfcn.h>

#include "llmc/base/check.h"

namespace nccl_api {
namespace {

constexpr const char* kInstall =
    "install NCCL (package libnccl2 of NVIDIA's repository, or pip's nvidia-nccl-cu12 or -cu13 with its lib folder in "
    "LD_LIBRARY_PATH), or start one process";

template <typename F> bool find(void* library, const char* name, F*& function) {
    function = reinterpret_cast<F*>(dlsym(library, name));
    return function != nullptr;
}

// The name of the first missing function, null if all exist.
const char* find_all(void* library, Functions& call) {
    const char* name = nullptr;
    auto missing = [&](const char* symbol, auto*& function) {
        name = symbol;
        return !find(library, symbol, function);
    };
    const bool incomplete =
        missing("ncclGetUniqueId", call.get_unique_id) || missing("ncclCommInitRank", call.comm_init_rank) ||
        missing("ncclCommDestroy", call.comm_destroy) || missing("ncclCommAbort", call.comm_abort) ||
        missing("ncclCommGetAsyncError", call.comm_get_async_error) ||
        missing("ncclGetErrorString", call.get_error_string) || missing("ncclGetLastError", call.get_last_error) ||
        missing("ncclAllReduce", call.all_reduce) || missing("ncclReduceScatter", call.reduce_scatter) ||
        missing("ncclAllGather", call.all_gather) || missing("ncclSend", call.send) ||
        missing("ncclRecv", call.recv) || missing("ncclGroupStart", call.group_start) ||
        missing("ncclGroupEnd", call.group_end);
    return incomplete ? name : nullptr;
}

// Leaves all of them null if one is missing.
void find_copy_engine_calls(void* library, Functions& call) {
    if (find(library, "ncclAlltoAll", call.all_to_all) && find(library, "ncclGather", call.gather) &&
        find(library, "ncclMemAlloc", call.mem_alloc) && find(library, "ncclMemFree", call.mem_free) &&
        find(library, "ncclCommWindowRegister", call.window_register))
        return;
    call.all_to_all = nullptr;
    call.gather = nullptr;
    call.mem_alloc = nullptr;
    call.mem_free = nullptr;
    call.window_register = nullptr;
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
    if (!find(handle, "ncclGetVersion", loaded.call.get_version))
        return strf("%s is not NCCL: it has no ncclGetVersion; %s", library.c_str(), kInstall);
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(loaded.call.get_version), &info) && info.dli_fname)
        loaded.path = info.dli_fname;
    const Result result = loaded.call.get_version(&loaded.version);
    if (result != kSuccess) return strf("%s: ncclGetVersion returns %d", loaded.path.c_str(), int{result});
    if (loaded.version < kMinimumVersion)
        return strf("%s is NCCL %s, and %s or newer is needed: %s", loaded.path.c_str(),
                    version_text(loaded.version).c_str(), version_text(kMinimumVersion).c_str(), kInstall);
    if (const char* name = find_all(handle, loaded.call))
        return strf("%s (NCCL %s) has no %s: %s", loaded.path.c_str(), version_text(loaded.version).c_str(), name,
                    kInstall);
    if (loaded.version >= kCopyEngineVersion) find_copy_engine_calls(handle, loaded.call);
    return "";
}

}  // namespace nccl_api

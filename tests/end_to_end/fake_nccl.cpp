// Replaces NCCL's library where there is no GPU, so that comm_nccl.cpp runs in tests: the same functions on host
// memory, over MPI. The words of FAKE_NCCL make it fail:
//
//   version=21500            ncclGetVersion returns 21500
//   stall=ncclSend           the first call of that name on rank 1 does not return
//   fail=ncclAllGather:3     on rank 1 the third call of that name returns an error
//   late                     ncclCommGetAsyncError returns an error once the collectives at the start are done
#include <mpi.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "llmc/parallel/comm/comm_nccl_api.h"

using namespace nccl_api;

struct nccl_api::Communicator {
    int rank, ranks;
    MPI_Comm comm;
};

namespace {

constexpr Result kSystemError = Result{2};

struct Message {
    bool send;
    void* data;
    size_t bytes;
    int peer;
    MPI_Comm comm;
};
std::vector<Message> group;
int depth = 0;
std::map<std::string, int> calls;

// The value of "name=value" in FAKE_NCCL, "" if it is not there, "yes" without a value.
std::string asked(const std::string& name) {
    const char* text = std::getenv("FAKE_NCCL");
    std::istringstream words(text ? text : "");
    for (std::string word; words >> word;) {
        if (word == name) return "yes";
        if (word.rfind(name + "=", 0) == 0) return word.substr(name.size() + 1);
    }
    return "";
}

int rank_of_process() {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

Result enter(const std::string& name) {
    const int call = ++calls[name];
    if (rank_of_process() != 1) return kSuccess;
    while (asked("stall") == name) std::this_thread::sleep_for(std::chrono::seconds(1));
    return asked("fail") == name + ":" + std::to_string(call) ? kSystemError : kSuccess;
}

MPI_Datatype type_of(Type type) {
    switch (type) {
        case kFloat32: return MPI_FLOAT;
        case kFloat64: return MPI_DOUBLE;
        case kInt32: return MPI_INT32_T;
        case kUint32: return MPI_UINT32_T;
        default: return MPI_BYTE;
    }
}

size_t bytes_of(Type type) { return type == kFloat64 ? 8 : type == kUint8 ? 1 : 4; }
MPI_Op op_of(Reduction op) { return op == kMax ? MPI_MAX : MPI_SUM; }
Result result_of(int status) { return status == MPI_SUCCESS ? kSuccess : kSystemError; }

// Messages between two ranks are matched in the order of their calls, as in NCCL.
Result run_group() {
    std::vector<MPI_Request> requests;
    int status = MPI_SUCCESS;
    for (const Message& m : group) {
        MPI_Request& request = requests.emplace_back();
        const int bytes = static_cast<int>(m.bytes);
        status |= m.send ? MPI_Isend(m.data, bytes, MPI_BYTE, m.peer, 7, m.comm, &request)
                         : MPI_Irecv(m.data, bytes, MPI_BYTE, m.peer, 7, m.comm, &request);
    }
    status |= MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
    group.clear();
    return result_of(status);
}

Result add(const char* name, Message message) {
    if (const Result result = enter(name)) return result;
    group.push_back(message);
    return depth == 0 ? run_group() : kSuccess;
}

}  // namespace

extern "C" {

Result ncclGetVersion(int* version) {
    const std::string wanted = asked("version");
    *version = wanted.empty() ? 22803 : std::stoi(wanted);
    return kSuccess;
}
Result ncclGetUniqueId(UniqueId* id) {
    std::memset(id->bytes, 'i', sizeof id->bytes);
    id->bytes[0] = static_cast<char>(rank_of_process());   // the first rank of the communicator
    return kSuccess;
}
Result ncclCommInitRank(Communicator** comm, int ranks, UniqueId id, int rank) {
    if (const Result result = enter("ncclCommInitRank")) return result;
    for (size_t i = 1; i < sizeof id.bytes; i++)
        if (id.bytes[i] != 'i') return kInvalidArgument;
    // All processes open communicators at the same time, each of one group.
    MPI_Comm part;
    if (MPI_Comm_split(MPI_COMM_WORLD, id.bytes[0], rank, &part) != MPI_SUCCESS) return kSystemError;
    *comm = new Communicator{rank, ranks, part};
    int size = 0;
    MPI_Comm_size(part, &size);
    return size == ranks ? kSuccess : kInvalidArgument;
}
Result ncclCommDestroy(Communicator* comm) {
    delete comm;   // not its MPI communicator: other processes may be gone
    return kSuccess;
}
Result ncclCommAbort(Communicator* comm) { return ncclCommDestroy(comm); }
Result ncclCommGetAsyncError(Communicator*, Result* state) {
    *state = asked("late").empty() || calls["ncclAlltoAll"] < 5 ? kSuccess : kRemoteError;
    return kSuccess;
}
const char* ncclGetErrorString(Result result) { return result == kRemoteError ? "remote error" : "system error"; }
const char* ncclGetLastError(Communicator*) { return "the last\nword"; }

Result ncclAllReduce(const void* in, void* out, size_t count, Type type, Reduction op, Communicator* comm, Stream) {
    if (const Result result = enter("ncclAllReduce")) return result;
    if (in != out) return kInvalidArgument;
    return result_of(MPI_Allreduce(MPI_IN_PLACE, out, static_cast<int>(count), type_of(type), op_of(op), comm->comm));
}
Result ncclReduceScatter(const void* in, void* out, size_t count, Type type, Reduction op, Communicator* comm, Stream) {
    if (const Result result = enter("ncclReduceScatter")) return result;
    if (static_cast<const char*>(in) + static_cast<size_t>(comm->rank) * count * bytes_of(type) != out)
        return kInvalidArgument;
    std::vector<char> own(count * bytes_of(type));
    const int status = MPI_Reduce_scatter_block(in, own.data(), static_cast<int>(count), type_of(type), op_of(op),
                                                comm->comm);
    std::memcpy(out, own.data(), own.size());
    return result_of(status);
}
Result ncclAllGather(const void* in, void* out, size_t count, Type type, Communicator* comm, Stream) {
    if (const Result result = enter("ncclAllGather")) return result;
    if (static_cast<char*>(out) + static_cast<size_t>(comm->rank) * count * bytes_of(type) != in)
        return kInvalidArgument;
    return result_of(MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, out, static_cast<int>(count * bytes_of(type)), MPI_BYTE,
                                   comm->comm));
}
Result ncclSend(const void* in, size_t count, Type type, int peer, Communicator* comm, Stream) {
    return add("ncclSend", {true, const_cast<void*>(in), count * bytes_of(type), peer, comm->comm});
}
Result ncclRecv(void* out, size_t count, Type type, int peer, Communicator* comm, Stream) {
    return add("ncclRecv", {false, out, count * bytes_of(type), peer, comm->comm});
}
Result ncclAlltoAll(const void* in, void* out, size_t count, Type type, Communicator* comm, Stream) {
    if (const Result result = enter("ncclAlltoAll")) return result;
    const int bytes = static_cast<int>(count * bytes_of(type));
    return result_of(MPI_Alltoall(in, bytes, MPI_BYTE, out, bytes, MPI_BYTE, comm->comm));
}
Result ncclGather(const void* in, void* out, size_t count, Type type, int root, Communicator* comm, Stream) {
    if (const Result result = enter("ncclGather")) return result;
    const int bytes = static_cast<int>(count * bytes_of(type));
    if (comm->rank == root && in != static_cast<char*>(out) + root * bytes) return kInvalidArgument;   // would copy
    return result_of(MPI_Gather(comm->rank == root ? MPI_IN_PLACE : in, bytes, MPI_BYTE, out, bytes, MPI_BYTE, root,
                                comm->comm));
}
Result ncclMemAlloc(void** memory, size_t bytes) {
    const size_t page = kWindowAlignBytes;
    *memory = std::aligned_alloc(page, (bytes + page - 1) / page * page);
    return *memory ? kSuccess : kInvalidUsage;
}
Result ncclMemFree(void* memory) {
    std::free(memory);
    return kSuccess;
}
Result ncclCommWindowRegister(Communicator* comm, void* memory, size_t bytes, Window** window, int flags) {
    if (const Result result = enter("ncclCommWindowRegister")) return result;
    *window = static_cast<Window*>(memory);
    unsigned long long sizes[2] = {bytes, ~0ull - bytes};   // equal on all ranks
    const Result result = result_of(MPI_Allreduce(MPI_IN_PLACE, sizes, 2, MPI_UNSIGNED_LONG_LONG, MPI_MAX, comm->comm));
    const bool alike = sizes[0] == ~0ull - sizes[1] && flags == kSymmetricWindow;
    const bool aligned = reinterpret_cast<uintptr_t>(memory) % kWindowAlignBytes == 0;
    return result == kSuccess && !(alike && aligned) ? kInvalidArgument : result;
}
Result ncclCommWindowDeregister(Communicator*, Window*) { return enter("ncclCommWindowDeregister"); }
Result ncclGroupStart() {
    depth++;
    return kSuccess;
}
Result ncclGroupEnd() { return --depth == 0 ? run_group() : kSuccess; }

}  // extern "C"

// connect() opens the library, so that only runs on several GPUs need it.
//
// Calls block the host only while NCCL opens connections. Its non-blocking mode would avoid that, but starts a thread
// per collective; instead connect() opens the connections, in a thread that can be abandoned.
#include "llmc/parallel/comm/comm_nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/parallel/comm/comm_nccl_api.h"

namespace {

using nccl_api::Communicator;
using nccl_api::Result;
using nccl_api::Type;

// fp32 elements of the first collectives: large enough for NCCL to open all connections.
constexpr int64_t kFirstElems = 4 << 20;

constexpr const char* kCopyEngines = "2";   // the value of NCCL_CTA_POLICY

Type type_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::kFp32: return nccl_api::kFloat32;
        case Dtype::kFp64: return nccl_api::kFloat64;
        case Dtype::kInt32: return nccl_api::kInt32;
        default: FAIL(kExitBug, "sum over ranks of %s", dtype_name(dtype));
    }
}

class NcclComm : public Comm {
public:
    explicit NcclComm(std::unique_ptr<Comm> host) : Comm(host->world()), host_(std::move(host)) {}
    ~NcclComm() override {
        if (Communicator* comm = comm_.exchange(nullptr)) nccl_.call.comm_destroy(comm);
        if (shared_memory_) nccl_.call.mem_free(shared_memory_);
    }

    std::vector<std::string> gather(const std::string& mine) override { return host_->gather(mine); }
    std::unique_ptr<Comm> subgroup(const std::vector<int>& members) override {
        return std::make_unique<NcclComm>(host_->subgroup(members));
    }
    [[noreturn]] void abort(int exit_code) override {
        host_->abort(exit_code);
        std::abort();
    }

    std::string connect(Ctx& ctx, int seconds) override {
        if (idle(ctx)) return "";
        load_everywhere();
        // Copy engines instead of multiprocessors where there is a choice: matmuls run beside the collectives.
        if (nccl_.call.all_to_all) setenv("NCCL_CTA_POLICY", kCopyEngines, 0);
        const int64_t free_before = device::device_free_bytes();
        const nccl_api::UniqueId id = common_id();
        bounded(ctx, seconds, "ncclCommInitRank", [this, id](Ctx&) {
            Communicator* comm = nullptr;
            const Result result = nccl_.call.comm_init_rank(&comm, world().ranks, id, world().rank);
            comm_ = comm;
            check(result, "ncclCommInitRank", world().ranks, "ranks");
        });
        bounded(ctx, seconds, "first collectives", [this](Ctx& own) { first_collectives(own); });
        connecting_ = false;
        return strf("NCCL %s (%s), %.2f GiB of device memory", nccl_api::version_text(nccl_.version).c_str(),
                    nccl_.path.c_str(), gib(free_before - device::device_free_bytes()));
    }

    void* shared_memory(Ctx& ctx, int64_t bytes, std::string& why) override {
        if (idle(ctx)) return nullptr;
        const char* policy = getenv("NCCL_CTA_POLICY");
        if (!nccl_.call.mem_alloc) {
            why = strf("it takes NCCL %s or newer, this is %s",
                       nccl_api::version_text(nccl_api::kCopyEngineVersion).c_str(),
                       nccl_api::version_text(nccl_.version).c_str());
        } else if (!policy || std::strcmp(policy, kCopyEngines) != 0) {
            why = strf("NCCL_CTA_POLICY is %s, not %s", policy ? printable(policy).c_str() : "not set", kCopyEngines);
        } else if (const Result result = nccl_.call.mem_alloc(&shared_memory_, static_cast<size_t>(bytes));
                   result != nccl_api::kSuccess) {
            why = strf("ncclMemAlloc of %lld bytes: %s", (long long)bytes, reason(result, comm_).c_str());
        }
        const std::vector<std::string> all = gather(why);
        for (size_t rank = 0; rank < all.size(); rank++)
            if (why.empty() && !all[rank].empty()) why = strf("on rank %zu: ", rank) + all[rank];
        if (why.empty()) return shared_memory_;
        if (shared_memory_) nccl_.call.mem_free(shared_memory_);
        return shared_memory_ = nullptr;
    }

    void share(Ctx& ctx, const std::vector<Tensor>& parts, int seconds) override {
        if (idle(ctx)) return;
        if (!windows_.empty()) gather("");   // no rank uses them any more
        for (nccl_api::Window* window : std::exchange(windows_, {}))
            bounded(ctx, seconds, "ncclCommWindowDeregister", [this, window](Ctx&) {
                check(nccl_.call.window_deregister(comm_, window), "ncclCommWindowDeregister", 1, "window");
            });
        for (const Tensor& part : parts) windows_.push_back(register_window(ctx, part, seconds));
    }

    nccl_api::Window* register_window(Ctx& ctx, const Tensor& part, int seconds) {
        constexpr const char* kCall = "ncclCommWindowRegister (NCCL_CTA_POLICY=0 does without)";
        // A window must begin at an aligned address, so it includes the end of the preceding part. A message that
        // begins in this end also ends there, so none is partly inside the window.
        const auto before = reinterpret_cast<uintptr_t>(part.data) % nccl_api::kWindowAlignBytes;
        const Tensor all{static_cast<char*>(part.data) - before, Dtype::kE4m3,
                         part.bytes() + static_cast<int64_t>(before)};
        nccl_api::Window* window = nullptr;   // closed with the communicator
        bounded(ctx, seconds, kCall, [this, all, &window](Ctx&) {
            check(nccl_.call.window_register(comm_, all.data, byte_count(all), &window, nccl_api::kSymmetricWindow),
                  kCall, all.elems, "bytes");
        });
        return window;
    }

    void sum(Ctx& ctx, Tensor values) override {
        if (idle(ctx) || values.elems == 0) return;
        check(nccl_.call.all_reduce(values.data, values.data, count(values), type_of(values.dtype), nccl_api::kSum,
                                    connected(), ctx.stream), "ncclAllReduce", values.elems, dtype_name(values.dtype));
    }

    void max(Ctx& ctx, uint32_t* values, int64_t elems) override {
        if (idle(ctx) || elems == 0) return;
        check(nccl_.call.all_reduce(values, values, static_cast<size_t>(elems), nccl_api::kUint32, nccl_api::kMax,
                                    connected(), ctx.stream), "ncclAllReduce (max)", elems, "uint32");
    }

    void reduce_scatter(Ctx& ctx, Tensor shards) override {
        CHECK(shards.dtype == Dtype::kFp32, "reduce_scatter of %s", dtype_name(shards.dtype));
        const int64_t shard = shard_elems(shards);
        if (idle(ctx) || shard == 0) return;
        const Tensor own = shards.slice(world().rank * shard, shard);
        check(nccl_.call.reduce_scatter(shards.data, own.data, count(own), nccl_api::kFloat32, nccl_api::kSum,
                                        connected(), ctx.stream), "ncclReduceScatter", shards.elems, "fp32");
    }

    void all_gather(Ctx& ctx, Tensor shards) override {
        const int64_t shard = shard_elems(shards);
        if (idle(ctx) || shard == 0) return;
        const Tensor own = shards.slice(world().rank * shard, shard);
        check(nccl_.call.all_gather(own.data, shards.data, byte_count(own), nccl_api::kUint8, connected(), ctx.stream),
              "ncclAllGather", shards.elems, dtype_name(shards.dtype));
    }

    void all_to_all(Ctx& ctx, Tensor out, Tensor in) override {
        check_shards(out, in);
        const int64_t shard = shard_elems(in);
        if (ctx.rehearsal || shard == 0) return;
        if (world().ranks == 1) return device::copy_on_device(ctx, out.data, in.data, in.bytes());
        if (nccl_.call.all_to_all)
            return check(nccl_.call.all_to_all(in.data, out.data, byte_count(in.slice(0, shard)), nccl_api::kUint8,
                                               connected(), ctx.stream), "ncclAlltoAll", in.elems,
                         dtype_name(in.dtype));
        check(grouped([&](Result& result) {
                  for (int r = 0; r < world().ranks; r++)
                      send_and_receive(result, ctx, out.slice(r * shard, shard), in.slice(r * shard, shard), r);
              }), "ncclSend and ncclRecv (all to all)", in.elems, dtype_name(in.dtype));
    }

    // Half of an all-to-all of two ranks is each rank's copy of its own shard, for which NCCL may take multiprocessors
    // where copy engines do the rest. A gather copies nothing on a root whose shard is in its place, so one for each
    // rank spares the copies. With more ranks the own shard is a smaller part, and gathers take longer: each fills the
    // links of one rank only.
    void exchange_shards(Ctx& ctx, Tensor out, Tensor in) override {
        if (windows_.empty() || world().ranks != 2 || ctx.rehearsal || in.elems == 0) return all_to_all(ctx, out, in);
        check_shards(out, in);
        const int64_t shard = shard_elems(in);
        for (int root = 0; root < 2; root++) {
            const Tensor sent = (root == world().rank ? out : in).slice(root * shard, shard);
            check(nccl_.call.gather(sent.data, out.data, byte_count(sent), nccl_api::kUint8, root, connected(),
                                    ctx.stream), "ncclGather", in.elems, dtype_name(in.dtype));
        }
    }

    void exchange(Ctx& ctx, Tensor out, Tensor in, int peer) override {
        check_exchange(out, in, peer);
        if (idle(ctx) || in.elems == 0) return;
        check(grouped([&](Result& result) { send_and_receive(result, ctx, out, in, peer); }), "ncclSend and ncclRecv",
              in.elems, dtype_name(in.dtype));
    }

    // Blocks that send would keep multiprocessors from a matmul until all ranks have come, and its blocks, one for each
    // multiprocessor, could not start together. So copy engines send whole shards if they can.
    void exchange_all(Ctx& ctx, Tensor out, Tensor in, const Counts& received, const Counts& sent) override {
        if (!windows_.empty()) return exchange_shards(ctx, out, in);
        const Tensor all = sent_to_others(in, sent);
        if (idle(ctx)) return;
        check(grouped([&](Result& result) {
                  for (int r = 0; r < world().ranks; r++)
                      if (r != world().rank)
                          send_and_receive(result, ctx, first_of_shard(out, r, received), first_of_shard(in, r, sent),
                                           r);
              }), "ncclSend and ncclRecv (all ranks)", all.elems, dtype_name(all.dtype));
    }

    std::string async_error() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        Communicator* comm = comm_;
        if (!comm) return "";
        Result state = nccl_api::kSuccess;
        const Result result = nccl_.call.comm_get_async_error(comm, &state);
        if (result != nccl_api::kSuccess) state = result;
        return state == nccl_api::kSuccess || state == nccl_api::kInProgress ? "" : "NCCL: " + reason(state, comm);
    }

    // Aborts without holding the lock: ncclCommAbort may never return, but async_error, which locks, must.
    void abort_collectives() override {
        Communicator* comm = nullptr;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            comm = comm_.exchange(nullptr);
        }
        if (comm) nccl_.call.comm_abort(comm);
    }

private:
    bool idle(const Ctx& ctx) const { return ctx.rehearsal || world().ranks == 1; }
    static size_t count(const Tensor& tensor) { return static_cast<size_t>(tensor.elems); }
    static size_t byte_count(const Tensor& tensor) { return static_cast<size_t>(tensor.bytes()); }
    static void check_shards(const Tensor& out, const Tensor& in) {
        CHECK(out.dtype == in.dtype && out.elems == in.elems, "shards of %lld %s into %lld %s", (long long)in.elems,
              dtype_name(in.dtype), (long long)out.elems, dtype_name(out.dtype));
    }

    // ---- start ----

    // All ranks fail alike if one of them lacks the library.
    void load_everywhere() {
        const std::string mine = nccl_api::load(nccl_api::kLibrary, nccl_);
        const std::vector<std::string> errors = gather(mine);
        const bool alike = std::count(errors.begin(), errors.end(), mine) == world().ranks;
        for (size_t rank = 0; rank < errors.size(); rank++)
            REQUIRE(errors[rank].empty(), "%s%s", alike ? "" : strf("on rank %zu: ", rank).c_str(),
                    errors[rank].c_str());
        require_same(*this, {{"version of NCCL", nccl_api::version_text(nccl_.version)}});
    }

    nccl_api::UniqueId common_id() {
        nccl_api::UniqueId id{};
        if (root()) check(nccl_.call.get_unique_id(&id), "ncclGetUniqueId", world().ranks, "ranks");
        const std::string all = gather(root() ? std::string(id.bytes, sizeof id.bytes) : "")[0];
        CHECK(all.size() == sizeof id.bytes, "NCCL's id arrived with %zu bytes", all.size());
        std::memcpy(id.bytes, all.data(), sizeof id.bytes);
        return id;
    }

    // Runs `work` in a thread, since a call that waits for other ranks cannot be cancelled. After `seconds` all ranks
    // end here, without closing the device, which would wait for the call, too.
    void bounded(const Ctx& ctx, int seconds, const char* what, std::function<void(Ctx&)> work) {
        std::packaged_task<void()> task([own = ctx, work = std::move(work)]() mutable {
            device::device_use(own);
            work(own);
        });
        std::future<void> done = task.get_future();
        std::thread(std::move(task)).detach();
        if (done.wait_for(std::chrono::seconds(seconds)) != std::future_status::ready) {
            const std::string error = async_error();
            lost(strf("%s: %d ranks have not all come through in %d s; %sNCCL_DEBUG=INFO shows where they wait, "
                      "NCCL_SOCKET_IFNAME names the network to use", what, world().ranks, seconds,
                      error.empty() ? "" : (error + "; ").c_str()), kExitPeerLost);
        }
        try {
            done.get();
        } catch (const Error& error) {
            lost(error.what(), error.exit_code);
        }
    }

    // Opens the connections that large messages use, so that no training step waits for them.
    void first_collectives(Ctx& ctx) {
        // Not freed after an error, since that would wait for collectives that never end.
        float* const memory = static_cast<float*>(device::device_alloc(2 * kFirstElems * 4));
        const int64_t elems = kFirstElems / world().ranks * world().ranks;
        const Tensor in{memory, Dtype::kFp32, elems}, out{memory + kFirstElems, Dtype::kFp32, elems};
        device::fill_bytes(ctx, in.data, 0, in.bytes());
        sum(ctx, in);
        reduce_scatter(ctx, in);
        all_gather(ctx, in);
        all_to_all(ctx, out, in);
        device::synchronize(ctx);
        device::device_free(memory);
    }

    // ---- calls ----

    // Ends the group even if a call in it fails.
    Result grouped(const std::function<void(Result&)>& calls) {
        connected();
        Result result = nccl_.call.group_start();
        calls(result);
        const Result end = nccl_.call.group_end();
        return result == nccl_api::kSuccess ? end : result;
    }
    void send_and_receive(Result& result, Ctx& ctx, const Tensor& out, const Tensor& in, int peer) {
        auto run = [&](Result r) {
            if (result == nccl_api::kSuccess) result = r;
        };
        if (in) run(nccl_.call.send(in.data, byte_count(in), nccl_api::kUint8, peer, comm_, ctx.stream));
        if (out) run(nccl_.call.recv(out.data, byte_count(out), nccl_api::kUint8, peer, comm_, ctx.stream));
    }

    Communicator* connected() const {
        Communicator* comm = comm_;
        if (!comm) FAIL(kExitPeerLost, "the ranks' devices are not connected, or not any more");
        return comm;
    }

    std::string reason(Result result, Communicator* comm) const {
        const char* last = nccl_.call.get_last_error(comm);
        std::string text = strf("%s (%d)", nccl_.call.get_error_string(result), int{result});
        if (last && *last) text += std::string("; ") + last;
        std::replace(text.begin(), text.end(), '\n', ' ');
        return text;
    }

    void check(Result result, const char* call, int64_t elems, const char* type) {
        // kInProgress occurs only with NCCL_COMM_BLOCKING=0 in the environment.
        Communicator* comm = comm_;
        while (result == nccl_api::kInProgress && comm) {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
            if (const Result asked = nccl_.call.comm_get_async_error(comm, &result); asked != nccl_api::kSuccess)
                result = asked;
        }
        if (result == nccl_api::kSuccess) return;
        const std::string what = strf("%s of %lld %s: %s; NCCL_DEBUG=WARN says more", call, (long long)elems, type,
                                      reason(result, comm).c_str());
        // While connecting, the cause is the machine: no network, too little shared memory, GPUs that cannot be shared.
        if (connecting_) FAIL(result == nccl_api::kRemoteError ? kExitPeerLost : kExitBadInput, "%s", what.c_str());
        const bool ours = result == nccl_api::kInvalidArgument || result == nccl_api::kInvalidUsage;
        lost(what, ours ? kExitBug : kExitPeerLost);
    }

    // Ends all ranks. An exception would close the device on its way up, and that waits for collectives that never end.
    [[noreturn]] void lost(const std::string& what, int exit_code) {
        end_with_error(this, what.c_str(), exit_code);
        abort(exit_code);
        std::abort();   // under a sanitizer the compiler does not see that abort(exit_code) never returns
    }

    std::unique_ptr<Comm> host_;
    nccl_api::Loaded nccl_;
    std::mutex mutex_;                            // keeps comm_ valid during async_error
    std::atomic<Communicator*> comm_{nullptr};    // null: not connected, or aborted
    bool connecting_ = true;
    void* shared_memory_ = nullptr;
    std::vector<nccl_api::Window*> windows_;   // of parts of such memory
};

}  // namespace

std::unique_ptr<Comm> open_nccl(std::unique_ptr<Comm> host) {
    return std::make_unique<NcclComm>(std::move(host));
}

#define OMPI_SKIP_MPICXX 1   // the C interface only
#include "llmc/parallel/comm/comm_mpi.h"

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "llmc/base/check.h"

namespace {

#define MPI_CHECK(call)                                                                                     \
    do {                                                                                                    \
        const int status_ = (call);                                                                         \
        if (status_ != MPI_SUCCESS) fail_mpi(status_, #call);                                               \
    } while (0)

[[noreturn]] void fail_mpi(int status, const char* call) {
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(status, text, &length);
    FAIL(kExitPeerLost, "%s: %.*s", call, length, text);
}

// Largest message: MPI's counts are int, and receive_copies needs this much memory per rank.
constexpr int64_t kMessageBytes = 4 << 20;

World world_of(MPI_Comm comm) {
    World world;
    MPI_CHECK(MPI_Comm_rank(comm, &world.rank));
    MPI_CHECK(MPI_Comm_size(comm, &world.ranks));
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &world.run_rank));
    MPI_Comm host;
    MPI_CHECK(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, world.rank, MPI_INFO_NULL, &host));
    MPI_CHECK(MPI_Comm_rank(host, &world.local_rank));
    MPI_CHECK(MPI_Comm_size(host, &world.local_ranks));
    MPI_CHECK(MPI_Comm_free(&host));
    return world;
}

class MpiComm : public Comm {
public:
    explicit MpiComm(MPI_Comm comm) : Comm(world_of(comm)), comm_(comm) {
        MPI_CHECK(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    }
    ~MpiComm() override {
        const bool whole = comm_ == MPI_COMM_WORLD;
        if ((whole ? MPI_Finalize() : MPI_Comm_free(&comm_)) != MPI_SUCCESS)
            std::fprintf(stderr, "warning: %s failed\n", whole ? "MPI_Finalize" : "MPI_Comm_free");
    }

    std::unique_ptr<Comm> subgroup(const std::vector<int>& members) override {
        MPI_Comm part;
        MPI_CHECK(MPI_Comm_split(comm_, members.front(), world().rank, &part));
        auto group = std::make_unique<MpiComm>(part);
        CHECK(group->world().ranks == static_cast<int>(members.size()), "a group of %zu ranks has %d", members.size(),
              group->world().ranks);
        return group;
    }

    std::vector<std::string> gather(const std::string& mine) override {
        const int ranks = world().ranks, length = static_cast<int>(mine.size());
        CHECK(mine.size() < (size_t{1} << 30) / static_cast<size_t>(ranks), "a text of %zu bytes", mine.size());
        std::vector<int> lengths(static_cast<size_t>(ranks)), starts(static_cast<size_t>(ranks));
        MPI_CHECK(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, comm_));
        std::exclusive_scan(lengths.begin(), lengths.end(), starts.begin(), 0);
        std::string all(static_cast<size_t>(starts.back() + lengths.back()), '\0');
        MPI_CHECK(MPI_Allgatherv(mine.data(), length, MPI_CHAR, all.data(), lengths.data(), starts.data(), MPI_CHAR,
                                 comm_));
        std::vector<std::string> texts;
        for (size_t r = 0; r < lengths.size(); r++)
            texts.push_back(all.substr(static_cast<size_t>(starts[r]), static_cast<size_t>(lengths[r])));
        return texts;
    }

    void sum(Ctx& ctx, Tensor values) override {
        if (ctx.rehearsal || world().ranks == 1) return;
        switch (values.dtype) {
            case Dtype::kFp32: return sum_all(values.as<float>(), values.elems);
            case Dtype::kFp64: return sum_all(values.as<double>(), values.elems);
            case Dtype::kInt32: return sum_all(values.as<int32_t>(), values.elems);
            default: FAIL(kExitBug, "sum over ranks of %s", dtype_name(values.dtype));
        }
    }

    void max(Ctx& ctx, uint32_t* values, int64_t count) override {
        if (ctx.rehearsal || world().ranks == 1) return;
        for (int64_t begin = 0; begin < count; begin += kMessageBytes / 4) {
            const int64_t n = std::min(count - begin, kMessageBytes / 4);
            MPI_CHECK(MPI_Allreduce(MPI_IN_PLACE, values + begin, static_cast<int>(n), MPI_UINT32_T, MPI_MAX, comm_));
        }
    }

    void reduce_scatter(Ctx& ctx, Tensor shards) override {
        if (ctx.rehearsal || world().ranks == 1) return;
        const Shards all = shards_of(shards);
        float* const own = reinterpret_cast<float*>(all.of(world().rank));
        CHECK(shards.dtype == Dtype::kFp32, "reduce_scatter of %s", dtype_name(shards.dtype));
        for_chunks(all.bytes, [&](int64_t begin, int64_t bytes) {
            const int64_t elems = bytes / dtype_bytes(Dtype::kFp32);
            float* const sums = own + begin / dtype_bytes(Dtype::kFp32);
            float* const copies = receive_copies<float>(elems, sums, [&](int r) { return all.of(r) + begin; });
            for (int64_t i = 0; i < elems; i++) sums[i] = sum_of(copies + i, elems, world().ranks);
        });
    }

    void all_gather(Ctx& ctx, Tensor shards) override {
        if (ctx.rehearsal || world().ranks == 1) return;
        const Shards all = shards_of(shards);
        for_chunks(all.bytes, [&](int64_t begin, int64_t bytes) {
            send_and_receive(bytes, [&](int) { return all.of(world().rank) + begin; },
                     [&](int r) { return all.of(r) + begin; });
        });
    }

    void all_to_all(Ctx& ctx, Tensor out, Tensor in) override {
        if (ctx.rehearsal) return;
        CHECK(out.dtype == in.dtype && out.elems == in.elems, "all_to_all from %lld to %lld elements",
              (long long)in.elems, (long long)out.elems);
        const Shards to = shards_of(out), from = shards_of(in);
        const int own = world().rank;
        std::memcpy(to.of(own), from.of(own), static_cast<size_t>(to.bytes));
        for_chunks(to.bytes, [&](int64_t begin, int64_t bytes) {
            send_and_receive(bytes, [&](int r) { return from.of(r) + begin; }, [&](int r) { return to.of(r) + begin; });
        });
    }

    void exchange(Ctx& ctx, Tensor out, Tensor in, int peer) override {
        check_exchange(out, in, peer);
        if (ctx.rehearsal) return;
        for_chunks(in.bytes(), [&](int64_t begin, int64_t bytes) {
            const int count = static_cast<int>(bytes);
            MPI_CHECK(MPI_Sendrecv(static_cast<const char*>(in.data) + begin, count, MPI_BYTE, peer, 0,
                                   static_cast<char*>(out.data) + begin, count, MPI_BYTE, peer, 0, comm_,
                                   MPI_STATUS_IGNORE));
        });
    }

    void exchange_all(Ctx& ctx, Tensor out, Tensor in, const Counts& received, const Counts& sent) override {
        if (ctx.rehearsal) return;
        std::vector<MPI_Request> requests;
        for (int r = 0; r < world().ranks; r++) {
            if (r == world().rank) continue;
            const Tensor to = first_of_shard(out, r, received), from = first_of_shard(in, r, sent);
            for_chunks(to.bytes(), [&](int64_t begin, int64_t bytes) {
                MPI_CHECK(MPI_Irecv(static_cast<char*>(to.data) + begin, static_cast<int>(bytes), MPI_BYTE, r, 0,
                                    comm_, &requests.emplace_back()));
            });
            for_chunks(from.bytes(), [&](int64_t begin, int64_t bytes) {
                MPI_CHECK(MPI_Isend(static_cast<const char*>(from.data) + begin, static_cast<int>(bytes), MPI_BYTE, r,
                                    0, comm_, &requests.emplace_back()));
            });
        }
        MPI_CHECK(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE));
    }

    [[noreturn]] void abort(int exit_code) override {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
        std::abort();
    }

private:
    struct Shards {
        char* begin;
        int64_t bytes;   // of each
        char* of(int rank) const { return begin + rank * bytes; }
    };
    Shards shards_of(const Tensor& tensor) const {
        return {static_cast<char*>(tensor.data), shard_elems(tensor) * dtype_bytes(tensor.dtype)};
    }

    // Calls body(begin, bytes) for chunks that fit into a message.
    template <typename Body> static void for_chunks(int64_t bytes, Body&& body) {
        for (int64_t begin = 0; begin < bytes; begin += kMessageBytes)
            body(begin, std::min(kMessageBytes, bytes - begin));
    }

    // Sends and receives `bytes` to and from every other rank.
    template <typename From, typename To> void send_and_receive(int64_t bytes, From&& from, To&& to) {
        std::vector<MPI_Request> requests;
        const int count = static_cast<int>(bytes);
        for (int r = 0; r < world().ranks; r++) {
            if (r == world().rank) continue;
            MPI_CHECK(MPI_Irecv(to(r), count, MPI_BYTE, r, 0, comm_, &requests.emplace_back()));
            MPI_CHECK(MPI_Isend(from(r), count, MPI_BYTE, r, 0, comm_, &requests.emplace_back()));
        }
        MPI_CHECK(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE));
    }

    // Sends from(r) to each other rank r. Returns (ranks, elems): what each rank sent to this one, and `mine`.
    template <typename T, typename From> T* receive_copies(int64_t elems, const T* mine, From&& from) {
        copies_.resize(static_cast<size_t>(world().ranks * elems) * sizeof(T));
        T* const copies = reinterpret_cast<T*>(copies_.data());
        std::copy(mine, mine + elems, copies + world().rank * elems);
        send_and_receive(elems * static_cast<int64_t>(sizeof(T)), from, [&](int r) { return copies + r * elems; });
        return copies;
    }

    template <typename T> void sum_all(T* values, int64_t elems) {
        for_chunks(elems * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t bytes) {
            const int64_t count = bytes / static_cast<int64_t>(sizeof(T));
            T* const sums = values + begin / static_cast<int64_t>(sizeof(T));
            T* const copies = receive_copies<T>(count, sums, [&](int) { return sums; });
            for (int64_t i = 0; i < count; i++) sums[i] = sum_of(copies + i, count, world().ranks);
        });
    }

    // In rank order: the order of MPI's own reductions may depend on the size.
    template <typename T> static T sum_of(const T* copies, int64_t stride, int64_t ranks) {
        T total = copies[0];
        for (int64_t r = 1; r < ranks; r++) total += copies[r * stride];
        return total;
    }

    MPI_Comm comm_;
    std::vector<char> copies_;
};

}  // namespace

std::unique_ptr<Comm> open_mpi() {
    int provided = 0;
    // A rank that waits leaves its core to other processes, unless the user wants otherwise.
    ::setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
    MPI_CHECK(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided));
    return std::make_unique<MpiComm>(MPI_COMM_WORLD);
}

// Allowed before MPI is initialised.
std::string mpi_library_text() {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "MPI of an unknown version";
    const std::string whole(text, static_cast<size_t>(length));
    return whole.substr(0, whole.find(','));
}

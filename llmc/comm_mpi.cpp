// Ranks over MPI. Device memory is host memory here: the CPU device.
#define OMPI_SKIP_MPICXX 1   // the C interface only
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "llmc/check.h"
#include "llmc/comm.h"

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

// Elements that a rank adds up at a time: bounds the memory of a sum.
constexpr int64_t kPieceElems = 1 << 20;

World world_of_mpi() {
    World world;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &world.rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &world.ranks));
    return world;
}

class MpiComm : public Comm {
public:
    MpiComm() : Comm(world_of_mpi()) {
        MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    }
    ~MpiComm() override {
        if (MPI_Finalize() != MPI_SUCCESS) std::fprintf(stderr, "warning: MPI_Finalize failed\n");
    }

    std::vector<std::string> gather(const std::string& mine) override {
        const int ranks = world().ranks, length = static_cast<int>(mine.size());
        CHECK(mine.size() < (size_t{1} << 30) / static_cast<size_t>(ranks), "a text of %zu bytes", mine.size());
        std::vector<int> lengths(static_cast<size_t>(ranks)), starts(static_cast<size_t>(ranks));
        MPI_CHECK(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, MPI_COMM_WORLD));
        int total = 0;
        for (int r = 0; r < ranks; r++) {
            starts[static_cast<size_t>(r)] = total;
            total += lengths[static_cast<size_t>(r)];
        }
        std::string all(static_cast<size_t>(total), '\0');
        MPI_CHECK(MPI_Allgatherv(mine.data(), length, MPI_CHAR, all.data(), lengths.data(), starts.data(), MPI_CHAR,
                                 MPI_COMM_WORLD));
        std::vector<std::string> texts;
        for (size_t r = 0; r < lengths.size(); r++)
            texts.push_back(all.substr(static_cast<size_t>(starts[r]), static_cast<size_t>(lengths[r])));
        return texts;
    }

    void sum(Ctx& ctx, Tensor values) override {
        if (ctx.rehearsal || world().ranks == 1) return;
        switch (values.dtype) {
            case Dtype::kFp32: return sum_all(values.as<float>(), values.elems);
            case Dtype::kBf16: return sum_all(values.as<bf16>(), values.elems);
            case Dtype::kFp64: return sum_all(values.as<double>(), values.elems);
            case Dtype::kInt32: return sum_all(values.as<int32_t>(), values.elems);
            default: FAIL(kExitBug, "sum over ranks of %s", dtype_name(values.dtype));
        }
    }

    void max(Ctx& ctx, uint32_t* values, int64_t count, int64_t stride) override {
        if (ctx.rehearsal || world().ranks == 1) return;
        std::vector<uint32_t> packed;
        for (int64_t i = 0; i < count; i++) packed.push_back(values[i * stride]);
        MPI_CHECK(MPI_Allreduce(MPI_IN_PLACE, packed.data(), static_cast<int>(count), MPI_UINT32_T, MPI_MAX,
                                MPI_COMM_WORLD));
        for (int64_t i = 0; i < count; i++) values[i * stride] = packed[static_cast<size_t>(i)];
    }

    [[noreturn]] void abort(int exit_code) override {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
        std::abort();
    }

private:
    // Blocks of `ranks` pieces: every rank gets all copies of its piece, adds them in rank order, and hands out the
    // sum. The library's own reduction may choose another order for another size.
    template <typename T> void sum_all(T* values, int64_t elems) {
        const int64_t ranks = world().ranks;
        std::vector<T> copies, sums;
        for (int64_t begin = 0; begin < elems; begin += ranks * kPieceElems) {
            const int64_t block = std::min(elems - begin, ranks * kPieceElems), piece = (block + ranks - 1) / ranks;
            std::vector<int> counts, starts, copy_counts, copy_starts;
            for (int64_t r = 0; r < ranks; r++) {
                counts.push_back(bytes_of<T>(std::clamp<int64_t>(block - r * piece, 0, piece)));
                starts.push_back(bytes_of<T>(std::min(block, r * piece)));
            }
            const int64_t own = counts[static_cast<size_t>(world().rank)] / static_cast<int64_t>(sizeof(T));
            for (int64_t r = 0; r < ranks; r++) {
                copy_counts.push_back(bytes_of<T>(own));
                copy_starts.push_back(bytes_of<T>(r * own));
            }
            copies.resize(static_cast<size_t>(std::max<int64_t>(1, own * ranks)));
            sums.resize(static_cast<size_t>(std::max<int64_t>(1, own)));
            MPI_CHECK(MPI_Alltoallv(values + begin, counts.data(), starts.data(), MPI_BYTE, copies.data(),
                                    copy_counts.data(), copy_starts.data(), MPI_BYTE, MPI_COMM_WORLD));
            for (int64_t i = 0; i < own; i++) sums[static_cast<size_t>(i)] = sum_of(copies.data() + i, own, ranks);
            MPI_CHECK(MPI_Allgatherv(sums.data(), bytes_of<T>(own), MPI_BYTE, values + begin, counts.data(),
                                     starts.data(), MPI_BYTE, MPI_COMM_WORLD));
        }
    }
    template <typename T> static int bytes_of(int64_t elems) {
        return static_cast<int>(elems * static_cast<int64_t>(sizeof(T)));
    }
    template <typename T> static T sum_of(const T* copies, int64_t stride, int64_t ranks) {
        if constexpr (std::is_same_v<T, int32_t> || std::is_same_v<T, double>) {
            T total = 0;
            for (int64_t r = 0; r < ranks; r++) total += copies[r * stride];
            return total;
        } else {
            float total = 0;
            for (int64_t r = 0; r < ranks; r++) total += static_cast<float>(copies[r * stride]);
            return T(total);
        }
    }
};

}  // namespace

std::unique_ptr<Comm> open_mpi() {
    int provided = 0;
    MPI_CHECK(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided));
    return std::make_unique<MpiComm>();
}

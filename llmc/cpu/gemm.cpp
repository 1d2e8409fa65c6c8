// Matmul of the CPU: both operands packed (bf16 converted on the way), tiles of D spread over threads.
#include "llmc/cpu/common.h"
#include "llmc/cpu/gemm_kernel.h"
#include "llmc/cpu/math.h"
#include "llmc/cpu/threads.h"

namespace cpu {
namespace {

constexpr int64_t kTileRows = 96;       // packed A (96 KiB) and the sums (192 KiB) stay in the L2 cache
constexpr int64_t kTileColumns = 512;

// How D is cut. Only speed depends on it.
struct Tiling {
    int64_t rows, columns;   // of a tile
    Tiling(int64_t M, int64_t N, int64_t micro_columns) {
        // A few tiles a thread even out cores that are shared with other work.
        int64_t tasks = 4 * thread_count();
        rows = std::min(kTileRows, round_up((M + tasks - 1) / tasks, kMicroRows));
        columns = std::min(kTileColumns, round_up(N, micro_columns));
        // Too few rows to share: cut the columns instead.
        int64_t row_tiles = (M + rows - 1) / rows;
        if (row_tiles < tasks) columns = round_up((columns * row_tiles + tasks - 1) / tasks, micro_columns);
    }
};

// Elements [0, columns) of one row of D from its sums.
template <typename T, typename D>
void finish_row(const GemmArgs& args, int64_t row, int64_t column, int64_t columns, const Acc<T>* sums) {
    D* out = args.D.as<D>() + row * args.N + column;
    D* pre = args.pre ? args.pre.as<D>() + row * args.N + column : nullptr;
    const T* bias = args.bias ? args.bias.as<T>() + column : nullptr;
    const bool with_gelu = args.epilogue == GemmEpilogue::kBiasGelu;
    for_lanes<Acc<T>>(columns, [&](int64_t i, auto n) {
        Vec<Acc<T>> value = load(sums + i, n);
        if (bias) value = value + load(bias + i, n);
        if (pre) store(pre + i, value, n);
        if (with_gelu) value = gelu(value);
        if (args.accumulate) value = load(out + i, n) + value;
        store(out + i, value, n);
    });
}

template <typename T> struct Operands {
    Operand<T> a, b;
};
template <typename T> Operands<T> operands(const GemmArgs& args) {
    const T *a = args.A.as<T>(), *b = args.B.as<T>();
    bool wgrad = args.layout == GemmLayout::kWgrad, forward = args.layout == GemmLayout::kForward;
    return {{a, wgrad ? args.M : args.K, wgrad, args.M}, {b, forward ? args.K : args.N, !forward, args.N}};
}

template <typename T, typename D> void run_gemm(const GemmArgs& args) {
    using A = Acc<T>;
    const int64_t M = args.M, N = args.N, K = args.K;
    const Operands<T> in = operands<T>(args);
    const Tiling tile(M, N, kMicroColumns<A>);
    const int64_t strip = std::min(kTileColumns, round_up(N, kMicroColumns<A>));   // columns packed at a time
    const int64_t packed_a_elems = tile.rows * std::min(K, kDepth) + kPanelSlack;
    const int64_t thread_elems = round_up(packed_a_elems, 16) + tile.rows * tile.columns;
    auto packed_b = make_buffer<A>(strip * K + kPanelSlack);
    auto private_memory = make_buffer<A>(thread_elems * thread_count());
    const int64_t blocks = (K + kDepth - 1) / kDepth, row_tiles = (M + tile.rows - 1) / tile.rows;

#pragma omp parallel if (M * N * K >= 32 * kParallelElems)
    for (int64_t left = 0; left < N; left += strip) {
        const int64_t width = std::min(strip, N - left), padded = round_up(width, kMicroColumns<A>);
        const int64_t panels = padded / kMicroColumns<A>;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < blocks * panels; task++) {
            int64_t k = task / panels * kDepth, j = task % panels * kMicroColumns<A>;
            int64_t depth = std::min(kDepth, K - k);
            A* panel = packed_b.get() + k * padded + j * depth;
            pack_panel<kMicroColumns<A>>(panel, in.b.from(left + j), k, depth);
        }
        A* packed_a = private_memory.get() + thread_elems * thread_index();
        A* sums = packed_a + round_up(packed_a_elems, 16);
        const int64_t column_tiles = (width + tile.columns - 1) / tile.columns;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < row_tiles * column_tiles; task++) {
            int64_t top = task / column_tiles * tile.rows, j = task % column_tiles * tile.columns;
            int64_t rows = std::min(tile.rows, M - top), columns = std::min(tile.columns, width - j);
            Operand<T> a = in.a.from(top);
            a.count = rows;
            for (int64_t k = 0; k < K; k += kDepth) {
                int64_t depth = std::min(kDepth, K - k);
                pack<kMicroRows>(packed_a, a, k, depth);
                multiply_packed(rows, columns, depth, packed_a, packed_b.get() + k * padded + j * depth, sums,
                                tile.columns, k > 0);
            }
            for (int64_t row = 0; row < rows; row++)
                finish_row<T, D>(args, top + row, left + j, columns, sums + row * tile.columns);
        }
    }
}

void check_gemm(const GemmArgs& args) {
    Dtype T = args.A.dtype;
    CHECK(args.M > 0 && args.N > 0 && args.K > 0, "gemm of %lld x %lld x %lld", (long long)args.M,
          (long long)args.N, (long long)args.K);
    check_tensor("gemm", "A", args.A, T, args.M * args.K);
    check_tensor("gemm", "B", args.B, T, args.N * args.K);
    check_tensor("gemm", "D", args.D, args.D.dtype, args.M * args.N);
    check_optional("gemm", "bias", args.bias, T, args.N);
    bool gelu = args.epilogue == GemmEpilogue::kBiasGelu;
    CHECK(gelu || !args.pre, "gemm: pre belongs to kBiasGelu");
    CHECK(!(args.bias && args.epilogue == GemmEpilogue::kNone), "gemm: a bias without an epilogue");
    CHECK(args.bias || args.epilogue != GemmEpilogue::kBias, "gemm: kBias without a bias");
    CHECK(!args.accumulate || args.epilogue == GemmEpilogue::kNone, "gemm: an epilogue on top of D");
    check_optional("gemm", "pre", args.pre, args.D.dtype, args.M * args.N);
}

}  // namespace

void gemm(Ctx&, const GemmArgs& args) {
    check_gemm(args);
    Dtype T = args.A.dtype, D = args.D.dtype;
    if (T == Dtype::kFp32 && D == Dtype::kFp32) run_gemm<float, float>(args);
    else if (T == Dtype::kBf16 && D == Dtype::kBf16) run_gemm<bf16, bf16>(args);
    else if (T == Dtype::kBf16 && D == Dtype::kFp32) run_gemm<bf16, float>(args);
    else if (T == Dtype::kFp64 && D == Dtype::kFp64) run_gemm<double, double>(args);
    else FAIL(kExitBug, "gemm: no CPU operation for %s operands and %s D", dtype_name(T), dtype_name(D));
}

}  // namespace cpu

// Token and position embeddings. CPU.
#include <vector>

#include "llmc/cpu/common.h"

namespace cpu {
namespace {

template <typename T> void forward(const EmbeddingForwardArgs& args) {
    const int64_t C = args.C;
    int32_t bad = 0;
#pragma omp parallel for schedule(static) reduction(+ : bad) if (args.N * C >= kParallelElems)
    for (int64_t n = 0; n < args.N; n++) {
        int64_t token = args.tokens[n];
        if (token < 0 || token >= args.V) {
            token = 0;
            bad++;
        }
        const T* embedding = args.wte.as<T>() + token * C;
        const T* position = args.wpe ? args.wpe.as<T>() + row_position(args.positions, n, args.T) * C : nullptr;
        T* out = args.out.as<T>() + n * C;
        for_lanes<Acc<T>>(C, [&](int64_t c, auto count) {
            Vec<Acc<T>> value = load(embedding + c, count) * Vec<Acc<T>>(Acc<T>(args.mul));
            if (position) value = value + load(position + c, count);
            store(out + c, value, count);
        });
    }
    *args.bad_tokens += bad;
}

// sum[c] = sum of the rows row(0), row(1), ... of dout, in order; negative row numbers are left out.
template <typename T, typename Row>
void sum_rows(std::vector<Acc<T>>& sum, const T* dout, int64_t C, int64_t count, Row&& row) {
    std::fill(sum.begin(), sum.end(), Acc<T>(0));
    for (int64_t i = 0; i < count; i++) {
        int64_t n = row(i);
        if (n >= 0) add_row(sum.data(), dout + n * C, C);
    }
}

// The beginnings of the ranges of `order` with equal keys[row], and N.
std::vector<int64_t> ranges_of(const int32_t* keys, const int32_t* order, int64_t N) {
    std::vector<int64_t> begins;
    for (int64_t i = 0; i < N; i++)
        if (i == 0 || keys[order[i]] != keys[order[i - 1]]) begins.push_back(i);
    begins.push_back(N);
    return begins;
}

// grad[k] += mul (sum of dout over the rows n with keys[n] == k), in the order of `order`. Keys outside [0, most) are
// ignored.
template <typename T>
void add_sorted(Tensor grad, const T* dout, int64_t C, const int32_t* keys, const int32_t* order, int64_t N,
                int64_t most, float mul = 1) {
    const std::vector<int64_t> begins = ranges_of(keys, order, N);
    const int64_t ranges = static_cast<int64_t>(begins.size()) - 1;
#pragma omp parallel if (N * C >= kParallelElems)
    {
        std::vector<Acc<T>> sum(static_cast<size_t>(C));
#pragma omp for schedule(dynamic, 16)
        for (int64_t i = 0; i < ranges; i++) {
            const int32_t* rows = order + begins[static_cast<size_t>(i)];
            const int32_t key = keys[rows[0]];
            if (key < 0 || key >= most) continue;
            sum_rows(sum, dout, C, begins[static_cast<size_t>(i) + 1] - begins[static_cast<size_t>(i)],
                     [&](int64_t row) { return rows[row]; });
            for (Acc<T>& value : sum) value *= Acc<T>(mul);
            add_to_grad(grad, key * C, sum.data(), C);
        }
    }
}

template <typename T> void backward(const EmbeddingBackwardArgs& args) {
    const int64_t C = args.C, batches = (args.N + args.T - 1) / args.T;
    const T* dout = args.dout.as<T>();
    add_sorted(args.dwte, dout, C, args.tokens, args.token_order, args.N, args.V, args.mul);
    if (!args.dwpe) return;
    if (args.positions) return add_sorted(args.dwpe, dout, C, args.positions, args.position_order, args.N, args.T);
#pragma omp parallel if (args.N * C >= kParallelElems)
    {
        std::vector<Acc<T>> sum(static_cast<size_t>(C));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < std::min(args.T, args.N); t++) {
            sum_rows(sum, dout, C, batches, [&](int64_t b) {
                int64_t n = b * args.T + t;
                return n < args.N ? n : -1;
            });
            add_to_grad(args.dwpe, t * C, sum.data(), C);
        }
    }
}

}  // namespace

void embedding_forward(Ctx&, const EmbeddingForwardArgs& args) {
    for_working_type("embedding_forward", args.out.dtype, [&]<typename T>(Tag<T>) {
        check_tensor("embedding_forward", "out", args.out, dtype_of<T>, args.N * args.C);
        check_at_least("embedding_forward", "wte", args.wte, dtype_of<T>, args.V * args.C);
        if (args.wpe)
            check_at_least("embedding_forward", "wpe", args.wpe, dtype_of<T>,
                           positions_of(args.positions, args.N, args.T) * args.C);
        forward<T>(args);
    });
}

void embedding_backward(Ctx&, const EmbeddingBackwardArgs& args) {
    for_working_type("embedding_backward", args.dout.dtype, [&]<typename T>(Tag<T>) {
        check_tensor("embedding_backward", "dout", args.dout, dtype_of<T>, args.N * args.C);
        check_grad<T>("embedding_backward", "dwte", args.dwte, std::max(args.dwte.elems, args.V * args.C));
        const int64_t least = std::min(args.T, args.N) * args.C;
        CHECK(!args.positions == !args.position_order && (args.dwpe || !args.positions),
              "embedding_backward: positions, position_order and dwpe come together");
        if (args.dwpe)
            check_grad<T>("embedding_backward", "dwpe", args.dwpe, std::max(args.dwpe.elems, least));
        backward<T>(args);
    });
}

}  // namespace cpu

// Causal attention on the CPU: one block of queries at a time against all keys up to it, with O(T) memory per thread.
#include "llmc/base/fp8_cast.h"
#include "llmc/cpu/cast_lines.h"
#include "llmc/cpu/common.h"
#include "llmc/cpu/gemm_kernel.h"
#include "llmc/cpu/math.h"
#include "llmc/cpu/quantize.h"
#include "llmc/cpu/threads.h"

namespace cpu {
namespace {

constexpr int64_t kQueries = 48;   // queries in a block, a multiple of kMicroRows

// Pointers to the heads of packed QKV.
template <typename T> struct Heads {
    const T* qkv;
    int64_t T_len, NH, NKV, HS;
    int64_t width() const { return (NH + 2 * NKV) * HS; }
    const T* q(int64_t b, int64_t h) const { return qkv + b * T_len * width() + h * HS; }
    const T* k(int64_t b, int64_t kv) const { return q(b, NH + kv); }
    const T* v(int64_t b, int64_t kv) const { return q(b, NH + NKV + kv); }
};

// A matrix as an operand that is summed over its columns, or over its rows.
template <typename T> Operand<T> over_columns(const T* data, int64_t stride, int64_t rows) {
    return {data, stride, false, rows};
}
template <typename T> Operand<T> over_rows(const T* data, int64_t stride, int64_t columns) {
    return {data, stride, true, columns};
}

// The scores of a problem, of forward or backward arguments.
template <typename A, typename Args> SoftCap<A> scores_of(const Args& args) {
    return {A(args.softmax_mul), A(args.softcap)};
}

// Replaces a row of products q k by exp(score - largest) for the first `visible` of `keys` and by 0 for the others.
// Returns the sum; sets largest to the largest score.
template <typename A> A exponentials(A* row, int64_t visible, int64_t keys, const SoftCap<A>& score, A* largest) {
    Vec<A> most = score.of(Vec<A>(row[0]));
    for_lanes<A>(visible, [&](int64_t j, auto n) {
        Vec<A> scaled = score.of(load(row + j, n));
        store(row + j, scaled, n);
        if (n == Vec<A>::kWidth) most = max(most, scaled);
        else for (int i = 0; i < n; i++) most = max(most, Vec<A>(row[j + i]));
    });
    *largest = max_lanes(most);
    Vec<A> sum;
    for_lanes<A>(visible, [&](int64_t j, auto n) {
        store(row + j, exp(load(row + j, n) - Vec<A>(*largest)), n);
        sum = sum + load(row + j, n);   // load sets lanes past the end to 0
    });
    std::fill(row + visible, row + keys, A(0));
    return sum_lanes(sum);
}

// The same with P in E4M3, as on tensor cores: the online softmax goes through 128 keys at a time, from the diagonal
// down. The largest P is scaled to 2^8; the maximum is updated only if a later P exceeds 2^8.75. The sum is that of P
// before rounding. row: integers; times `mul` and the scale of its key each is a score in log2 units. The integers come
// with the bias of the tensor cores' accumulators, which rounds the scores: see cuda/attention_forward_fp8_sm90.cu.
// begin: position of key 0. running_max: what is subtracted from the scores. largest_score: raised to the scores.
float fp8_exponentials(float* row, int64_t begin, int64_t visible, int64_t keys, float mul, const float* key_scales,
                       float* running_max, float* largest_score) {
    constexpr float kLn2 = 0.69314718f, kMost = 8.75f, kNewMost = 8, kNone = -1e30f, kBias = 0x1.8p23f;
    float sum = 0, now = kNone;
    for (int64_t end = visible, first; end > 0; end = first) {
        first = std::max<int64_t>(0, (begin + end - 1) / kHeadBlock * kHeadBlock - begin);
        float largest = kNone;
        const float key_mul = mul * key_scales[(begin + first) / kHeadBlock];
        for (int64_t j = first; j < end; j++) largest = std::max(largest, row[j]);
        largest *= key_mul;
        *largest_score = std::max(*largest_score, largest * kLn2);
        if (largest > now + kMost) {
            const float next = largest - kNewMost;
            const auto change = static_cast<float>(exp(static_cast<double>(now - next) * kLn2));
            for (int64_t j = end; j < visible; j++) row[j] *= change;
            sum *= change, now = next;
        }
        const Vec<float> bias(kBias), by(key_mul), less(-std::fma(kBias, key_mul, now)), ln2(kLn2);
        for_lanes<float>(end - first, [&](int64_t j, auto n) {
            store(row + first + j, exp(fma(load(row + first + j, n) + bias, by, less) * ln2), n);
        });
        for (int64_t j = first; j < end; j++) {
            sum += row[j];
            row[j] = from_fp8(Dtype::kE4m3, fp8_cast<Dtype::kE4m3>(row[j]));
        }
    }
    std::fill(row + visible, row + keys, 0.0f);
    *running_max = now * kLn2;
    return sum;
}

// Positions [begin, end) of a sequence.
struct Span {
    int64_t begin, end;
};

// Calls f(span) for every document of a sequence. Each is treated as a separate sequence, so nothing has to be masked.
template <typename Args, typename F> void for_documents(const Args& args, int64_t b, F&& f) {
    if (!args.documents) return f(Span{0, args.T});
    const int32_t* ends = args.documents + (args.B + b) * args.T;
    for (int64_t begin = 0; begin < args.T; begin = ends[begin]) f(Span{begin, ends[begin]});
}

// The keys [begin, end) of a document that a block of queries attends to. Its query i attends to those from first(i)
// to past(i) - 1, counted from `begin`.
struct BlockKeys {
    int64_t first_query, begin, end, window;
    // `begin` is a multiple of kMicroRows, because sums over queries write whole groups of keys.
    BlockKeys(int64_t first, int64_t queries, int64_t of_window)
        : first_query(first), begin(std::max<int64_t>(0, first - of_window + 1) / kMicroRows * kMicroRows),
          end(first + queries), window(of_window) {}
    int64_t count() const { return end - begin; }
    int64_t first(int64_t i) const { return std::max(begin, first_query + i - window + 1) - begin; }
    int64_t past(int64_t i) const { return first_query + i + 1 - begin; }
};
template <typename Args> int64_t window_of(const Args& args) { return args.window == 0 ? args.T : args.window; }

// `count` tokens of a head of Q or K from `first` on as the integers of quantize_heads, which bf16 represents.
template <typename T>
std::vector<T> integers(const AttentionForwardArgs& args, int64_t b, int64_t head, int64_t first, int64_t count) {
    const int64_t row = (b * (args.NH + 2 * args.NKV) + head) * head_blocks(args.T) * kHeadBlock + first;
    const auto* codes = static_cast<const int8_t*>(args.heads.bytes.data) + row * args.HS;
    std::vector<T> found;
    for (int64_t i = 0; i < count * args.HS; i++) found.push_back(T(static_cast<float>(codes[i])));
    return found;
}

template <typename T>
void forward_head(const AttentionForwardArgs& args, int64_t b, int64_t h, Span document, Acc<T>* scratch) {
    using A = Acc<T>;
    const Heads<T> heads{args.qkv.as<T>(), args.T, args.NH, args.NKV, args.HS};
    const int64_t kv = h / (args.NH / args.NKV), HS = args.HS, length = document.end - document.begin;
    const int64_t first_token = document.begin * heads.width();
    const T *q = heads.q(b, h) + first_token, *k = heads.k(b, kv) + first_token, *v = heads.v(b, kv) + first_token;
    const int64_t score_stride = round_up(args.T, kMicroColumns<A>);
    const int64_t out_stride = round_up(HS, kMicroColumns<A>);
    const float* const scales = args.heads ? args.heads.scales.as<float>() : nullptr;
    const int64_t blocks = head_blocks(args.T), first_head = b * (args.NH + 2 * args.NKV);
    const double sink = args.sinks ? widen(args.sinks.as<T>()[h]) : -HUGE_VAL;
    std::vector<T> q8, k8;
    if (scales) k8 = integers<T>(args, b, args.NH + kv, document.begin, length);
    A* scores = scratch;
    A* sums = scores + kQueries * score_stride;
    A* work = sums + kQueries * out_stride;
    for (int64_t first = 0; first < length; first += kQueries) {
        const int64_t queries = std::min(kQueries, length - first);
        const BlockKeys keys(first, queries, window_of(args));
        const int64_t token = b * args.T + document.begin + first, skipped = keys.begin * heads.width();
        if (scales) {
            q8 = integers<T>(args, b, h, document.begin + first, queries);
            multiply(over_columns(q8.data(), HS, queries), over_columns(k8.data() + keys.begin * HS, HS, keys.count()),
                     HS, scores, score_stride, false, work);
        } else {
            multiply(over_columns(q + first * heads.width(), heads.width(), queries),
                     over_columns(k + skipped, heads.width(), keys.count()), HS, scores, score_stride, false, work);
        }
        A inverse_sum[kQueries];
        float largest_score = 0;
        for (int64_t i = 0; i < queries; i++) {
            const int64_t hidden = keys.first(i), visible = keys.past(i) - hidden, rest = keys.count() - hidden;
            A largest;
            A* row = scores + i * score_stride + hidden;
            A sum;
            std::fill(row - hidden, row, A(0));
            if constexpr (std::is_same_v<T, bf16>) {
                constexpr float kLog2E = 1.44269504f;
                const int64_t at = document.begin + keys.begin + hidden;
                const int64_t block = (document.begin + first + i) / kHeadBlock;
                sum = !scales ? exponentials(row, visible, rest, scores_of<A>(args), &largest)
                              : fp8_exponentials(row, at, visible, rest, args.softmax_mul * kLog2E
                                                     * scales[(first_head + h) * blocks + block],
                                                 scales + (first_head + args.NH + kv) * blocks, &largest,
                                                 &largest_score);
            } else {
                sum = exponentials(row, visible, rest, scores_of<A>(args), &largest);
            }
            if (!scales) largest_score = std::max(largest_score, static_cast<float>(largest));
            const double most = std::max(static_cast<double>(largest), sink), keep = exp(largest - most);
            const double with_sink = sum * keep + exp(sink - most);
            inverse_sum[i] = static_cast<A>(keep / with_sink);
            args.lse.as<A>()[(b * args.NH + h) * args.T + document.begin + first + i] =
                static_cast<A>(most + log(with_sink));
        }
        if (args.max_logits)   // their bits are in the order of the values
            raise_amax(reinterpret_cast<uint32_t*>(args.max_logits + h), std::bit_cast<uint32_t>(largest_score));
        multiply(over_columns(scores, score_stride, queries), over_rows(v + skipped, heads.width(), HS),
                 keys.count(), sums, out_stride, false, work);
        for (int64_t i = 0; i < queries; i++) {
            T* out = args.out.as<T>() + ((token + i) * args.NH + h) * HS;
            for_lanes<A>(HS, [&](int64_t d, auto n) {
                store(out + d, load(sums + i * out_stride + d, n) * Vec<A>(inverse_sum[i]), n);
            });
        }
    }
}

template <typename T> void forward(const AttentionForwardArgs& args) {
    using A = Acc<T>;
    const int64_t score_stride = round_up(args.T, kMicroColumns<A>);
    const int64_t out_stride = round_up(args.HS, kMicroColumns<A>);
    const int64_t elems = kQueries * (score_stride + out_stride)
                          + std::max(multiply_scratch<A>(kQueries, args.T, args.HS),
                                     multiply_scratch<A>(kQueries, args.HS, args.T));
    auto scratch = make_buffer<A>(elems * thread_count());
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < args.B * args.NH; task++) {
        const int64_t b = task / args.NH, h = task % args.NH;
        for_documents(args, b, [&](Span document) {
            forward_head<T>(args, b, h, document, scratch.get() + elems * thread_index());
        });
    }
}

// Scratch of one thread of the backward pass.
template <typename A> struct BackwardBuffers {
    int64_t score_stride, head_stride;
    A *probabilities, *dscores, *dq, *dk, *dv, *work;
    static int64_t elems(int64_t T, int64_t HS) {
        int64_t columns = kMicroColumns<A>, rows = round_up(T, kMicroRows);
        int64_t work = std::max({multiply_scratch<A>(kQueries, T, HS), multiply_scratch<A>(kQueries, HS, T),
                                 multiply_scratch<A>(T, HS, kQueries)});
        return 2 * kQueries * round_up(T, columns) + (kQueries + 2 * rows) * round_up(HS, columns) + work;
    }
    BackwardBuffers(A* memory, int64_t T, int64_t HS)
        : score_stride(round_up(T, kMicroColumns<A>)), head_stride(round_up(HS, kMicroColumns<A>)) {
        int64_t rows = round_up(T, kMicroRows);
        probabilities = memory;
        dscores = probabilities + kQueries * score_stride;
        dq = dscores + kQueries * score_stride;
        dk = dq + kQueries * head_stride;
        dv = dk + rows * head_stride;
        work = dv + rows * head_stride;
    }
};

template <typename T>
void store_rows(T* out, int64_t out_stride, const Acc<T>* in, int64_t in_stride, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++)
        for_lanes<Acc<T>>(columns, [&](int64_t d, auto n) {
            store(out + i * out_stride + d, load(in + i * in_stride + d, n), n);
        });
}

// Backward pass for a block of queries of head h; `first` counts from the start of the document. Writes dq; dk and dv
// of all keys that the block attends to are += if `add`, else =.
template <typename T>
void backward_block(const AttentionBackwardArgs& args, int64_t b, int64_t h, Span document, int64_t first, bool add,
                    const BackwardBuffers<Acc<T>>& buffers) {
    using A = Acc<T>;
    const Heads<T> heads{args.qkv.as<T>(), args.T, args.NH, args.NKV, args.HS};
    const int64_t HS = args.HS, width = heads.width(), out_width = args.NH * HS;
    const int64_t queries = std::min(kQueries, document.end - document.begin - first);
    const BlockKeys keys(first, queries, window_of(args));
    const int64_t first_token = (document.begin + keys.begin) * width, at = document.begin + first;
    const int64_t stride = buffers.score_stride, head_stride = buffers.head_stride;
    const int64_t kv = h / (args.NH / args.NKV);
    const T *q = heads.q(b, h) + at * width, *k = heads.k(b, kv) + first_token, *v = heads.v(b, kv) + first_token;
    const T* dout = args.dout.as<T>() + (b * args.T + at) * out_width + h * HS;
    const T* out = args.out.as<T>() + (b * args.T + at) * out_width + h * HS;
    const int64_t row_begin = (b * args.NH + h) * args.T + at;
    const SoftCap<A> scores = scores_of<A>(args);

    multiply(over_columns(q, width, queries), over_columns(k, width, keys.count()), HS, buffers.probabilities, stride,
             false, buffers.work);
    multiply(over_columns(dout, out_width, queries), over_columns(v, width, keys.count()), HS, buffers.dscores,
             stride, false, buffers.work);
    for (int64_t i = 0; i < queries; i++) {
        const A delta = dot<A>(dout + i * out_width, out + i * out_width, HS);
        const A lse = args.lse.as<A>()[row_begin + i];
        args.delta.as<A>()[row_begin + i] = delta;
        A *p = buffers.probabilities + i * stride, *ds = buffers.dscores + i * stride;
        const int64_t hidden = keys.first(i), past = keys.past(i);
        std::fill(p, p + hidden, A(0));
        std::fill(ds, ds + hidden, A(0));
        for_lanes<A>(past - hidden, [&](int64_t offset, auto n) {
            const int64_t j = hidden + offset;
            const Vec<A> score = scores.of(load(p + j, n)), probability = exp(score - Vec<A>(lse));
            const Vec<A> dscore = probability * (load(ds + j, n) - Vec<A>(delta)) * Vec<A>(args.softmax_mul)
                                  * scores.slope(score);
            store(p + j, probability, n);
            store(ds + j, dscore, n);
        });
        std::fill(p + past, p + keys.count(), A(0));
        std::fill(ds + past, ds + keys.count(), A(0));
    }
    multiply(over_columns(buffers.dscores, stride, queries), over_rows(k, width, HS), keys.count(), buffers.dq,
             head_stride, false, buffers.work);
    const int64_t sums = keys.begin * head_stride;
    multiply(over_rows(buffers.probabilities, stride, keys.count()), over_rows(dout, out_width, HS), queries,
             buffers.dv + sums, head_stride, add, buffers.work);
    multiply(over_rows(buffers.dscores, stride, keys.count()), over_rows(q, width, HS), queries, buffers.dk + sums,
             head_stride, add, buffers.work);
    T* dq = args.dqkv.as<T>() + (b * args.T + at) * width + h * HS;
    store_rows(dq, width, buffers.dq, head_stride, queries, HS);
}

// Backward pass for one key/value head and the query heads that share it, so that no two threads write the same
// gradient. The last block comes first, because without a window it reaches all keys and can initialise their sums.
template <typename T>
void backward_group(const AttentionBackwardArgs& args, int64_t b, int64_t kv, Acc<T>* memory) {
    using A = Acc<T>;
    const BackwardBuffers<A> buffers(memory, args.T, args.HS);
    const int64_t group = args.NH / args.NKV, width = (args.NH + 2 * args.NKV) * args.HS;
    for_documents(args, b, [&](Span document) {
        const int64_t length = document.end - document.begin, last = (length - 1) / kQueries * kQueries;
        const bool windowed = window_of(args) < length;
        if (windowed)
            for (A* sums : {buffers.dk, buffers.dv}) std::fill(sums, sums + length * buffers.head_stride, A(0));
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
            for (int64_t first = last; first >= 0; first -= kQueries)
                backward_block<T>(args, b, h, document, first, windowed || h > kv * group || first < last, buffers);
        T* dk = args.dqkv.as<T>() + (b * args.T + document.begin) * width + (args.NH + kv) * args.HS;
        store_rows(dk, width, buffers.dk, buffers.head_stride, length, args.HS);
        store_rows(dk + args.NKV * args.HS, width, buffers.dv, buffers.head_stride, length, args.HS);
    });
}

template <typename T> void backward(const AttentionBackwardArgs& args) {
    using A = Acc<T>;
    const int64_t elems = BackwardBuffers<A>::elems(args.T, args.HS);
    auto scratch = make_buffer<A>(elems * thread_count());
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < args.B * args.NKV; task++)
        backward_group<T>(args, task / args.NKV, task % args.NKV, scratch.get() + elems * thread_index());
}

template <typename T> void sinks_backward(const AttentionBackwardArgs& args) {
    using A = Acc<T>;
#pragma omp parallel for schedule(static)
    for (int64_t h = 0; h < args.NH; h++) {
        const double sink = widen(args.sinks.as<T>()[h]);
        const A sum = static_cast<A>(sum_terms(args.B * args.T, [&](int64_t n) {
            const int64_t row = (n / args.T * args.NH + h) * args.T + n % args.T;
            return -exp(sink - static_cast<double>(args.lse.as<A>()[row])) * args.delta.as<A>()[row];
        }));
        add_to_grad(args.dsinks, h, &sum, 1);
    }
}

void check_heads(const char* op, int64_t NH, int64_t NKV, int64_t HS) {
    CHECK(NH > 0 && NKV > 0 && HS > 0 && NH % NKV == 0, "%s: %lld query heads, %lld key heads, head size %lld", op,
          (long long)NH, (long long)NKV, (long long)HS);
}

// Checks the contract of AttentionForwardArgs::documents.
template <typename Args> void check_documents(const char* op, const Args& args) {
    if (!args.documents) return;
    const int32_t *starts = args.documents, *ends = starts + args.B * args.T;
    for (int64_t row = 0; row < args.B * args.T; row++) {
        const int64_t t = row % args.T, before = t > 0 ? ends[row - 1] : 0;
        const bool first = before == t;
        CHECK(starts[row] == (first ? t : starts[row - 1]) && (first ? ends[row] > t : ends[row] == before)
                  && ends[row] <= args.T,
              "%s: the document of sequence %lld, position %lld, is [%d, %d)", op, (long long)(row / args.T),
              (long long)t, starts[row], ends[row]);
    }
}

}  // namespace

const char* attention_kernel(const Ctx&, Dtype, int64_t, bool) { return "row by row on the CPU"; }
int64_t attention_sums_elems(Dtype, int64_t, int64_t, int64_t, int64_t) { return 0; }

void attention_forward(Ctx&, const AttentionForwardArgs& args) {
    check_heads("attention_forward", args.NH, args.NKV, args.HS);
    CHECK(args.window >= 0, "attention_forward: a window of %lld tokens", (long long)args.window);
    check_documents("attention_forward", args);
    const int64_t N = args.B * args.T;
    const QuantResult result("attention_forward", args.quant, args.out, args.qkv.dtype, N, args.NH * args.HS);
    for_working_type("attention_forward", args.qkv.dtype, [&]<typename T>(Tag<T>) {
        check_tensor("attention_forward", "qkv", args.qkv, dtype_of<T>, N * (args.NH + 2 * args.NKV) * args.HS);
        check_tensor("attention_forward", "out", args.out, dtype_of<T>, N * args.NH * args.HS);
        check_tensor("attention_forward", "lse", args.lse, stat_dtype<T>, N * args.NH);
        check_optional("attention_forward", "sinks", args.sinks, dtype_of<T>, args.NH);
        CHECK(!args.heads || (std::is_same_v<T, bf16> && args.softcap == 0),
              "attention_forward: FP8 heads of %s, soft cap %g", dtype_name(dtype_of<T>), args.softcap);
        forward<T>(args);
    });
    result.quantize();
}

void attention_backward(Ctx&, const AttentionBackwardArgs& args) {
    check_heads("attention_backward", args.NH, args.NKV, args.HS);
    CHECK(args.window >= 0, "attention_backward: a window of %lld tokens", (long long)args.window);
    check_documents("attention_backward", args);
    const int64_t N = args.B * args.T, width = (args.NH + 2 * args.NKV) * args.HS;
    const QuantResult result("attention_backward", args.quant, args.dqkv, args.qkv.dtype, N, width);
    for_working_type("attention_backward", args.qkv.dtype, [&]<typename T>(Tag<T>) {
        check_tensor("attention_backward", "qkv", args.qkv, dtype_of<T>, N * width);
        check_tensor("attention_backward", "dqkv", args.dqkv, dtype_of<T>, args.qkv.elems);
        check_tensor("attention_backward", "out", args.out, dtype_of<T>, N * args.NH * args.HS);
        check_tensor("attention_backward", "dout", args.dout, dtype_of<T>, args.out.elems);
        check_tensor("attention_backward", "lse", args.lse, stat_dtype<T>, N * args.NH);
        check_tensor("attention_backward", "delta", args.delta, stat_dtype<T>, N * args.NH);
        check_optional("attention_backward", "sinks", args.sinks, dtype_of<T>, args.NH);
        if (args.sinks) check_grad<T>("attention_backward", "dsinks", args.dsinks, args.NH);
        backward<T>(args);
        if (args.sinks) sinks_backward<T>(args);
    });
    result.quantize();
}

}  // namespace cpu

// Speed of memory-bound operations. Each is compared with the CPU on a small shape, then timed: random data, input sets
// that rotate through more than three times the L2 cache, launches back to back for a quarter of a second. The bytes
// are those that must move at least (every tensor once); the ceiling is a copy on the device in the same run.
#pragma once
#include <cmath>
#include <cstring>
#include <numeric>

#include "dev/bench/bench_harness.h"

struct Dims {
    int64_t N, T, C, F, V, Vp, NH, NKV, HS, elems;
};
inline const Dims kSmall = {.N = 48, .T = 24, .C = 256, .F = 512, .V = 1000, .Vp = 1024, .NH = 4, .NKV = 2, .HS = 64,
                     .elems = 10007};
inline constexpr int64_t kExperts = 8;   // of a token, of V

enum class Fill { kNormal, kSmallSquares, kScratch, kTokens, kOrder, kOffsets, kState, kZero };
struct Field {
    std::string name;
    Dtype dtype;
    int64_t elems;
    Fill fill = Fill::kNormal;
};
using View = std::function<Tensor(const std::string&)>;

inline int64_t vocabulary_rank(int64_t n, int64_t V) {
    // Token ranks with frequencies of about 1 / rank, as words in text.
    const double u = (philox(5, static_cast<uint64_t>(n)).word[0] + 0.5) * 0x1p-32;
    return std::min(V - 1, static_cast<int64_t>(std::pow(static_cast<double>(V), u)) - 1);
}
// Scattered over the vocabulary, so that frequent tokens are not neighbours.
inline std::vector<int32_t> make_tokens(int64_t N, int64_t V) {
    std::vector<int32_t> tokens(static_cast<size_t>(N));
    for (int64_t n = 0; n < N; n++)
        tokens[static_cast<size_t>(n)] = static_cast<int32_t>(vocabulary_rank(n, V) * 7919 % V);
    return tokens;
}
inline std::vector<int32_t> make_order(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> order(tokens.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return tokens[static_cast<size_t>(a)] < tokens[static_cast<size_t>(b)];
    });
    return order;
}
inline int64_t distinct_tokens(const Dims& d) {
    std::vector<int32_t> tokens = make_tokens(d.N, d.V);
    std::sort(tokens.begin(), tokens.end());
    return std::unique(tokens.begin(), tokens.end()) - tokens.begin();
}

inline StepState make_state() {
    StepState state{};
    state.lr = 1e-4f, state.dloss_mul = 1e-3f, state.grad_mul = 0.5f, state.adam_step = 100;
    return state;
}

// The initial values of a field; fill_normal gives the same bits on both devices.
template <typename Normal>
void fill(const Field& field, const Dims& d, uint64_t key, Tensor at, Normal fill_normal,
          const std::function<void(const void*, int64_t)>& copy_in) {
    auto copy_ints = [&](const std::vector<int32_t>& values) { copy_in(values.data(), at.bytes()); };
    switch (field.fill) {
        case Fill::kNormal: fill_normal({at, key, 0, 0.0f, 1.0f}); break;
        case Fill::kSmallSquares: fill_normal({at, key, 0, 1.0f, 0.125f}); break;  // positive
        case Fill::kTokens: copy_ints(make_tokens(field.elems, d.V)); break;
        case Fill::kOrder: copy_ints(make_order(make_tokens(field.elems, d.V))); break;
        case Fill::kOffsets: {   // of experts with as many rows each
            std::vector<int32_t> offsets;
            for (int64_t e = 0; e < field.elems; e++)
                offsets.push_back(static_cast<int32_t>(d.N * kExperts * e / (field.elems - 1)));
            copy_ints(offsets);
            break;
        }
        case Fill::kState: {
            const StepState state = make_state();
            copy_in(&state, sizeof state);
            break;
        }
        case Fill::kScratch:
        case Fill::kZero:
            copy_in(std::vector<char>(static_cast<size_t>(at.bytes())).data(), at.bytes());
            break;
    }
}

struct Bench {
    std::string name;
    Dims dims;
    std::vector<Field> (*fields)(const Dims&);
    std::function<void(Ctx&, const View&, const Dims&)> on_gpu, on_cpu;
    double bytes;   // that must move
};

struct DeviceSet {
    std::vector<Field> fields;
    std::map<std::string, Tensor> tensors;
    DeviceSet(Ctx& ctx, const Bench& bench, const Dims& d, uint64_t number) : fields(bench.fields(d)) {
        uint64_t key = number * 100;
        for (const Field& field : fields) {
            Tensor t{nullptr, field.dtype, field.elems};
            t.data = cuda::device_alloc(t.bytes());
            tensors[field.name] = t;
            fill(field, d, key++, t, [&](const FillNormalArgs& args) { cuda::fill_normal(ctx, args); },
                 [&](const void* from, int64_t bytes) {
                     cuda::copy_to_device(ctx, t.data, from, bytes);
                     cuda::synchronize(ctx);
                 });
        }
    }
    ~DeviceSet() {
        for (auto& [name, t] : tensors) cuda::device_free(t.data);
    }
    DeviceSet(const DeviceSet&) = delete;
    DeviceSet& operator=(const DeviceSet&) = delete;
    Tensor view(const std::string& name) const { return tensors.at(name); }
    int64_t bytes() const {
        int64_t sum = 0;
        for (auto& [name, t] : tensors) sum += t.bytes();
        return sum;
    }
};

inline double element(const Tensor& t, int64_t i) {
    if (t.dtype == Dtype::kBf16) return static_cast<float>(static_cast<const bf16*>(t.data)[i]);
    if (t.dtype == Dtype::kFp32) return static_cast<const float*>(t.data)[i];
    if (t.dtype == Dtype::kFp64) return static_cast<const double*>(t.data)[i];
    if (dtype_bytes(t.dtype) == 1) return static_cast<const uint8_t*>(t.data)[i];
    return static_cast<const int32_t*>(t.data)[i];
}

// The largest relative distance between the devices over all tensors of the small shape except scratch.
inline double small_shape_error(Ctx& ctx, const Bench& bench) {
    DeviceSet gpu(ctx, bench, kSmall, 0);
    bench.on_gpu(ctx, [&](const std::string& name) { return gpu.view(name); }, kSmall);
    std::map<std::string, std::vector<char>> host;
    auto host_view = [&](const std::string& name) {
        const Tensor t = gpu.view(name);
        return Tensor{host.at(name).data(), t.dtype, t.elems};
    };
    Ctx cpu_ctx;
    uint64_t key = 0;
    for (const Field& field : gpu.fields) {
        host[field.name].resize(static_cast<size_t>(field.elems * dtype_bytes(field.dtype)));
        fill(field, kSmall, key++, host_view(field.name),
             [&](const FillNormalArgs& args) { cpu::fill_normal(cpu_ctx, args); },
             [&](const void* from, int64_t bytes) { std::memcpy(host[field.name].data(), from, bytes); });
    }
    bench.on_cpu(cpu_ctx, host_view, kSmall);
    double worst = 0;
    for (const Field& field : gpu.fields) {
        if (field.fill == Fill::kScratch || field.dtype == Dtype::kInt32) continue;
        const Tensor want = host_view(field.name);
        std::vector<char> copy(static_cast<size_t>(want.bytes()));
        cuda::copy_to_host(ctx, copy.data(), gpu.view(field.name).data, want.bytes());
        cuda::synchronize(ctx);
        const Tensor got{copy.data(), field.dtype, field.elems};
        double difference = 0, size = 0;
        for (int64_t i = 0; i < field.elems; i++) {
            difference += std::pow(element(got, i) - element(want, i), 2);
            size += std::pow(element(want, i), 2);
        }
        const double error = std::sqrt(difference / std::max(size, 1e-30));
        worst = error <= worst ? worst : error;  // NaN stays
    }
    return worst;
}

// One row of the table: an operation, its tensors, its argument struct and its bytes.
template <typename Args>
Bench bench(std::string name, const Dims& dims, std::vector<Field> (*fields)(const Dims&),
            void (*on_gpu)(Ctx&, const Args&), void (*on_cpu)(Ctx&, const Args&),
            Args (*make)(const View&, const Dims&), double bytes) {
    return {std::move(name), dims, fields,
            [=](Ctx& ctx, const View& view, const Dims& d) { on_gpu(ctx, make(view, d)); },
            [=](Ctx& ctx, const View& view, const Dims& d) { on_cpu(ctx, make(view, d)); }, bytes};
}

inline constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32, kI = Dtype::kInt32;

inline void run_bench(Ctx& ctx, const Bench& bench, double ceiling_gbps) {
    const double error = small_shape_error(ctx, bench);
    if (!(error < 0x1p-7)) {
        std::printf("%-34s | WRONG on the small shape: relative error %.3g\n", bench.name.c_str(), error);
        return;
    }
    auto make = [&](uint64_t number) { return std::make_unique<DeviceSet>(ctx, bench, bench.dims, number); };
    const double us = time_in_turn_us(ctx, make, [&](const DeviceSet& set) {
        bench.on_gpu(ctx, [&](const std::string& name) { return set.view(name); }, bench.dims);
    });
    const double gbps = bench.bytes / us * 1e-3;
    std::printf("%-34s | %9.1f | %6.0f | %5.1f\n", bench.name.c_str(), us, gbps, 100 * gbps / ceiling_gbps);
    std::fflush(stdout);
}

inline int memory_bench_main(int argc, char** argv, const char* program, const std::vector<Bench>& benches) {
    const std::string columns = strf("%-34s | %9s | %6s | %s", "kernel", "us", "GB/s", "% of the copy");
    return bench_main(argc, argv, program, columns, [&](Ctx& ctx, double ceiling_gbps, const Wanted& wanted) {
        for (const Bench& bench : benches) {
            if (wanted(bench.name)) run_bench(ctx, bench, ceiling_gbps);
        }
    });
}

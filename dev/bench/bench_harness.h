// Shared by the benches of memory-bound operations: consecutive launches on alternating sets of tensors, and the rate
// of a copy on the device as the ceiling.
#pragma once
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/rng.h"
#include "llmc/ops/ops.h"

// Median of five, in microseconds a launch.
inline double time_us(Ctx& ctx, const std::function<void(int64_t)>& launch) {
    Event *begin = cuda::event_create(), *end = cuda::event_create();
    auto batch_ms = [&](int64_t launches) {
        cuda::event_record(ctx, begin);
        for (int64_t i = 0; i < launches; i++) launch(i);
        cuda::event_record(ctx, end);
        cuda::event_wait(end);
        return static_cast<double>(cuda::event_elapsed_ms(begin, end));
    };
    batch_ms(3);
    const double one_ms = batch_ms(5) / 5;
    const int64_t launches = std::max<int64_t>(5, static_cast<int64_t>(50 / one_ms));
    std::vector<double> batches;
    for (int i = 0; i < 5; i++) batches.push_back(batch_ms(launches) / static_cast<double>(launches) * 1e3);
    cuda::event_destroy(begin);
    cuda::event_destroy(end);
    std::sort(batches.begin(), batches.end());
    return batches[2];
}

inline double copy_gbps(Ctx& ctx) {
    const int64_t bytes = int64_t{1} << 31;
    void *from = cuda::device_alloc(bytes), *to = cuda::device_alloc(bytes);
    cuda::fill_normal(ctx, {Tensor{from, Dtype::kFp32, bytes / 4}, 1, 0, 0.0f, 1.0f});
    const double us = time_us(ctx, [&](int64_t) { cuda::copy_on_device(ctx, to, from, bytes); });
    cuda::device_free(from);
    cuda::device_free(to);
    return 2.0 * static_cast<double>(bytes) / us * 1e-3;
}

// Device tensors by name, made at their first use: normally distributed numbers in float types, unspecified bytes in
// others.
class Tensors {
public:
    struct Normal {
        float mean, std;
    };
    using NormalOf = Normal (*)(const std::string& name);

    Tensors(Ctx& ctx, uint64_t number, NormalOf normal_of) : ctx_(ctx), number_(number), normal_of_(normal_of) {}
    ~Tensors() {
        for (auto& [name, t] : tensors_) cuda::device_free(t.data);
    }
    Tensors(const Tensors&) = delete;
    Tensors& operator=(const Tensors&) = delete;
    Tensor operator()(const std::string& name, Dtype dtype, int64_t elems) {
        Tensor& t = tensors_[name];
        if (t) return t;
        t = {nullptr, dtype, elems};
        t.data = cuda::device_alloc(t.bytes());
        const auto [mean, std] = normal_of_(name);
        const bool normal = dtype == Dtype::kBf16 || dtype == Dtype::kFp32;
        if (normal) cuda::fill_normal(ctx_, {t, rng_key(number_, name), 0, mean, std});
        return t;
    }
    // A tensor with the bytes of `start`.
    template <typename T> T* object(const std::string& name, const T& start) {
        const bool fresh = tensors_.count(name) == 0;
        const Tensor t = (*this)(name, Dtype::kInt32, sizeof(T) / 4);
        if (fresh) {
            cuda::copy_to_device(ctx_, t.data, &start, sizeof start);
            cuda::synchronize(ctx_);
        }
        return static_cast<T*>(t.data);
    }
    int64_t bytes() const {
        int64_t sum = 0;
        for (auto& [name, t] : tensors_) sum += t.bytes();
        return sum;
    }

private:
    Ctx& ctx_;
    uint64_t number_;
    NormalOf normal_of_;
    std::map<std::string, Tensor> tensors_;
};

// time_us of launch(set) for alternating sets: as many as make(1), make(2), ... need to exceed the L2 cache. make
// returns a unique_ptr to a set that already has all of its tensors.
template <typename Make, typename Launch> double time_in_turn_us(Ctx& ctx, Make make, Launch launch) {
    constexpr int64_t kRotate = 200000000;   // bytes; the L2 cache of an H200 has 60 MB
    std::vector<decltype(make(uint64_t{1}))> sets;
    int64_t rotating = 0;
    while (sets.size() < 2 || rotating < kRotate) {
        sets.push_back(make(sets.size() + 1));
        rotating += sets.back()->bytes();
    }
    return time_us(ctx, [&](int64_t i) { launch(*sets[static_cast<size_t>(i) % sets.size()]); });
}

// The same with sets whose tensors the first run makes.
inline double time_tensors_us(Ctx& ctx, Tensors::NormalOf normal_of, const std::function<void(Tensors&)>& run) {
    auto make = [&](uint64_t number) {
        auto set = std::make_unique<Tensors>(ctx, number, normal_of);
        run(*set);
        return set;
    };
    return time_in_turn_us(ctx, make, run);
}

// The main of a bench: run(ctx, ceiling, wanted) prints all rows, or those whose names contain the argument.
using Wanted = std::function<bool(const std::string& name)>;
inline int bench_main(int argc, char** argv, const char* program, const std::string& columns,
                      const std::function<void(Ctx&, double ceiling_gbps, const Wanted&)>& run) {
    try {
        Ctx ctx;
        cuda::device_open(ctx, 0);
        const DeviceInfo info = cuda::device_info(0);
        const double ceiling = copy_gbps(ctx);
        std::printf("%s, driver %s, CUDA %s; device copy %.0f GB/s (read + written)\n", info.name.c_str(),
                    info.driver.c_str(), info.toolkit.c_str(), ceiling);
        std::printf("%s\n", columns.c_str());
        run(ctx, ceiling, [&](const std::string& name) {
            return argc < 2 || name.find(argv[1]) != std::string::npos;
        });
        std::printf("device copy again: %.0f GB/s\n", copy_gbps(ctx));
        cuda::device_close(ctx);
    } catch (const Error& error) {
        std::fprintf(stderr, "%s: %s\n", program, error.what());
        return error.exit_code;
    }
    return 0;
}

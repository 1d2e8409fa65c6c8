// Operations with a QuantOut on the GPU: the result must be bitwise equal to quantization on the CPU of the bf16 result
// that the same operation writes without a QuantOut.
#pragma once
#include <map>

#include "tests/gpu/gpu_op.h"
#include "tests/support/quant_test.h"

namespace op_test {

using HostTensors = std::map<std::string, HostTensor>;
using View = std::function<Tensor(const std::string&)>;

inline ScaleEntry& entry_in(HostTensor& t) { return *static_cast<ScaleEntry*>(t.data()); }

// Returns the tensors of a QuantOut for X (N, C) before the operation. Their scales make E4M3 saturate and E5M2 flush.
inline HostTensors quant_tensors(const QuantRequest& v, int64_t N, int64_t C, uint32_t amax_bits) {
    HostTensors t;
    t["entry"] = HostTensor(Dtype::kInt32, 4);
    t["counts"] = HostTensor(Dtype::kInt32, 8).fill(3);
    t["first"] = HostTensor(Dtype::kInt32, 1).fill(1000);
    entry_in(t["entry"]) = {.scale_inv = -1.0f, .scale = v.format == Dtype::kE4m3 ? 300.5f : 0x1.4p-13f,
                          .amax_bits = v.scaling == Scaling::kCurrent ? amax_bits : 7u, .step_amax_bits = 5u};
    const bool blocks = v.granularity != Granularity::kTensor;
    if (v.rowwise) t["rowwise"] = HostTensor(v.format, N * C);
    if (v.transposed) t["transposed"] = HostTensor(v.format, N * C);
    if (v.rowwise && blocks) t["rowwise_scale_inv"] = HostTensor(Dtype::kFp32, scale_inv_elems(v.granularity, N, C));
    if (v.transposed && blocks)
        t["transposed_scale_inv"] = HostTensor(Dtype::kFp32, scale_inv_elems(v.granularity, C, N));
    if (v.dbias) {
        t["quant_dbias"] = random_tensor(Dtype::kFp32, C, rng_key(8, "quant_dbias"));
        t["quant_dbias_scratch"] = HostTensor(Dtype::kFp32, quant_partial_rows(N) * C);
    }
    return t;
}
inline QuantOut quant_out(const QuantRequest& v, const View& view) {
    return {.rowwise = view("rowwise"), .transposed = view("transposed"), .granularity = v.granularity,
            .scaling = v.scaling, .entry = static_cast<ScaleEntry*>(view("entry").data),
            .rowwise_scale_inv = view("rowwise_scale_inv"), .transposed_scale_inv = view("transposed_scale_inv"),
            .record = v.record, .counts = v.counts ? static_cast<Fp8Counts*>(view("counts").data) : nullptr,
            .first_nonfinite = v.counts ? static_cast<uint32_t*>(view("first").data) : nullptr, .event = 17,
            .dbias = view("quant_dbias"), .dbias_scratch = view("quant_dbias_scratch")};
}

// An operation with a QuantOut: its tensors before it runs, and how to run it on the GPU.
struct Producer {
    std::string name, result;              // X of shape (N, C)
    int64_t N, C;
    std::vector<std::string> same = {};    // other outputs, whose bits quant must not change
    std::vector<std::string> close = {};   // sums over rows, whose order quant may change
    bool result_optional = false;          // X may be absent if copies()
    bool result_kept = false;              // X is written even if copies()
    bool rows_only = false;                // it makes only rowwise E4M3 in blocks of 1 x 128
    HostTensors tensors = {};
    std::function<void(const View&, const QuantOut&)> run = {};
};

// Runs the operation with the QuantOut of v (null: none) and returns all tensors afterwards.
inline HostTensors run_producer(const Producer& p, const QuantRequest* v, const HostTensors& request) {
    std::map<std::string, DeviceTensor> device;
    for (const HostTensors* all : {&p.tensors, &request})
        for (auto& [name, tensor] : *all) {
            if (v && v->copies() && !v->keep_out && p.result_optional && name == p.result) continue;
            device.try_emplace(name, tensor);
        }
    const View view = [&](const std::string& name) {
        auto found = device.find(name);
        return found == device.end() ? Tensor{} : found->second.view();
    };
    p.run(view, v ? quant_out(*v, view) : QuantOut{});
    cuda::synchronize(gpu());
    HostTensors after;
    for (auto& [name, tensor] : device) after[name] = tensor.download();
    return after;
}
inline HostTensors quantize_on_cpu(const QuantRequest& v, HostTensors request, HostTensor x, int64_t N, int64_t C) {
    const View view = [&](const std::string& name) {
        auto found = request.find(name);
        return found == request.end() ? Tensor{} : found->second.view();
    };
    Ctx ctx;
    cpu::quantize(ctx, {.quant = quant_out(v, view), .in = x.view(), .N = N, .C = C});
    return request;
}

inline uint32_t amax_bits_of_all(HostTensor& x) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < x.elems(); i++) amax = std::max(amax, amax_bits_of(static_cast<float>(x.as<bf16>()[i])));
    return amax;
}

inline void check_dbias(const Producer& p, HostTensor& x, const HostTensor& before, const HostTensor& after) {
    HostTensor want(Dtype::kFp64, p.C), sizes(Dtype::kFp64, p.C);
    for (int64_t c = 0; c < p.C; c++) {
        double sum = before.get(c), size = std::fabs(sum);
        for (int64_t n = 0; n < p.N; n++) sum += x.get(n * p.C + c), size += std::fabs(x.get(n * p.C + c));
        want.set(c, sum);
        sizes.set(c, size);
    }
    check_close("dbias of X", after, want, [&](int64_t c) { return column_chain(p.N) * 0x1p-24 * sizes.get(c); });
}

inline void check_same_bits(const HostTensors& got, const HostTensors& want) {
    for (auto& [name, tensor] : want) {
        INFO(name);
        CHECK(got.at(name).same_bits(tensor));
    }
}

// Checks all requests. `finite`: X has no NaN or infinity, and some of its elements saturate or are flushed.
inline void check_producer(const Producer& p, bool finite = true) {
    HostTensors plain = run_producer(p, nullptr, {});
    HostTensor& x = plain.at(p.result);
    const uint32_t amax = amax_bits_of_all(x);
    const bool large = x.elems() > 4000000;
    for (const QuantRequest& v : quant_requests()) {
        if ((v.transposed && p.N % 16 != 0) || v.granularity == Granularity::kBlock128x128) continue;   // weights
        const bool of_rows = v.rowwise && !v.transposed && !v.dbias && v.granularity == Granularity::kBlock1x128;
        if (p.rows_only && !of_rows) continue;
        const bool only_sums = v.dbias && !v.copies() && !v.record;
        if (large && !only_sums && !(v.transposed && v.record && v.scaling == Scaling::kDelayed)) continue;
        INFO(p.name << ", " << v.name);
        const HostTensors request = quant_tensors(v, p.N, p.C, amax);
        HostTensors got = run_producer(p, &v, request);
        HostTensors want = quantize_on_cpu(v, request, x, p.N, p.C);
        for (const char* sums : {"quant_dbias", "quant_dbias_scratch"}) want.erase(sums);
        check_same_bits(got, want);
        for (const std::string& name : p.same) {
            INFO(name);
            CHECK(got.at(name).same_bits(plain.at(name)));
        }
        for (const std::string& name : p.close)   // terms of size 16 at most
            check_close(name, got.at(name), plain.at(name),
                        [&](int64_t) { return column_chain(p.N) * 0x1p-24 * static_cast<double>(p.N) * 16; }, 1);
        if (!v.copies() || p.result_kept || (v.keep_out && p.result_optional)) CHECK(got.at(p.result).same_bits(x));
        if (!finite) continue;
        if (v.dbias) check_dbias(p, x, request.at("quant_dbias"), got.at("quant_dbias"));
        const auto* counts = static_cast<const Fp8Counts*>(want.at("counts").data());
        if (v.counts && v.granularity == Granularity::kTensor && v.scaling == Scaling::kDelayed && x.elems() > 10000)
            CHECK((v.format == Dtype::kE4m3 ? counts->saturated : counts->flushed) > 3ull + (3ull << 32));
    }
}

}  // namespace op_test

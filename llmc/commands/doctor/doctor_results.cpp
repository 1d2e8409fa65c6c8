// Items of `doctor` that compute: an FP8 linear layer with each recipe, forward and backward, attention, and its FP8
// forward. They make the trainer's own calls and compare the results with the CPU operations and with double precision,
// within the bounds that the tests use.
#include <algorithm>
#include <memory>

#include "llmc/base/check.h"
#include "llmc/commands/doctor/doctor_items.h"
#include "llmc/model/linear.h"
#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/ops/owned.h"
#include "llmc/ops/reference_attention.h"
#include "llmc/ops/reference_attention_fp8.h"
#include "llmc/ops/reference_gemm_fp8.h"

namespace {

using reference::Bound;
using reference::HostTensor;

// A copy of a host tensor in device memory.
class OnDevice {
public:
    OnDevice(Ctx& ctx, const HostTensor& host) : ctx_(ctx), host_(host), memory_(device::device_alloc(host.bytes())) {
        device::copy_to_device(ctx, memory_.get(), host.data(), host.bytes());
        device::synchronize(ctx);
    }

    Tensor view() const { return {memory_.get(), host_.dtype(), host_.elems()}; }
    HostTensor download() const {
        HostTensor result = host_;
        device::copy_to_host(ctx_, result.data(), memory_.get(), host_.bytes());
        device::synchronize(ctx_);
        return result;
    }

private:
    Ctx& ctx_;
    const HostTensor host_;
    const DevicePtr<> memory_;
};

// Returns what is wrong with a result, "" if nothing. The bound must detect a change of one element by `share` of the
// largest; `corrupt` makes such a change.
std::string wrong_result(const char* name, HostTensor got, const HostTensor& want, const Bound& bound, double share,
                         bool corrupt) {
    double largest = 0;
    for (int64_t i = 0; i < want.elems(); i++) largest = std::max(largest, std::fabs(want.get(i)));
    const int64_t middle = want.elems() / 2;
    if (corrupt) got.set(middle, got.get(middle) + share * largest);
    const std::string wrong = reference::first_difference(got, want, bound);
    if (!wrong.empty()) return std::string(name) + ": " + wrong;
    got.set(middle, got.get(middle) + share * largest);
    return reference::first_difference(got, want, bound).empty() ? std::string(name) + ": its bound is blind" : "";
}

// ---- FP8

// Multiples of 16, as FP8 matmuls need, but not of 128.
constexpr int64_t kTokens = 80, kIn = 272, kOut = 144;

// The tensors that a quantization reads and writes, on either device.
template <typename Place> struct Quantized {
    Place in, slot, history, updates, largest, rowwise, transposed, rowwise_scale_inv, transposed_scale_inv;
};
// The results of f for each tensor.
template <typename Q, typename F> auto transform(Q& q, F f) {
    return Quantized<decltype(f(q.in))>{f(q.in), f(q.slot), f(q.history), f(q.updates), f(q.largest), f(q.rowwise),
                                        f(q.transposed), f(q.rowwise_scale_inv), f(q.transposed_scale_inv)};
}
struct QuantOps {
    void (*amax)(Ctx&, const AmaxArgs&);
    void (*update)(Ctx&, const Fp8UpdateArgs&);
    void (*quantize)(Ctx&, const QuantizeArgs&);
};
constexpr QuantOps kOnDevice = {ops::amax, ops::fp8_update, ops::quantize};
constexpr QuantOps kOnCpu = {cpu::amax, cpu::fp8_update, cpu::quantize};

// Quantizes a BF16 tensor (N, C) as Fp8State does: with the scale of a delayed update, of the current tensor, or of its
// blocks.
void quantize(Ctx& ctx, const QuantOps& call, const Quantized<Tensor>& t, const RecipeRow& row, Granularity granularity,
              int64_t N, int64_t C) {
    auto* slot = static_cast<Fp8Slot*>(t.slot.data);
    const bool blocks = granularity != Granularity::kTensor;
    if (!blocks) call.amax(ctx, {.slot = slot, .in = t.in});
    if (row.history)
        call.update(ctx, {.slots = slot, .history = t.history.as<float>(), .updates = t.updates.as<int32_t>(),
                          .largest = t.largest.as<float>(), .count = 1, .length = 1, .interval = 1,
                          .most_recent = false, .state = nullptr});
    QuantOut quant{.rowwise = t.rowwise, .transposed = t.transposed, .granularity = granularity,
                   .scaling = row.scaling, .slot = slot};
    if (blocks) {
        quant.rowwise_scale_inv = t.rowwise_scale_inv;
        quant.transposed_scale_inv = t.transposed_scale_inv;
    }
    call.quantize(ctx, {.quant = quant, .in = t.in, .N = N, .C = C});
}

// x, w or dy of the linear.
class Operand {
public:
    Operand(Ctx& ctx, const char* name, const RecipeRow& row, Granularity granularity, Dtype format, int64_t N,
            int64_t C, double size)
        : name_(name), format_(format), granularity_(granularity), N_(N), C_(C), host_(fresh(size)) {
        device_.reset(new Quantized<OnDevice>(transform(host_, [&](HostTensor& t) { return OnDevice(ctx, t); })));
        quantize(ctx, kOnDevice, transform(*device_, [](OnDevice& t) { return t.view(); }), row, granularity_, N_,
                 C_);
        got_ = transform(*device_, [](OnDevice& t) { return t.download(); });
        Ctx host;
        quantize(host, kOnCpu, transform(host_, [](HostTensor& t) { return t.view(); }), row, granularity_, N_, C_);
    }

    // Returns "" or how the device's bytes differ from the CPU's; they must be equal.
    std::string difference() const {
        if (!got_.rowwise.same_bits(host_.rowwise)) return name_ + " differs from the CPU's bytes";
        if (!got_.transposed.same_bits(host_.transposed)) return name_ + " transposed differs from the CPU's bytes";
        const bool same = same_scales(rowwise_scales(got_), rowwise_scales(host_), N_, C_)
                          && same_scales(transposed_scales(got_), transposed_scales(host_), C_, N_);
        return same ? "" : "scales of " + name_ + " differ from the CPU's";
    }
    Fp8Operand rowwise() const {
        return {device_->rowwise.view(), scale_inv(device_->rowwise_scale_inv), granularity_};
    }
    Fp8Operand transposed() const {
        return {device_->transposed.view(), scale_inv(device_->transposed_scale_inv), granularity_};
    }
    // Copies codes and scales for the reference.
    void copy_to(HostTensor& codes, HostTensor& scales, bool transposed) const {
        codes = transposed ? got_.transposed : got_.rowwise;
        scales = transposed ? transposed_scales(got_) : rowwise_scales(got_);
    }

private:
    bool whole() const { return granularity_ == Granularity::kTensor; }
    Tensor scale_inv(const OnDevice& of_blocks) const {
        return whole() ? device_->slot.view().slice(0, 1) : of_blocks.view();
    }
    HostTensor rowwise_scales(const Quantized<HostTensor>& q) const {
        return whole() ? first(q.slot) : q.rowwise_scale_inv;
    }
    HostTensor transposed_scales(const Quantized<HostTensor>& q) const {
        return whole() ? first(q.slot) : q.transposed_scale_inv;
    }
    static HostTensor first(const HostTensor& slot) {   // scale_inv
        HostTensor scale(Dtype::kFp32, 1);
        scale.set(0, slot.get(0));
        return scale;
    }
    bool same_scales(const HostTensor& a, const HostTensor& b, int64_t R, int64_t K) const {
        for (int64_t r = 0; r < R; r++)
            for (int64_t k = 0; k < K; k += 128) {
                const int64_t i = reference::scale_inv_index(granularity_, R, K, r, k);
                if (a.get(i) != b.get(i)) return false;
            }
        return true;
    }
    Quantized<HostTensor> fresh(double size) const {
        auto zeros = [](Dtype dtype, int64_t elems) { return HostTensor(dtype, elems).fill(0); };
        const uint64_t key = rng_key(11, name_);
        return {.in = reference::random_tensor(Dtype::kBf16, N_ * C_, key, size), .slot = zeros(Dtype::kFp32, 4),
                .history = zeros(Dtype::kFp32, 1), .updates = zeros(Dtype::kInt32, 1),
                .largest = zeros(Dtype::kFp32, 1).fill(fp8_largest(format_)), .rowwise = HostTensor(format_, N_ * C_),
                .transposed = HostTensor(format_, N_ * C_),
                .rowwise_scale_inv = zeros(Dtype::kFp32, scale_inv_elems(granularity_, N_, C_)),
                .transposed_scale_inv = zeros(Dtype::kFp32, scale_inv_elems(granularity_, C_, N_))};
    }

    const std::string name_;
    const Dtype format_;
    const Granularity granularity_;
    const int64_t N_, C_;
    Quantized<HostTensor> host_, got_;   // the results of the CPU and of the device
    std::unique_ptr<Quantized<OnDevice>> device_;
};

struct Pass {
    const char* name;
    GemmLayout layout;
    const Operand &a, &b;
    bool a_transposed, b_transposed;
    Dtype a_format;   // b is E4M3
    Granularity a_granularity, b_granularity;
    int64_t M, N, K;
    bool fast;
    HostTensor before;   // D before the matmul
};

std::string wrong_pass(const Pass& pass, const HostTensor& got, bool gpu, bool corrupt) {
    reference::Fp8Product p{.M = pass.M, .N = pass.N, .K = pass.K,
                         .kind = {pass.a_format, Dtype::kE4m3, pass.a_granularity, pass.b_granularity},
                         .result = got.dtype(), .layout = pass.layout,
                         .accumulate = pass.layout == GemmLayout::kWgrad, .fast = pass.fast};
    pass.a.copy_to(p.a, p.a_scale_inv, pass.a_transposed);
    pass.b.copy_to(p.b, p.b_scale_inv, pass.b_transposed);
    p.d = pass.before;
    const reference::Fp8Expected e = reference::expected_of(p);
    const Bound bound = gpu ? reference::gpu_bound(p, e) : reference::cpu_bound(p, e);
    return wrong_result(pass.name, got, e.product, bound, pass.fast ? 1.0 / 8 : 1.0 / 16, corrupt);
}

// Checks a recipe: quantized tensors equal the CPU's, and the three matmuls run in FP8 and are within their bounds.
Finding check_recipe(Patient& patient, const RecipeRow& row, bool corrupt) {
    Ctx& ctx = patient.ctx;
    const bool fast = row.fast_accumulation;   // as with --fp8-fast-accum fprop
    const Operand x(ctx, "x", row, row.x, Dtype::kE4m3, kTokens, kIn, 1.5);
    const Operand w(ctx, "w", row, row.weight, Dtype::kE4m3, kOut, kIn, 0.02);
    const Operand dy(ctx, "dy", row, row.dy, row.dy_format, kTokens, kOut, 3e-5);
    for (const Operand* operand : {&x, &w, &dy})
        if (const std::string wrong = operand->difference(); !wrong.empty())
            return failed(wrong, "the cast to FP8 is wrong: do not train here; run make test-gpu");

    const HostTensor y0(Dtype::kBf16, kTokens * kOut), dx0(Dtype::kBf16, kTokens * kIn),
        dw0 = reference::random_tensor(Dtype::kFp32, kOut * kIn, rng_key(11, "dw"), 1e-4);
    const OnDevice y(ctx, y0), dx(ctx, dx0), dw(ctx, dw0);
    const Fp8Linear fp8{.in = kIn, .out = kOut, .weight = w.rowwise(), .weight_transposed = w.transposed(),
                        .fast_fprop = fast};
    const Linear linear{.weight = {}, .bias = {}, .dweight = dw.view(), .dbias = {}, .in = kIn, .out = kOut,
                        .fp8 = &fp8};
    const LinearOperand of_x{.high = {}, .fp8 = {x.rowwise(), x.transposed()}};
    const LinearOperand of_dy{.high = {}, .fp8 = {dy.rowwise(), dy.transposed()}};
    const int64_t before = device::fp8_matmuls(ctx);
    linear_forward(ctx, linear, y.view(), of_x, kTokens);
    linear_backward(ctx, linear, dx.view(), of_dy, of_x, kTokens);
    const int64_t executed = device::fp8_matmuls(ctx) - before;
    if (executed != 3) return failed(strf("%lld of 3 matmuls ran in FP8", ll(executed)), "run make test-gpu");

    const Pass fprop{"fprop", GemmLayout::kForward, x, w, false, false, Dtype::kE4m3, row.x, row.weight,
                     kTokens, kOut, kIn, fast, y0};
    const Pass dgrad{"dgrad", GemmLayout::kDgrad, dy, w, false, true, row.dy_format, row.dy, row.weight,
                     kTokens, kIn, kOut, false, dx0};
    const Pass wgrad{"wgrad", GemmLayout::kWgrad, dy, x, true, true, row.dy_format, row.dy, row.x,
                     kOut, kIn, kTokens, false, dw0};
    for (const auto& [pass, result] : {std::pair{&fprop, &y}, {&dgrad, &dx}, {&wgrad, &dw}}) {
        const std::string wrong = wrong_pass(*pass, result->download(), patient.gpu(), corrupt);
        if (!wrong.empty()) return failed(wrong, "FP8 matmuls are wrong: do not train here; run make test-gpu");
    }
    return ok(strf("fprop, dgrad and wgrad of %lld x %lld x %lld%s: casts equal the CPU's, sums are within their "
                   "bounds", ll(kTokens), ll(kOut), ll(kIn), patient.gpu() ? "" : ", emulated by the CPU"));
}

// ---- attention

std::string wrong_attention(Patient& patient, const reference::QkvShape& shape, bool corrupt) {
    const reference::AttentionProblem a(shape, Dtype::kBf16);
    const reference::AttentionProblem::Result given = a.on_cpu(a.type), fresh = a.fresh(a.type);
    Ctx& ctx = patient.ctx;
    const OnDevice qkv(ctx, a.qkv), dout(ctx, a.dout), out(ctx, fresh.out), lse(ctx, fresh.lse), dqkv(ctx, fresh.dqkv),
        delta(ctx, fresh.delta), given_out(ctx, given.out), given_lse(ctx, given.lse);
    const OnDevice sums(ctx, HostTensor(Dtype::kFp32, device::attention_sums_elems(a.type, shape.B, shape.T, shape.NH,
                                                                                   shape.HS)));
    ops::attention_forward(ctx, a.forward_args(out.view(), lse.view(), qkv.view(), nullptr));
    ops::attention_backward(ctx, a.backward_args(dqkv.view(), delta.view(), dout.view(), given_out.view(),
                                                 given_lse.view(), qkv.view(), nullptr, sums.view()));
    device::synchronize(ctx);
    // Kernels on tensor cores round P to BF16.
    const reference::Reference want =
        reference::reference_of(a, given, patient.gpu() && reference::on_tensor_cores(a) ? 1.01 * 0x1p-8 : 0);
    std::string wrong;
    auto check = [&](const char* name, const OnDevice& got, const std::vector<double>& expected,
                     const std::vector<double>& error) {
        if (!wrong.empty()) return;
        HostTensor values(Dtype::kFp64, static_cast<int64_t>(expected.size()));
        for (int64_t i = 0; i < values.elems(); i++) values.set(i, expected[static_cast<size_t>(i)]);
        wrong = wrong_result(name, got.download(), values,
                             [&](int64_t i) { return error[static_cast<size_t>(i)]; }, 1.0 / 16, corrupt);
    };
    check("out", out, want.out, want.out_error);
    check("log sum exp", lse, want.lse, want.lse_error);
    check("dqkv", dqkv, want.dqkv, want.dqkv_error);
    return wrong;
}

// ---- FP8 attention

std::string wrong_fp8_attention(Patient& patient, const reference::Fp8Attention& a, bool corrupt) {
    Ctx& ctx = patient.ctx;
    const HostTensor input = a.random_qkv();
    const reference::Fp8Attention::Result cpu = a.on_cpu(input), fresh = a.fresh(input);
    const OnDevice qkv(ctx, fresh.qkv), bytes(ctx, fresh.bytes), scales(ctx, fresh.scales), out(ctx, fresh.out),
        lse(ctx, fresh.lse);
    const Fp8Heads copies{bytes.view(), scales.view()};
    ops::quantize_heads(ctx, a.quantize_args(copies, qkv.view(), {}));
    ops::attention_forward(ctx, a.forward_args(out.view(), lse.view(), qkv.view(), copies, nullptr));
    if (!bytes.download().same_bits(cpu.bytes)) return "codes differ from the CPU's bytes";
    if (!scales.download().same_bits(cpu.scales)) return "scales differ from the CPU's";
    if (!qkv.download().same_bits(cpu.qkv)) return "qkv is not rounded to the values of its FP8 codes";
    const reference::Fp8Reference want = reference::fp8_attention_reference(a, cpu.qkv, patient.gpu());
    const auto wrong = [&](const char* name, const OnDevice& got, const HostTensor& exact,
                           const std::vector<double>& error) {
        // The rounding of P to E4M3 may hide a smaller change than a quarter.
        return wrong_result(name, got.download(), exact, [&](int64_t i) { return error[static_cast<size_t>(i)]; },
                            1.0 / 4, corrupt);
    };
    const std::string of_out = wrong("out", out, want.out, want.out_error);
    return of_out.empty() ? wrong("log sum exp", lse, want.lse, want.lse_error) : of_out;
}

}  // namespace

Findings look_at_fp8_matmuls(Patient& patient) {
    Findings findings;
    for (const RecipeRow& row : recipe_rows()) {
        const bool runs = fp8_device_error({.recipe = row.recipe}, patient.info).empty();
        if (!patient.opened) findings.push_back(not_checked("no device"));
        else if (!runs) findings.push_back(not_checked("does not run here"));
        else findings.push_back(check_recipe(patient, row, patient.corrupted("FP8 matmuls")));
        findings.back().name = std::string("FP8 ") + row.name;
    }
    return findings;
}

Findings look_at_attention(Patient& patient) {
    if (!patient.opened) return {not_checked("no device")};
    std::string kernels;
    // The head dims of GPT-2 and of Llama-3.
    for (const reference::QkvShape& shape : {reference::QkvShape{1, 129, 4, 2, 64}, {2, 65, 4, 1, 128}}) {
        const std::string wrong = wrong_attention(patient, shape, patient.corrupted("attention"));
        if (!wrong.empty())
            return {failed(strf("head size %lld: %s", ll(shape.HS), wrong.c_str()),
                           "attention is wrong: do not train here; run make test-gpu")};
        const std::string kernel = device::attention_kernel(patient.ctx, Dtype::kBf16, shape.HS);
        if (kernels.find(kernel) == std::string::npos) kernels += (kernels.empty() ? "" : "; ") + kernel;
    }
    return {ok(strf("forward and backward, head dims 64 and 128 (%s): within their bounds", kernels.c_str()))};
}

Findings look_at_fp8_attention(Patient& patient) {
    if (!patient.opened) return {not_checked("no device")};
    if (const std::string reason = fp8_attention_error(patient.info); !reason.empty()) return {not_checked(reason)};
    // More than one block of 128 keys, the last one partly filled.
    for (const reference::Fp8Attention& a : {reference::Fp8Attention{1, 129, 4, 2, 64}, {2, 193, 4, 1, 128}}) {
        const std::string wrong = wrong_fp8_attention(patient, a, patient.corrupted("FP8 attention"));
        if (!wrong.empty())
            return {failed(strf("head size %lld: %s", ll(a.HS), wrong.c_str()),
                           "do not use --fp8-attention here; run make test-gpu")};
    }
    return {ok(strf("forward, head dims 64 and 128: FP8 codes equal the CPU's, sums are within their bounds%s",
                    patient.gpu() ? "" : ", emulated by the CPU"))};
}

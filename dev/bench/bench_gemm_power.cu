// Candidates for custom matmuls with one scale per tensor (gemm_tiles/) beside the library's best algorithm, at the
// Llama-3-8B shapes: rate, clock, watts and joules under a sustained load, after a comparison of results.
// Usage: bench_gemm_power [--shapes PARTS] [--variants PARTS] [--seconds S] [--limit S] [--a FILE] [--b FILE] [--list]
//   PARTS: parts of names, separated by commas, such as "qkv forward,wgrad" or "A2,turns"
//   --seconds: of each variant (0.4); the library runs half as long before and after each
//   --limit: no variant starts later than this (230 s)
//   --a, --b: FP8 codes of A and of B, such as captured tensors, repeated to the size needed; default: normal numbers
// Each shape runs in a child process, so that a variant that hangs or faults costs only itself: another child continues
// with the next variant, and later shapes leave it out.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "dev/bench/gemm_bench.h"
#include "dev/bench/gemm_tiles/child_process.h"
#include "dev/bench/gemm_tiles/gemm_tiles.h"
#include "dev/bench/gemm_tiles/power_meter.h"
#include "llmc/base/system/files.h"

namespace {

using gemm_bench::Buffers;
using gemm_tiles::Call;
using gemm_tiles::Operands;
using gemm_tiles::type_of_a;
using gemm_tiles::type_of_b;
using gemm_tiles::Variant;

struct Options {
    std::string shapes, variants, a, b, child, skip;
    double seconds = 0.4, limit = 230;
    int from = 0;
    bool list = false;
};

struct Case {
    std::string name;
    int64_t M, N, K;
    Operands operands;
    GemmLayout layout;
    Dtype result = Dtype::kBf16;
    bool accumulate = false, swiglu = false;

    bool fast() const { return operands == Operands::kE4m3; }
    double flop() const { return 2.0 * static_cast<double>(M * N) * static_cast<double>(K); }
    bool takes(const Variant& v) const {
        return v.operands == operands && v.swiglu == swiglu;
    }
};

std::vector<Case> all_cases() {
    constexpr int64_t kTokens = 8192;
    struct Linear {
        std::string name;
        int64_t out, in;
    };
    const Linear linears[] = {{"qkv", 6144, 4096}, {"proj", 4096, 4096}, {"gate+up", 28672, 4096},
                              {"down", 4096, 14336}};
    constexpr Operands kForward = Operands::kE4m3, kBackward = Operands::kE5m2E4m3;
    std::vector<Case> cases;
    for (const Linear& l : linears)
        cases.push_back({l.name + " forward", kTokens, l.out, l.in, kForward, GemmLayout::kForward});
    for (const Linear& l : linears)
        cases.push_back({l.name + " dgrad", kTokens, l.in, l.out, kBackward, GemmLayout::kDgrad});
    for (const Linear& l : linears)
        cases.push_back({l.name + " wgrad fp32 +=", l.out, l.in, kTokens, kBackward, GemmLayout::kWgrad, Dtype::kFp32,
                         true});
    cases.push_back({"gate+up swiglu forward", kTokens, 28672, 4096, kForward, GemmLayout::kForward, Dtype::kBf16,
                     false, true});
    for (const Linear& l : linears)
        cases.push_back({l.name + " wgrad bf16 =", l.out, l.in, kTokens, kBackward, GemmLayout::kWgrad});
    for (const Linear& l : linears)
        cases.push_back({l.name + " bf16 forward", kTokens, l.out, l.in, Operands::kBf16, GemmLayout::kForward});
    return cases;
}

// Whether the name has one of the parts, or there are none.
bool wanted(const std::string& name, const std::string& parts) {
    if (parts.empty()) return true;
    for (size_t begin = 0; begin <= parts.size();) {
        const size_t end = std::min(parts.find(',', begin), parts.size());
        if (name.find(parts.substr(begin, end - begin)) != std::string::npos) return true;
        begin = end + 1;
    }
    return false;
}

// ---- comparison of results

struct Differences {
    double squares, difference_squares;   // of the second; of their difference
    float largest;                        // difference
    unsigned long long beyond;            // elements that differ by more than allowed, or are not finite
};
__device__ float element(const void* x, bool fp32, int64_t i) {
    return fp32 ? static_cast<const float*>(x)[i] : cuda::to_float(static_cast<const bf16*>(x)[i]);
}
// Each element may differ by `absolute` and by two roundings to its type.
__global__ void compare_kernel(Differences* out, const void* x, const void* y, bool fp32, int64_t elems,
                               float absolute) {
    const float relative = fp32 ? 0x1p-22f : 0x1p-7f;
    double squares = 0, difference_squares = 0;
    float largest = 0;
    unsigned long long beyond = 0;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elems; i += int64_t{gridDim.x} * blockDim.x) {
        const float a = element(x, fp32, i), b = element(y, fp32, i), difference = fabsf(a - b);
        squares += static_cast<double>(b) * b, difference_squares += static_cast<double>(difference) * difference;
        largest = fmaxf(largest, difference);
        beyond += !(difference <= absolute + relative * fmaxf(fabsf(a), fabsf(b)));
    }
    squares = cuda::warp_sum(squares), difference_squares = cuda::warp_sum(difference_squares);
    largest = cuda::warp_max(largest), beyond = cuda::warp_sum(beyond);
    if (threadIdx.x % 32 != 0) return;
    atomicAdd(&out->squares, squares);
    atomicAdd(&out->difference_squares, difference_squares);
    atomicMax(reinterpret_cast<unsigned*>(&out->largest), __float_as_uint(largest));
    atomicAdd(&out->beyond, beyond);
}
__global__ void compare_bytes_kernel(unsigned long long* different, const uint8_t* x, const uint8_t* y, int64_t elems) {
    unsigned long long count = 0;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elems; i += int64_t{gridDim.x} * blockDim.x)
        count += x[i] != y[i];
    count = cuda::warp_sum(count);
    if (threadIdx.x % 32 == 0) atomicAdd(different, count);
}
template <typename T> T read(Ctx& ctx, const void* from) {
    T value;
    cuda::copy_to_host(ctx, &value, from, sizeof value);
    cuda::synchronize(ctx);
    return value;
}

Differences compare(Ctx& ctx, const Tensor& x, const Tensor& y, double absolute) {
    Buffers buffers(ctx);
    auto* out = static_cast<Differences*>(buffers.empty(Dtype::kInt32, sizeof(Differences) / 4).data);
    CUDA_CHECK(cudaMemsetAsync(out, 0, sizeof *out, cuda::stream_of(ctx)));
    compare_kernel<<<1056, 256, 0, cuda::stream_of(ctx)>>>(out, x.data, y.data, x.dtype == Dtype::kFp32, x.elems,
                                                           static_cast<float>(absolute));
    CHECK_LAUNCH("compare_kernel");
    return read<Differences>(ctx, out);
}
unsigned long long different_bytes(Ctx& ctx, const Tensor& x, const Tensor& y) {
    Buffers buffers(ctx);
    auto* count = static_cast<unsigned long long*>(buffers.empty(Dtype::kInt32, 2).data);
    CUDA_CHECK(cudaMemsetAsync(count, 0, sizeof *count, cuda::stream_of(ctx)));
    compare_bytes_kernel<<<1056, 256, 0, cuda::stream_of(ctx)>>>(count, static_cast<const uint8_t*>(x.data),
                                                                 static_cast<const uint8_t*>(y.data), x.elems);
    CHECK_LAUNCH("compare_bytes_kernel");
    return read<unsigned long long>(ctx, count);
}

// What two results with root mean square `rms` may differ by besides their last rounding. Tensor cores align 32
// products and the sum so far to the largest of them and drop what lies 2^-12 below it: once per 32 of K for the sum,
// with one sign, and for the products with either sign (four standard deviations). Sums reach six standard deviations.
double tolerance(const Case& c, double rms) {
    if (c.operands == Operands::kBf16) return rms * 6 * static_cast<double>(c.K) * 0x1p-24;
    const double range = c.fast() ? static_cast<double>(c.K) : 256, steps = range / 32;
    const double sums = rms * std::sqrt(range / static_cast<double>(c.K)), chains = static_cast<double>(c.K) / range;
    return 2 * 6 * 0x1p-12 * sums * (steps * chains + 4 * std::sqrt(33 * steps * chains));
}

// ---- one case

// One product with its own operands and results; the sets of a case rotate, so that operands are not in the L2 cache.
struct Set {
    Call call;   // D and act are those that are timed
    GemmArgs library;
    ActivationForwardArgs activation;
};

// Codes of a file, repeated.
Tensor from_file(Buffers& buffers, const std::string& path, Dtype dtype, int64_t elems) {
    std::vector<uint8_t> codes;
    read_file(path, [&](const void* data, int64_t bytes) {
        codes.insert(codes.end(), static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(data) + bytes);
    });
    REQUIRE(!codes.empty(), "%s is empty", path.c_str());
    const Tensor t = buffers.empty(dtype, elems);
    for (int64_t at = 0; at < t.bytes();) {
        const int64_t bytes = std::min<int64_t>(static_cast<int64_t>(codes.size()), t.bytes() - at);
        cuda::copy_to_device(buffers.ctx, static_cast<char*>(t.data) + at, codes.data(), bytes);
        at += bytes;
    }
    cuda::synchronize(buffers.ctx);
    return t;
}

// Seconds until the clock has settled under the power limit.
constexpr double kWarmUp = 0.6;

class CaseRun {
public:
    CaseRun(const Case& c, const Options& options)
        : case_(c), options_(options), context_(true), ctx_(context_.ctx), buffers_(ctx_),
          meter_(cuda::device_info(0).bus), start_(PowerMeter::Clock::now()) {
        const int64_t operands = (c.M + c.N) * c.K * dtype_bytes(type_of_a(c.operands));
        const int64_t bytes = operands + c.M * c.N * dtype_bytes(c.result);
        for (int64_t used = 0; sets_.size() < 2 || used < (160 << 20); used += bytes) sets_.push_back(make_set());
        checked_ = empty_result();
    }
    // Returns the number of variants with wrong results.
    int run() {
        std::vector<Variant> variants;
        for (const Variant& v : gemm_tiles::variants(ctx_))
            if (case_.takes(v) && wanted(v.name, options_.variants)
                && ("," + options_.skip).find("," + v.name + ",") == std::string::npos)
                variants.push_back(v);
        if (options_.from == 0) print_head();
        run_library(0);   // searches its algorithm
        sustain(kWarmUp, [&](size_t i) { run_library(i); });
        Window before = sustain(options_.seconds / 2, [&](size_t i) { run_library(i); });
        if (options_.from == 0) print_row("library", before, "");
        int wrong = 0;
        for (size_t i = static_cast<size_t>(options_.from); i < variants.size(); i++) {
            const Variant& v = variants[i];
            if (PowerMeter::seconds(start_, PowerMeter::Clock::now()) > options_.limit) {
                say(strf("  %s and later: not run, --limit is over", v.name.c_str()));
                break;
            }
            say(strf("@start %zu %s", i, v.name.c_str()));
            bool right = true;
            const std::string difference = check(v, right);
            wrong += !right;
            const Window own = sustain(options_.seconds, [&](size_t set) { v.run(ctx_, of(set).call); });
            const Window after = sustain(options_.seconds / 2, [&](size_t set) { run_library(set); });
            const double library_us = (before.us + after.us) / 2, ratio = library_us / own.us;
            const double joules = own.joules() > 0 ? (before.joules() + after.joules()) / 2 / own.joules() : 0;
            print_row(v.name, own, strf("%6.3f %6.3f %+6.1f%%  %s", ratio, joules, 100 * (before.us / after.us - 1),
                                        difference.c_str()));
            say(strf("@result %.4f %.4f %d %s", ratio, joules, right, v.name.c_str()));
            before = after;
        }
        return wrong;
    }

private:
    struct Window {
        double us = 0;
        PowerMeter::Reading reading = {};
        double joules() const { return 1e-6 * us * reading.watts.value_or(0); }
    };

    static void say(const std::string& text) {
        std::printf("%s\n", text.c_str());
        std::fflush(stdout);
    }
    void print_head() const {
        say(strf("%s: M %lld N %lld K %lld, %s x %s -> %s%s", case_.name.c_str(), (long long)case_.M,
                 (long long)case_.N, (long long)case_.K, dtype_name(type_of_a(case_.operands)),
                 dtype_name(type_of_b(case_.operands)), dtype_name(case_.result),
                 case_.swiglu          ? ", then the activation and its casts"
                 : case_.operands == Operands::kBf16 ? ""
                 : case_.fast()        ? ", fast accumulation"
                                       : ", precise accumulation"));
        say(strf("  %-30s %7s %5s %5s %7s %6s %6s %6s %7s  %s", "", "TFLOP/s", "MHz", "W", "mJ", "% peak", "x rate",
                 "x J", "drift", "largest difference, root mean square / that of D"));
    }
    // % peak: of the tensor cores at this clock.
    void print_row(const std::string& name, const Window& w, const std::string& rest) const {
        const double rate = case_.flop() / w.us * 1e-6, mhz = w.reading.mhz.value_or(0);
        const double per_clock = case_.operands == Operands::kBf16 ? 4096 : 8192;
        say(strf("  %-30s %7.0f %5.0f %5.0f %7.1f %6.1f %s", name.c_str(), rate, mhz, w.reading.watts.value_or(0),
                 1e3 * w.joules(), mhz > 0 ? 1e8 * rate / (per_clock * ctx_.sm_count * mhz) : 0, rest.c_str()));
    }

    Tensor operand(Dtype dtype, int64_t elems, const std::string& path) {
        if (!path.empty() && is_fp8(dtype)) return from_file(buffers_, path, dtype, elems);
        return buffers_.random(dtype, elems);
    }
    Tensor scale_inv(double value) {
        const Tensor t = buffers_.empty(Dtype::kFp32, 4);
        cuda::fill_constant(ctx_, {.out = t, .value = static_cast<float>(value)});
        return t.slice(0, 1);
    }
    Tensor empty_result() { return buffers_.empty(case_.result, case_.M * case_.N); }
    // Normal numbers have a sixth of the format's largest as their standard deviation; scales give results of order 1.
    Set make_set() {
        const Case& c = case_;
        const Dtype of_a = type_of_a(c.operands), of_b = type_of_b(c.operands);
        Set s{.call = {.D = empty_result(), .A = operand(of_a, c.M * c.K, options_.a),
                       .B = operand(of_b, c.N * c.K, options_.b), .a_scale_inv = {}, .b_scale_inv = {}, .M = c.M,
                       .N = c.N, .K = c.K, .accumulate = c.accumulate},
              .library = {}, .activation = {}};
        CUDA_CHECK(cudaMemsetAsync(s.call.D.data, 0, static_cast<size_t>(s.call.D.bytes()), cuda::stream_of(ctx_)));
        if (is_fp8(of_a)) {
            s.call.a_scale_inv = scale_inv(6 / fp8_largest(of_a));
            s.call.b_scale_inv = scale_inv(6 / fp8_largest(of_b) / std::sqrt(static_cast<double>(c.K)));
        }
        if (c.swiglu) {
            s.call.act = buffers_.empty(Dtype::kE4m3, c.M * c.N / 2);
            s.call.act_transposed = buffers_.empty(Dtype::kE4m3, c.M * c.N / 2);
            s.call.slot = new_slot();
            s.activation = {.kind = Activation::kSwiglu, .out = {}, .in = s.call.D, .N = c.M, .F = c.N / 2,
                            .quant = {.rowwise = s.call.act, .transposed = s.call.act_transposed,
                                      .slot = s.call.slot, .record = true}};
        }
        s.library = {.D = s.call.D, .A = s.call.A, .B = s.call.B, .bias = {}, .pre = {}, .M = c.M, .N = c.N, .K = c.K,
                     .layout = c.layout, .accumulate = c.accumulate, .A_scale_inv = s.call.a_scale_inv,
                     .B_scale_inv = s.call.b_scale_inv, .fast_accumulation = c.fast()};
        return s;
    }
    Fp8Slot* new_slot() {
        auto* slot = static_cast<Fp8Slot*>(buffers_.empty(Dtype::kInt32, sizeof(Fp8Slot) / 4).data);
        const Fp8Slot start{.scale_inv = 1, .scale = 30, .amax_bits = 0, .step_amax_bits = 0};
        cuda::copy_to_device(ctx_, slot, &start, sizeof start);
        cuda::synchronize(ctx_);
        return slot;
    }
    const Set& of(size_t i) const { return sets_[i % sets_.size()]; }
    void run_library(size_t i) {
        cuda::gemm(ctx_, of(i).library);
        if (case_.swiglu) cuda::activation_forward(ctx_, of(i).activation);
    }

    // Compares the results of the first set with the library's, which it computes anew.
    std::string check(const Variant& v, bool& right) {
        const Set& s = sets_[0];
        Call call = s.call;
        call.D = checked_;
        const char* error = gemm_tiles::call_error(v, call);
        REQUIRE(!error, "%s: %s", v.name.c_str(), error);
        // NaNs are overwritten, or else seen; sums begin from 0.
        for (const Tensor& d : {call.D, s.call.D})
            CUDA_CHECK(cudaMemsetAsync(d.data, case_.accumulate ? 0 : 0xff, static_cast<size_t>(d.bytes()),
                                       cuda::stream_of(ctx_)));
        run_library(0);
        v.run(ctx_, call);
        const Tensor &own = call.D, &library = s.call.D;
        const double count = static_cast<double>(own.elems);
        const double rms = std::sqrt(compare(ctx_, library, library, 0).squares / count);
        const Differences d = compare(ctx_, own, library, tolerance(case_, rms));
        right = d.beyond == 0 && rms > 0;
        std::string text = strf("%.2e %.2e", d.largest / rms, std::sqrt(d.difference_squares / count) / rms);
        if (d.beyond > 0) text += strf(" WRONG: %llu elements", d.beyond);
        if (!case_.swiglu) return text;
        // act must have the bits that the activation's own kernel gets from the same gate and up.
        Buffers buffers(ctx_);
        ActivationForwardArgs again = s.activation;
        again.in = own;
        again.quant.rowwise = buffers.empty(Dtype::kE4m3, call.act.elems);
        again.quant.transposed = buffers.empty(Dtype::kE4m3, call.act.elems);
        again.quant.slot = new_slot();
        Call recorded = call;
        recorded.slot = new_slot();
        v.run(ctx_, recorded);
        cuda::activation_forward(ctx_, again);
        const unsigned long long bytes = different_bytes(ctx_, call.act, again.quant.rowwise)
                                         + different_bytes(ctx_, call.act_transposed, again.quant.transposed);
        const uint32_t amax = read<Fp8Slot>(ctx_, recorded.slot).amax_bits;
        const uint32_t want_amax = read<Fp8Slot>(ctx_, again.quant.slot).amax_bits;
        if (bytes == 0 && amax == want_amax) return text + " act equal";
        right = false;
        return text + strf(" WRONG: %llu bytes of act, amax %08x instead of %08x", bytes, amax, want_amax);
    }

    template <typename Launch> Window sustain(double seconds, Launch launch) {
        cudaEvent_t begin, end;
        CUDA_CHECK(cudaEventCreate(&begin));
        CUDA_CHECK(cudaEventCreate(&end));
        auto time_us = [&](int64_t launches) {
            CUDA_CHECK(cudaEventRecord(begin, cuda::stream_of(ctx_)));
            for (int64_t i = 0; i < launches; i++) launch(static_cast<size_t>(i));
            CUDA_CHECK(cudaEventRecord(end, cuda::stream_of(ctx_)));
            CUDA_CHECK(cudaEventSynchronize(end));
            float ms = 0;
            CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
            return 1e3 * ms / static_cast<double>(launches);
        };
        time_us(2);
        const double one_us = time_us(4);
        const PowerMeter::Time from = PowerMeter::Clock::now();
        Window w{.us = time_us(std::max<int64_t>(4, static_cast<int64_t>(1e6 * seconds / one_us)))};
        const PowerMeter::Time to = PowerMeter::Clock::now();
        w.reading = meter_.between(from + (to - from) / 5, to);
        CUDA_CHECK(cudaEventDestroy(begin));
        CUDA_CHECK(cudaEventDestroy(end));
        return w;
    }

    const Case case_;
    const Options options_;
    gemm_bench::Context context_;
    Ctx& ctx_;
    Buffers buffers_;
    PowerMeter meter_;
    const PowerMeter::Time start_;
    std::vector<Set> sets_;
    Tensor checked_;
};

// ---- the parent

struct Best {
    double ratio = 0, joules = 0;
    std::string variant = "none";
};

int run_children(const Options& options, const std::vector<Case>& cases) {
    const PowerMeter::Time start = PowerMeter::Clock::now();
    auto left = [&] { return options.limit - PowerMeter::seconds(start, PowerMeter::Clock::now()); };
    std::vector<std::pair<std::string, Best>> summary;
    std::string skip;   // variants that hung or faulted, each followed by a comma
    int failed = 0;
    for (const Case& c : cases) {
        Best best;
        for (int next = 0, current = -1;; current = -1) {
            if (left() <= 0) {
                std::printf("%s: not run, --limit is over\n", c.name.c_str());
                break;
            }
            std::string variant = "the library";
            const auto line = [&](const std::string& text) {
                char name[128] = "";
                double ratio = 0, joules = 0;
                int right = 0;
                if (std::sscanf(text.c_str(), "@start %d %127[^\n]", &current, name) == 2) {
                    variant = name;
                } else if (std::sscanf(text.c_str(), "@result %lf %lf %d %127[^\n]", &ratio, &joules, &right, name)
                           == 4) {
                    if (right && ratio > best.ratio) best = {ratio, joules, name};
                } else {
                    std::printf("%s\n", text.c_str());
                }
                std::fflush(stdout);
            };
            const int end = run_child({"bench_gemm_power", "--child", c.name, "--from", strf("%d", next), "--seconds",
                                       strf("%g", options.seconds), "--limit", strf("%g", left()), "--variants",
                                       options.variants, "--a", options.a, "--b", options.b, "--skip", skip},
                                      30, 8 + 3 * options.seconds, line);
            failed += end != 0;
            if (end == 0 || end == 1) break;   // 1: a variant was wrong, and has said so
            std::printf("  %-30s %s\n", variant.c_str(),
                        end == kSilent ? "HANG: stopped" : strf("FAULT: exit status %d", end).c_str());
            if (current < 0) break;   // the library or the setup
            skip += variant + ",";
            next = current;   // which is now that of the variant after it
        }
        summary.emplace_back(c.name, best);
    }
    std::printf("\nbest of each shape, times the library's rate and joules\n");
    for (const auto& [name, best] : summary)
        std::printf("  %-26s %6.3f %6.3f  %s\n", name.c_str(), best.ratio, best.joules, best.variant.c_str());
    std::printf("%.0f s, %d failed\n", options.limit - left(), failed);
    return failed > 0;
}

Options options_of(int argc, char** argv) {
    Options o;
    const std::map<std::string, std::string*> texts = {{"--shapes", &o.shapes}, {"--variants", &o.variants},
                                                       {"--a", &o.a}, {"--b", &o.b}, {"--child", &o.child},
                                                       {"--skip", &o.skip}};
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--list") {
            o.list = true;
            continue;
        }
        REQUIRE(i + 1 < argc, "%s: no such option, or no value", word.c_str());
        const char* value = argv[++i];
        if (const auto text = texts.find(word); text != texts.end()) *text->second = value;
        else if (word == "--seconds") o.seconds = std::atof(value);
        else if (word == "--limit") o.limit = std::atof(value);
        else if (word == "--from") o.from = std::atoi(value);
        else FAIL(kExitBadInput, "%s: no such option", word.c_str());
    }
    REQUIRE(o.seconds > 0 && o.seconds <= 10, "--seconds between 0 and 10");
    return o;
}

}  // namespace

int main(int argc, char** argv) try {
    const Options options = options_of(argc, argv);
    std::vector<Case> cases;
    for (const Case& c : all_cases())
        if (options.child.empty() ? wanted(c.name, options.shapes) : c.name == options.child) cases.push_back(c);
    REQUIRE(!cases.empty(), "no shape has a name with \"%s\"", options.shapes.c_str());
    if (options.list) {
        for (const Case& c : cases) std::printf("%s\n", c.name.c_str());
        return 0;
    }
    if (options.child.empty()) return run_children(options, cases);
    return CaseRun(cases[0], options).run() > 0;
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code == 1 ? 2 : error.exit_code;
}

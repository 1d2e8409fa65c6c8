// Candidates for attention (attention_candidates/) beside the kernels in use, at GPT-2's shapes.
// Usage: bench_attention_candidates [--seconds S]
//   --seconds: of each window of launches (0.2); a candidate and the kernel in use take turns, three windows each
// Each candidate runs in a child process, so that one that hangs or faults costs only itself. It is first compared with
// the kernel in use, bit by bit, at small shapes with odd numbers of tokens and at those that are timed; the candidate
// for the forward within a tolerance where scores are large, since its rounding differs there. Prints shape | us of the
// kernel in use | us of the candidate | TFLOP/s of both, for the backward 2.5 times the FLOPs of the forward | speedup.
// Times of the backward are those of the fused kernel and of clearing its counters, without delta and the rounding of
// dQ; the first lines have the whole backward in the candidate's place. The shape of 8192 tokens at head dim 64 has 65
// steps an item on average instead of 9, which tells what the ends of items cost. Exit status 1: a candidate was wrong,
// hung or faulted.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "dev/bench/attention_candidates/attention_candidates.h"
#include "dev/bench/gemm_tiles/child_process.h"

namespace {

struct Shape {
    int64_t B, NH, NKV, T, HS;
};
const Shape kTimed[] = {{64, 12, 12, 1024, 64}, {16, 12, 12, 1024, 64}, {4, 25, 25, 1024, 64}, {8, 12, 12, 8192, 64},
                        {1, 32, 8, 8192, 128}};
// One tile and less, a last tile whose second half has no keys, groups of heads, more items than blocks.
const Shape kSmall[] = {{1, 1, 1, 1, 64}, {2, 3, 3, 64, 64}, {2, 4, 2, 65, 64}, {1, 6, 2, 128, 64}, {3, 4, 2, 300, 64},
                        {2, 5, 5, 449, 64}, {1, 8, 1, 1000, 64}, {40, 12, 12, 320, 64}, {2, 4, 2, 300, 128}};

using Fused = void (*)(Ctx&, const AttentionBackwardArgs&, const cuda::DqSums&, const cuda::AttentionShape&);
struct Candidate {
    const char* name;
    Fused run;   // null: the forward
    bool other_head_dims;
};
template <int in_flight>
void backward64(Ctx& ctx, const AttentionBackwardArgs& args, const cuda::DqSums& sums,
                const cuda::AttentionShape& shape) {
    attention_candidates::backward64(ctx, args, sums, shape, in_flight);
}
const Candidate kCandidates[] = {
    {"the kernel in use, and in place of a candidate the whole backward", cuda::attention_backward_fused_sm90, true},
    {"bounded loop over items", cuda::attention_backward_fused_bounded, true},
    {"dS read once, next step's products early", backward64<1>, false},
    {"the same, two additions in flight", backward64<2>, false},
    {"forward without the largest scores of tiles", nullptr, false}};

// Math: *count += words of a that differ from those of b
// Source: own
// Traffic: both read once.
// Requires: count: zero before
// Parallel: a thread strides over words.
__global__ void count_different_kernel(unsigned long long* count, const uint32_t* a, const uint32_t* b, int64_t words) {
    unsigned long long different = 0;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (int64_t i = first; i < words; i += static_cast<int64_t>(gridDim.x) * blockDim.x) different += a[i] != b[i];
    if (different > 0) atomicAdd(count, different);
}

// Buffers of a shape, with results of the forward and, twice, room for those of the backward.
class Problem {
public:
    Problem(Ctx& ctx, const Shape& s, float std = 1) : ctx_(ctx) {
        const int64_t N = s.B * s.T, width = (s.NH + 2 * s.NKV) * s.HS;
        const float mul = 1 / std::sqrt(static_cast<float>(s.HS));
        shape_ = {s.B, s.T, s.NH, s.NKV, s.HS, mul, nullptr, static_cast<int>(s.T)};
        const Tensor qkv = buffer(Dtype::kBf16, N * width), out = buffer(Dtype::kBf16, N * s.NH * s.HS),
                     dout = buffer(Dtype::kBf16, N * s.NH * s.HS), lse = buffer(Dtype::kFp32, N * s.NH);
        fill(qkv, 1, std), fill(dout, 2, 1);
        forward_ = {.out = out, .lse = lse, .qkv = qkv, .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV, .HS = s.HS,
                    .softmax_mul = mul};
        other_forward_ = forward_;
        other_forward_.out = buffer(Dtype::kBf16, out.elems), other_forward_.lse = buffer(Dtype::kFp32, lse.elems);
        forward();
        const Tensor delta = buffer(Dtype::kFp32, N * s.NH);
        const int64_t sums_elems = cuda::attention_sums_elems(Dtype::kBf16, s.B, s.T, s.NH, s.HS);
        CHECK(sums_elems > 0, "no compute capability 9.0");
        tiles_ = ceil_div(s.T, cuda::kSumRows), units_ = 2 * s.B * s.NH * tiles_;
        for (int set = 0; set < 2; set++) {
            results_[set] = {.dqkv = buffer(Dtype::kBf16, N * width), .delta = delta, .dout = dout, .out = out,
                             .lse = lse, .qkv = qkv, .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV, .HS = s.HS,
                             .softmax_mul = mul, .sums = buffer(Dtype::kFp32, sums_elems)};
        }
        cuda::attention_backward(ctx, results_[0]);   // computes delta
        count_ = static_cast<unsigned long long*>(buffer(Dtype::kFp32, 2).data);
    }
    ~Problem() {
        for (void* p : all_) cuda::device_free(p);
    }
    Problem(const Problem&) = delete;
    Problem& operator=(const Problem&) = delete;

    void forward() { cuda::attention_forward_sm90(ctx_, forward_, shape_); }
    void other_forward() { cuda::attention_forward_late_reference(ctx_, other_forward_, shape_); }
    void spoil_other_forward() {
        for (const Tensor& t : {other_forward_.out, other_forward_.lse})
            CUDA_CHECK(cudaMemsetAsync(t.data, 0xff, static_cast<size_t>(t.bytes()), cuda::stream_of(ctx_)));   // NaN
    }
    unsigned long long different_forward() {
        return different({{forward_.out, other_forward_.out}, {forward_.lse, other_forward_.lse}});
    }
    // The larger of the errors of out and of lse, in units of what is allowed. P has relative errors of 2^-9 in both
    // kernels, so their sums of values differ by 2^-8 of the largest value, and out is rounded to 2^-9 twice. lse: sums
    // of rounded exponentials and the rounding of the result itself.
    double forward_error() {
        const std::vector<bf16> qkv = host<bf16>(forward_.qkv), a = host<bf16>(forward_.out),
                                b = host<bf16>(other_forward_.out);
        const std::vector<float> c = host<float>(forward_.lse), d = host<float>(other_forward_.lse);
        double value = 0, error = 0;
        for (const bf16& x : qkv) value = std::max(value, std::abs(static_cast<double>(static_cast<float>(x))));
        for (size_t i = 0; i < a.size(); i++) {
            const double off = std::abs(static_cast<float>(a[i]) - static_cast<float>(b[i])) / (0x1p-7 * value);
            error = std::isnan(off) || off > error ? off : error;   // NaN stays: nothing is larger
        }
        for (size_t i = 0; i < c.size(); i++) {
            const double off = std::abs(c[i] - d[i]) / (0x1p-16 * (1 + std::abs(static_cast<double>(c[i]))));
            error = std::isnan(off) || off > error ? off : error;
        }
        return error;
    }
    void whole_backward() { cuda::attention_backward(ctx_, results_[0]); }
    void run(const Candidate& candidate, int set) {
        auto* const data = results_[set].sums.as<float>();
        auto* const taken = reinterpret_cast<uint32_t*>(data + units_ * (cuda::sum_bytes(head_dim()) / 4));
        const cuda::DqSums sums{.data = data, .taken = taken, .turns = taken + 1,
                                .NH = static_cast<uint32_t>(shape_.NH), .tiles = static_cast<uint32_t>(tiles_)};
        CUDA_CHECK(cudaMemsetAsync(taken, 0, static_cast<size_t>(4 + units_ * 4), cuda::stream_of(ctx_)));
        candidate.run(ctx_, results_[set], sums, shape_);
    }
    // Writes the same bytes to all results.
    void spoil(int set, int byte) {
        for (const Tensor& t : {results_[set].dqkv, results_[set].sums})
            CUDA_CHECK(cudaMemsetAsync(t.data, byte, static_cast<size_t>(t.bytes()), cuda::stream_of(ctx_)));
    }
    // Inverts a bit of dqkv (0) or sums (1) of a set.
    void plant_fault(int set, int where) {
        const Tensor& t = where == 0 ? results_[set].dqkv : results_[set].sums;
        uint32_t word = 0;
        char* const at = t.as<char>() + t.bytes() / 8 * 4;
        cuda::copy_to_host(ctx_, &word, at, 4);
        cuda::synchronize(ctx_);
        word ^= 1;
        cuda::copy_to_device(ctx_, at, &word, 4);
        cuda::synchronize(ctx_);
    }
    // Words of dqkv and sums, with the counters behind them, that differ between the sets.
    unsigned long long different() {
        return different({{results_[0].dqkv, results_[1].dqkv}, {results_[0].sums, results_[1].sums}});
    }

private:
    unsigned long long different(const std::vector<std::pair<Tensor, Tensor>>& pairs) {
        CUDA_CHECK(cudaMemsetAsync(count_, 0, 8, cuda::stream_of(ctx_)));
        for (const auto& [a, b] : pairs)
            count_different_kernel<<<1024, 256, 0, cuda::stream_of(ctx_)>>>(count_, a.as<uint32_t>(), b.as<uint32_t>(),
                                                                            a.bytes() / 4);
        unsigned long long count = 0;
        cuda::copy_to_host(ctx_, &count, count_, 8);
        cuda::synchronize(ctx_);
        return count;
    }
    template <typename T> std::vector<T> host(const Tensor& t) {
        std::vector<T> values(static_cast<size_t>(t.elems));
        cuda::copy_to_host(ctx_, values.data(), t.data, t.bytes());
        cuda::synchronize(ctx_);
        return values;
    }
    int head_dim() const { return static_cast<int>(shape_.HS); }
    Tensor buffer(Dtype dtype, int64_t elems) {
        all_.push_back(cuda::device_alloc((elems + 2) * dtype_bytes(dtype)));
        return {all_.back(), dtype, elems};
    }
    void fill(const Tensor& t, uint64_t key, float std) {
        cuda::fill_normal(ctx_, {.out = t, .key = key, .element_offset = 0, .mean = 0, .std = std});
    }

    Ctx& ctx_;
    std::vector<void*> all_;
    AttentionForwardArgs forward_, other_forward_;
    AttentionBackwardArgs results_[2];
    cuda::AttentionShape shape_;
    int64_t tiles_ = 0, units_ = 0;
    unsigned long long* count_ = nullptr;
};

std::string name_of(const Shape& s) {
    return strf("%3lld %3lld %3lld %5lld %4lld", (long long)s.B, (long long)s.NH, (long long)s.NKV, (long long)s.T,
                (long long)s.HS);
}

double window_us(Ctx& ctx, double seconds, const std::function<void()>& launch) {
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    auto time_us = [&](int64_t launches) {
        CUDA_CHECK(cudaEventRecord(begin, cuda::stream_of(ctx)));
        for (int64_t i = 0; i < launches; i++) launch();
        CUDA_CHECK(cudaEventRecord(end, cuda::stream_of(ctx)));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        return 1e3 * ms / static_cast<double>(launches);
    };
    time_us(2);
    const double one_us = time_us(4), us = time_us(std::max<int64_t>(4, static_cast<int64_t>(1e6 * seconds / one_us)));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return us;
}

// Whether `runs` runs of a candidate for the backward equal the kernel in use, and planted faults are found.
bool same_bits(Problem& problem, const Candidate& candidate, const Shape& s, int runs) {
    problem.spoil(0, 0x3c);
    problem.run(kCandidates[0], 0);
    for (int i = 0; i < runs; i++) {
        problem.spoil(1, 0x3c);
        problem.run(candidate, 1);
        const unsigned long long different = problem.different();
        if (different == 0) continue;
        std::printf("%s | WRONG in run %d: %llu words differ\n", name_of(s).c_str(), i, different);
        return false;
    }
    for (int where : {0, 1}) {
        problem.plant_fault(1, where);
        CHECK(problem.different() == 1, "a planted fault was not found");
        problem.plant_fault(1, where);
    }
    return true;
}

// Whether the candidate for the forward is close enough to the kernel in use.
bool close_forward(Problem& problem, const Shape& s) {
    problem.spoil_other_forward();
    problem.other_forward();
    const double error = problem.forward_error();
    if (!(error <= 1)) std::printf("%s | WRONG: %.2f of the bound\n", name_of(s).c_str(), error);
    return error <= 1;
}

// As same_bits for the forward, with scores near 0, whose reference stays that of the first tile; with larger ones only
// close_forward.
bool right_forward(Ctx& ctx, const Shape& s) {
    bool right = true;
    for (float std : {0.25f, 1.0f, 3.0f, 8.0f}) {   // of queries and keys
        Problem problem(ctx, s, std);
        right = close_forward(problem, s) && right;
        const unsigned long long different = std < 1 ? problem.different_forward() : 0;
        if (different > 0) std::printf("%s | WRONG: %llu words differ\n", name_of(s).c_str(), different);
        right = right && different == 0;
    }
    return right;
}

// Runs one candidate; 0: only the times of the kernel in use.
int child(int number, double seconds) {
    Ctx ctx;
    cuda::device_open(ctx, 0);
    const Candidate& candidate = kCandidates[number];
    std::printf("%s\n", candidate.name);
    std::fflush(stdout);
    bool right = true;
    for (const Shape& s : kSmall) {
        if (number == 0 || (s.HS != 64 && !candidate.other_head_dims)) continue;
        if (candidate.run == nullptr) {
            right = right_forward(ctx, s) && right;
            continue;
        }
        Problem problem(ctx, s);
        right = same_bits(problem, candidate, s, 20) && right;
    }
    for (const Shape& s : kTimed) {
        if (s.HS != 64 && !candidate.other_head_dims) continue;
        Problem problem(ctx, s);
        if (candidate.run == nullptr) right = close_forward(problem, s) && right;
        else if (number > 0) right = same_bits(problem, candidate, s, 3) && right;
        const double mflop_of_forward = 2e-6 * static_cast<double>(s.B * s.NH * s.T) * static_cast<double>(s.T * s.HS);
        const double mflop = candidate.run == nullptr ? mflop_of_forward : 2.5 * mflop_of_forward;
        double us[2] = {};
        for (int turn = 0; turn < 3; turn++) {
            us[0] += window_us(ctx, seconds, [&] {
                if (candidate.run == nullptr) problem.forward();
                else problem.run(kCandidates[0], 0);
            }) / 3;
            us[1] += window_us(ctx, seconds, [&] {
                if (candidate.run == nullptr) problem.other_forward();
                else if (number == 0) problem.whole_backward();
                else problem.run(candidate, 1);
            }) / 3;
        }
        std::printf("%s | %9.1f | %12.1f | %7.0f %7.0f | %6.3f\n", name_of(s).c_str(), us[0], us[1], mflop / us[0],
                    mflop / us[1], us[0] / us[1]);
        std::fflush(stdout);
    }
    if (number > 0) std::printf("%s\n", right ? "right" : "WRONG");
    cuda::device_close(ctx);
    return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
    std::string number;
    double seconds = 0.2;
    for (int i = 1; i < argc; i += 2) {
        const std::string word = argv[i];
        REQUIRE(i + 1 < argc && (word == "--seconds" || word == "--child"),
                "usage: bench_attention_candidates [--seconds S]");
        if (word == "--child") number = argv[i + 1];
        else seconds = std::atof(argv[i + 1]);
    }
    if (!number.empty()) return child(std::atoi(number.c_str()), seconds);
    std::printf("  B  NH NKV     T   HS | in use us | candidate us | TFLOP/s of both | speedup\n");
    int failed = 0;
    for (size_t i = 0; i < std::size(kCandidates); i++) {
        const int end = run_child({"bench_attention_candidates", "--child", std::to_string(i), "--seconds",
                                   strf("%g", seconds)}, 25, 6 + 8 * seconds, [](const std::string& line) {
            std::printf("%s\n", line.c_str());
            std::fflush(stdout);
        });
        if (end == 0) continue;
        failed++;
        if (end != 1) std::printf("%s\n", end == kSilent ? "HANG: stopped" : strf("FAULT: status %d", end).c_str());
    }
    return failed > 0;
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}

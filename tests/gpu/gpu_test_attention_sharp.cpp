// Attention of the GPU with few dominant probabilities, as in trained models: a wrong or misplaced score then changes
// results by powers of e.
#include "tests/gpu/gpu_attention.h"

using namespace attention_test;

namespace attention_sharp_test {

namespace {

enum class Sharp { kSink, kSameToken, kPreviousToken, kOwnHeight };
constexpr Sharp kAllSharp[] = {Sharp::kSink, Sharp::kSameToken, Sharp::kPreviousToken, Sharp::kOwnHeight};

// A different number for each pair.
int64_t mixed(int64_t key, int64_t channel) {
    uint64_t x = static_cast<uint64_t>(key) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(channel) + 1;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return static_cast<int64_t>(x >> 40);
}
// +1 or -1 in each channel, from numbers that nothing else uses.
double sign_of(int64_t key, int64_t channel) { return mixed(key, channel) % 2 ? 1 : -1; }

// Every query head has one key with a score of 5 to 60, and a later one with 80, which must be masked; in every second
// key head all scores are lower by 80. So lse differs between rows and heads by powers of e: a score with the lse of
// another row, or from another tile or head, gives a very different probability.
void add_own_heights(Attention& a) {
    const Shape& s = a;
    const double unit = static_cast<double>(a.softmax_mul) * static_cast<double>(s.HS), each = std::sqrt(40 / unit);
    auto add = [&](int64_t at, int64_t key, double amount) {
        for (int64_t d = 0; d < s.HS; d++) a.qkv.set(at + d, a.qkv.get(at + d) + amount * sign_of(key, d));
    };
    const int64_t lower = s.B * s.NKV * s.T;   // vector that lowers scores
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t t = 0; t < s.T; t++)
            for (int64_t h = 0; h < s.NH; h++) {
                const int64_t group = s.NH / s.NKV, head = h / group, own = (b * s.NKV + head) * s.T;
                const int64_t pick = mixed(a.row(b, t, h), 1000), later = t + 1 + mixed(a.row(b, t, h), 1001) % s.T;
                add(a.q(b, t, h), own + pick % (t + 1), static_cast<double>(5 + pick / 4096 % 56) / (unit * each));
                if (later < s.T) add(a.q(b, t, h), own + later, 80 / (unit * each));
                if (head % 2) add(a.q(b, t, h), lower, -80 / (unit * each));
                if (h % group > 0) continue;
                add(a.k(b, t, h), own + t, each);
                if (head % 2) add(a.k(b, t, h), lower, each);
            }
}

// Scores about 40 above the others: of the first key (far from the diagonal for most queries), of every key with the
// token of the query (keys that come later too, which must not be seen), of the key before; or as add_own_heights.
Attention sharp_problem(Shape shape, Sharp kind) {
    shape.magnitude = 0.3;
    Attention a(shape, Dtype::kBf16);
    if (kind == Sharp::kOwnHeight) {
        add_own_heights(a);
        return a;
    }
    const int64_t HS = shape.HS;
    const double height = 40 / (static_cast<double>(a.softmax_mul) * static_cast<double>(HS)), each = std::sqrt(height);
    auto add = [&](int64_t at, int64_t key) {
        for (int64_t d = 0; d < HS; d++) a.qkv.set(at + d, a.qkv.get(at + d) + each * sign_of(key, d));
    };
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < shape.B; b++)
        for (int64_t t = 0; t < shape.T; t++) {
            const int64_t token = (t * t + 31 * t + 7 * b) % 89;
            for (int64_t h = 0; h < shape.NH + shape.NKV; h++) {
                const bool query = h < shape.NH;
                const int64_t at = a.q(b, t, h), head = query ? h / (shape.NH / shape.NKV) : h - shape.NH;
                const int64_t own = (b * shape.NKV + head) * (shape.T + 100);   // keys of vectors of this key head
                if (kind == Sharp::kSink) {
                    if (query || t == 0) add(at, own);
                } else if (kind == Sharp::kSameToken) {
                    add(at, own + token);
                } else if (!query || t > 0) {
                    add(at, own + t - query);
                }
            }
        }
    return a;
}

// The kernels for devices before compute capability 9.0.
Ctx older() {
    Ctx ctx = gpu();
    ctx.sm = 89;
    return ctx;
}

struct OnDevice {
    DeviceTensor qkv, dout, out, lse, dqkv, delta, sums;

    OnDevice(const Attention& a, const Attention::Result& r)
        : qkv(a.qkv), dout(a.dout), out(r.out), lse(r.lse), dqkv(r.dqkv), delta(r.delta),
          sums(HostTensor(Dtype::kFp32, cuda::attention_sums_elems(a.type, a.B, a.T, a.NH, a.HS))) {}
    // Forward pass, and the backward pass of its results.
    Attention::Result run(Ctx& ctx, const Attention& a) {
        cuda::attention_forward(ctx, a.forward_args(out.view(), lse.view(), qkv.view(), nullptr));
        cuda::attention_backward(ctx, a.backward_args(dqkv.view(), delta.view(), dout.view(), out.view(), lse.view(),
                                                      qkv.view(), nullptr, sums.view()));
        cuda::synchronize(ctx);
        return {out.download(), lse.download(), dqkv.download(), delta.download()};
    }
};

}  // namespace

TEST_CASE("gpu attention with few dominant probabilities, against loops in double") {
    for (int64_t HS : {64, 96, 128, 256})
        for (Sharp kind : kAllSharp) {
            INFO("kind " << static_cast<int>(kind));
            check_against_loops(sharp_problem({1, 400, 4, 1, HS}, kind));
            check_against_loops(sharp_problem({2, 257, 4, 2, HS}, kind));
            if (kind != Sharp::kOwnHeight) continue;
            check_against_loops(sharp_problem({50, 260, 2, 1, HS}, kind));   // blocks take several items
        }
}

// Many tiles per block, several query heads per key head, long sequences: compared with the kernels for older devices,
// within the roundings of P, and bitwise equal in every run.
TEST_CASE("gpu attention with few dominant probabilities, at the trainer's shapes") {
    struct Case {
        Shape shape;
        Sharp kind;
        int runs;
    };
    for (const Case& c :
         {Case{{2, 2048, 16, 4, 128}, Sharp::kOwnHeight, 200}, Case{{8, 2048, 16, 4, 128}, Sharp::kSink, 4},
          Case{{8, 2048, 16, 4, 128}, Sharp::kOwnHeight, 10}, Case{{1, 8192, 32, 8, 128}, Sharp::kOwnHeight, 4},
          Case{{2, 2048, 8, 2, 256}, Sharp::kOwnHeight, 200}, Case{{2, 1024, 8, 8, 96}, Sharp::kOwnHeight, 20},
          Case{{2, 1024, 12, 12, 64}, Sharp::kSameToken, 200}, Case{{16, 1024, 12, 12, 64}, Sharp::kOwnHeight, 4}}) {
        const Attention a = sharp_problem(c.shape, c.kind);
        INFO(a.name() << "kind " << static_cast<int>(c.kind));
        OnDevice device(a, a.fresh(a.type));
        Ctx plain = older();
        const Attention::Result want = device.run(plain, a), got = device.run(gpu(), a);
        const auto far_off = [](const HostTensor& x, const HostTensor& y, double atol, double rtol) {
            return first_difference(x, y, [&](int64_t i) { return atol + rtol * std::fabs(y.get(i)); });
        };
        CHECK_EQ(far_off(got.lse, want.lse, 2e-3, 0), "");
        CHECK_EQ(far_off(got.out, want.out, 0.02, 0.02), "");
        CHECK_EQ(far_off(got.dqkv, want.dqkv, 0.25, 0.05), "");
        for (int i = 0; i < c.runs; i++) {
            const Attention::Result again = device.run(gpu(), a);
            CHECK(again.same_bits(got));
        }
    }
}

}  // namespace attention_sharp_test

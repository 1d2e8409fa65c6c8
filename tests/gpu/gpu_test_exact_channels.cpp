// The operations of exact channels on the GPU: bitwise equal to the CPU's, except that a layernorm with a bias rounds
// once less.
#include "tests/gpu/gpu_op.h"
#include "tests/support/exact_channels_test.h"

using namespace op_test;

namespace exact_channels_test {

namespace {

constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32;

void add_matrix(OpCase& c, const Quantized& q) {
    c.add("codes", Kind::kFixed, q.codes);
    c.add("scale_inv", Kind::kFixed, q.scale_inv);
}

}  // namespace

TEST_CASE("gpu exact channels: channel_energy") {
    for (Case shape : cases()) {
        Quantized x(shape, 1);
        for (int64_t i = 0; i < x.codes.elems(); i += 97) static_cast<uint8_t*>(x.codes.data())[i] = 0x7f;   // NaN
        OpCase c(strf("channel_energy of %lld x %lld", ll(shape.N), ll(shape.C)), kF);
        add_matrix(c, x);
        c.poison("energies", Kind::kFixed, shape.C);
        c.run_same_types(cuda::channel_energy, cpu::channel_energy, [&](auto view) {
            return ChannelEnergyArgs{.energies = view("energies"),
                                     .x = {view("codes"), view("scale_inv"), shape.granularity}, .N = shape.N,
                                     .C = shape.C};
        });
        c.check_bits("energies");
    }
}

TEST_CASE("gpu exact channels: top_channels") {
    for (int64_t C : {16, 48, 1000, 1024, 4100})
        for (int64_t K : {16, 48, 256}) {
            if (K > C) continue;
            for (int skip : {0, 1}) {
                HostTensor energies(kF, 3 * C);   // many ties; the second linear has no energies
                for (int64_t i = 0; i < 3 * C; i++) {
                    const uint32_t random = philox(3, static_cast<uint64_t>(i)).word[0];
                    energies.set(i, i / C == 1 ? 0 : std::exp2(random % 9));
                }
                energies.set(C - 1, HUGE_VAL);
                StepState state{};
                state.skip = skip;
                OpCase c(strf("top_channels %lld of %lld", ll(K), ll(C)), kF);
                c.add("energies", Kind::kFixed, energies);
                c.add("state", Kind::kFixed, tensor_of(state));
                c.add("channels", Kind::kFixed, HostTensor(Dtype::kInt32, 3 * K).fill(-1));
                c.run_same_types(cuda::top_channels, cpu::top_channels, [&](auto view) {
                    return TopChannelsArgs{.channels = view("channels"), .energies = view("energies"), .rows = 3,
                                           .C = C, .K = K, .state = object_in<const StepState>(view("state"))};
                });
                c.check_bits("channels");
            }
        }
}

TEST_CASE("gpu exact channels: exact_weight_columns") {
    for (Case shape : cases()) {
        if (shape.granularity == Granularity::kBlock1x128) continue;
        for (Dtype dtype : {kF, kB}) {
            Quantized w(shape, 2);
            for (ShardRange range : random_ranges(shape.N * shape.C, 3, 1, 5)) {
                if (range.elems == 0) continue;
                OpCase c(strf("exact_weight_columns of %lld x %lld from %lld", ll(shape.N), ll(shape.C),
                              ll(range.begin)), dtype);
                add_matrix(c, w);
                c.add("codes", Kind::kFixed, part_of(w.codes, range));
                c.add("in", Kind::kFixed, part_of(w.values.to(dtype), range));
                c.add("channels", Kind::kFixed, some_channels(shape.C));
                c.add("out", Kind::kFixed, HostTensor(kB, shape.N * 2 * kChannels).fill(7));
                c.run_same_types(cuda::exact_weight_columns, cpu::exact_weight_columns, [&](auto view) {
                    return ExactWeightArgs{.out = view("out"), .in = view("in"),
                                           .w = {view("codes"), view("scale_inv"), shape.granularity},
                                           .channels = view("channels"), .begin = range.begin, .R = shape.N,
                                           .C = shape.C};
                });
                c.check_bits("out");
            }
        }
    }
}

TEST_CASE("gpu exact channels: exact_norm_columns") {
    for (Case shape : cases()) {
        if (shape.granularity == Granularity::kBlock128x128) continue;
        for (bool layer : {false, true}) {
            NormCase norm(shape, layer);
            Ctx ctx;
            norm.forward(ctx);
            OpCase c(strf("exact_norm_columns of %lld x %lld, layernorm %d", ll(shape.N), ll(shape.C), layer), kB);
            add_matrix(c, norm.x);
            c.add("in", Kind::kFixed, norm.in);
            c.add("rstd", Kind::kFixed, norm.rstd);
            if (layer) c.add("mean", Kind::kFixed, norm.mean);
            if (layer) c.add("bias", Kind::kFixed, norm.bias);
            c.add("weight", Kind::kFixed, norm.weight);
            c.add("channels", Kind::kFixed, norm.channels);
            c.add("out", Kind::kFixed, HostTensor(kB, shape.N * 2 * kChannels));
            c.run_same_types(cuda::exact_norm_columns, cpu::exact_norm_columns, [&](auto view) {
                return ExactNormArgs{.out = view("out"), .in = view("in"), .mean = view("mean"), .rstd = view("rstd"),
                                     .weight = view("weight"), .bias = view("bias"),
                                     .x = {view("codes"), view("scale_inv"), shape.granularity},
                                     .channels = view("channels"), .N = shape.N, .C = shape.C};
            });
            if (!layer) c.check_bits("out");
            else   // the sum of product and bias is rounded to bf16, from one rounding to fp32 more or less
                check_close(c.name(), c.on_gpu("out"), c.on_cpu("out"), [&](int64_t i) {
                    return 0x1p-7 * std::fabs(c.on_cpu("out").get(i)) + 0x1p-6;
                });
        }
    }
}

// The two halves come from the norm and its codes on the GPU itself: x is the norm's own result.
TEST_CASE("gpu exact channels: exact_norm_columns has the bits of the norm's result") {
    for (bool layer : {false, true}) {
        const Case shape{144, 400, Granularity::kTensor};
        NormCase norm(shape, layer);
        DeviceTensor in(norm.in), weight(norm.weight), bias(norm.bias), mean(norm.mean), rstd(norm.rstd),
            out(norm.out), codes(norm.x.codes), scale_inv(norm.x.scale_inv), channels(norm.channels),
            columns(HostTensor(kB, shape.N * 2 * kChannels));
        const Tensor means = layer ? mean.view() : Tensor{}, biases = layer ? bias.view() : Tensor{};
        const NormForwardArgs args{.out = out.view(), .residual_out = {}, .mean = means, .rstd = rstd.view(),
                                   .in = in.view(), .residual = {}, .weight = weight.view(), .bias = biases,
                                   .N = shape.N, .C = shape.C, .eps = 1e-5f};
        if (layer) cuda::layernorm_forward(gpu(), args);
        else cuda::rmsnorm_forward(gpu(), args);
        cuda::exact_norm_columns(gpu(), {.out = columns.view(), .in = in.view(), .mean = means, .rstd = rstd.view(),
                                         .weight = weight.view(), .bias = biases,
                                         .x = {codes.view(), scale_inv.view(), shape.granularity},
                                         .channels = channels.view(), .N = shape.N, .C = shape.C});
        const HostTensor x = out.download(), got = columns.download();
        int64_t wrong = 0;
        for (int64_t i = 0; i < shape.N * kChannels; i++) {
            const int64_t n = i / kChannels, j = i % kChannels;
            const auto c = static_cast<int64_t>(norm.channels.get(j));
            wrong += got.get((2 * n + 1) * kChannels + j) != x.get(n * shape.C + c);
        }
        CHECK(wrong == 0);
    }
}

}  // namespace exact_channels_test

// Tensors of more than 2^31 elements: the results of the last rows must equal, to the bit, those of an operation on
// these rows alone, which the other tests compare with the CPU. A test needs at most 18 GB.
#include "tests/gpu/gpu_bulk.h"
#include "tests/gpu/gpu_op.h"

#include <map>
#include <memory>
#include <numeric>

#include "llmc/base/fp8.h"

using namespace op_test;

namespace large_test {

namespace {

constexpr int64_t kRows = 128;   // compared rows: whole blocks of 128 x 128
constexpr Dtype kB = Dtype::kBf16;

bool is_large(int64_t elems) { return elems > int64_t{1} << 31; }

// FP8 results (N, C) of an operation, with one scale or with block scales.
class Quantized {
public:
    Quantized(int64_t N, int64_t C, bool blocks)
        : N_(N), C_(C), blocks_(blocks), rowwise_(Dtype::kE4m3, N * C), transposed_(Dtype::kE4m3, N * C),
          scales_(Dtype::kFp32, blocks ? scale_inv_elems(Granularity::kBlock1x128, N, C) : 1),
          transposed_scales_(Dtype::kFp32, blocks ? scale_inv_elems(Granularity::kBlock1x128, C, N) : 1),
          entry_(tensor_of(ScaleEntry{.scale_inv = 0, .scale = 48, .amax_bits = 0, .step_amax_bits = 0})) {}
    QuantOut quant() {
        return {.rowwise = rowwise_.tensor, .transposed = transposed_.tensor,
                .granularity = blocks_ ? Granularity::kBlock1x128 : Granularity::kTensor,
                .entry = static_cast<ScaleEntry*>(entry_.view().data),
                .rowwise_scale_inv = blocks_ ? scales_.tensor : Tensor{},
                .transposed_scale_inv = blocks_ ? transposed_scales_.tensor : Tensor{}};
    }
    // Compares the last rows with all rows of `few`: every row, and some columns of transposed results.
    void check_last(Quantized& few) {
        CHECK(rowwise_.last(kRows * C_).same_bits(few.rowwise_.last(kRows * C_)));
        int64_t wrong = 0;
        for (int64_t c = 0; c < C_; c += std::max<int64_t>(1, C_ / 61))
            wrong += !transposed_.part((c + 1) * N_ - kRows, kRows).same_bits(few.transposed_.part(c * kRows, kRows));
        wrong += !transposed_.last(kRows).same_bits(few.transposed_.last(kRows));
        if (blocks_) {
            for (int64_t block = 0; block < C_ / 128; block++)
                wrong += !scales_.part((block + 1) * N_ - kRows, kRows)
                              .same_bits(few.scales_.part(block * kRows, kRows));
            wrong += !transposed_scales_.last(C_).same_bits(few.transposed_scales_.last(C_));
        }
        CHECK_EQ(wrong, 0);
    }

private:
    const int64_t N_, C_;
    const bool blocks_;
    Bulk rowwise_, transposed_, scales_, transposed_scales_;
    DeviceTensor entry_;
};

// An operation on N rows.
class LargeCase {
public:
    using View = std::function<Tensor(const std::string&)>;

    explicit LargeCase(int64_t N) : N_(N) { REQUIRE(N % kRows == 0); }
    void random(const std::string& name, int64_t width) {
        const Tensor t = output(name, width);
        cuda::fill_normal(gpu(), {.out = t, .key = rows_.size(), .element_offset = 0, .mean = 0.1f, .std = 1});
    }
    Tensor output(const std::string& name, int64_t width, Dtype dtype = kB) {
        return rows_.try_emplace(name, dtype, N_ * width).first->second.tensor;
    }
    // value(n) of every row.
    template <typename Value> void ints(const std::string& name, Value&& value) {
        std::vector<int32_t> host(static_cast<size_t>(N_));
        for (int64_t n = 0; n < N_; n++) host[static_cast<size_t>(n)] = static_cast<int32_t>(value(n));
        const Tensor t = output(name, 1, Dtype::kInt32);
        cuda::copy_to_device(gpu(), t.data, host.data(), t.bytes());
        cuda::synchronize(gpu());
    }
    void fixed(const std::string& name, const HostTensor& host) { fixed_.try_emplace(name, host); }

    // run(view, N, quant) runs the operation. columns: those of the FP8 result, 0 if there is none. compared: the
    // tensors that it writes.
    template <typename Run>
    void check(Run&& run, const std::vector<std::string>& compared, int64_t columns = 0, bool blocks = false) {
        std::map<std::string, DeviceTensor> few;   // before the operation overwrites its input
        for (auto& [name, bulk] : rows_) few.try_emplace(name, bulk.last(bulk.tensor.elems / N_ * kRows));
        const auto view = [&](auto& rows, auto&& tensor_of) {
            return View([&, tensor_of](const std::string& name) {
                if (auto found = rows.find(name); found != rows.end()) return tensor_of(found->second);
                auto found = fixed_.find(name);
                return found == fixed_.end() ? Tensor{} : found->second.view();
            });
        };
        std::unique_ptr<Quantized> all, some;
        if (columns > 0) {
            all = std::make_unique<Quantized>(N_, columns, blocks);
            some = std::make_unique<Quantized>(kRows, columns, blocks);
        }
        run(view(rows_, [](Bulk& bulk) { return bulk.tensor; }), N_, all ? all->quant() : QuantOut{});
        run(view(few, [](DeviceTensor& t) { return t.view(); }), kRows, some ? some->quant() : QuantOut{});
        cuda::synchronize(gpu());
        for (const std::string& name : compared) {
            INFO(name);
            Bulk& bulk = rows_.at(name);
            CHECK(bulk.last(bulk.tensor.elems / N_ * kRows).same_bits(few.at(name).download()));
        }
        if (all) all->check_last(*some);
    }

private:
    const int64_t N_;
    std::map<std::string, Bulk> rows_;
    std::map<std::string, DeviceTensor> fixed_;
};

const bool kSkipped = left_out(int64_t{1} << 31);

}  // namespace

TEST_CASE("gpu large: casts of the logits, and the classifier") {
    if (kSkipped) return;
    constexpr int64_t N = 16768, V = 128256;   // 2^31 + 3e6 logits
    REQUIRE(is_large(N * V));
    LargeCase c(N);
    c.random("logits", V);
    c.output("losses", 1, Dtype::kFp32);
    c.ints("targets", [](int64_t n) { return n % 5 == 3 ? int64_t{kIgnoreIndex} : n * 7919 % V; });
    StepState state{};
    state.dloss_mul = 1.0f / 64;
    c.fixed("state", tensor_of(state));
    for (bool blocks : {false, true})
        c.check([&](const LargeCase::View& view, int64_t rows, const QuantOut& quant) {
            cuda::quantize(gpu(), {.quant = quant, .in = view("logits"), .N = rows, .C = V});
        }, {}, V, blocks);
    for (bool write : {false, true})
        c.check([&](const LargeCase::View& view, int64_t rows, const QuantOut&) {
            cuda::classifier(gpu(), {.logits = view("logits"), .losses = view("losses"),
                                     .targets = view("targets").as<int32_t>(),
                                     .state = static_cast<StepState*>(view("state").data), .N = rows, .V = V, .Vp = V,
                                     .write_dlogits = write});
        }, {"logits", "losses"});
}

TEST_CASE("gpu large: activation functions") {
    if (kSkipped) return;
    constexpr int64_t F = 28672;
    for (Activation kind : {Activation::kSwiglu, Activation::kGelu}) {
        const int64_t width = activation_inputs(kind, F);
        {
            const int64_t N = 75008;
            REQUIRE(is_large(N * F));
            LargeCase c(N);
            c.random("in", width);
            const auto forward = [&](const LargeCase::View& view, int64_t rows, const QuantOut& quant) {
                cuda::activation_forward(gpu(), {.kind = kind, .out = view("out"), .in = view("in"), .N = rows, .F = F,
                                                 .quant = quant});
            };
            c.check(forward, {}, F);
            c.output("out", F);
            c.check(forward, {"out"});
        }
        const int64_t N = 2 * F * 37504 / width;   // inputs of 2.15e9 elements
        REQUIRE(is_large(N * width));
        for (bool quantized : {false, true}) {
            LargeCase c(N);
            c.random("in", width);
            c.random("dout", F);
            c.check([&](const LargeCase::View& view, int64_t rows, const QuantOut& quant) {
                cuda::activation_backward(gpu(), {.kind = kind, .din = quant ? Tensor{} : view("in"),
                                                  .dout = view("dout"), .in = view("in"), .N = rows, .F = F,
                                                  .quant = quant});
            }, {"in"}, quantized ? width : 0);
        }
    }
}

TEST_CASE("gpu large: norms") {
    if (kSkipped) return;
    constexpr int64_t C = 8192, N = 262272;
    REQUIRE(is_large(N * C));
    for (bool layer : {false, true}) {
        const HostTensor weight = random_tensor(kB, C, 5), bias = layer ? random_tensor(kB, C, 6) : HostTensor{};
        for (bool quantized : {false, true}) {
            LargeCase c(N);
            c.random("in", C);
            c.random("residual", C);
            c.output("sum", C);
            if (!quantized) c.output("out", C);
            c.output("mean", 1, Dtype::kFp32);
            c.output("rstd", 1, Dtype::kFp32);
            c.fixed("weight", weight);
            c.fixed("bias", bias);
            c.check([&](const LargeCase::View& view, int64_t rows, const QuantOut& quant) {
                (layer ? cuda::layernorm_forward : cuda::rmsnorm_forward)(
                    gpu(), {.out = view("out"), .residual_out = view("sum"), .mean = layer ? view("mean") : Tensor{},
                            .rstd = view("rstd"), .in = view("in"), .residual = view("residual"),
                            .weight = view("weight"), .bias = view("bias"), .N = rows, .C = C, .eps = 1e-5f,
                            .quant = quant});
            }, quantized ? std::vector<std::string>{"sum", "rstd"} : std::vector<std::string>{"sum", "rstd", "out"},
                    quantized ? C : 0);
        }
    }
    LargeCase c(N);   // dx overwrites dresidual; the weight gradient also sums over other rows
    c.random("dx", C);
    c.random("dout", C);
    c.random("x", C);
    cuda::fill_constant(gpu(), {.out = c.output("rstd", 1, Dtype::kFp32), .value = 0.75f});
    c.fixed("weight", random_tensor(kB, C, 5));
    c.fixed("dweight", HostTensor(Dtype::kFp32, C).fill(0));
    c.fixed("scratch", HostTensor(Dtype::kFp32, 2 * kPartialRows * C));
    for (int64_t columns : {int64_t{0}, C})
        c.check([&](const LargeCase::View& view, int64_t rows, const QuantOut& quant) {
            cuda::rmsnorm_backward(gpu(), {.dx = view("dx"), .dresidual = view("dx"), .dweight = view("dweight"),
                                           .dbias = {}, .scratch = view("scratch"), .dout = view("dout"),
                                           .x = view("x"), .mean = {}, .rstd = view("rstd"),
                                           .weight = view("weight"), .N = rows, .C = C, .quant = quant});
        }, {"dx"}, columns);
}

TEST_CASE("gpu large: rope and qk-norm") {
    if (kSkipped) return;
    // The last rows have positions 0 to 127.
    constexpr int64_t NH = 32, NKV = 8, HS = 128, width = (NH + 2 * NKV) * HS, T = 65536, N = 6 * T + kRows;
    REQUIRE(is_large(N * width));
    const HostTensor table = random_tensor(Dtype::kFp32, T * HS, 3);
    for (int64_t columns : {int64_t{0}, width})
        for (bool restart : {false, true}) {
            LargeCase c(N);
            c.random("qkv", width);
            c.ints("positions", [](int64_t n) { return n % 1000; });
            c.fixed("table", table);
            c.check([&](const LargeCase::View& view, int64_t rows, const QuantOut& quant) {
                cuda::rope_forward(gpu(), {.qkv = view("qkv"), .cos_sin = view("table"), .N = rows, .T = T, .NH = NH,
                                           .NKV = NKV, .HS = HS, .quant = quant,
                                           .positions = restart ? view("positions").as<int32_t>() : nullptr});
            }, columns ? std::vector<std::string>{} : std::vector<std::string>{"qkv"}, columns);
        }
    LargeCase c(N);
    c.random("in", width);
    c.output("out", width);
    c.output("rstd", NH + NKV, Dtype::kFp32);
    c.fixed("q", random_tensor(kB, HS, 1));
    c.fixed("k", random_tensor(kB, HS, 2));
    c.check([&](const LargeCase::View& view, int64_t rows, const QuantOut&) {
        cuda::qk_norm_forward(gpu(), {.out = view("out"), .rstd = view("rstd"), .in = view("in"), .q_weight = view("q"),
                                      .k_weight = view("k"), .N = rows, .NH = NH, .NKV = NKV, .HS = HS, .KS = HS,
                                      .eps = 1e-6f});
    }, {"out", "rstd"});
}

TEST_CASE("gpu large: embedding") {
    if (kSkipped) return;
    constexpr int64_t C = 4096, N = 524416, V = 12;
    REQUIRE(is_large(N * C));
    // Only the last rows have tokens 7 to 11.
    const auto token_of = [](int64_t n) { return n < N - kRows ? n % 7 : 7 + n % 5; };
    LargeCase c(N);
    c.ints("tokens", token_of);
    c.output("out", C);
    c.fixed("wte", random_tensor(kB, V * C, 1));
    c.fixed("bad", HostTensor(Dtype::kInt32, 1).fill(0));
    c.check([&](const LargeCase::View& view, int64_t rows, const QuantOut&) {
        cuda::embedding_forward(gpu(), {.out = view("out"), .wte = view("wte"), .wpe = {},
                                        .tokens = view("tokens").as<int32_t>(),
                                        .bad_tokens = view("bad").as<int32_t>(), .N = rows, .T = rows, .C = C, .V = V});
    }, {"out"});

    c.random("dout", C);
    const HostTensor before = random_tensor(Dtype::kFp32, V * C, 2);
    std::vector<HostTensor> after;
    c.check([&](const LargeCase::View& view, int64_t rows, const QuantOut&) {
        std::vector<int32_t> order(static_cast<size_t>(rows));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return token_of(N - rows + a) < token_of(N - rows + b); });
        DeviceTensor dwte(before), order_tensor(int_tensor(order));
        cuda::embedding_backward(gpu(), {.dwte = dwte.view(), .dwpe = {}, .dout = view("dout"),
                                         .tokens = view("tokens").as<int32_t>(),
                                         .token_order = order_tensor.view().as<int32_t>(), .N = rows, .T = rows,
                                         .C = C, .V = V});
        cuda::synchronize(gpu());
        after.push_back(dwte.download());
    }, {});
    int64_t wrong = 0;
    for (int64_t i = 7 * C; i < V * C; i++) wrong += after[0].get(i) != after[1].get(i);
    CHECK_EQ(wrong, 0);
    CHECK(!after[0].same_bits(before));
}

// Compares the last document; documents and tiles begin at multiples of 1024 tokens.
TEST_CASE("gpu large: attention, and the quantized heads of FP8 attention") {
    if (kSkipped) return;
    constexpr int64_t NH = 8, NKV = 8, HS = 128, width = (NH + 2 * NKV) * HS, length = 1024, T = 684 * length;
    REQUIRE(is_large(T * width));
    struct Problem {
        int64_t tokens;
        Bulk qkv{kB, tokens * width}, dqkv{kB, tokens * width}, out{kB, tokens * NH * HS}, dout{kB, tokens * NH * HS},
            lse{Dtype::kFp32, tokens * NH}, delta{Dtype::kFp32, tokens * NH},
            sums{Dtype::kFp32, std::max<int64_t>(1, cuda::attention_sums_elems(kB, 1, tokens, NH, HS))},
            documents{Dtype::kInt32, 2 * tokens};

        explicit Problem(int64_t n) : tokens(n) {
            std::vector<int32_t> ranges(static_cast<size_t>(2 * tokens));
            for (int64_t t = 0; t < tokens; t++) {
                ranges[static_cast<size_t>(t)] = static_cast<int32_t>(t / length * length);
                ranges[static_cast<size_t>(tokens + t)] = static_cast<int32_t>((t / length + 1) * length);
            }
            cuda::copy_to_device(gpu(), documents.tensor.data, ranges.data(), documents.tensor.bytes());
            cuda::synchronize(gpu());
        }
        void run() {
            const auto* ranges = documents.tensor.as<int32_t>();
            cuda::attention_forward(gpu(), {.out = out.tensor, .lse = lse.tensor, .qkv = qkv.tensor, .B = 1,
                                            .T = tokens, .NH = NH, .NKV = NKV, .HS = HS, .softmax_mul = 0.1f,
                                            .documents = ranges});
            cuda::attention_backward(gpu(), {.dqkv = dqkv.tensor, .delta = delta.tensor, .dout = dout.tensor,
                                             .out = out.tensor, .lse = lse.tensor, .qkv = qkv.tensor, .B = 1,
                                             .T = tokens, .NH = NH, .NKV = NKV, .HS = HS, .softmax_mul = 0.1f,
                                             .documents = ranges, .sums = sums.tensor});
            cuda::synchronize(gpu());
        }
    };
    Problem all(T), last(length);
    cuda::fill_normal(gpu(), {.out = all.qkv.tensor, .key = 1, .element_offset = 0, .mean = 0, .std = 1});
    cuda::fill_normal(gpu(), {.out = all.dout.tensor, .key = 2, .element_offset = 0, .mean = 0, .std = 1});
    for (auto [to, from] : {std::pair{&last.qkv, &all.qkv}, std::pair{&last.dout, &all.dout}}) {
        const HostTensor part = from->last(to->tensor.elems);
        cuda::copy_to_device(gpu(), to->tensor.data, part.data(), part.bytes());
        cuda::synchronize(gpu());
    }
    all.run(), last.run();
    CHECK(all.out.last(length * NH * HS).same_bits(last.out.last(length * NH * HS)));
    CHECK(all.dqkv.last(length * width).same_bits(last.dqkv.last(length * width)));
    for (int64_t h = 0; h < NH; h++)
        CHECK(all.lse.part((h + 1) * T - length, length).same_bits(last.lse.part(h * length, length)));

    const auto quantize = [&](Problem& p, const Bulk& bytes, const Bulk& scales) {
        cuda::quantize_heads(gpu(), {.heads = {bytes.tensor, scales.tensor}, .qkv = p.qkv.tensor, .cos_sin = {}, .B = 1,
                                     .T = p.tokens, .NH = NH, .NKV = NKV, .HS = HS});
        cuda::synchronize(gpu());
    };
    constexpr int64_t heads = NH + 2 * NKV, blocks = T / kHeadBlock, last_blocks = length / kHeadBlock;
    Bulk bytes(Dtype::kE4m3, T * width), scales(Dtype::kFp32, heads * blocks);
    Bulk last_bytes(Dtype::kE4m3, length * width), last_scales(Dtype::kFp32, heads * last_blocks);
    quantize(all, bytes, scales), quantize(last, last_bytes, last_scales);
    for (int64_t h = 0; h < heads; h++) {
        CHECK(bytes.part(((h + 1) * blocks - last_blocks) * kHeadBlock * HS, length * HS)
                  .same_bits(last_bytes.part(h * length * HS, length * HS)));
        CHECK(scales.part((h + 1) * blocks - last_blocks, last_blocks)
                  .same_bits(last_scales.part(h * last_blocks, last_blocks)));
    }
}

// All rows of A are equal, so all rows of the product are.
TEST_CASE("gpu large: matmuls of the head") {
    if (kSkipped) return;
    constexpr int64_t N = 16768, V = 128256, C = 256;
    Bulk logits(kB, N * V), x(kB, N * C), weight(kB, V * C);
    cuda::fill_constant(gpu(), {.out = x.tensor, .value = 0.5f});
    cuda::fill_normal(gpu(), {.out = weight.tensor, .key = 1, .element_offset = 0, .mean = 0, .std = 1});
    cuda::gemm(gpu(), {.D = logits.tensor, .A = x.tensor, .B = weight.tensor, .M = N, .N = V, .K = C});
    const HostTensor first = logits.part(0, V);
    CHECK(logits.part(N / 2 * V, V).same_bits(first));
    CHECK(logits.last(V).same_bits(first));
    cuda::fill_constant(gpu(), {.out = logits.tensor, .value = 0.5f});
    cuda::gemm(gpu(), {.D = x.tensor, .A = logits.tensor, .B = weight.tensor, .M = N, .N = C,
                       .K = V, .layout = GemmLayout::kDgrad});
    CHECK(x.last(C).same_bits(x.part(0, C)));
}

TEST_CASE("gpu large: the amax of the last element") {
    if (kSkipped) return;
    const int64_t elems = (int64_t{1} << 31) + 40;
    Bulk in(kB, elems);
    cuda::fill_constant(gpu(), {.out = in.tensor, .value = 1});
    cuda::fill_constant(gpu(), {.out = in.tensor.slice(elems - 1, 1), .value = 1000});
    DeviceTensor entry(tensor_of(ScaleEntry{}));
    cuda::amax(gpu(), {.entry = static_cast<ScaleEntry*>(entry.view().data), .in = in.tensor});
    cuda::synchronize(gpu());
    CHECK_EQ(object_of<ScaleEntry>(entry.download()).amax_bits, amax_bits_of(1000.0f));
}

}  // namespace large_test

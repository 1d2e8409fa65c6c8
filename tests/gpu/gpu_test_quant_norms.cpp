// Quantizing norms, rope, qk-norm and attention.
#include "tests/gpu/gpu_quant.h"

using namespace op_test;

namespace quant_norms_test {

namespace {

constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32;

HostTensor random(const std::string& name, Dtype dtype, int64_t elems, double mul = 1, double mean = 0) {
    return random_tensor(dtype, elems, rng_key(9, name), mul, mean);
}

struct Shape {
    int64_t N, C;
};
// One warp or block per row, with and without idle threads; part of a group, several groups, several groups per block
// (4240 rows with one block per multiprocessor, 12704 with up to three); rows of which fewer than 32 fit, and more of
// them than blocks; numbers of rows that `transposed` does not support; a row too long for the row kernels.
const Shape kShapes[] = {{16, 16},    {48, 256},    {272, 768},  {80, 1024},  {48, 1040}, {272, 1536},
                         {112, 1600}, {12704, 1040}, {32, 4096},  {4240, 2048}, {272, 4096}, {272, 5120},
                         {48, 8192},  {7, 768},     {7, 1600},   {16, 20000}};

Producer forward(bool layer, const Shape& s, bool residual, bool corrupted) {
    const int64_t elems = s.N * s.C;
    Producer p{.name = strf("%s_forward %lld x %lld", layer ? "layernorm" : "rmsnorm", (long long)s.N, (long long)s.C),
               .result = "out", .N = s.N, .C = s.C, .same = {"rstd"}, .result_optional = true};
    p.tensors["in"] = random("in", kB, elems, 1, 0.5);
    if (corrupted) p.tensors["in"].set(elems / 2, std::numeric_limits<double>::infinity());
    if (residual) {
        p.tensors["residual"] = random("residual", kB, elems);
        p.tensors["residual_out"] = HostTensor(kB, elems);
        p.same.push_back("residual_out");
    }
    p.tensors["weight"] = random("weight", kB, s.C, 0.5, 1);
    if (layer) {
        p.tensors["bias"] = random("bias", kB, s.C);
        p.tensors["mean"] = HostTensor(kF, s.N);
        p.same.push_back("mean");
    }
    p.tensors["rstd"] = HostTensor(kF, s.N);
    p.tensors["out"] = HostTensor(kB, elems);
    p.run = [=](const View& view, const QuantOut& quant) {
        (layer ? cuda::layernorm_forward : cuda::rmsnorm_forward)(
            gpu(), {.out = view("out"), .residual_out = view("residual_out"), .mean = view("mean"),
                    .rstd = view("rstd"), .in = view("in"), .residual = view("residual"), .weight = view("weight"),
                    .bias = view("bias"), .N = s.N, .C = s.C, .eps = 1e-5f, .quant = quant});
    };
    return p;
}

Producer backward(bool layer, const Shape& s, bool in_place, bool corrupted) {
    const int64_t elems = s.N * s.C;
    Producer p{.name = strf("%s_backward %lld x %lld", layer ? "layernorm" : "rmsnorm", (long long)s.N,
                            (long long)s.C),
               .result = "dx", .N = s.N, .C = s.C, .close = {"dweight"}, .result_kept = true};
    p.tensors["dx"] = random("dx", kB, elems);
    if (!in_place) p.tensors["dresidual"] = random("dresidual", kB, elems);
    p.tensors["dout"] = random("dout", kB, elems);
    if (corrupted) p.tensors["dout"].set(elems / 2, std::numeric_limits<double>::quiet_NaN());
    p.tensors["x"] = random("x", kB, elems);
    p.tensors["weight"] = random("weight", kB, s.C, 0.5, 1);
    p.tensors["rstd"] = random("rstd", kF, s.N, 0.25, 1);
    p.tensors["dweight"] = random("dweight", kF, s.C);
    p.tensors["scratch"] = HostTensor(kF, 2 * kPartialRows * s.C);
    if (layer) {
        p.tensors["mean"] = random("mean", kF, s.N, 0.25);
        p.tensors["dbias"] = random("dbias", kF, s.C);
        p.close.push_back("dbias");
    }
    if (corrupted) p.close.clear();
    p.run = [=](const View& view, const QuantOut& quant) {
        (layer ? cuda::layernorm_backward : cuda::rmsnorm_backward)(
            gpu(), {.dx = view("dx"), .dresidual = view(in_place ? "dx" : "dresidual"), .dweight = view("dweight"),
                    .dbias = view("dbias"), .scratch = view("scratch"), .dout = view("dout"), .x = view("x"),
                    .mean = view("mean"), .rstd = view("rstd"), .weight = view("weight"), .N = s.N, .C = s.C,
                    .quant = quant});
    };
    return p;
}

struct Heads {
    int64_t B, T, NH, NKV, HS;
    int64_t N() const { return B * T; }
    int64_t C() const { return (NH + 2 * NKV) * HS; }
    std::string text() const {
        return strf(" %lld x %lld, (%lld + 2 * %lld) x %lld", (long long)B, (long long)T, (long long)NH,
                    (long long)NKV, (long long)HS);
    }
};
// Head sizes with specialised kernels and others; more than one chunk of heads; rows that end within a group.
const Heads kHeads[] = {{3, 16, 12, 12, 64}, {2, 136, 6, 2, 128}, {1, 80, 32, 8, 128}, {1, 32, 2, 1, 80},
                        {2, 24, 2, 1, 256},  {1, 48, 3, 1, 16},   {1, 16, 4, 2, 24},   {1, 7, 4, 2, 64}};
// qk-norm over all heads: a part of a tile of rows, several tiles, numbers of rows that `transposed` does not support,
// columns that are no whole tiles, and rows too long for the row kernels.
const Heads kAllHeads[] = {{1, 16, 1, 1, 384}, {1, 48, 1, 1, 2048}, {2, 136, 1, 1, 1600}, {1, 1104, 1, 1, 768},
                           {1, 7, 1, 1, 2048}, {1, 33, 1, 1, 1008}, {1, 16, 1, 1, 1008},  {1, 48, 1, 1, 8208}};

// at_positions: documents of 5 tokens.
Producer rope(const Heads& h, bool forward, bool at_positions = false) {
    Producer p{.name = (forward ? "rope_forward" : "rope_backward") + h.text() + (at_positions ? " at positions" : ""),
               .result = "qkv", .N = h.N(), .C = h.C()};
    p.tensors["qkv"] = random("qkv", kB, h.N() * h.C());
    p.tensors["cos_sin"] = angle_table(h.T, h.HS);
    HostTensor& positions = p.tensors["positions"] = HostTensor(Dtype::kInt32, h.N());
    for (int64_t n = 0; n < h.N(); n++) positions.set(n, static_cast<double>(n % 5));
    p.run = [=](const View& view, const QuantOut& quant) {
        (forward ? cuda::rope_forward : cuda::rope_backward)(
            gpu(), {.qkv = view("qkv"), .cos_sin = view("cos_sin"), .N = h.N(), .T = h.T, .NH = h.NH, .NKV = h.NKV,
                    .HS = h.HS, .quant = quant,
                    .positions = at_positions ? view("positions").template as<int32_t>() : nullptr});
    };
    return p;
}

Producer qk_norm(const Heads& h) {
    Producer p{.name = "qk_norm_backward" + h.text(), .result = "dqkv", .N = h.N(), .C = h.C(),
               .same = {"dq_weight", "dk_weight"}};
    p.tensors["dqkv"] = random("dqkv", kB, h.N() * h.C());
    p.tensors["in"] = random("in", kB, h.N() * h.C());
    p.tensors["rstd"] = random("rstd", kF, h.N() * (h.NH + h.NKV), 0.25, 1);
    for (const char* name : {"q_weight", "k_weight"}) p.tensors[name] = random(name, kB, h.HS, 0.5, 1);
    for (const char* name : {"dq_weight", "dk_weight"}) p.tensors[name] = random(name, kF, h.HS);
    p.tensors["scratch"] = HostTensor(kF, 2 * kPartialRows * h.HS);
    p.run = [=](const View& view, const QuantOut& quant) {
        cuda::qk_norm_backward(gpu(), {.dqkv = view("dqkv"), .dq_weight = view("dq_weight"),
                                       .dk_weight = view("dk_weight"), .scratch = view("scratch"), .in = view("in"),
                                       .rstd = view("rstd"), .q_weight = view("q_weight"), .k_weight = view("k_weight"),
                                       .N = h.N(), .NH = h.NH, .NKV = h.NKV, .HS = h.HS, .KS = h.HS, .quant = quant});
    };
    return p;
}

void add_attention(Producer& p, const Heads& h) {
    p.tensors["qkv"] = random("qkv", kB, h.N() * h.C());
    p.tensors["out"] = HostTensor(kB, h.N() * h.NH * h.HS);
    p.tensors["lse"] = HostTensor(kF, h.N() * h.NH);
}
float softmax_mul(const Heads& h) { return 1.0f / std::sqrt(static_cast<float>(h.HS)); }

Producer attention_forward(const Heads& h) {
    Producer p{.name = "attention_forward" + h.text(), .result = "out", .N = h.N(), .C = h.NH * h.HS,
               .same = {"lse"}, .result_kept = true};
    add_attention(p, h);
    p.run = [=](const View& view, const QuantOut& quant) {
        cuda::attention_forward(gpu(), {.out = view("out"), .lse = view("lse"), .qkv = view("qkv"), .B = h.B,
                                        .T = h.T, .NH = h.NH, .NKV = h.NKV, .HS = h.HS,
                                        .softmax_mul = softmax_mul(h), .quant = quant});
    };
    return p;
}
Producer attention_backward(const Heads& h) {
    Producer p{.name = "attention_backward" + h.text(), .result = "dqkv", .N = h.N(), .C = h.C(), .result_kept = true};
    add_attention(p, h);
    const HostTensors after = run_producer(attention_forward(h), nullptr, {});
    p.tensors["out"] = after.at("out");
    p.tensors["lse"] = after.at("lse");
    p.tensors["dout"] = random("dout", kB, h.N() * h.NH * h.HS);
    p.tensors["dqkv"] = HostTensor(kB, h.N() * h.C());
    p.tensors["delta"] = HostTensor(kF, h.N() * h.NH);
    const int64_t sums = cuda::attention_sums_elems(kB, h.B, h.T, h.NH, h.HS);
    p.tensors["sums"] = HostTensor(kF, std::max<int64_t>(sums, 1));
    p.run = [=](const View& view, const QuantOut& quant) {
        cuda::attention_backward(gpu(), {.dqkv = view("dqkv"), .delta = view("delta"), .dout = view("dout"),
                                         .out = view("out"), .lse = view("lse"), .qkv = view("qkv"), .B = h.B,
                                         .T = h.T, .NH = h.NH, .NKV = h.NKV, .HS = h.HS,
                                         .softmax_mul = softmax_mul(h), .quant = quant, .sums = view("sums")});
    };
    return p;
}

}  // namespace

TEST_CASE("gpu quant: layernorm and rmsnorm") {
    for (const Shape& s : kShapes) {
        if (left_out(s.N * s.C)) continue;
        for (bool layer : {false, true}) {
            check_producer(forward(layer, s, s.N != 80, false));
            check_producer(backward(layer, s, s.N == 80, false));
            if (s.N * s.C > 100000) continue;
            check_producer(forward(layer, s, true, true), false);
            check_producer(backward(layer, s, false, true), false);
        }
    }
}

TEST_CASE("gpu quant: rope and qk-norm") {
    for (const Heads& h : kHeads) {
        if (left_out(h.N() * h.C())) continue;
        check_producer(rope(h, false));
        check_producer(rope(h, true));
        check_producer(rope(h, false, true));
        check_producer(rope(h, true, true));
        check_producer(qk_norm(h));
    }
    for (const Heads& h : kAllHeads)
        if (!left_out(h.N() * h.C())) check_producer(qk_norm(h));
}

// Three rows of 72 threads per block: warps begin within rows, and the last one is not full.
TEST_CASE("gpu quant: rope finds an amax in any thread") {
    const Heads h{1, 10, 12, 12, 64};
    if (left_out(h.N() * h.C())) return;
    Producer p = rope(h, true);
    const QuantRequest record = quant_request("record only");
    const HostTensors request = quant_tensors(record, h.N(), h.C(), 0);
    for (int64_t i = 0; i < h.N() * h.C(); i += 8) {
        HostTensor& qkv = p.tensors["qkv"] = HostTensor(kB, h.N() * h.C()).fill(0);
        qkv.set(i, 3);
        HostTensors got = run_producer(p, &record, request);
        INFO("element " << i);
        CHECK_EQ(entry_in(got.at("entry")).amax_bits, amax_bits_of_all(got.at("qkv")));
    }
}

TEST_CASE("gpu quant: attention") {
    for (const Heads& h : {Heads{2, 40, 4, 2, 64}, Heads{1, 80, 2, 1, 128}, Heads{3, 16, 2, 1, 16}}) {
        check_producer(attention_forward(h));
        check_producer(attention_backward(h));
    }
}

TEST_CASE("gpu quant: arguments that quantizing operations refuse") {
    Producer p = forward(false, {16, 64}, false, false);
    p.tensors["out"] = HostTensor(kF, 16 * 64);
    for (const char* name : {"in", "weight"}) p.tensors[name] = p.tensors[name].to(kF);
    QuantRequest v = quant_request("delayed");
    const HostTensors request = quant_tensors(v, 16, 64, 0);
    CHECK_NE(error_of([&] { run_producer(p, &v, request); }).find("made of bf16"), std::string::npos);
    p = forward(false, {8, 64}, false, false);
    CHECK_NE(error_of([&] { run_producer(p, &v, quant_tensors(v, 8, 64, 0)); }).find("8 rows transposed"),
             std::string::npos);
}

}  // namespace quant_norms_test

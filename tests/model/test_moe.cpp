// Mixtures of experts against a loop over the experts in double.
#include "tests/support/doctest.h"

#include <cmath>
#include <numeric>

#include "llmc/base/fp8_cast.h"
#include "llmc/model/moe_mlp.h"
#include "tests/support/fp8_model_test.h"
#include "tests/support/reference.h"

using Values = std::vector<double>;

#ifndef LLMC_CUDA
namespace {

Values random_values(int64_t count, uint64_t key, double size, double mean = 0) {
    Values values;
    for (int64_t i = 0; i < count; i++)
        values.push_back(mean + size * static_cast<double>(rng_normal(key, static_cast<uint64_t>(i))));
    return values;
}

struct Mixture {
    int64_t N, C, F, E, K;
    bool normalize;
    bool fp8 = false;   // quantize as the blockwise recipe does, what bf16 has
    bool shared = false;   // with the router of models with shared experts, of which this one has two
    bool even = false;     // of RouterForwardArgs
    bool gpt_oss = false;  // biases and clamped_swiglu
    double scale() const { return shared ? 2.5 : 1; }
    Values x = {}, norm = {}, router = {}, up = {}, down = {};   // x: the residual stream
    Values dy = {};   // the gradient of the block's output
    Values bias = {}, shared_up = {}, shared_down = {};   // up: as of two experts in turn
    Values logit_bias = {}, up_bias = {}, down_bias = {};
};
struct MixtureResult {
    Values out, dx, dnorm, drouter, dup, ddown, dshared_up, dshared_down, dlogit_bias, dup_bias, ddown_bias;
    std::vector<int64_t> rows;   // of experts
};

// The rows of `experts`: the experts of token n are those of entry n, n + N, ... of the list of all rows by expert.
Mixture mixture(std::vector<int64_t> rows, int64_t K, bool normalize, bool shared, bool gpt_oss) {
    const int64_t E = static_cast<int64_t>(rows.size()), R = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    Mixture m{.N = R / K, .C = 32, .F = 80, .E = E, .K = K, .normalize = normalize, .shared = shared,
              .gpt_oss = gpt_oss};
    const int64_t N = m.N, C = m.C, F = m.F;
    m.x = random_values(N * C, 1, 1), m.dy = random_values(N * C, 2, 0.1), m.norm = random_values(C, 3, 0.1, 1);
    m.router = random_values(E * C, 4, 0.05);
    m.up = random_values(E * 2 * F * C, 5, gpt_oss ? 0.5 : 0.3), m.down = random_values(E * C * F, 6, 0.3);
    m.bias = random_values(shared ? E : 0, 7, 0.1);
    m.shared_up = random_values(shared ? 4 * F * C : 0, 8, 0.3);
    m.shared_down = random_values(shared ? 2 * C * F : 0, 9, 0.3);
    m.logit_bias = random_values(gpt_oss ? E : 0, 10, 0.3);
    m.up_bias = random_values(gpt_oss ? E * 2 * F : 0, 11, 1), m.down_bias = random_values(gpt_oss ? E * C : 0, 12, 1);
    // Expert e answers to channel e, which is large in its tokens.
    for (int64_t e = 0; e < E; e++) m.router[static_cast<size_t>(e * C + e)] += 1;
    for (int64_t n = 0; n < N; n++)
        for (int64_t e = 0; e < E; e++) m.x[static_cast<size_t>(n * C + e)] -= 4;
    int64_t row = 0;
    for (int64_t e = 0; e < E; e++)
        for (int64_t i = 0; i < rows[static_cast<size_t>(e)]; i++, row++)
            m.x[static_cast<size_t>(row % N * C + e)] += 8;
    return m;
}

double bf16_of(double value) { return static_cast<double>(static_cast<float>(bf16(static_cast<float>(value)))); }

// Elements of a (rows, columns) matrix, rounded to bf16 and quantized in blocks of `height` rows and 128 columns.
Values fp8_of(const Values& values, int64_t columns, int64_t height) {
    Values out(values.size());
    const int64_t rows = static_cast<int64_t>(values.size()) / columns;
    for (int64_t row = 0; row < rows; row += height)
        for (int64_t left = 0; left < columns; left += kScaleBlock) {
            double amax = 0;
            const auto each = [&](auto&& f) {
                for (int64_t r = row; r < std::min(rows, row + height); r++)
                    for (int64_t c = left; c < std::min(columns, left + kScaleBlock); c++)
                        f(static_cast<size_t>(r * columns + c));
            };
            each([&](size_t i) { amax = std::max(amax, std::fabs(bf16_of(values[i]))); });
            const float scale = block_scale_of(amax_bits_of(static_cast<float>(amax)), fp8_largest(Dtype::kE4m3));
            each([&](size_t i) {
                const uint8_t code = fp8_cast<Dtype::kE4m3>(static_cast<float>(bf16_of(values[i])) * scale);
                out[i] = static_cast<double>(from_fp8(Dtype::kE4m3, code)) / static_cast<double>(scale);
            });
        }
    return out;
}
// The weights of all experts, each (rows, columns).
Values fp8_experts(const Values& values, int64_t rows, int64_t columns) {
    Values out;
    for (auto at = values.begin(); at != values.end(); at += rows * columns)
        for (double value : fp8_of(Values(at, at + rows * columns), columns, kScaleBlock)) out.push_back(value);
    return out;
}

double at(const Values& v, int64_t i) { return v[static_cast<size_t>(i)]; }
double& to(Values& v, int64_t i) { return v[static_cast<size_t>(i)]; }
Values row_of(const Values& v, bool fp8) { return fp8 ? fp8_of(v, static_cast<int64_t>(v.size()), 1) : v; }

// Expert e of these weights and one token with x = h, its output and gradients. Returns the gradient of its weight.
struct ExpertWeights {
    const Values &up, &down;
    Values &dup, &ddown;
    bool fp8;
    Values *dup_bias = nullptr, *ddown_bias = nullptr;   // with m.gpt_oss
};
double add_expert(const Mixture& m, int64_t n, int64_t e, double weight, const Values& h, Values& dh, Values& out,
                  const ExpertWeights& w) {
    const int64_t C = m.C, F = m.F;
    const Values hq = row_of(h, w.fp8), dy = row_of(Values(m.dy.begin() + n * C, m.dy.begin() + (n + 1) * C), w.fp8);
    const auto stored = [&](double value) { return w.fp8 ? bf16_of(value) : value; };
    double dweight = 0;
    Values act, dboth(static_cast<size_t>(2 * F));   // [dgate | dup]
    for (int64_t f = 0; f < F; f++) {
        const int64_t gate_row = (2 * e * F + f) * C, up_row = gate_row + F * C;
        double gate = 0, up = 0, dact = 0;
        for (int64_t c = 0; c < C; c++) {
            gate += at(w.up, gate_row + c) * at(hq, c);
            up += at(w.up, up_row + c) * at(hq, c);
            dact += at(dy, c) * at(w.down, (e * C + c) * F + f);
        }
        gate = stored(gate), up = stored(up), dact = stored(dact);
        bool gate_is_clamped = false, up_is_clamped = false;
        if (m.gpt_oss) {
            gate += at(m.up_bias, 2 * e * F + f), up += at(m.up_bias, (2 * e + 1) * F + f);
            gate_is_clamped = gate > 7, up_is_clamped = std::fabs(up) > 7;
            gate = std::min(gate, 7.0), up = std::clamp(up, -7.0, 7.0) + 1;
        }
        const double slope = m.gpt_oss ? 1.702 : 1;
        const double sigmoid = 1 / (1 + std::exp(-slope * gate)), silu = gate * sigmoid;
        act.push_back(silu * up * weight);
        dweight += dact * silu * up;
        if (!gate_is_clamped) to(dboth, f) = dact * weight * up * sigmoid * (1 + slope * gate * (1 - sigmoid));
        if (!up_is_clamped) to(dboth, F + f) = dact * weight * silu;
    }
    for (int64_t f = 0; m.gpt_oss && f < 2 * F; f++) to(*w.dup_bias, 2 * e * F + f) += at(dboth, f);
    for (int64_t c = 0; m.gpt_oss && c < C; c++) {
        to(out, n * C + c) += weight * at(m.down_bias, e * C + c);
        dweight += at(m.dy, n * C + c) * at(m.down_bias, e * C + c);
        to(*w.ddown_bias, e * C + c) += weight * at(m.dy, n * C + c);
    }
    act = row_of(act, w.fp8), dboth = row_of(dboth, w.fp8);
    for (int64_t f = 0; f < F; f++)
        for (int64_t c = 0; c < C; c++) {
            const int64_t down = (e * C + c) * F + f;
            to(out, n * C + c) += at(w.down, down) * at(act, f);
            to(w.ddown, down) += at(dy, c) * at(act, f);
        }
    for (int64_t f = 0; f < 2 * F; f++)
        for (int64_t c = 0; c < C; c++) {
            const int64_t up = (2 * e * F + f) * C + c;
            to(w.dup, up) += at(dboth, f) * at(hq, c);
            to(dh, c) += at(dboth, f) * at(w.up, up);
        }
    return dweight;
}

// One token: the experts by a loop over all of them. m.up and m.down are quantized with m.fp8.
void add_token(const Mixture& m, int64_t n, double eps, MixtureResult& r) {
    const int64_t C = m.C, E = m.E;
    const ExpertWeights own{m.up, m.down, r.dup, r.ddown, m.fp8, &r.dup_bias, &r.ddown_bias},
        shared{m.shared_up, m.shared_down, r.dshared_up, r.dshared_down, false};
    double squares = 0;
    for (int64_t c = 0; c < C; c++) squares += at(m.x, n * C + c) * at(m.x, n * C + c);
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(C) + eps);
    Values h, dh(static_cast<size_t>(C)), p, dp(static_cast<size_t>(E));
    for (int64_t c = 0; c < C; c++) h.push_back(at(m.x, n * C + c) * rstd * at(m.norm, c));
    if (m.fp8)
        for (double& value : h) value = bf16_of(value);
    double total = 0;
    for (int64_t e = 0; e < E; e++) {
        double logit = m.gpt_oss ? at(m.logit_bias, e) : 0;
        for (int64_t c = 0; c < C; c++) logit += at(m.router, e * C + c) * at(h, c);
        p.push_back(m.shared ? 1 / (1 + std::exp(-logit)) : std::exp(logit));
        total += p.back();
    }
    for (double& value : p) value /= m.shared ? 1 : total;
    Values score = p, sorted;
    for (int64_t e = 0; m.shared && e < E; e++) to(score, e) += at(m.bias, e);
    for (int64_t e = 0; m.even && e < E; e++) to(score, e) = evenly_chosen(n, e, E, m.K);
    sorted = score;
    std::sort(sorted.rbegin(), sorted.rend());
    const double least = at(sorted, m.K - 1);
    double sum = 0, mean = 0;
    for (int64_t e = 0; e < E; e++) sum += at(score, e) < least ? 0 : at(p, e);
    if (!m.normalize) sum = 1;
    for (int64_t e = 0; m.shared && e < 2; e++)
        add_expert(m, n, e, 1, h, dh, r.out, shared);
    for (int64_t e = 0; e < E; e++) {
        if (at(score, e) < least) continue;
        r.rows[static_cast<size_t>(e)]++;
        const double weight = m.scale() * at(p, e) / sum;
        const double dweight = add_expert(m, n, e, weight, h, dh, r.out, own);
        to(dp, e) = m.scale() * dweight;
        mean += dweight * weight;
    }
    double dot = 0;
    for (int64_t e = 0; e < E; e++) {
        if (m.normalize && at(score, e) >= least) to(dp, e) = (at(dp, e) - mean) / sum;
        dot += at(dp, e) * at(p, e);
    }
    for (int64_t e = 0; e < E; e++) {
        const double dlogit = at(p, e) * (m.shared ? at(dp, e) * (1 - at(p, e)) : at(dp, e) - dot);
        if (m.gpt_oss) to(r.dlogit_bias, e) += dlogit;
        for (int64_t c = 0; c < C; c++) {
            to(r.drouter, e * C + c) += dlogit * at(h, c);
            to(dh, c) += dlogit * at(m.router, e * C + c);
        }
    }
    double along = 0;
    for (int64_t c = 0; c < C; c++) along += at(dh, c) * at(m.norm, c) * at(m.x, n * C + c);
    for (int64_t c = 0; c < C; c++) {
        const double x = at(m.x, n * C + c);
        to(r.dnorm, c) += at(dh, c) * x * rstd;
        to(r.dx, n * C + c) = at(m.dy, n * C + c) + rstd * at(dh, c) * at(m.norm, c)
                              - x * rstd * rstd * rstd * along / static_cast<double>(C);
    }
}

MixtureResult reference_of(Mixture m, double eps) {
    if (m.fp8) m.up = fp8_experts(m.up, 2 * m.F, m.C), m.down = fp8_experts(m.down, m.C, m.F);
    const auto zeros = [](const Values& like) { return Values(like.size()); };
    MixtureResult r{zeros(m.x), zeros(m.x), zeros(m.norm), zeros(m.router), zeros(m.up), zeros(m.down),
                    zeros(m.shared_up), zeros(m.shared_down), zeros(m.logit_bias), zeros(m.up_bias),
                    zeros(m.down_bias), std::vector<int64_t>(static_cast<size_t>(m.E))};
    for (int64_t n = 0; n < m.N; n++) add_token(m, n, eps, r);
    return r;
}

void fill(const Tensor& tensor, const Values& values) {
    REQUIRE(tensor.elems == static_cast<int64_t>(values.size()));
    for (int64_t i = 0; i < tensor.elems; i++) {
        const double value = values[static_cast<size_t>(i)];
        if (tensor.dtype == Dtype::kFp64) tensor.as<double>()[i] = value;
        else if (tensor.dtype == Dtype::kBf16) tensor.as<bf16>()[i] = bf16(static_cast<float>(value));
        else tensor.as<float>()[i] = static_cast<float>(value);
    }
}

// Values that bf16 has, so that all dtypes compute with the same ones.
Values rounded(const Values& values) {
    Values out;
    for (double value : values) out.push_back(bf16_of(value));
    return out;
}

// Sets FP8 weights, and quantizes dy for `down`.
LinearOperand start_fp8(TestModel& model, ModelContext& context, const Mixture& m, Tensor dy) {
    for (const auto& [kind, values] : {std::pair(LinearKind::kUp, &m.up), {LinearKind::kDown, &m.down}}) {
        std::vector<float> master(values->begin(), values->end());
        model.trainer->fp8().quantize_weight(model.ctx, *model.trainer->fp8().linear(0, kind),
                                             {master.data(), Dtype::kFp32, static_cast<int64_t>(master.size())},
                                             nullptr);
        device::synchronize(model.ctx);
    }
    const PendingOperand quantized = context.begin_dy(context.linear(0, LinearKind::kDown),
                                                      context.alloc_dy(m.N, m.C, dy, true), m.N, true);
    ops::quantize(model.ctx, {.quant = quantized.quant, .in = dy, .N = m.N, .C = m.C});
    return context.finish(model.ctx, quantized);
}

// Two experts in turn as one MLP of twice the width and back: blocks (a, b) of rows become (b, a); rows of F columns of
// each expert become the halves of rows of 2 F.
Values swapped(const Values& values, int64_t a, int64_t b) {
    const int64_t size = static_cast<int64_t>(values.size()) / (a * b);
    Values out;
    for (int64_t j = 0; j < b; j++)
        for (int64_t i = 0; i < a; i++)
            out.insert(out.end(), values.begin() + (i * b + j) * size, values.begin() + (i * b + j + 1) * size);
    return out;
}
Values side_by_side(const Values& values, int64_t rows, int64_t F) {
    Values out;
    for (int64_t i = 0; i < 2 * rows; i++) {
        const auto from = values.begin() + (i % 2 * rows + i / 2) * F;
        out.insert(out.end(), from, from + F);
    }
    return out;
}
Values apart(const Values& values, int64_t rows, int64_t F) {
    Values out;
    for (int64_t i = 0; i < 2 * rows; i++) {
        const auto from = values.begin() + (i % rows * 2 + i / rows) * F;
        out.insert(out.end(), from, from + F);
    }
    return out;
}

// The same by MoeMlp, forward, recomputation and backward.
MixtureResult result_of(const Mixture& m, Dtype dtype, Recompute level) {
    Config config = tiny_config(tiny_moe(), dtype, 1, m.N);
    ModelConfig& shape = config.shape;
    shape.hidden_size = m.C, shape.ffn_hidden_size = m.F, shape.num_layers = 1;
    shape.shared_experts = m.shared ? 2 : 0, shape.routed_scale = m.scale();
    shape.num_experts = m.E, shape.experts_per_token = m.K, shape.normalize_experts = m.normalize;
    if (m.gpt_oss)
        shape.activation = Activation::kClampedSwiglu, shape.linear_bias = LinearBias::kMlp,
        shape.attention_sinks = true, shape.qk_norm = false;
    if (m.fp8) config.fp8_recipe = Fp8Recipe::kBlockwise, config.fp8_format = Fp8Format::kE4m3;
    if (m.fp8) config.bf16_linears = {"*.qkv", "*.proj"};
    TestModel model(config);
    const LayerParams& p = model.table.layers[0];
    Decoder& decoder = model.trainer->decoder();
    std::vector<std::pair<int, Values>> weights = {{p.norm2_weight, m.norm}, {p.router_weight, m.router},
                                                   {p.up_weight, m.up}, {p.down_weight, m.down}};
    if (m.shared)
        weights.insert(weights.end(), {{p.router_bias, m.bias}, {p.shared_up_weight, swapped(m.shared_up, 2, 2)},
                                       {p.shared_down_weight, side_by_side(m.shared_down, m.C, m.F)}});
    if (m.gpt_oss)
        weights.insert(weights.end(), {{p.router_logit_bias, m.logit_bias}, {p.experts_up_bias, m.up_bias},
                                       {p.experts_down_bias, m.down_bias}});
    for (const auto& [param, values] : weights) {
        if (decoder.weight(param)) fill(decoder.weight(param), values);
        std::memset(decoder.grad(param).data, 0, static_cast<size_t>(decoder.grad(param).bytes()));
    }
    std::vector<double> load(static_cast<size_t>(m.E));
    DecoderOptions options{.max_seq = m.N, .dtype = dtype, .recompute = level, .even_experts = m.even};
    options.expert_load = {load.data(), Dtype::kFp64, m.E};
    constexpr int64_t kBytes = int64_t{1} << 26;
    const std::unique_ptr<void, void (*)(void*)> memory(device::device_alloc(kBytes), device::device_free);
    Arena arena(memory.get(), kBytes);
    arena.set_poison(true);
    ModelContext context(shape, model.table, options, arena, decoder.store(), model.trainer->fp8());
    const auto mlps = make_mlps(context);
    Mlp* const mlp = mlps[0].get();
    Arena::Scope scope(model.ctx, arena);
    const int64_t elems = m.N * m.C;
    const Tensor zero = context.scratch(dtype, elems), x = context.scratch(dtype, elems),
                 branch = context.scratch(dtype, elems), dy = context.scratch(dtype, elems);
    fill(zero, Values(m.x.size())), fill(x, m.x), fill(dy, m.dy);
    const DeviceBatch batch{.B = 1, .T = m.N};
    const NormInput input{.in = zero, .residual = x, .residual_out = mlp->residual(0, m.N)};
    const StepState state{};   // no loss of the router
    const LinearOperand of_dy = m.fp8 ? start_fp8(model, context, m, dy) : LinearOperand{.unquantized = dy};
    mlp->forward(model.ctx, 0, input, branch, batch);
    const Values out = model.read(branch);
    mlp->recompute(model.ctx, 0, input, batch);
    const LinearOperand dx = mlp->backward(model.ctx, 0, of_dy, {.unquantized = dy}, {}, batch, &state);
    const auto grad = [&](int param) { return param < 0 ? Values() : model.grad(param); };
    return {out, model.read(dx.unquantized), grad(p.norm2_weight), grad(p.router_weight), grad(p.up_weight),
            grad(p.down_weight), swapped(grad(p.shared_up_weight), 2, 2),
            m.shared ? apart(grad(p.shared_down_weight), m.C, m.F) : Values(), grad(p.router_logit_bias),
            grad(p.experts_up_bias), grad(p.experts_down_bias), {}};
}

}  // namespace

TEST_CASE("experts compute what a loop over the experts in double computes, with any number of rows") {
    const struct {
        std::vector<int64_t> rows;
        int64_t K;
        bool normalize, shared, even = false, gpt_oss = false;
    } cases[] = {{{0, 1, 127, 128, 129, 15}, 1, false, false},   // one expert of each token
                 {{129, 128, 127, 1, 0, 31}, 2, true, false},
                 {{129, 128, 127, 1, 0, 31}, 2, false, false},
                 {{129, 128, 127, 1, 0, 31}, 2, true, true},
                 {{0, 1, 127, 128, 129, 15}, 1, false, true},
                 {{64, 64, 64, 64, 64}, 2, true, false, true},   // chosen evenly
                 {{54, 53, 53, 54, 53, 53}, 2, false, true, true},
                 {{0, 144, 0}, 1, false, false},               // all tokens to one
                 {{129, 128, 127, 1, 0, 31}, 2, true, false, false, true},
                 {{16, 16, 16}, 3, true, false}};              // all experts of every token; FP8 has 16 tokens
    for (const auto& c : cases) {
        Mixture m = mixture(c.rows, c.K, c.normalize, c.shared, c.gpt_oss);
        m.even = c.even;
        for (Values* values : {&m.x, &m.norm, &m.router, &m.up, &m.down, &m.dy, &m.bias, &m.shared_up, &m.shared_down,
                               &m.logit_bias, &m.up_bias, &m.down_bias})
            *values = rounded(*values);
        for (Dtype dtype : {Dtype::kFp64, Dtype::kFp32, Dtype::kBf16, Dtype::kE4m3}) {   // the last one: blockwise
            m.fp8 = dtype == Dtype::kE4m3;
            const MixtureResult expected = reference_of(m, static_cast<double>(1e-5f));
            CHECK(expected.rows == c.rows);
            CAPTURE(dtype_name(dtype));
            if (m.fp8) dtype = Dtype::kBf16;
            for (Recompute level : {Recompute::kNone, Recompute::kNormAct, Recompute::kBlock}) {
                const MixtureResult result = result_of(m, dtype, level);
                // Sums of a few hundred products, each rounded a few times. The gradient of the router cancels where
                // a probability is near 1, but BF16 rounds the operands of sums alone.
                const double tolerance = (dtype == Dtype::kBf16 ? 16 : 128) * reference::unit_roundoff(dtype);
                const std::pair<const char*, Values MixtureResult::*> all[] = {
                    {"out", &MixtureResult::out}, {"dx", &MixtureResult::dx}, {"dnorm", &MixtureResult::dnorm},
                    {"drouter", &MixtureResult::drouter}, {"dup", &MixtureResult::dup},
                    {"ddown", &MixtureResult::ddown}, {"dshared_up", &MixtureResult::dshared_up},
                    {"dshared_down", &MixtureResult::dshared_down}, {"dlogit_bias", &MixtureResult::dlogit_bias},
                    {"dup_bias", &MixtureResult::dup_bias}, {"ddown_bias", &MixtureResult::ddown_bias}};
                for (const auto& [name, part] : all) {
                    CAPTURE(name);
                    const Values &got = result.*part, &want = expected.*part;
                    if (want.empty()) continue;
                    const bool none = norm_of(want) < 1e-12;   // a router of which all experts are chosen with weight 1
                    if (none) CHECK(norm_of(got) < 1e-4);
                    if (none) continue;
                    CHECK(distance(got, want) < tolerance);
                    Values mutated = got;
                    mutated[mutated.size() / 3] += 2 * tolerance * norm_of(want);
                    CHECK(distance(mutated, want) > tolerance);   // one changed element shows
                }
            }
        }
    }
}

// The weight of an expert has its own blocks, in both orientations, and shards of it have the same bits.
TEST_CASE("experts in FP8: every weight is quantized as if it were alone, and transposed") {
    const Config config = fp8_config(fp8_moe(), Fp8Recipe::kBlockwise);
    TestModel model(config);
    for (LinearKind kind : {LinearKind::kUp, LinearKind::kDown}) {
        const Fp8Linear& linear = *model.trainer->fp8().linear(1, kind);
        REQUIRE(linear.experts == config.shape.num_experts);
        const int64_t in = linear.in, out = linear.out;
        Values whole = random_values(linear.experts * in * out, 3, 1);
        for (size_t i = 0; i < whole.size(); i++)   // experts of different sizes
            whole[i] *= std::ldexp(1, static_cast<int>(i / static_cast<size_t>(in * out)) * 3);
        std::vector<float> master(whole.begin(), whole.end());
        const Tensor all{master.data(), Dtype::kFp32, linear.experts * in * out};
        model.trainer->fp8().quantize_weight(model.ctx, linear, all, nullptr);
        const Values expected = fp8_experts(whole, out, in);
        int64_t wrong = 0;
        for (int64_t e = 0; e < linear.experts; e++)
            for (int64_t o = 0; o < out; o++)
                for (int64_t i = 0; i < in; i++) {
                    const auto value = [&](const Fp8Operand& of, int64_t R, int64_t K, int64_t r, int64_t k) {
                        const uint8_t code = static_cast<const uint8_t*>(of.data.data)[(e * R + r) * K + k];
                        const int64_t stride = (scale_blocks(K) + 3) / 4 * 4, block = r / 128 * stride + k / 128;
                        const int64_t at = e * scale_inv_elems(of.granularity, R, K) + block;
                        return static_cast<double>(from_fp8(Dtype::kE4m3, code) * of.scale_inv.as<float>()[at]);
                    };
                    const double want = expected[static_cast<size_t>((e * out + o) * in + i)];
                    wrong += value(linear.weight, out, in, o, i) != want;
                    wrong += value(linear.weight_transposed, in, out, i, o) != want;
                }
        CHECK(wrong == 0);
    }
}

TEST_CASE("experts in FP8: near BF16; recomputation and poisoned scratch do not change any bit") {
    const std::vector<std::string> none, mixed = {"0.up", "1.down"};
    for (const auto& [recipe, in_bf16, gpt_oss] :
         {std::tuple(Fp8Recipe::kBlockwise, none, false), {Fp8Recipe::kBlockwise, mixed, false},
          {Fp8Recipe::kBlockwiseBf16Wgrad, none, false}, {Fp8Recipe::kBlockwise, none, true},
          {Fp8Recipe::kBlockwiseBf16Wgrad, none, true}}) {
        Config config = fp8_config(fp8_moe(), recipe);
        if (!in_bf16.empty())   // and a layer without experts
            config.shape.qk_norm = true, config.shape.num_layers = 3, config.shape.dense_layers = 1,
            config.shape.dense_ffn_size = 96;
        config.bf16_linears = in_bf16;
        if (gpt_oss)
            config.shape.activation = Activation::kClampedSwiglu, config.shape.linear_bias = LinearBias::kAll,
            config.shape.attention_sinks = true;
        const auto set = [](TestModel& m) { m.set_random_batch(4, 3); };
        check_recompute(config, set, 2);
        TestModel model(config), reference(fp8_config(config.shape, Fp8Recipe::kNone));
        for (TestModel* m : {&model, &reference}) set(*m), m->gradients();
        CHECK(model.loss() == doctest::Approx(reference.loss()).epsilon(0.01));
        CHECK(model.loss() != reference.loss());
        const std::vector<Values> grads = all_grads(model), expected = all_grads(reference);
        for (size_t p = 0; p < grads.size(); p++) {   // some tokens go to other experts; gradients of routers cancel
            const bool router = model.table.params[p].name.find("router") != std::string::npos;
            CHECK_MESSAGE(cosine(grads[p], expected[p]) > (router ? 0.8 : 0.9), model.table.params[p].name);
        }
    }
}

TEST_CASE("recomputation routes a token as before, even if it would now choose other experts") {
    std::vector<float> probs = {5, 1, 2, 3, 1, 2, 3, 4}, lse(2), weights(4);
    std::vector<int32_t> experts = {1, 2, 0, 3};
    const auto floats = [](std::vector<float>& v) {
        return Tensor{v.data(), Dtype::kFp32, static_cast<int64_t>(v.size())};
    };
    const Tensor chosen{experts.data(), Dtype::kInt32, 4};
    Ctx ctx;
    const RouterForwardArgs args{.probs = floats(probs), .lse = floats(lse), .experts = chosen,
                                 .weights = floats(weights), .bias = {}, .N = 2, .E = 4, .K = 2, .form = {},
                                 .chosen = true};
    ops::router_forward(ctx, args);
    CHECK(experts == std::vector<int32_t>{1, 2, 0, 3});
    CHECK(std::fabs(weights[0] - 1 / (1 + std::exp(1.0f))) < 1e-6f);
    CHECK(std::fabs(weights[2] + weights[3] - 1) < 1e-6f);
    RouterForwardArgs free = args;
    free.chosen = false;
    ops::router_forward(ctx, free);
    CHECK(experts == std::vector<int32_t>{0, 3, 2, 3});
}
#endif

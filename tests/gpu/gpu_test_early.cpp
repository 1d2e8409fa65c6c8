// Consecutive operations whose kernels may be launched before the previous one has ended must give the same bits as
// with a synchronization after each. Every operation here reads what another has just written and writes what another
// has just read; between them are a fill, a copy, and work on a second stream.
#include <cmath>

#include "tests/gpu/gpu_op.h"
#include "tests/support/comm_ops_test.h"

using namespace op_test;

namespace early_test {

namespace {

constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32, kCodes = Dtype::kE4m3;
constexpr int64_t kN = 2048, kC = 2048, kElems = kN * kC, kHeadSize = 128;

class Chain {
public:
    explicit Chain(bool wait) : wait_(wait) {
        cuda::side_open(side_, gpu());
        for (Event*& event : events_) event = cuda::event_create();
        for (const char* name : {"a", "b", "c", "d"}) add(name, random_tensor(kB, kElems, rng_key(31, name)));
        for (const char* name : {"rows", "columns", "kept"}) add(name, HostTensor(kCodes, kElems));
        for (const char* name : {"grad", "master", "m", "v"}) {
            add(name, random_tensor(kF, kElems, rng_key(32, name), 0.125, name[0] == 'v' ? 1 : 0));
        }
        add("weight", random_tensor(kB, kC, rng_key(33, "weight"), 0.25, 1));
        add("rstd", random_tensor(kF, kN, rng_key(33, "rstd"), 0.125, 1));
        add("dweight", random_tensor(kF, kC, rng_key(33, "dweight")));
        add("scratch", HostTensor(kF, 2 * kPartialRows * kC));
        for (const char* name : {"row_v", "new_v"}) add(name, random_tensor(kF, kC, rng_key(33, name), 0.125, 1));
        add("angles", angle_table(kN, kHeadSize));
        add("chunks", HostTensor(kCodes, kElems));
        add("scales", HostTensor(kF, kElems / kGradCommChunk).fill(0));
        add("entry", tensor_of(ScaleEntry{1.0f, 100.0f, 0, 0}));
        StepState state{};
        state.lr = 0.01f, state.grad_mul = 1.0f, state.adam_step = 1;
        add("state", tensor_of(state));
    }
    ~Chain() {
        cuda::synchronize(gpu());
        for (Event* event : events_) cuda::event_destroy(event);
        cuda::side_close(side_);
    }
    Chain(const Chain&) = delete;
    Chain& operator=(const Chain&) = delete;

    void round() {
        step([&](Ctx& ctx) {
            cuda::rmsnorm_forward(ctx, {.out = at("a"), .residual_out = at("b"), .mean = {}, .rstd = at("rstd"),
                                        .in = at("c"), .residual = at("d"), .weight = at("weight"), .bias = {},
                                        .N = kN, .C = kC, .eps = 1e-5f, .quant = quant(Scaling::kDelayed)});
        });
        keep_on_side("rows");
        step([&](Ctx& ctx) {
            cuda::activation_forward(ctx, {.kind = Activation::kGelu, .out = at("c"), .in = at("a"), .N = kN, .F = kC,
                                           .quant = quant(Scaling::kDelayed)});
        });
        step([&](Ctx& ctx) {
            cuda::rmsnorm_backward(ctx, {.dx = at("d"), .dresidual = at("d"), .dweight = at("dweight"), .dbias = {},
                                         .scratch = at("scratch"), .dout = at("c"), .x = at("b"), .mean = {},
                                         .rstd = at("rstd"), .weight = at("weight"), .N = kN, .C = kC,
                                         .quant = quant(Scaling::kDelayed)});
        });
        step([&](Ctx& ctx) { cuda::amax(ctx, {.entry = entry(), .in = at("d")}); });
        step([&](Ctx& ctx) {
            cuda::quantize(ctx, {.quant = quant(Scaling::kCurrent), .in = at("d"), .N = kN, .C = kC});
        });
        step([&](Ctx& ctx) { cuda::fp8_clear(ctx, {.entries = entry(), .count = 1}); });
        step([&](Ctx& ctx) {
            cuda::rope_forward(ctx, {.qkv = at("c"), .cos_sin = at("angles"), .N = kN, .T = kN,
                                     .NH = kC / kHeadSize - 4, .NKV = 2, .HS = kHeadSize});
        });
        step([&](Ctx& ctx) { cuda::cast(ctx, {.out = at("grad"), .in = at("c")}); });
        step([&](Ctx& ctx) {
            cuda::quantize_chunks(ctx, {.out = at("chunks"), .scales = at("scales"), .in = at("grad")});
        });
        step([&](Ctx& ctx) {
            cuda::sum_ranks(ctx, {.out = at("grad"), .in = at("chunks"), .scales = at("scales"), .ranks = 1});
        });
        step([&](Ctx& ctx) {
            cuda::adamw(ctx, {.param = at("c"), .master = at("master"), .m = at("m"), .v = at("v"), .grad = at("grad"),
                              .state = object_in<StepState>(at("state")), .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-8f,
                              .weight_decay = 0.1f, .rng_key = 5, .element_offset = 0, .entry = entry()});
        });
        step([&](Ctx& ctx) {
            cuda::muon_momentum(ctx, {.m = at("m"), .grad = at("grad"), .state = object_in<StepState>(at("state")),
                                      .beta = 0.95f, .rng_key = 5, .element_offset = 0});
        });
        step([&](Ctx& ctx) {
            cuda::muon_polynomial(ctx, {.square = at("d"), .gram = at("c"), .k = kC, .a = 1, .b = -0.5, .c = 0.25});
        });
        step([&](Ctx& ctx) {
            cuda::muon_row_norm(ctx, {.matrix = at("d"), .v = at("row_v"), .new_v = at("new_v"),
                                      .state = object_in<StepState>(at("state")), .rows = kC, .cols = kC,
                                      .beta2 = 0.95});
        });
        step([&](Ctx& ctx) { cuda::copy_on_device(ctx, at("row_v").data, at("new_v").data, at("new_v").bytes()); });
        step([&](Ctx& ctx) {
            cuda::muon_update(ctx, {.param = at("c"), .master = at("master"), .direction = at("grad"),
                                    .state = object_in<StepState>(at("state")), .scale = 0.5f, .weight_decay = 0.1f,
                                    .entry = entry()});
        });
        step([&](Ctx& ctx) { cuda::fill_bytes(ctx, at("grad").data, 0, at("grad").bytes() / 2); });
        step([&](Ctx& ctx) { cuda::copy_on_device(ctx, at("d").data, at("a").data, at("d").bytes() / 2); });
    }
    std::map<std::string, HostTensor> download() {
        std::map<std::string, HostTensor> all;
        for (auto& [name, tensor] : tensors_) {
            if (name != "scratch") all[name] = tensor.download();
        }
        return all;
    }

private:
    void add(const std::string& name, const HostTensor& start) { tensors_.try_emplace(name, start); }
    Tensor at(const std::string& name) const { return tensors_.at(name).view(); }
    ScaleEntry* entry() const { return object_in<ScaleEntry>(at("entry")); }
    QuantOut quant(Scaling scaling) const {
        QuantOut out;
        out.rowwise = at("rows"), out.transposed = at("columns"), out.entry = entry(), out.record = true;
        out.scaling = scaling;
        return out;
    }
    template <typename F> void step(F run) {
        run(gpu());
        if (wait_) cuda::synchronize(gpu());
    }
    // A copy on the second stream between two operations of the first: its source must be complete and not overwritten.
    void keep_on_side(const char* name) {
        cuda::event_record(gpu(), events_[0]);
        cuda::event_order(side_, events_[0]);
        cuda::copy_on_device(side_, at("kept").data, at(name).data, at(name).bytes());
        cuda::event_record(side_, events_[1]);
        cuda::event_order(gpu(), events_[1]);
    }

    bool wait_;
    Ctx side_;
    Event* events_[2];
    std::map<std::string, DeviceTensor> tensors_;
};

TEST_CASE("gpu early launches: nothing is read or written too early") {
    if (left_out(kElems)) return;
    constexpr int kRounds = 6;
    Chain waiting(true);
    for (int i = 0; i + 1 < kRounds; i++) waiting.round();
    const auto before = waiting.download();
    waiting.round();
    const auto want = waiting.download();
    // The test can fail: a round changes everything but the parameters.
    for (const char* name : {"a", "b", "c", "d", "rows", "columns", "kept", "master", "dweight", "scales"}) {
        INFO(name);
        CHECK_FALSE(want.at(name).same_bits(before.at(name)));
    }
    for (int repeat = 0; repeat < 4; repeat++) {
        Chain chain(false);
        for (int i = 0; i < kRounds; i++) chain.round();
        const auto got = chain.download();
        for (auto& [name, tensor] : want) {
            INFO(name << ", repeat " << repeat);
            CHECK(got.at(name).same_bits(tensor));
        }
    }
}

}  // namespace

}  // namespace early_test

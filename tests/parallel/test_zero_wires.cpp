// Gradients on their way between ranks: every comm stream brings exactly the sum of what each rank sent in
// its form, values that are not finite reach all ranks, and the error against fp32 is measured right.
#include "tests/support/zero_test.h"

#include <cmath>
#include <limits>
#include <optional>

#include "llmc/base/fp8.h"
#include "llmc/train/rank_consistency.h"
#include "tests/support/watched_store.h"

namespace {

using Floats = std::vector<float>;

// Gradients of every parameter by every rank before they travel, and their sums as AdamW reads them.
struct Journey {
    std::vector<std::map<int, Floats>> local;   // by rank, parameter
    std::map<int, Floats> sums;
    std::map<int, ParamForm> kinds;
    std::vector<GradCommReport> reports;            // by rank
    int skip = 0;
};
using Corrupt = std::function<void(int rank, int param, Tensor grad)>;   // a copy on the host, which goes back

void capture_gradients(TestModel& model, WatchedStore& store, std::map<int, Floats>& local, const Corrupt& corrupt) {
    store.gradients_ready = [&model, &local, corrupt](int layer) {
        for (size_t i = 0; i < model.table.params.size(); i++) {
            const int param = static_cast<int>(i);
            if (model.table.layer_of(param) != layer) continue;
            const Tensor grad = model.trainer->decoder().grad(param);
            if (corrupt) {
                Bytes bytes = raw(model, grad);
                corrupt(model.comm.world().rank, param, {bytes.data(), grad.dtype, grad.elems});
                device::copy_to_device(model.ctx, grad.data, bytes.data(), grad.bytes());
            }
            const std::vector<double> values = model.read(grad);
            local[param] = Floats(values.begin(), values.end());
        }
    };
}

Journey travel(Config config, int ranks, const Corrupt& corrupt = {}) {
    config.global_batch_size = 12 * config.micro_batch_size;
    Journey journey;
    journey.local.resize(static_cast<size_t>(ranks));
    journey.reports.resize(static_cast<size_t>(ranks));
    std::mutex mutex;
    LocalRanks(ranks).run([&](Comm& comm) {
        const auto rank = static_cast<size_t>(comm.world().rank);
        TestModel model(config, true, &comm);
        WatchedStore store(model);
        capture_gradients(model, store, journey.local[rank], corrupt);
        model.set_random_batch(config.global_batch_size, 5);
        model.staged.count_fp8 = config.fp8_stats_interval > 0;
        model.staged.grad_comm_report = model.trainer->reducer().report_bytes() ? &journey.reports[rank] : nullptr;
        model.step();
        const std::lock_guard lock(mutex);
        journey.skip += model.result.skip;
        for (size_t i = 0; i < model.table.params.size(); i++) {
            const int param = static_cast<int>(i);
            journey.kinds[param] = model.trainer->buckets().layout().form(param);
            journey.sums[param].resize(static_cast<size_t>(model.table.params[i].elems()));
        }
        for (const ShardRange& range : model.trainer->sharded_state().ranges()) {
            const std::vector<double> sum = model.read(model.trainer->sharded_state().reduced_grad(range));
            std::copy(sum.begin(), sum.end(), journey.sums[range.param].begin() + range.begin);
        }
    });
    return journey;
}

// What one rank's gradient of a parameter is after the way through a comm stream.
Floats arrived(Floats gradient, GradCommDtype comm_stream) {
    if (comm_stream == GradCommDtype::kFp32) return gradient;
    if (comm_stream == GradCommDtype::kBf16) {
        for (float& x : gradient) x = static_cast<float>(bf16(x));
        return gradient;
    }
    const auto n = static_cast<int64_t>((gradient.size() + kGradCommChunk - 1) / kGradCommChunk * kGradCommChunk);
    Floats padded = gradient, scales(static_cast<size_t>(n / kGradCommChunk));
    padded.resize(static_cast<size_t>(n));
    std::vector<uint8_t> codes(static_cast<size_t>(n));
    Ctx ctx;
    cpu::quantize_chunks(ctx, {.out = {codes.data(), Dtype::kE4m3, n}, .scales = {scales.data(), Dtype::kFp32,
                               n / kGradCommChunk}, .in = {padded.data(), Dtype::kFp32, n}});
    for (size_t i = 0; i < gradient.size(); i++)
        gradient[i] = from_fp8(Dtype::kE4m3, codes[i]) * scales[i / static_cast<size_t>(kGradCommChunk)];
    return gradient;
}

Floats sum_of(const Journey& journey, int param, GradCommDtype comm_stream) {
    Floats sum = arrived(journey.local[0].at(param), comm_stream);
    for (size_t rank = 1; rank < journey.local.size(); rank++) {
        const Floats other = arrived(journey.local[rank].at(param), comm_stream);
        for (size_t i = 0; i < sum.size(); i++) sum[i] += other[i];
    }
    return sum;
}

bool same_bits(const Floats& a, const Floats& b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); i++)
        if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
    return true;
}

GradCommDtype wire_of(const Config& config, ParamForm kind) {
    if (config.grad_comm_dtype == Dtype::kE4m3 && kind != ParamForm::kOther) return GradCommDtype::kFp8;
    const bool bf16_anyway = config.grad_dtype == Dtype::kBf16 || config.grad_comm_dtype == Dtype::kBf16;
    return bf16_anyway ? GradCommDtype::kBf16 : GradCommDtype::kFp32;
}

void check_journey(const Config& config, const Journey& journey) {
    for (const auto& [param, sum] : journey.sums) {
        CAPTURE(param);
        CHECK(same_bits(sum, sum_of(journey, param, wire_of(config, journey.kinds.at(param)))));
    }
}

struct GradCommCase {
    std::string name;
    Config config;
};
// Every comm stream under every type of gradient, without FP8 matmuls and with.
std::vector<GradCommCase> comm_dtypes() {
    std::vector<GradCommCase> cases;
    for (Fp8Recipe recipe : {Fp8Recipe::kNone, Fp8Recipe::kDelayed}) {
        for (Dtype grad : {Dtype::kFp32, Dtype::kBf16}) {
            for (Dtype comm_stream : {Dtype::kFp32, Dtype::kBf16, Dtype::kE4m3}) {
                Config config = in_small_buckets(fp8_config(fp8_shapes()[recipe == Fp8Recipe::kNone], recipe));
                config.grad_dtype = grad;
                config.grad_comm_dtype = comm_stream;
                cases.push_back({strf("%s gradients, %s wire", dtype_name(grad), dtype_name(comm_stream)), config});
            }
        }
    }
    return cases;
}

}  // namespace

TEST_CASE("wires: what arrives is the sum in rank order of what each rank sent in its form") {
    for (const GradCommCase& comm_stream : comm_dtypes()) {
        for (int ranks : {2, 3, 4}) {
            CAPTURE(comm_stream.name);
            CAPTURE(ranks);
            const Journey journey = travel(comm_stream.config, ranks);
            CHECK(journey.skip == 0);
            check_journey(comm_stream.config, journey);
        }
    }
}

TEST_CASE("wires: a gradient that is one element off is seen") {
    const Config config = in_small_buckets(fp8_config(fp8_shapes()[1], Fp8Recipe::kNone));
    Journey journey = travel(config, 3);
    Floats& sum = journey.sums.begin()->second;
    sum.back() = std::nextafter(sum.back(), 1.0f);
    CHECK(!same_bits(sum, sum_of(journey, journey.sums.begin()->first, GradCommDtype::kFp32)));
}

TEST_CASE("wires: bits of a run depend neither on overlap nor on who owns what, and it learns") {
    for (const GradCommCase& comm_stream : comm_dtypes()) {
        for (int ranks : {2, 3}) {
            CAPTURE(comm_stream.name);
            CAPTURE(ranks);
            const Run run = train(comm_stream.config, ranks, 2);
            CHECK(run.skips == std::vector<int>(2, 0));
            CHECK(run == train(comm_stream.config, ranks, 2, {}, {.defers_compute = true}));
            CHECK(run == train(changed(comm_stream.config, [](Config& c) { c.overlap = false; }), ranks, 2));
            CHECK(run == train(changed(comm_stream.config, [](Config& c) { c.zero = 0; }), ranks, 2));
        }
    }
}

TEST_CASE("wires: an outlier and zeros on one rank cost their chunks alone, what is not finite stops all ranks") {
    const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (GradCommCase& comm_stream : comm_dtypes()) {
        if (comm_stream.config.fp8_recipe != Fp8Recipe::kNone) continue;
        CAPTURE(comm_stream.name);
        auto put = [](Tensor grad, int64_t i, float value) {
            if (grad.dtype == Dtype::kBf16) grad.as<bf16>()[i] = bf16(value);
            else grad.as<float>()[i] = value;
        };
        const Journey tame = travel(comm_stream.config, 3, [&](int rank, int, Tensor grad) {
            if (rank != 1 || grad.elems < 600) return;
            put(grad, 130, 1e4f);
            for (int64_t i = 256; i < 512; i++) put(grad, i, 0.0f);
        });
        CHECK(tame.skip == 0);
        check_journey(comm_stream.config, tame);
        for (float value : {infinity, -infinity, nan}) {
            const Journey wild = travel(comm_stream.config, 3, [&](int rank, int param, Tensor grad) {
                if (rank == 2 && param == 4) put(grad, grad.elems - 1, value);
            });
            CHECK(wild.skip == 3);
            check_journey(comm_stream.config, wild);
        }
    }
}

TEST_CASE("wires: a step that is not finite on one rank changes nothing on any, and the next one goes on") {
    for (const GradCommCase& comm_stream : comm_dtypes()) {
        CAPTURE(comm_stream.name);
        static thread_local std::optional<WatchedStore> store;   // a thread is a rank
        auto corrupt = [](TestModel& model, int step) {
            if (model.comm.world().rank != 1 || step != 1) return;
            store.emplace(model).gradients_ready = [&model](int layer) {
                const Tensor grad = model.trainer->decoder().grad(model.table.blocks[1].up_weight);
                if (layer == 1) device::fill_bytes(model.ctx, grad.data, 0xff, grad.bytes());
            };
        };
        auto mend = [](TestModel&, int) { store.reset(); };
        const Run one = train(comm_stream.config, 3, 1), skipped = train(comm_stream.config, 3, 2, {corrupt, mend});
        CHECK(skipped.skips == std::vector<int>{0, 1});
        CHECK(std::isnan(skipped.norms[1].value));
        CHECK(skipped.weights == one.weights);
        CHECK(skipped.state == one.state);
        const Run on = train(comm_stream.config, 3, 3, {corrupt, mend});
        CHECK(on.skips == std::vector<int>{0, 1, 0});
        CHECK(on.state != one.state);
    }
}

TEST_CASE("wires: the error of gradients in FP8 is that against the fp32 sums, and finding it out changes nothing") {
    for (Dtype grad : {Dtype::kFp32, Dtype::kBf16}) {
        Config config = in_small_buckets(fp8_config(fp8_shapes()[1], Fp8Recipe::kTensorwise));
        config.bf16_linears = {"0.*"};
        config.grad_dtype = grad;
        config.grad_comm_dtype = Dtype::kE4m3;
        const Journey silent = travel(config, 3);
        config.fp8_stats_interval = 1;
        const Journey journey = travel(config, 3);
        CHECK(journey.sums == silent.sums);
        const auto records = grad_comm_records(journey.reports);
        REQUIRE(records.size() == 2);
        CHECK(records[0].name == "linears in FP8");
        CHECK(records[1].name == "linears in BF16");
        for (size_t kind = 0; kind < 2; kind++) {
            double exact = 0, found = 0, both = 0, apart = 0;
            for (const auto& [param, sum] : journey.sums) {
                if (journey.kinds.at(param) != static_cast<ParamForm>(kind)) continue;
                const Floats fp32 = sum_of(journey, param, GradCommDtype::kFp32);
                for (size_t i = 0; i < sum.size(); i++) {
                    const double a = static_cast<double>(fp32[i]), b = static_cast<double>(sum[i]);
                    exact += a * a, found += b * b, both += a * b, apart += (a - b) * (a - b);
                }
            }
            const GradCommRecord& r = records[kind];
            CHECK(r.relative_l2 == doctest::Approx(std::sqrt(apart / exact)).epsilon(1e-12));
            CHECK(r.cosine == doctest::Approx(both / std::sqrt(exact * found)).epsilon(1e-12));
            // E4M3 rounds by 2^-4 at most, and by about 2.5 % rms; sums of three cancel a little.
            CHECK(r.relative_l2 > 0.01);
            CHECK(r.relative_l2 < 0.0625);
            CHECK(r.saturated == 0);
            CHECK(r.flushed < 0.1);
            CHECK(r.nonfinite == 0);
        }
    }
}

TEST_CASE("ranks that do not agree on a factor are named, with the tensor") {
    for (Fp8Recipe recipe : {Fp8Recipe::kDelayed, Fp8Recipe::kTensorwise}) {
        Config config = in_small_buckets(fp8_config(fp8_shapes()[1], recipe));
        config.global_batch_size = 3;
        std::vector<std::string> errors(3), later(3);
        LocalRanks(3).run([&](Comm& comm) {
            const auto rank = static_cast<size_t>(comm.world().rank);
            TestModel model(config, true, &comm);
            Bytes report(static_cast<size_t>(model.trainer->fp8().report_bytes()));
            model.set_random_batch(3, 5);
            model.staged.fp8_report = report.data();
            model.step();
            check_scales(comm, model.trainer->fp8(), report.data(), 1);
            auto* slots = reinterpret_cast<Fp8Slot*>(report.data());
            if (rank == 2) slots[17].scale *= 2, slots[20].scale *= 2;   // of 24: 16 and on are weights
            if (rank == 1) slots[3].amax_bits++, slots[18].step_amax_bits++, slots[21].scale_inv = 0;
            try {
                check_scales(comm, model.trainer->fp8(), report.data(), 7);
            } catch (const Error& error) {
                errors[rank] = error.what();
            }
            if (rank == 2) slots[17].scale /= 2, slots[20].scale /= 2, slots[4].scale *= 2;
            try {
                check_scales(comm, model.trainer->fp8(), report.data(), 7);
            } catch (const Error& error) {
                later[rank] = error.what();
            }
        });
        for (const std::string& error : errors) {
            CHECK(error == errors[0]);
            CHECK(error.rfind("step 7: FP8 scales differ between ranks: the scale of 0.proj.weight is ", 0) == 0);
            CHECK(error.find("on rank 2") != std::string::npos);
        }
        // The scales of current scaling are each rank's own, except of weights.
        for (const std::string& error : later) {
            const bool named = error.find("the scale of 1.qkv.x ") != std::string::npos;
            CHECK(named == (recipe == Fp8Recipe::kDelayed));
        }
    }
}

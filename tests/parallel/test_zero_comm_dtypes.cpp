// Gradient reduction in every communication dtype: the result is exactly the sum of what each rank sent, non-finite
// values reach all ranks, and the error against fp32 is measured correctly.
#include "tests/support/zero_test.h"

#include <cmath>
#include <limits>

#include "llmc/base/fp8.h"
#include "llmc/train/run/rank_consistency.h"
#include "tests/support/watched_store.h"

namespace {

using Floats = std::vector<float>;

using Gradients = std::map<int, Floats>;   // by parameter

// The gradients of every parameter and rank before each reduction, and their sums as AdamW reads them.
struct Reduction {
    std::vector<std::vector<Gradients>> local;   // by rank, reduction
    int64_t group = 0;                           // ranks that shard one copy; 0: all
    Dtype shard = Dtype::kFp32;
    std::map<int, Floats> sums;
    std::map<int, ParamForm> kinds;
    std::vector<GradCommReport> reports;            // by rank
    int skip = 0;
};
using Corrupt = std::function<void(int rank, int param, Tensor grad)>;   // changes a copy on the host

void capture_gradients(TestModel& model, WatchedStore& store, std::vector<Gradients>& local, const Corrupt& corrupt) {
    const int dropped = model.trainer->fp8().needs_calibration() ? 1 : 0;
    store.gradients_ready = [&model, &local, corrupt, passes = -dropped](int layer) mutable {
        // With --zero 0 and 1 the gradients of the step are reduced once, after the last micro-batch.
        const bool first_layer = layer == model.config.shape.num_layers;
        if (first_layer && ++passes > 0 && (passes == 1 || model.config.zero >= 2)) local.emplace_back();
        if (passes <= 0) return;   // the calibration, whose gradients are dropped
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
            local.back()[param] = Floats(values.begin(), values.end());
        }
    };
}

Reduction reduce_gradients(Config config, int ranks, const Corrupt& corrupt = {}) {
    config.global_batch_size = 12 * config.micro_batch_size;
    Reduction reduction;
    reduction.local.resize(static_cast<size_t>(ranks));
    if (config.zero >= 2) reduction.shard = config.grad_shard_dtype;
    reduction.group = config.zero_group > 0 ? config.zero_group : ranks;
    reduction.reports.resize(static_cast<size_t>(ranks));
    std::mutex mutex;
    LocalRanks(ranks).run([&](Comm& comm) {
        const auto rank = static_cast<size_t>(comm.world().rank);
        TestModel model(config, true, &comm);
        WatchedStore store(model);
        capture_gradients(model, store, reduction.local[rank], corrupt);
        model.set_random_batch(config.global_batch_size, 5);
        model.staged.count_fp8 = config.fp8_stats_interval > 0;
        model.staged.grad_comm_report = model.trainer->gradients().report_bytes() ? &reduction.reports[rank] : nullptr;
        model.step();
        const std::lock_guard lock(mutex);
        reduction.skip += model.result.skip;
        for (size_t i = 0; i < model.table.params.size(); i++) {
            const int param = static_cast<int>(i);
            reduction.kinds[param] = model.trainer->buckets().layout().form(param);
            reduction.sums[param].resize(static_cast<size_t>(model.table.params[i].elems()));
        }
        for (const ShardRange& range : model.trainer->sharded_state().ranges()) {
            const std::vector<double> sum = model.read(model.trainer->gradients().reduced(range));
            std::copy(sum.begin(), sum.end(), reduction.sums[range.param].begin() + range.begin);
        }
    });
    return reduction;
}

// One rank's gradient rounded to the communication dtype.
Floats communicated(Floats gradient, GradCommDtype dtype) {
    if (dtype == GradCommDtype::kFp32) return gradient;
    if (dtype == GradCommDtype::kBf16) {
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

// a += b, rounded to a dtype; an empty a is no term.
void add(Floats& a, const Floats& b, Dtype dtype = Dtype::kFp32) {
    if (a.empty()) a = b;
    else for (size_t i = 0; i < a.size(); i++) a[i] += b[i];
    if (dtype == Dtype::kBf16) for (float& x : a) x = static_cast<float>(bf16(x));
}

// Ranks are added within a group, then reductions, each time rounded to the shard's dtype, then groups.
Floats sum_of(const Reduction& reduction, int param, GradCommDtype dtype, size_t first_reduction = 0,
              bool rounds = true) {
    Floats sum;
    const auto group = static_cast<size_t>(reduction.group);
    for (size_t begin = 0; begin < reduction.local.size(); begin += group) {
        Floats of_group;
        for (size_t r = first_reduction; r < reduction.local[0].size(); r++) {
            Floats reduced;
            for (size_t rank = begin; rank < begin + group; rank++)
                add(reduced, communicated(reduction.local[rank][r].at(param), dtype));
            add(of_group, reduced, rounds ? reduction.shard : Dtype::kFp32);
        }
        add(sum, of_group);
    }
    if (rounds) add(sum, Floats(sum.size(), -0.0f), reduction.shard);
    return sum;
}

bool same_bits(const Floats& a, const Floats& b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); i++)
        if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
    return true;
}

GradCommDtype comm_dtype_of(const Config& config, ParamForm kind) {
    if (config.grad_comm_dtype == Dtype::kE4m3 && kind != ParamForm::kOther) return GradCommDtype::kFp8;
    const bool bf16_anyway = config.grad_dtype == Dtype::kBf16 || config.grad_comm_dtype == Dtype::kBf16;
    return bf16_anyway ? GradCommDtype::kBf16 : GradCommDtype::kFp32;
}

void check_reduction(const Config& config, const Reduction& reduction) {
    for (const auto& [param, sum] : reduction.sums) {
        CAPTURE(param);
        CHECK(same_bits(sum, sum_of(reduction, param, comm_dtype_of(config, reduction.kinds.at(param)))));
    }
}

Config with_bf16_shard(Config config) {
    config.zero = 2;
    config.grad_shard_dtype = Dtype::kBf16;
    return config;
}

// Every communication dtype with every gradient dtype, without and with FP8 matmuls.
std::vector<TrainingCase> comm_dtypes() {
    std::vector<TrainingCase> cases;
    for (Fp8Recipe recipe : {Fp8Recipe::kNone, Fp8Recipe::kDelayed})
        for (Dtype grad : {Dtype::kFp32, Dtype::kBf16})
            for (Dtype comm : {Dtype::kFp32, Dtype::kBf16, Dtype::kE4m3}) {
                Config config = in_small_buckets(fp8_config(fp8_shapes()[recipe == Fp8Recipe::kNone], recipe));
                config.grad_dtype = grad;
                config.grad_comm_dtype = comm;
                cases.push_back({strf("%s gradients, %s communicated", dtype_name(grad), dtype_name(comm)), config});
            }
    return cases;
}

std::vector<TrainingCase> at_both_levels() {
    std::vector<TrainingCase> cases = comm_dtypes();
    for (TrainingCase c : comm_dtypes()) {
        c.name += ", ZeRO-2";
        c.config.zero = 2;
        cases.push_back(c);
        c.name += ", bf16 shard";
        c.config = with_bf16_shard(c.config);
        cases.push_back(c);
    }
    return cases;
}

}  // namespace

TEST_CASE("grad comm dtypes: the reduced gradient is the sum, in rank order, of the rounded gradients") {
    for (const TrainingCase& c : comm_dtypes())
        for (int ranks : {2, 3, 4}) {
            CAPTURE(c.name, ranks);
            for (const auto& [zero, shard] : {std::pair{1, Dtype::kFp32}, {2, Dtype::kFp32}, {2, Dtype::kBf16}})
                for (int64_t group : {0, 2}) {
                    if (group > 0 && ranks < 4) continue;
                    CAPTURE(zero, group, dtype_name(shard));
                    const Config config = changed(c.config, [&](Config& c) {
                        c.zero = zero, c.zero_group = group, c.grad_shard_dtype = shard;
                    });
                    const Reduction reduction = reduce_gradients(config, ranks);
                    CHECK(reduction.local[0].size() == static_cast<size_t>(zero == 2 ? 12 / ranks : 1));
                    CHECK(reduction.skip == 0);
                    check_reduction(config, reduction);
                }
        }
}

TEST_CASE("grad comm dtypes: with a bf16 shard levels 2 and 3 have the same bits") {
    for (const TrainingCase& c : comm_dtypes())
        for (int ranks : {2, 3}) {
            CAPTURE(c.name, ranks);
            const Config two = with_bf16_shard(c.config);
            const Config three = at_level(two, 3);
            const Run run = train(two, ranks, 2);
            CHECK(run.skips == std::vector<int>(2, 0));
            CHECK(run == train(three, ranks, 2));
            // The shard rounds: 12 micro-batches of rounding errors 2^-9 each, of either sign.
            const Run wide = train(at_level(c.config, 2), ranks, 2);
            CHECK(run.state != wide.state);
            check_near(run.norms, wide.norms, 12 * 0x1p-9);
        }
    Config config = in_small_buckets(fp8_config(fp8_shapes()[1], Fp8Recipe::kDelayed));
    config.global_batch_size = 3;
    for (int64_t zero : {2, 3}) {
        const Config wide = at_level(config, zero);
        const MemoryPlan before = memory_of(wide, 3), after = memory_of(changed(wide, [](Config& c) {
            c.grad_shard_dtype = Dtype::kBf16;
        }), 3);
        const auto saved = [&](Purpose purpose) {
            const auto i = static_cast<size_t>(purpose);
            return before.purpose_bytes[i] - after.purpose_bytes[i];
        };
        CHECK(saved(Purpose::kGradients) == 2 * before.flat_elems / 3);
        CHECK(saved(Purpose::kGradients) == before.arena_bytes - after.arena_bytes);
    }
}

TEST_CASE("grad comm dtypes: an outlier affects only its chunk, a non-finite value skips the step on all ranks") {
    const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (TrainingCase& c : at_both_levels()) {
        if (c.config.fp8_recipe != Fp8Recipe::kNone) continue;
        CAPTURE(c.name);
        auto put = [](Tensor grad, int64_t i, float value) {
            if (grad.dtype == Dtype::kBf16) grad.as<bf16>()[i] = bf16(value);
            else grad.as<float>()[i] = value;
        };
        const Reduction tame = reduce_gradients(c.config, 3, [&](int rank, int, Tensor grad) {
            if (rank != 1 || grad.elems < 600) return;
            put(grad, 130, 1e4f);
            for (int64_t i = 256; i < 512; i++) put(grad, i, 0.0f);
        });
        CHECK(tame.skip == 0);
        check_reduction(c.config, tame);
        for (float value : {infinity, -infinity, nan}) {
            const Reduction wild = reduce_gradients(c.config, 3, [&](int rank, int param, Tensor grad) {
                if (rank == 2 && param == 4) put(grad, grad.elems - 1, value);
            });
            CHECK(wild.skip == 3);
            check_reduction(c.config, wild);
        }
    }
}

TEST_CASE("grad comm dtypes: the reported error is that against fp32 sums, and measuring it changes nothing") {
    for (const auto& [zero, grad, shard] :
         {std::tuple{1, Dtype::kFp32, Dtype::kFp32}, {1, Dtype::kBf16, Dtype::kFp32}, {2, Dtype::kFp32, Dtype::kFp32},
          {2, Dtype::kBf16, Dtype::kFp32}, {2, Dtype::kFp32, Dtype::kBf16}}) {
        Config config = in_small_buckets(fp8_config(fp8_shapes()[1], Fp8Recipe::kTensorwise));
        config.zero = zero, config.grad_shard_dtype = shard, config.bf16_linears = {"0.*"}, config.grad_dtype = grad;
        config.grad_comm_dtype = Dtype::kE4m3;
        const Reduction silent = reduce_gradients(config, 3);
        config.fp8_stats_interval = 1;
        const Reduction reduction = reduce_gradients(config, 3);
        CHECK(reduction.sums == silent.sums);
        const auto records = grad_comm_records(reduction.reports);
        REQUIRE(records.size() == 2);
        CHECK(records[0].name == "linears in FP8");
        CHECK(records[1].name == "linears in BF16");
        for (size_t kind = 0; kind < 2; kind++) {
            double exact = 0, found = 0, both = 0, apart = 0;
            const size_t last = reduction.local[0].size() - 1;   // is the one that is compared
            for (const auto& [param, total] : reduction.sums) {
                if (reduction.kinds.at(param) != static_cast<ParamForm>(kind)) continue;
                const Floats fp32 = sum_of(reduction, param, GradCommDtype::kFp32, last, false);
                const Floats sum = last == 0 ? total : sum_of(reduction, param, GradCommDtype::kFp8, last, false);
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

TEST_CASE("a scale that differs between ranks is named with its rank and tensor") {
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
            auto* entries = reinterpret_cast<ScaleEntry*>(report.data());
            if (rank == 2) entries[17].scale *= 2, entries[20].scale *= 2;   // of 24: 16 and on are weights
            if (rank == 1) entries[3].amax_bits++, entries[18].step_amax_bits++, entries[21].scale_inv = 0;
            try {
                check_scales(comm, model.trainer->fp8(), report.data(), 7);
            } catch (const Error& error) {
                errors[rank] = error.what();
            }
            if (rank == 2) entries[17].scale /= 2, entries[20].scale /= 2, entries[4].scale *= 2;
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
        // With current scaling only weights have the same scales on all ranks.
        for (const std::string& error : later) {
            const bool named = error.find("the scale of 1.qkv.x ") != std::string::npos;
            CHECK(named == (recipe == Fp8Recipe::kDelayed));
        }
    }
}

// The planned communication of a step is that of its steps, to the byte.
#include "tests/support/zero_test.h"

namespace {

// Forwards all calls, and counts them while `counting`.
class CountingComm : public Comm {
public:
    explicit CountingComm(Comm& inner) : CountingComm(inner, nullptr) {}
    bool counting = false;
    std::map<std::string, PlannedCollective> calls;   // by name, type and ranks; of its subgroups, too

    std::vector<std::string> gather(const std::string& mine) override { return inner_.gather(mine); }
    std::unique_ptr<Comm> subgroup(const std::vector<int>& members) override {
        std::unique_ptr<Comm> group = inner_.subgroup(members);
        auto counted = std::unique_ptr<CountingComm>(new CountingComm(*group, whole_));
        counted->own_ = std::move(group);
        return counted;
    }
    void sum(Ctx& ctx, Tensor values) override {
        note(ctx, "all-reduce sum", values);
        inner_.sum(ctx, values);
    }
    void max(Ctx& ctx, uint32_t* values, int64_t count) override {
        note(ctx, "all-reduce max", {values, Dtype::kInt32, count});
        inner_.max(ctx, values, count);
    }
    void reduce_scatter(Ctx& ctx, Tensor shards) override {
        note(ctx, "reduce-scatter", shards);
        inner_.reduce_scatter(ctx, shards);
    }
    void all_gather(Ctx& ctx, Tensor shards) override {
        note(ctx, "all-gather", shards);
        inner_.all_gather(ctx, shards);
    }
    void all_to_all(Ctx& ctx, Tensor out, Tensor in) override {
        note(ctx, "all-to-all", in);
        inner_.all_to_all(ctx, out, in);
    }
    void exchange_all(Ctx& ctx, Tensor out, Tensor in, const Counts& received, const Counts& sent) override {
        note(ctx, "send", sent_to_others(in, sent));
        inner_.exchange_all(ctx, out, in, received, sent);
    }
    [[noreturn]] void abort(int exit_code) override { throw Error(exit_code, "abort"); }

    static std::string key(const char* name, Dtype dtype, int ranks) {
        return strf("%s %s %d", name, dtype_name(dtype), ranks);
    }

private:
    CountingComm(Comm& inner, CountingComm* whole) : Comm(inner.world()), inner_(inner), whole_(whole ? whole : this) {}
    void note(const Ctx& ctx, const char* name, const Tensor& tensor) {
        if (!whole_->counting || ctx.rehearsal) return;
        PlannedCollective& c = whole_->calls[key(name, tensor.dtype, world().ranks)];
        c.calls++;
        c.bytes += tensor.bytes();
    }
    Comm& inner_;
    CountingComm* const whole_;
    std::unique_ptr<Comm> own_;
};

Config small(Fp8Recipe recipe) {
    Config config = in_small_buckets(fp8_config(fp8_shapes()[1], recipe));
    config.global_batch_size = 12;
    return config;
}

void check_plan(const Config& config, int ranks) {
    LocalRanks(ranks).run([&](Comm& comm) {
        CountingComm counted(comm);
        TestModel model(config, true, &counted);
        model.set_random_batch(config.global_batch_size, 5);
        model.step();   // delayed scaling calibrates in it
        counted.counting = true;
        model.set_random_batch(config.global_batch_size, 6);
        model.step();
        size_t found = 0;
        for (const PlannedCollective& planned : model.plan.collectives) {
            const auto at = counted.calls.find(CountingComm::key(planned.name, planned.dtype, planned.ranks));
            CAPTURE(planned.name);
            if (at == counted.calls.end()) continue;
            found++;
            CHECK(planned.calls == at->second.calls);
            if (std::string(planned.name) == "send" && !comm.root()) continue;   // ranks send different matrices
            CHECK(planned.bytes == at->second.bytes);
        }
        CHECK(found == model.plan.collectives.size());
        CHECK(found == counted.calls.size());
    });
}

}  // namespace

TEST_CASE("comm plan: a step communicates what is planned, with every recipe, communication dtype and --zero") {
    for (Fp8Recipe recipe : kRecipes)
        for (Dtype grad : {Dtype::kFp32, Dtype::kBf16, Dtype::kE4m3})
            for (int zero : {0, 1, 2, 3}) {
                Config config = small(recipe);
                config.grad_comm_dtype = grad;
                config.zero = zero;
                CAPTURE(static_cast<int>(recipe), dtype_name(grad), zero);
                check_plan(config, 3);
                if (grad == Dtype::kFp32)
                    check_plan(changed(config, [](Config& c) { c.optimizer = OptimizerKind::kMuon; }), 3);
                if (zero == 0 || recipe == Fp8Recipe::kTensorwise) continue;
                config.zero_group = 2;
                check_plan(config, 4);
            }
}

TEST_CASE("comm plan: bytes follow from the communication dtypes") {
    const Config config = small(Fp8Recipe::kDelayed);
    const MemoryPlan bf16 = memory_of(small(Fp8Recipe::kNone), 4);
    CHECK(bytes_of(bf16, "reduce-scatter", Dtype::kFp32) == 4 * bf16.flat_elems);
    CHECK(bytes_of(bf16, "all-gather", Dtype::kBf16) == 2 * bf16.flat_elems);
    CHECK(bytes_of(bf16, "all-gather", Dtype::kE4m3) == 0);

    const MemoryPlan fp8 = memory_of(config, 4);
    const int64_t flat = fp8.flat_elems;
    CHECK(bytes_of(fp8, "reduce-scatter", Dtype::kFp32) == 4 * flat);
    const int64_t in_fp8 = bytes_of(fp8, "all-gather", Dtype::kE4m3);
    CHECK(in_fp8 > flat / 2);
    CHECK(bytes_of(fp8, "all-gather", Dtype::kBf16) == 2 * (flat - in_fp8));

    // Gradients of linears take a byte each and a scale per chunk; the others are in fp32.
    const MemoryPlan coded = memory_of(changed(config, [](Config& c) { c.grad_comm_dtype = Dtype::kE4m3; }), 4);
    const int64_t codes = bytes_of(coded, "all-to-all", Dtype::kE4m3);
    CHECK(codes >= in_fp8);
    CHECK(bytes_of(coded, "all-to-all", Dtype::kFp32) == codes / kGradCommChunk * 4);
    CHECK(bytes_of(coded, "reduce-scatter", Dtype::kFp32) == 4 * (flat - codes));
    for (const MemoryPlan* plan : {&bf16, &fp8, &coded})
        for (const PlannedCollective& c : plan->collectives) {
            const bool both_ways = std::string(c.name).rfind("all-reduce", 0) == 0;
            if (c.bytes < 100) continue;   // integer division by 4 rounds down
            CHECK(c.sent_bytes == c.bytes / 4 * (both_ways ? 6 : 3));
        }
}

TEST_CASE("comm plan: two ranks that exchange shards of gradients copy none within their memory") {
    const auto all_to_all = [](int ranks, Dtype dtype) {
        const Config config = changed(small(Fp8Recipe::kDelayed), [&](Config& c) { c.grad_comm_dtype = dtype; });
        for (const PlannedCollective& c : memory_of(config, ranks).collectives)
            if (std::string(c.name) == "all-to-all" && c.dtype == dtype) return c;
        return PlannedCollective{.name = "", .dtype = dtype};
    };
    CHECK(all_to_all(2, Dtype::kBf16).sent_bytes > 0);
    CHECK(all_to_all(2, Dtype::kBf16).copied_bytes == 0);
    CHECK(all_to_all(4, Dtype::kBf16).copied_bytes == all_to_all(4, Dtype::kBf16).bytes / 4);
    CHECK(all_to_all(2, Dtype::kE4m3).copied_bytes == all_to_all(2, Dtype::kE4m3).bytes / 2);
}

TEST_CASE("comm plan: ZeRO-2 reduces every micro-batch, and copies of a shard are added once a step") {
    const Config one = small(Fp8Recipe::kDelayed), two = changed(one, [](Config& c) { c.zero = 2; });
    const MemoryPlan plan = memory_of(two, 4);
    CHECK(bytes_of(plan, "reduce-scatter", Dtype::kFp32) == 3 * 4 * plan.flat_elems);   // 12 micro-batches, 4 ranks
    for (int64_t zero : {1, 2}) {
        const MemoryPlan groups = memory_of(changed(one, [&](Config& c) { c.zero = zero, c.zero_group = 2; }), 4);
        const int64_t flat = groups.flat_elems;
        CHECK(bytes_of(groups, "reduce-scatter", Dtype::kFp32) == (zero == 1 ? 1 : 3) * 4 * flat);
        CHECK(bytes_of(groups, "all-reduce sum", Dtype::kFp32) == 4 * flat / 2);
        for (const PlannedCollective& c : groups.collectives) {
            const bool whole = c.dtype == Dtype::kFp64 || c.dtype == Dtype::kInt32;   // norm, amaxes, bad tokens
            CHECK(c.ranks == (whole ? 4 : 2));
        }
    }
}

TEST_CASE("comm plan: the table has a line per collective and a total; one rank has no table") {
    const Config config = small(Fp8Recipe::kNone);
    const MemoryPlan plan = memory_of(config, 2);
    const std::string text = communication_text(config, plan.collectives, 2, plan.buckets);
    CHECK(std::count(text.begin(), text.end(), '\n') == static_cast<long>(plan.collectives.size()) + 3);
    int64_t all = 0;
    for (const PlannedCollective& c : plan.collectives) all += c.bytes;
    const size_t last = text.rfind("  all ");
    REQUIRE(last != std::string::npos);
    CHECK(text.find(" " + std::to_string(all) + " ", last) != std::string::npos);
    CHECK(text.find(strf("of each of 2 ranks in a step, %lld buckets", static_cast<long long>(plan.buckets)))
          != std::string::npos);
    const MemoryPlan one = memory_of(config, 1);
    CHECK(one.collectives.empty());
    CHECK(communication_text(config, one.collectives, 1, one.buckets).empty());
}

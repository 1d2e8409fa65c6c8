// The two streams of a run on several ranks are ordered by events, each of which is needed. The CPU runs the extreme
// orders that the events allow, one stream as late as possible and the other immediately: if no event is missing, the
// results are those without overlap.
#include "tests/support/zero_test.h"

#include "tests/support/data_test.h"

namespace {

constexpr int kSteps = 3;
constexpr int64_t kMany = 1 << 20;   // orders

// The bytes of all results of a run, by rank.
using Seen = std::vector<std::vector<Bytes>>;

class Witness {
public:
    Witness(TestModel& model, std::vector<Bytes>& seen, const DataLoader& data)
        : model_(model), seen_(seen), data_(data),
          fp8_report_(static_cast<size_t>(model.trainer->fp8().report_bytes())) {
        take_batch(0);
    }

    void step(int number, bool count) {
        take_batch(number);
        model_.staged.count_fp8 = count;
        if (count) {
            model_.staged.fp8_report = fp8_report_.empty() ? nullptr : fp8_report_.data();
            model_.staged.grad_comm_report = model_.trainer->gradients().report_bytes() ? &grad_comm_report_ : nullptr;
        }
        model_.step();
        note(model_.result);
        if (count) seen_.push_back(fp8_report_), note(grad_comm_report_);
        model_.staged.fp8_report = model_.staged.grad_comm_report = nullptr;
    }
    // One micro-batch, on rank 0.
    void evaluate() { note(model_.trainer->evaluator().evaluate(model_.ctx, &data_, 1, model_.staged).loss_sum); }
    // In the memory of the steps before and after it. Its orders are not counted.
    void evaluate_in_bf16(int64_t* orders) {
        Bf16Evaluation* const bf16 = model_.trainer->bf16_evaluation();
        if (!bf16) return;
        const int64_t left = orders ? std::exchange(*orders, kMany) : 0;
        note(bf16->begin(model_.ctx).evaluate(model_.ctx, &data_, 1, model_.staged).loss_sum);
        if (orders) *orders = left;
    }
    void sample() {
        if (!model_.comm.root() && !model_.trainer->evaluator().passes_are_collective()) return;
        note(model_.trainer->evaluator().generate(model_.ctx, {30, 60, 119},
                                      {.tokens = 1, .temperature = 0.8}, 9, model_.staged).back());
        // The drawn token depends little on the logits, so compare those, too.
        const int64_t T = model_.config.seq_length, elems = model_.config.shape.padded_vocab();
        const Dtype dtype = model_.config.dtype;
        model_.trainer->decoder().logits_row(model_.ctx, {.B = 1, .T = T}, 2,
                                             {add(elems * dtype_bytes(dtype)), dtype, elems});
        device::synchronize(model_.ctx);
    }
    // Reads what a checkpoint reads.
    void save() {
        std::map<std::string, Bytes> rest;
        add_state(model_, rest);
        for (const auto& [name, bytes] : rest) seen_.push_back(bytes);
        for (const auto& [name, bytes] : read_weights(model_)) seen_.push_back(bytes);
        const std::string scales = state_text(model_);
        seen_.push_back(Bytes(scales.begin(), scales.end()));
        check_weights_are_rounded_masters(model_);
    }

private:
    void take_batch(int number) {
        model_.set_random_batch(model_.config.global_batch_size, 100 + static_cast<uint64_t>(number));
    }
    char* add(int64_t bytes) { return seen_.emplace_back(static_cast<size_t>(bytes)).data(); }
    template <typename T> void note(const T& value) { std::memcpy(add(sizeof value), &value, sizeof value); }

    TestModel& model_;
    std::vector<Bytes>& seen_;
    const DataLoader& data_;
    Bytes fp8_report_;
    GradCommReport grad_comm_report_{};
};

// The orders of evaluation, sampling and saving are not counted: the ranks also wait for each other on the host there,
// so some would not be missed.
void watch_collective(Witness& witness, int64_t* orders) {
    for (int i = 0; i < kSteps; i++) witness.step(i, i == 1);
    const int64_t left = orders ? *orders : 0;
    witness.evaluate_in_bf16(nullptr);
    witness.step(kSteps, false);
    witness.evaluate();
    witness.sample();
    witness.save();
    if (orders) *orders = left;
}

// Steps, evaluation, sampling and saving, each during an all-gather of weights. orders: of rank 0.
Seen watch(const Config& config, const DataLoader& data, bool defers_compute, int64_t* orders = nullptr) {
    Seen seen(2);
    LocalRanks(2).run([&](Comm& comm) {
        TestModel model(config, true, &comm, {defers_compute, comm.root() ? orders : nullptr});
        Witness witness(model, seen[static_cast<size_t>(comm.world().rank)], data);
        if (model.trainer->evaluator().passes_are_collective())
            return watch_collective(witness, comm.root() ? orders : nullptr);
        witness.evaluate();
        witness.step(0, false);
        witness.sample();
        witness.step(1, true);
        witness.step(2, false);
        witness.evaluate_in_bf16(comm.root() ? orders : nullptr);
        witness.step(kSteps, false);
        witness.save();
    });
    return seen;
}

struct StreamCase {
    std::string name;
    Config config;
    bool every_order = true;   // each event is needed
};
// Together the cases use every communication dtype of gradients and weights.
std::vector<StreamCase> stream_cases() {
    std::vector<StreamCase> stream_cases;
    const auto shapes = fp8_shapes();
    auto add = [&](const std::string& name, size_t shape, Fp8Recipe recipe) -> Config& {
        Config config = in_small_buckets(fp8_config(shapes[shape], recipe));
        config.seq_length = 16;
        config.global_batch_size = 2;
        config.shape.vocab_size = 120;   // rows on either rank
        config.lr = 0.03;                // every step changes every weight
        config.fp8_amax_compute_algo = AmaxAlgo::kMostRecent;   // and every scale
        config.valid_data = {"valid.bin"};   // of evaluations in BF16
        return stream_cases.emplace_back(StreamCase{name, config}).config;
    };
    add("bf16", 0, Fp8Recipe::kNone);
    Config& delayed = add("delayed, gradients in FP8", 1, Fp8Recipe::kDelayed);
    delayed.grad_comm_dtype = Dtype::kE4m3;
    delayed.fp8_stats_interval = 1;
    Config& tensorwise = add("tensorwise, bf16 gradients", 1, Fp8Recipe::kTensorwise);
    tensorwise.grad_dtype = Dtype::kBf16;
    add("blockwise, replicated", 0, Fp8Recipe::kBlockwise).zero = 0;
    // The last masters that are kept in the memory of gradients are quantized during the evaluation.
    add("blockwise, masters offloaded", 1, Fp8Recipe::kBlockwise).offload = {"masters"};
    stream_cases.back().every_order = false;
    // Matrices go to their owners and back while others are computed. In small buckets each rank sends and receives in
    // every exchange.
    Config& muon = add("bf16, Muon", 0, Fp8Recipe::kNone);
    muon.optimizer = OptimizerKind::kMuon;
    muon.lr = 0.003, muon.bucket_mb = 0.006;
    // Two micro-batches, so that buckets use memory again in which others were reduced.
    Config& two = add("delayed, gradients sharded and in FP8", 0, Fp8Recipe::kDelayed);
    two.zero = 2, two.global_batch_size = 4, two.grad_comm_dtype = Dtype::kE4m3, two.fp8_stats_interval = 1;
    Config& small = add("bf16, gradients sharded, a bucket for each parameter", 1, Fp8Recipe::kNone);
    small.zero = 2, small.global_batch_size = 4, small.grad_dtype = Dtype::kBf16, small.bucket_mb = 1e-6;
    // Buffers that several layers use, and two micro-batches.
    const auto shard_weights = [](Config& config, int64_t layers) {
        config.zero = 3, config.shape.num_layers = layers, config.bucket_mb = 0.1, config.global_batch_size = 4;
    };
    shard_weights(add("bf16, sharded weights", 1, Fp8Recipe::kNone), 3);
    Config& in_fp8 = add("blockwise, sharded weights", 1, Fp8Recipe::kBlockwise);
    shard_weights(in_fp8, 4);
    in_fp8.fp8_lm_head = true;
    in_fp8.fp8_stats_interval = 1;
    // The first collective of a gather already waits for the collective before it, which follows the new masters.
    stream_cases.back().every_order = false;
    Config& int8 = add("INT8 forward, sharded weights", 1, Fp8Recipe::kInt8Forward);
    shard_weights(int8, 4);
    int8.fp8_stats_interval = 1;
    stream_cases.back().every_order = false;
    // Layers stay in their buffers, so that the head waits for the embedding alone.
    Config& tied = add("tensorwise, sharded weights, all kept, tied head in FP8", 0, Fp8Recipe::kTensorwise);
    shard_weights(tied, 2);
    tied.fp8_lm_head = true;
    stream_cases.back().every_order = false;
    Config& kept = add("delayed, sharded weights", 0, Fp8Recipe::kDelayed);
    shard_weights(kept, 4);
    kept.fp8_lm_head = true;
    kept.recompute = Recompute::kBlock;
    // Tokens, their gradients and sums of both travel beside the matmuls of experts, often several in a row: the later
    // ones need not wait.
    Config& experts = add("blockwise, experts of two ranks", 1, Fp8Recipe::kBlockwise);
    experts.shape.ffn_hidden_size = 80, experts.shape.num_experts = 4, experts.expert_parallel = 2;
    stream_cases.back().every_order = false;
    Config& shared = add("bf16, experts of two ranks, shared experts", 1, Fp8Recipe::kNone);
    shared.shape.ffn_hidden_size = 40, shared.shape.num_experts = 4, shared.shape.shared_experts = 1;
    shared.shape.num_layers = 3, shared.shape.dense_layers = 1, shared.shape.dense_ffn_size = 48;
    shared.expert_parallel = 2, shared.recompute = Recompute::kNormAct;
    stream_cases.back().every_order = false;
    return stream_cases;
}

}  // namespace

TEST_CASE("streams: either may be deferred as far as the events allow, and each event is needed") {
    if (!device::device_info(-1).toolkit.empty()) return;   // the order on a GPU is not controlled
    const data_test::TempDir dir;
    data_test::spill(dir / "valid.bin", data_test::llmc_v1(data_test::counting(0, 120)));
    for (const StreamCase& c : stream_cases()) {
        CAPTURE(c.name);
        const DataLoader data(data_test::config_of({dir / "valid.bin"}, c.config.seq_length));
        const auto alone = [](Config& config) { config.overlap = false; };
        const Seen expected = watch(changed(c.config, alone), data, false);
        int64_t left = kMany;
        CHECK(watch(c.config, data, false, &left) == expected);
        const int64_t orders = kMany - left;
        left = kMany;
        CHECK(watch(c.config, data, true, &left) == expected);
        CHECK(kMany - left == orders);
        // A missing event for the compute stream shows when the side stream is deferred, and vice versa.
        if (!c.every_order) continue;
        const auto differs = [&](bool defers_compute, int64_t missing) {
            try {
                return watch(c.config, data, defers_compute, &missing) != expected;
            } catch (const Error&) { return true; }   // such as of logits that are not finite
        };
        int64_t of_compute = 0, of_side = 0;
        for (int64_t n = 0; n < orders; n++)
            if (differs(false, n)) of_compute++;
            else if (differs(true, n)) of_side++;
            else MESSAGE(c.name, ": without event ", n, " nothing changes");
        CHECK(of_compute + of_side == orders);
        CHECK(of_compute >= kSteps);
        CHECK(of_side >= kSteps);
    }
}

TEST_CASE("streams: weights recomputed from masters during an all-gather are the same in either order") {
    const Actions again{{}, [](TestModel& model, int) {
        model.trainer->weights_from_masters(model.ctx, true);
    }};
    for (const StreamCase& c : stream_cases()) {
        if (c.config.expert_parallel > 1) continue;   // its ranks have different weights
        CAPTURE(c.name);
        const Run expected = train(changed(c.config, [](Config& config) { config.overlap = false; }), 2, 2, again);
        for (bool compute : {false, true})
            CHECK(train(c.config, 2, 2, again, {.defers_compute = compute}) == expected);
    }
}

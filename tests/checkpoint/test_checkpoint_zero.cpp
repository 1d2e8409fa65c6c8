// Checkpoints of training: a run resumes a checkpoint of another number of ranks.
#include "tests/support/zero_test.h"

#include <nlohmann/json.hpp>

#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/train/run/run_checkpoints.h"
#include "tests/support/checkpoint_test.h"

using namespace checkpoint_test;
using Json = nlohmann::json;

namespace {

// With gradients communicated in FP8, other tensors are in a rank's memory when it saves.
std::vector<TrainingCase> cases() {
    std::vector<TrainingCase> cases;
    const auto shapes = fp8_shapes();
    auto add = [&](const std::string& name, size_t shape, Fp8Recipe recipe) -> Config& {
        return cases.emplace_back(TrainingCase{name, in_small_buckets(fp8_config(shapes[shape], recipe))}).config;
    };
    add("fp32", 0, Fp8Recipe::kNone).dtype = Dtype::kFp32;
    add("bf16, bf16 gradients and moments", 1, Fp8Recipe::kNone).moment_dtype = Dtype::kBf16;
    cases.back().config.grad_dtype = Dtype::kBf16;
    add("fp8 moments", 1, Fp8Recipe::kNone).moment_dtype = Dtype::kE4m3;
    add("delayed, tied head in FP8", 0, Fp8Recipe::kDelayed).fp8_lm_head = true;
    add("delayed", 2, Fp8Recipe::kDelayed);
    Config& one_in_bf16 = add("1F1L", 1, Fp8Recipe::kTensorwise);
    one_in_bf16.first_last_layers_bf16 = true;
    one_in_bf16.num_layers_at_start_in_bf16 = 1;
    add("blockwise, gradients in FP8", 1, Fp8Recipe::kBlockwise).grad_comm_dtype = Dtype::kE4m3;
    add("INT8 forward, gradients sharded", 1, Fp8Recipe::kInt8Forward).zero = 2;
    add("tensorwise, replicated", 1, Fp8Recipe::kTensorwise).zero = 0;
    add("delayed, gradients sharded", 0, Fp8Recipe::kDelayed).zero = 2;
    add("muon", 1, Fp8Recipe::kNone).optimizer = OptimizerKind::kMuon;
    add("muon, delayed, gradients sharded", 1, Fp8Recipe::kDelayed).zero = 2;
    cases.back().config.optimizer = OptimizerKind::kMuon;
    cases.back().config.moment_dtype = Dtype::kE4m3;
    cases.back().config.muon_beta2 = 0.9;
    for (TrainingCase& c : cases) c.config.global_batch_size = 12;
    return cases;
}

// The state of one rank: all forms of the weights, the scales, and its shards of masters and moments.
struct Left {
    std::map<std::string, Bytes> weights, state;
    std::string factors;
    bool operator==(const Left&) const = default;
};
Left left_of(TestModel& model) {
    Left left{read_weights(model), {}, state_text(model)};
    add_state(model, left.state);
    return left;
}

void train_step(TestModel& model, uint64_t number) {
    model.set_random_batch(model.config.global_batch_size, 100 + number);
    model.step();
}

std::unique_ptr<CheckpointSaver> saver_of(TestModel& model, Comm& comm, const std::string& root) {
    SaveOptions options;
    options.root = root;
    options.async = model.config.save_async;
    return std::make_unique<CheckpointSaver>(options, model.config.shape, model.table,
                                             model.trainer->state_access(model.ctx), comm);
}

std::string state_json_of(TestModel& model) {
    Json state = Json::parse(checkpoint_test::state_json(model.result.adam_step));
    state["fp8"] = Json::parse(state_text(model));
    return state.dump();
}

// Loads a checkpoint as a resumed run does.
void resume(TestModel& model, Comm& comm, const std::string& root) {
    const FoundCheckpoint found = ::find_checkpoint("auto", root, comm);
    load_checkpoint(found.path, model.config.shape, model.table, model.trainer->state_access(model.ctx), comm,
                    kStagingBytes, model.config.optimizer);
    const auto saved = Json::parse(found.state_json);
    StepState state{};
    state.adam_step = model.result.adam_step = saved.at("adam_step").get<int64_t>();
    device::copy_to_device(model.ctx, model.trainer->state(), &state, sizeof state);
    model.trainer->fp8().initialise(model.ctx);
    CHECK(restore_fp8_state(model.ctx, model.trainer->fp8(), saved.at("fp8")).empty());
    model.trainer->weights_from_masters(model.ctx, false);
    device::synchronize(model.ctx);
}

// Makes two steps, saves, and makes a third step while the checkpoint is written. Returns the state at the save, by
// rank, and the third loss.
struct Straight {
    std::vector<Left> saved;
    double loss = 0;
};
Straight train_and_save(const Config& config, int ranks, const std::string& root) {
    Straight straight;
    straight.saved.resize(static_cast<size_t>(ranks));
    CHECK(run_ranks(ranks, [&](LocalComm& comm) {
        TestModel model(config, true, &comm, {.defers_compute = config.save_async});
        const auto saver = saver_of(model, comm, root);
        train_step(model, 0);
        train_step(model, 1);
        saver->save(2, state_json_of(model));
        straight.saved[static_cast<size_t>(comm.world().rank)] = left_of(model);
        train_step(model, 2);
        saver->finish();
        if (comm.root()) straight.loss = model.loss();
        CHECK(model.arena.peak_bytes() == model.plan.arena_bytes);
        // The plan predicts the memory that saving needs.
        int64_t largest = 0;
        for (const std::string& bytes : comm.gather(std::to_string(saver->buffer_bytes())))
            largest = std::max<int64_t>(largest, std::stoll(bytes));
        CHECK(model.plan.pinned_bytes == largest);
    }) == std::vector<std::string>(static_cast<size_t>(ranks), "nothing"));
    return straight;
}

}  // namespace

TEST_CASE("checkpoint, training: a run resumed on another number of ranks has equal bits in all state") {
    int number = 0;
    for (const TrainingCase& c : cases()) {
        const int others = number++ % 2 == 0 ? 1 : 3;
        for (int writers : {2, others}) {
            CAPTURE(c.name, writers);
            TempDir dir;
            Config config = c.config;
            config.save = dir / "first";
            config.save_async = (writers == 2) == (number % 4 < 2);
            const Straight straight = train_and_save(config, writers, config.save);
            const auto expected = contents(dir / "first/step-00000002");
            for (int readers : {1, 2, 3, 4}) {
                if (writers != 2 && readers != writers && readers != 4) continue;
                CAPTURE(readers);
                const std::string again = dir / ("again" + std::to_string(readers));
                CHECK(run_ranks(readers, [&](LocalComm& comm) {
                    TestModel model(config, true, &comm, {.defers_compute = readers % 2 == 0});
                    const Left fresh = left_of(model);
                    resume(model, comm, dir / "first");
                    const Left left = left_of(model);
                    CHECK(left.factors == straight.saved[0].factors);
                    CHECK(left.weights == straight.saved[0].weights);
                    CHECK(left.weights != fresh.weights);
                    if (readers == writers) CHECK(left == straight.saved[static_cast<size_t>(comm.world().rank)]);
                    const auto saver = saver_of(model, comm, again);
                    saver->save(2, state_json_of(model));
                    saver->finish();
                    train_step(model, 2);
                    if (readers == writers) CHECK(model.loss() == straight.loss);
                    const double tolerance = config.dtype == Dtype::kFp32 ? 1e-6 : 0.01;
                    CHECK(model.loss() == doctest::Approx(straight.loss).epsilon(tolerance));
                }) == std::vector<std::string>(static_cast<size_t>(readers), "nothing"));
                CHECK(contents(again + "/step-00000002") == expected);
            }
        }
    }
}

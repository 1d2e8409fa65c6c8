// A small model on the device of this build, with access to everything that tests compare.
#pragma once
#include "tests/support/doctest.h"

#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "llmc/base/rng.h"
#include "llmc/perf/fp8_speedup.h"
#include "llmc/train/plan.h"
#include "llmc/train/trainer.h"
#include "tests/support/deferred_stream.h"

// Small but complete shapes: odd row counts, a vocabulary that needs padding, grouped queries.
inline ModelConfig tiny_gpt2() {
    ModelConfig c{.num_layers = 2, .hidden_size = 24, .ffn_hidden_size = 40, .num_attention_heads = 3,
                  .num_query_groups = 3, .kv_channels = 8, .vocab_size = 29, .max_positions = 16, .rope_scaling = {}};
    return c;
}

inline ModelConfig tiny_llama() {
    ModelConfig c = tiny_gpt2();
    c.hidden_size = 32, c.num_attention_heads = 4, c.num_query_groups = 2, c.norm = Norm::kRmsNorm;
    c.position = PositionEmbedding::kRope, c.activation = Activation::kSwiglu, c.linear_bias = LinearBias::kNone;
    c.tied_head = false;
    return c;
}

inline ModelConfig tiny_moe() {
    ModelConfig c = tiny_llama();
    c.ffn_hidden_size = 24;
    c.qk_norm = true;
    c.num_experts = 5;
    return c;
}

inline ModelConfig tiny_gpt_oss() {
    ModelConfig c = tiny_moe();
    c.qk_norm = false, c.activation = Activation::kClampedSwiglu, c.linear_bias = LinearBias::kAll;
    c.attention_sinks = true, c.sliding_window = {3, 0};
    return c;
}

inline Config tiny_config(const ModelConfig& shape, Dtype dtype, int64_t B, int64_t T) {
    Config c;
    c.shape = shape, c.seq_length = T, c.micro_batch_size = c.global_batch_size = B, c.train_iters = 1, c.dtype = dtype;
    c.lr = 1e-3, c.adam_beta1 = 0.9, c.adam_beta2 = 0.95, c.adam_eps = 1e-8, c.weight_decay = 0.1, c.clip_grad = 1.0;
    c.seed = 7;
    return c;
}

// Memory plan of a run of this configuration on `ranks` ranks.
inline MemoryPlan memory_of(const Config& config, int ranks) {
    const ParamTable table = make_param_table(config);
    return plan_memory(config, table, fp8_plan_of(config, table), ranks);
}

// The order in which the CPU executes its two streams.
struct Streams {
    bool defers_compute = false;   // defer the compute stream instead of the side stream; see cpu::defer
    int64_t* orders = nullptr;     // see cpu::count_orders
};

class TestModel {
public:
    static constexpr int32_t kSeparator = 1;   // with --reset-attention-mask

    // one_of: communicator of one of several ranks; null: a single rank.
    explicit TestModel(const Config& c, bool poison = true, Comm* one_of = nullptr, const Streams& streams = {})
        : comm(one_of ? *one_of : *single_), config(c), table(make_param_table(config)) {
        device::device_open(ctx, 0);
        cpu::count_orders(ctx, streams.orders);
        if (streams.defers_compute) cpu::defer(ctx);
        plan = plan_memory(config, table, fp8_plan, comm.world().ranks);
        memory_ = device::device_alloc(plan.arena_bytes);
        device::fill_bytes(ctx, memory_, 0xff, plan.arena_bytes);
        arena = Arena(memory_, plan.arena_bytes);
        arena.set_poison(poison);
        trainer = std::make_unique<Trainer>(config, table, fp8_plan, arena, groups_);
        device::fill_bytes(ctx, trainer->state(), 0, sizeof(StepState));
        trainer->decoder().upload_constants(ctx);
        trainer->initialise(ctx);
    }
    ~TestModel() {
        trainer.reset();
        device::device_close(ctx);   // deferred work may still use the memory
        device::device_free(memory_);
    }

    // Sets micro-batches of micro_batch_size sequences, which are distributed over the ranks.
    void set_batch(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) {
        const int64_t B = config.micro_batch_size, T = config.seq_length, N = B * config.part_length();
        const World& context = groups_.context.world();
        counted = 0;
        for (int32_t target : targets) counted += target != kIgnoreIndex;
        const int64_t micro_batches = static_cast<int64_t>(tokens.size()) / (B * T);
        staged.micro_batches = (micro_batches - groups_.data_rank + groups_.data_ranks - 1) / groups_.data_ranks;
        memory_of_inputs_.resize(static_cast<size_t>(input_elems(config, staged.micro_batches * B)));
        static_cast<HostInputs&>(staged) = inputs_in(config, memory_of_inputs_.data(), staged.micro_batches * B);
        staged.calibration_micro_batch = -1;
        SequenceReader reader(config, context);
        for (int64_t i = 0; i < staged.micro_batches; i++) {
            const int64_t begin = (i * groups_.data_ranks + groups_.data_rank) * B * T;
            std::vector<uint8_t> starts;
            for (int64_t t = begin; t < begin + B * T; t++)
                starts.push_back(tokens[static_cast<size_t>(t)] == kSeparator);
            const auto in_batch = reader.set(tokens.data() + begin, targets.data() + begin, starts.data(),
                                             staged.after(i * N, context.ranks));
            if (staged.calibration_micro_batch < 0 && in_batch.whole > 0) staged.calibration_micro_batch = i;
        }
        staged.calibration_micro_batch = std::max<int64_t>(0, staged.calibration_micro_batch);
        inputs_ = {};
        inputs_.lr = static_cast<float>(config.lr);
        inputs_.dloss_mul = static_cast<float>(1.0 / static_cast<double>(counted));
        inputs_.token_mul = static_cast<float>(1.0 / static_cast<double>(tokens.size()));
        staged.inputs = &inputs_, staged.result = &result, staged.counted_tokens = counted;
    }
    void set_random_batch(int64_t sequences, uint64_t key, bool with_ignored = true) {
        const int64_t n = sequences * config.seq_length;
        std::vector<int32_t> tokens, targets;
        for (int64_t i = 0; i < n; i++) {
            const Philox4 p = philox(key, static_cast<uint64_t>(i));
            tokens.push_back(static_cast<int32_t>(p.word[0] % static_cast<uint32_t>(config.shape.vocab_size)));
            const bool ignored = with_ignored && p.word[2] % 5 == 0;
            const uint32_t target = p.word[1] % static_cast<uint32_t>(config.shape.vocab_size);
            targets.push_back(ignored ? kIgnoreIndex : static_cast<int32_t>(target));
        }
        set_batch(tokens, targets);
    }

    void step() {
        trainer->step(ctx, staged);
        device::synchronize(ctx);
    }
    // Gradients of the batch without an update: the learning rate is 0 for this step.
    void gradients() {
        inputs_.lr = 0;
        step();
        inputs_.lr = static_cast<float>(config.lr);
    }
    double loss() const { return result.loss_sum / static_cast<double>(counted); }

    // Every float type as double.
    std::vector<double> read(const Tensor& tensor) {
        std::vector<char> raw(static_cast<size_t>(tensor.bytes()));
        device::copy_to_host(ctx, raw.data(), tensor.data, tensor.bytes());
        device::synchronize(ctx);
        std::vector<double> values;
        for (int64_t i = 0; i < tensor.elems; i++) {
            const size_t at = static_cast<size_t>(i);
            switch (tensor.dtype) {
                case Dtype::kFp32:
                    values.push_back(static_cast<double>(reinterpret_cast<float*>(raw.data())[at]));
                    break;
                case Dtype::kFp64: values.push_back(reinterpret_cast<double*>(raw.data())[at]); break;
                case Dtype::kBf16:
                    values.push_back(static_cast<double>(static_cast<float>(reinterpret_cast<bf16*>(raw.data())[at])));
                    break;
                default: throw Error(kExitBug, "not a float tensor");
            }
        }
        return values;
    }
    std::vector<double> grad(int param) { return read(trainer->decoder().grad(param)); }
    std::vector<double> weight(int param) { return read(trainer->decoder().weight(param)); }
    // Logits (true vocabulary) of a row of the last forward pass, which was one of whole micro-batches.
    std::vector<double> logits(int64_t row) {
        const int64_t Vp = config.shape.padded_vocab();
        const Tensor tensor{device::device_alloc(Vp * dtype_bytes(config.dtype)), config.dtype, Vp};
        trainer->decoder().logits_row(ctx, {.B = config.micro_batch_size, .T = config.part_length()}, row, tensor);
        std::vector<double> values = read(tensor);
        device::device_free(tensor.data);
        values.resize(static_cast<size_t>(config.shape.vocab_size));
        for (double& value : values) value = trainer->decoder().logit_of(value);
        return values;
    }
    // Compares `count` elements of a parameter's gradient, spread by the generator, with central differences of the
    // batch's loss (fp64, on the CPU). Returns the largest relative difference.
    double check_differences(int param, uint64_t count) {
        gradients();
        if (config.shape.has_experts()) gradients();   // the auxiliary loss takes the load of the step before
        const std::vector<double> grad = this->grad(param);
        const Param& p = table.params[static_cast<size_t>(param)];
        double worst = 0;
        for (uint64_t k = 0; k < count; k++) {
            const int64_t at = philox(5, k, static_cast<uint64_t>(param)).word[0] % p.elems();
            double& weight = weight_element<double>(param, at);
            const double value = weight, h = 1e-5;
            double losses[2];
            for (int side = 0; side < 2; side++) {
                weight = value + (side ? h : -h);
                gradients();
                losses[side] = loss() + config.z_loss * result.z_sum / static_cast<double>(counted)
                               + result.router_loss;
            }
            weight = value;   // with lr 0 the masters do not change, but the weights are rounded from them
            // dloss_mul is a float, so the gradient has its relative rounding error of 2^-24.
            const double numeric = (losses[1] - losses[0]) / (2 * h), analytic = grad[static_cast<size_t>(at)];
            const double error = std::fabs(numeric - analytic) / (1e-4 + std::fabs(numeric));
            CHECK_MESSAGE(error < 1e-5, p.name, "[", at, "] numeric ", numeric, " analytic ", analytic);
            worst = std::fmax(worst, error);
        }
        return worst;
    }
    // An element of a weight in the working type, on the CPU, to change it before the next call.
    template <typename T> T& weight_element(int param, int64_t at) {
        trainer->gatherer().wait(ctx);
        device::synchronize(ctx);
        return trainer->decoder().weight(param).slice(at, 1).as<T>()[0];
    }

private:
    const std::unique_ptr<Comm> single_ = open_single();

public:
    Comm& comm;
    const Config config;
    const ParamTable table;
    const Fp8Plan fp8_plan = fp8_plan_of(config, table);
    Ctx ctx;
    MemoryPlan plan;
    Arena arena;
    std::unique_ptr<Trainer> trainer;
    StagedStep staged;
    StepState result{};
    int64_t counted = 0;

private:
    const Groups groups_{comm, group_sizes(config, comm.world().ranks)};
    void* memory_ = nullptr;
    std::vector<int32_t> memory_of_inputs_;
    StepState inputs_{};
};

// |a - b| / |b|
inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double difference = 0, bb = 0;
    for (size_t i = 0; i < a.size(); i++) difference += (a[i] - b[i]) * (a[i] - b[i]), bb += b[i] * b[i];
    return std::sqrt(difference / bb);
}

inline double norm_of(const std::vector<double>& a) {
    return std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0));
}

inline double cosine(const std::vector<double>& a, const std::vector<double>& b) {
    double ab = 0, aa = 0, bb = 0;
    for (size_t i = 0; i < a.size(); i++) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
    return ab / std::sqrt(aa * bb);
}

inline std::vector<std::vector<double>> all_grads(TestModel& model) {
    std::vector<std::vector<double>> grads;
    for (size_t i = 0; i < model.table.params.size(); i++) grads.push_back(model.grad(static_cast<int>(i)));
    return grads;
}

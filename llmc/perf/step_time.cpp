#include "llmc/perf/step_time.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>

namespace {

constexpr const char* kPartNames[kStepParts] = {
    "matmuls", "attention", "norms, activations, rope", "FP8 quantization", "sums of ranks", "optimizer",
    "gaps and clocks", "communication not hidden", "memory traffic of comm", "host link not hidden",
};

StepPart part_of(const PlannedOp& op) {
    using enum StepPart;
    if (op.in_update) return kOptimizer;
    switch (op.kind) {
        case OpKind::attention_forward: case OpKind::attention_backward: case OpKind::quantize_heads: return kAttention;
        case OpKind::quantize: case OpKind::amax: case OpKind::cast: case OpKind::fp8_clear: case OpKind::fp8_update:
        case OpKind::block_amax: case OpKind::fp8_scales: case OpKind::quantize_run: case OpKind::block_scales:
        case OpKind::count_scales: case OpKind::transpose_bytes: case OpKind::quantize_int8: case OpKind::row_amax:
        case OpKind::quantize_int8_run: case OpKind::row_scales: case OpKind::transpose_int8:
        case OpKind::transpose_scaled: return kQuantization;
        case OpKind::sum_ranks: case OpKind::quantize_chunks: case OpKind::compare_sums: return kSums;
        case OpKind::sum_squares: case OpKind::step_guard: case OpKind::adamw: case OpKind::ema:
        case OpKind::qk_clip_factors: case OpKind::qk_clip:
        case OpKind::muon_momentum: case OpKind::muon_normalize: case OpKind::muon_polynomial:
        case OpKind::muon_row_norm: case OpKind::muon_update: return kOptimizer;
        default: return kElementwise;
    }
}

// Bytes per second sent by a rank to other hosts. Nominal: a 400 Gb/s adapter per GPU (DGX H100 and H200 data sheets).
constexpr double kNetworkRate = 50e9;
// Bytes per second between host memory and a GPU, each way. Pinned memory of four H200 that copied at once, and of one
// (dev/results/2026-11-27-h200-start): one GPU is bounded by its PCIe Gen5 x16, four by what their host's memory moves.
// Four GPUs share a socket in the usual hosts of eight.
struct HostLink {
    double one_way, both_ways;   // while the other direction is idle, and while it is busy
};
HostLink host_link(int ranks) {
    constexpr double kMemoryOneWay = 4 * 40e9, kMemoryBothWays = 4 * 22.5e9;
    const double sharing = std::min(ranks, 4);
    return {std::min(55e9, kMemoryOneWay / sharing), std::min(50e9, kMemoryBothWays / sharing)};
}

// The backward pass of the last micro-batch hides the reduction of gradients, and the first forward pass the all-gather
// of weights; except for the embedding, whose gradients are complete last and whose weights are needed first. With
// --zero 2 each backward pass hides a reduction, except that of the embedding, which the next forward pass hides. With
// --zero 3 each pass hides an all-gather of its weights, one layer ahead; only the embedding is gathered before the
// first pass of the step.
double exposed_ms(const Config& config, const MemoryPlan& plan, const StepTime& time, double forward_ms,
                  double backward_ms, double micro_batches) {
    if (!config.overlap) return time.reduce_ms + time.gather_ms;
    auto exposed = [&](double ms, double compute_ms) {
        return plan.edge_share * ms + std::max(0.0, (1 - plan.edge_share) * ms - compute_ms);
    };
    double gather_ms = exposed(time.gather_ms, forward_ms);
    if (config.zero == 3 && plan.ranks > 1) {
        const double passes = 2 * micro_batches * (1 - plan.edge_share);
        const double first_ms = time.gather_ms * plan.edge_share / (plan.edge_share + passes);
        const double pass_ms = (time.gather_ms - first_ms) / (2 * micro_batches);
        gather_ms = first_ms + micro_batches * std::max(0.0, pass_ms - forward_ms);
        backward_ms -= pass_ms;   // what is left to hide the reduction
    }
    if (config.zero < 2) return exposed(time.reduce_ms, backward_ms) + gather_ms;
    const double reduce_ms = time.reduce_ms / micro_batches, edge_ms = plan.edge_share * reduce_ms;
    const double between_ms = exposed(reduce_ms, backward_ms) - edge_ms + std::max(0.0, edge_ms - forward_ms);
    return (micro_batches - 1) * between_ms + exposed(reduce_ms, backward_ms) + gather_ms;
}

double link_rate(const Gpu& gpu) { return kLinkRate * gpu.link_gbps / measured_gpu().link_gbps; }

// Whether a collective leaves the hosts. Groups of --zero-group and --context-parallel consist of neighbouring ranks;
// sums in FP32 are between the groups of --zero-group.
bool between_hosts(const Config& config, const MemoryPlan& plan, const PlannedCollective& c) {
    if (plan.ranks <= kRanksPerHost || (c.exchange && c.ranks <= kRanksPerHost)) return false;
    const int64_t group = config.zero_group > 0 ? config.zero_group : plan.ranks;
    const bool of_copies = std::strcmp(c.name, "all-reduce sum") == 0 && c.dtype == Dtype::kFp32;
    return group > kRanksPerHost || c.ranks != group || of_copies;
}

// The exposed time of the copies of --offload in each direction, in ms. The update hides copies of the optimizer state;
// those that fit into the buffers are prefetched and hidden, too. Each pass hides its copies of activations.
double exposed_link_ms(const MemoryPlan& plan, StepTime& time, double micro_batches, double forward_ms,
                       double backward_ms) {
    const HostLink link = host_link(plan.ranks);
    const double buffers = real(plan.purpose_bytes[static_cast<size_t>(Purpose::kOffload)]);
    const double state = 1e3 * real(plan.state_host_bytes) / link.both_ways;
    const double activations = 1e3 * real(plan.activation_host_bytes) / link.one_way;   // of a micro-batch
    time.host_link_ms = state + micro_batches * activations;
    return std::max(0.0, state - 1e3 * buffers / link.both_ways - time[StepPart::kOptimizer])
           + micro_batches * (std::max(0.0, activations - forward_ms) + std::max(0.0, activations - backward_ms));
}

// Of Muon's rounds, nothing hides that the first matrices arrive and that the last results return.
double exposed_matrices_ms(const Config& config, const MemoryPlan& plan, const StepTime& time) {
    double rounds = 0;
    for (const PlannedCollective& c : plan.collectives) rounds += c.matrices ? real(c.calls) - 2 : 0;
    if (!config.overlap || rounds == 0) return time.matrices_ms;
    const double edges_ms = time.matrices_ms / rounds;   // half of a round's matrices each
    return edges_ms + std::max(0.0, time.matrices_ms - edges_ms - time.update_matmuls_ms);
}

// Adds communication and copies from and to host memory. forward_ms, backward_ms: of a micro-batch.
void add_communication(const Config& config, const MemoryPlan& plan, const Rates& rates, double micro_batches,
                       double forward_ms, double backward_ms, double slower_memory, StepTime& time) {
    const double link = link_rate(*time.gpu);
    double traffic = 2e-3 * (time.tokens_ms - time.exposed_tokens_ms) * link;
    for (const PlannedCollective& c : plan.collectives) {
        if (c.tokens) continue;
        const bool gathers = std::strcmp(c.name, "all-gather") == 0;
        if (!c.exchange) traffic += 2 * real(c.sent_bytes + c.copied_bytes);
        double& ms = c.exchange ? time.exchange_ms : c.matrices ? time.matrices_ms
                     : gathers ? time.gather_ms : time.reduce_ms;
        ms += 1e3 * real(c.sent_bytes) / (between_hosts(config, plan, c) ? kNetworkRate : link);
    }
    time[StepPart::kCommunication] =
        time.exchange_ms + time.exposed_tokens_ms + exposed_matrices_ms(config, plan, time)
        + exposed_ms(config, plan, time, forward_ms, backward_ms, micro_batches);
    // The memory traffic of hidden collectives takes time from the operations beside them, which lack this bandwidth:
    // what is sent is read, as much is written on arrival, and a rank may copy its block within its memory, too.
    // On two H200, the steps of --zero 2 and 3 are longer by about this time (dev/results/2026-11-24-two-gpus.md).
    if (config.overlap && plan.ranks > 1)
        time[StepPart::kCommTraffic] = 1e3 * traffic / rates.copy_rate * slower_memory;
    time[StepPart::kHostLink] = exposed_link_ms(plan, time, micro_batches, forward_ms, backward_ms);
}

}  // namespace

double StepTime::total_ms() const { return std::accumulate(ms.begin(), ms.end(), 0.0); }

std::vector<std::pair<std::string, double>> StepTime::named_ms() const {
    std::vector<std::pair<std::string, double>> named;
    for (size_t i = 0; i < ms.size(); i++)
        if (ms[i] != 0) named.emplace_back(kPartNames[i], ms[i]);
    return named;
}

StepTime predict_step(const Config& config, const MemoryPlan& plan, const Gpu& gpu, const Rates& rates) {
    StepTime time{.gpu = &gpu};
    if (config.dtype == Dtype::kFp64) return time;
    // Times from the rates of another GPU: matmuls and attention are scaled by the peak of their dtype, all else by
    // memory bandwidth.
    const Gpu& from = rates.gpu == std::string(gpu.name) ? gpu : measured_gpu();
    const double slower16 = from.bf16 / gpu.bf16, slower8 = from.fp8 / gpu.fp8,
                 slower_memory = from.memory_tbps / gpu.memory_tbps;
    double forward_ms = 0, backward_ms = 0;
    auto add = [&](StepPart part, bool backward, double ms) {
        time[part] += ms;
        (backward ? backward_ms : forward_ms) += ms;
    };
    const auto matmul_ms = [&](const PlannedGemm& g) {
        const double us = g.experts > 0 ? rates.expert_matmul_us(g.shape, g.experts) : rates.matmul_us(g.shape);
        return 1e-3 * us * (dtype_bytes(g.shape.A.dtype) == 1 ? slower8 : slower16)
               * real(g.count);
    };
    const auto op_ms = [&](const PlannedOp& op) {
        const double slower = op.attention.HS == 0 ? slower_memory : op.attention.fp8 ? slower8 : slower16;
        return 1e-3 * rates.op_us(op) * slower * real(op.count);
    };
    for (const PlannedGemm& g : plan.step_gemms)
        if (g.in_update) time.update_matmuls_ms += matmul_ms(g);
        else add(StepPart::kMatmuls, g.shape.layout != GemmLayout::kForward, matmul_ms(g));
    for (const PlannedGemm& g : plan.step_gemms) {
        if (g.experts == 0) continue;
        const auto pass = static_cast<size_t>(g.shape.layout);
        time.expert_ms[pass] += matmul_ms(g);
        time.expert_flop[pass] += 2 * real(g.shape.M) * real(g.shape.N) * real(g.shape.K) * real(g.count);
    }
    for (const PlannedOp& op : plan.step_ops)
        add(part_of(op), std::string_view(op_name(op.kind)).ends_with("_backward"), op_ms(op));
    for (const StepRecorder& exchange : plan.exchanges) {   // within hosts
        const double ms = 1e3 * real(exchange.sent_bytes) / link_rate(gpu);
        double beside_ms = 0;
        for (const PlannedGemm& g : exchange.gemms) beside_ms += matmul_ms(g);
        for (const PlannedOp& op : exchange.ops) beside_ms += op_ms(op);
        time.tokens_ms += ms;
        time.exposed_tokens_ms += std::max(0.0, ms - (1 + rates.overhead) * beside_ms);
    }
    time[StepPart::kOptimizer] += time.update_matmuls_ms;
    forward_ms *= 1 + rates.overhead;
    backward_ms *= 1 + rates.overhead;
    const double micro_batches = real(config.global_batch_size)
                                 / real(config.micro_batch_size * config.data_ranks(plan.ranks));
    // Gradients are set to zero, at the rate of a copy.
    const double gradients = real(plan.purpose_bytes[static_cast<size_t>(Purpose::kGradients)]);
    time[StepPart::kOptimizer] += 1e3 * gradients / rates.copy_rate * slower_memory;
    time[StepPart::kOverhead] = rates.overhead * time.total_ms();
    add_communication(config, plan, rates, micro_batches, forward_ms / micro_batches, backward_ms / micro_batches,
                      slower_memory, time);
    return time;
}

StepTime predict_step(const Config& config, const MemoryPlan& plan, const Gpu& gpu) {
    const Rates* own = find_rates(gpu.name);
    return predict_step(config, plan, gpu, own ? *own : measured_rates());
}

const Gpu& planned_gpu(const Config& config, const DeviceInfo& found) {
    if (config.gpu.empty()) {
        const Gpu* here = find_gpu(found.name);
        return here ? *here : measured_gpu();
    }
    if (const Gpu* named = find_gpu(config.gpu)) return *named;
    std::string names;
    for (const Gpu& gpu : planned_gpus()) names += (names.empty() ? "'" : ", '") + std::string(gpu.name) + "'";
    FAIL(kExitBadInput, "--gpu %s: unknown; rates are known for %s", config.gpu.c_str(), names.c_str());
}

PredictedStep predicted_step(const Config& config, const MemoryPlan& plan, const DeviceInfo& device) {
    const Gpu* gpu = find_gpu(device.name);
    if (!gpu) return {};
    const StepTime time = predict_step(config, plan, *gpu);
    return {.ms = time.total_ms(), .scaled_from = find_rates(gpu->name) ? "" : measured_gpu().name,
            .parts_ms = time.named_ms()};
}

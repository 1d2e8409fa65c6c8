#include "llmc/config/environment.h"

#include <unistd.h>

#include <algorithm>

#include "llmc/base/check.h"
#include "llmc/base/nearest.h"
#include "llmc/base/system/host.h"

namespace {

constexpr struct {
    const char *name, *effect;
} kOwn[] = {
    {"LLMFP8_HEARTBEATS", "shared memory for the heartbeats of the ranks, which the launch wrapper has created"},
    {kHostVariable, "the host that this rank claims to run on, so that a test on one machine can have several hosts"},
};

std::string own_effect(const std::string& name) {
    std::vector<std::string> known;
    for (const auto& own : kOwn) {
        if (name == own.name) return std::string("used: ") + own.effect;
        known.push_back(own.name);
    }
    FAIL(kExitBadInput, "unknown environment variable %s: did you mean %s?", name.c_str(),
         nearest(name, known).c_str());
}

// NVTE_* are Transformer Engine's variables. Those that guides recommend have specific reasons.
std::string nvte_effect(const std::string& name) {
    if (name == "NVTE_FP8_ALLREDUCE") return "unused: no version of Transformer Engine knows it either";
    if (name.starts_with("NVTE_FP8_DPA") || name == "NVTE_FP8_MHA")
        return "unused: it is for FP8 attention in Transformer Engine; here that is --fp8-attention";
    if (name.starts_with("NVTE_FP8_BLOCK_SCALING_"))
        return "unused: it is Transformer Engine's; scales of blocks are powers of two here (--fp8-recipe blockwise)";
    return "unused: it is Transformer Engine's, which this trainer does not use; FP8 is set by --fp8-* options";
}

std::string connections_effect(const std::string& value, bool gpu) {
    if (!gpu) return "unused: no GPU";
    if (value == "1")
        return "used by CUDA, WARNING: with 1 queue streams wait for each other, so communication does not overlap "
               "with matmuls; unset it (Megatron wanted it for tensor parallelism, which is not used here)";
    return "used by CUDA: hardware queues for streams";
}

// Returns "" for a value that OpenMP accepts: positive numbers, separated by commas for nested levels. OpenMP prints a
// complaint of its own about any other value.
std::string threads_effect(const std::string& value) {
    const size_t digits = std::min(value.find_first_not_of("0123456789, "), value.size());
    const bool positive = value.find_first_of("123456789") != std::string::npos;
    const bool taken = digits == value.size() && value.size() < 20 && positive;
    return taken ? "" : "unused: it is not a positive number, so OpenMP uses all cores";
}

// The value without control characters and at most 80 characters long, so that it fits on a line of the screen.
std::string shown(std::string value) {
    for (char& c : value)
        if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) c = '?';
    return value.size() > 80 ? value.substr(0, 77) + "..." : value;
}

}  // namespace

std::vector<VariableEffect> environment_effects(const std::vector<std::string>& variables, int ranks, bool gpu) {
    std::vector<VariableEffect> effects;
    for (const std::string& variable : variables) {
        const size_t equals = std::min(variable.find('='), variable.size());
        const std::string name = variable.substr(0, equals);
        const std::string value = variable.substr(std::min(equals + 1, variable.size()));
        std::string effect;
        const bool nvte = name.starts_with("NVTE_");
        if (nvte) effect = nvte_effect(name);
        if (name.starts_with("NCCL_")) effect = !gpu ? "unused: no GPU, so no NCCL"
                                                        : ranks > 1 ? "passed to NCCL" : "unused: one rank, so no NCCL";
        if (name == "CUDA_DEVICE_MAX_CONNECTIONS") effect = connections_effect(value, gpu);
        if (name == "OMP_NUM_THREADS") effect = threads_effect(value);
        if (name.starts_with("LLMFP8_")) effect = own_effect(name);
        if (effect.empty()) continue;
        const bool warn = nvte || name == "OMP_NUM_THREADS" || effect.find("WARNING") != std::string::npos;
        effects.push_back({.name = name, .value = shown(value), .effect = effect, .warn = warn});
    }
    // The order of environment variables is arbitrary.
    std::sort(effects.begin(), effects.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    return effects;
}

std::vector<std::string> own_environment() {
    std::vector<std::string> variables;
    for (char** entry = environ; entry && *entry; entry++) variables.push_back(*entry);
    return variables;
}

std::vector<std::string> environment_lines(const std::vector<std::string>& variables, int ranks, bool gpu) {
    std::vector<std::string> lines;
    for (const VariableEffect& e : environment_effects(variables, ranks, gpu))
        lines.push_back("environment: " + e.name + "=" + e.value + " " + e.effect);
    return lines;
}

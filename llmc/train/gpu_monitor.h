// What the GPUs of a run did, for its log: utilization, power, clocks and energy, sampled by NVML in a thread of every
// rank. Nothing waits for a stream; of several ranks, each step's report is one more gather in host memory.
#pragma once
#include <memory>
#include <string>

#include "llmc/base/nvml.h"
#include "llmc/parallel/comm.h"
#include "llmc/train/log.h"

class GpuMonitor {
public:
    explicit GpuMonitor(Comm& comm) : comm_(comm) {}

    // Starts to sample the GPU at this rank's PCI address; "", the CPU's: there is none. After it, every rank calls
    // restart and report in the same order.
    void start(const std::string& bus, const char* library = kNvmlLibrary);
    // What was before, such as an evaluation, belongs to no step.
    void restart();
    // Of the time since the last call of either that had a sample of every GPU; empty if a GPU has none yet. tokens: of
    // the step that is reported, over all ranks. Collective.
    GpuRecord report(double tokens);
    // Why a GPU is not sampled, once; "" if there is nothing to say.
    std::string note();

private:
    Comm& comm_;
    std::unique_ptr<GpuSampler> sampler_;
    GpuSamples since_;               // the last record
    std::optional<double> joules_;   // of the counter then
    double tokens_ = 0;              // since then
    std::string note_;
};

// What the GPUs of a run did, for its log: utilization, power, clocks and energy, sampled by NVML in a thread of every
// rank. Nothing waits for a stream. With several ranks, each report takes one more gather in host memory.
#pragma once
#include <cmath>
#include <memory>
#include <string>

#include "llmc/base/system/nvml.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/train/log/run_log.h"

class GpuMonitor {
public:
    explicit GpuMonitor(Comm& comm) : comm_(comm) {}

    // Starts to sample the GPU at this rank's PCI address; does nothing for "", the address on the CPU. Afterwards
    // every rank must call restart and report in the same order.
    void start(const std::string& bus, const char* library = kNvmlLibrary);
    // Discards the samples so far, which belong to no step, such as those of an evaluation.
    void restart();
    // Ends the time of the step that is reported next, unless this has happened: later samples belong to the step after
    // it. To be called when the GPU has completed the step; the host may be far into enqueuing the next one by the time
    // of report, which else ends the step. Not collective.
    void end_step();
    // Returns the record of the time since the last restart or non-empty report; empty if a GPU has no sample of that
    // time yet. tokens: of the step that is reported, over all ranks. Collective.
    GpuRecord report(double tokens);
    // Returns, once, why a GPU is not sampled; else "".
    std::string note();

private:
    Comm& comm_;
    std::unique_ptr<GpuSampler> sampler_;
    GpuSamples since_;               // samples since the last record
    bool ended_ = false;             // since_ has all samples of the step that is reported next
    double millijoules_ = NAN;       // of the energy counter at the last record
    double tokens_ = 0;              // since the last record
    std::string note_;
};

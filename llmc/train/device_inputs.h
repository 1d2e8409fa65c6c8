// The inputs of a micro-batch on the device.
#pragma once
#include "llmc/model/decoder.h"
#include "llmc/ops/arena.h"
#include "llmc/train/host_inputs.h"

class DeviceInputs {
public:
    // Takes memory for the inputs of a micro-batch. config is not owned.
    DeviceInputs(const Config& config, Arena& arena);
    // Copies the inputs of B sequences of T tokens of this rank, at most a micro-batch. Those that are null on the host
    // are so in the result, but for a rehearsal, which has all.
    DeviceBatch upload(Ctx& ctx, const HostInputs& host, int64_t B, int64_t T, StepState* state) const;
    int32_t* tokens() const { return places_.tokens; }

private:
    const int64_t context_ranks_;
    const HostInputs places_;   // on the device
};

// Device memory for a StepState.
StepState* take_step_state(Arena& arena);

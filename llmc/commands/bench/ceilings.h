// Measures the ceilings of this device.
#pragma once
#include "llmc/commands/bench/bench_table.h"

// A copy, and a square matmul of each dtype of the matmuls and attention in `work`. Frees the memory that it takes.
Ceilings measure_ceilings(Ctx& ctx, const StepRecorder& work);

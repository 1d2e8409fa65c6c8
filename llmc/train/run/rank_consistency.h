// Checks across ranks: equal FP8 scales, the error of gradients reduced in FP8, and equal matmul algorithms. All ranks
// call each function.
#pragma once
#include <string>
#include <vector>

#include "llmc/model/parameters/fp8_state.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/train/log/run_log.h"
#include "llmc/train/trainer.h"

// Gradients of one kind that were reduced in FP8 in one optimizer step, compared with the same sums in fp32.
struct GradCommRecord {
    std::string name;                      // "linears in FP8"
    double relative_l2 = 0, cosine = 1;
    double saturated = 0, flushed = 0;     // fractions of the values cast
    int64_t nonfinite = 0;                 // number of values
};

// Exit 1 if a scale differs between ranks, naming the first such tensor and rank. Compares the scales that later passes
// reuse: all scales if the recipe has histories, else those of the weights.
void check_scales(Comm& comm, const Fp8State& state, const void* fp8_report, int64_t step);

// Logs the comparison of gradients reduced in FP8 and in fp32, if the step made it.
void report_grad_comm(RunLog& log, Comm& comm, const StagedStep& staged, int64_t step);
// Merges the reports of all ranks.
std::vector<GradCommRecord> grad_comm_records(const std::vector<GradCommReport>& reports);

// Replaces the matmul algorithms that each rank found by those of rank 0, which checkpoints contain, so that a resume
// repeats the bits of every rank. Returns "" or which rank cannot use them, and why.
std::string share_matmul_plans(Ctx& ctx, Comm& comm);

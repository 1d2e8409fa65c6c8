// What holds of all ranks together in a step: that their FP8 scales agree, how far gradients that travelled in FP8 are
// from fp32, and that the same matmul algorithms run.
#pragma once
#include <string>
#include <vector>

#include "llmc/model/fp8_state.h"
#include "llmc/parallel/comm.h"
#include "llmc/train/log.h"
#include "llmc/train/trainer.h"

// Exit 1, naming the first tensor whose scale is not that of rank 0, and the rank. Compares what outlives a tensor:
// with histories all scales, else those of the weights. On every rank.
void check_scales(Comm& comm, const Fp8State& state, const void* fp8_report, int64_t step);

// The record of a step that compared; on every rank.
void report_grad_comm(RunLog& log, Comm& comm, const StagedStep& staged, int64_t step);
// Of the reports of all ranks.
std::vector<GradCommRecord> grad_comm_records(const std::vector<GradCommReport>& reports);

// Each rank searched matmul algorithms of its own. From now on all run those of rank 0, which are the ones in
// checkpoints, so that a resume repeats the bits of every rank. On every rank; "" or which one cannot, and why.
std::string share_matmul_plans(Ctx& ctx, Comm& comm);

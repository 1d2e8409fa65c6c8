// Work that all ranks do together and that may fail on one of them: all ranks get the same Error.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "llmc/base/check.h"
#include "llmc/parallel/comm/comm.h"

// The outcome of work on one rank: a text for the other ranks, or an error.
struct RankOutcome {
    int exit_code = kExitOk;
    std::string text;
};

// Does the work, and returns its text or the error that it throws.
RankOutcome outcome_of(const std::function<std::string()>& work);
// Throws the error of the outcome, if it is an error.
void raise(const RankOutcome& outcome);

// Gathers the texts of all ranks. If one failed, throws the error of the lowest such rank on every rank. If there are
// several ranks, the error names that rank: "WHAT, rank 1: no space left". Collective.
std::vector<std::string> gather_outcomes(Comm& comm, const RankOutcome& mine, const std::string& what);

// Does the work on every rank. An error that all ranks have is thrown as it is; any other error names its rank. This
// function is collective, so the work itself must not be.
void on_all_ranks(Comm& comm, const std::string& what, const std::function<void()>& work);

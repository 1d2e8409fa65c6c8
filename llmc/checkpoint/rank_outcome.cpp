#include "llmc/checkpoint/rank_outcome.h"

#include "llmc/base/system/process_limits.h"

RankOutcome outcome_of(const std::function<std::string()>& work) {
    try {
        return {kExitOk, work()};
    } catch (const std::exception& error) {
        const Error said = as_error(error);
        return {said.exit_code, said.what()};
    }
}

void raise(const RankOutcome& outcome) {
    if (outcome.exit_code != kExitOk) throw Error(outcome.exit_code, outcome.text);
}

std::vector<std::string> gather_outcomes(Comm& comm, const RankOutcome& mine, const std::string& what) {
    std::vector<std::string> texts = comm.gather(static_cast<char>(mine.exit_code) + mine.text);
    for (size_t rank = 0; rank < texts.size(); rank++) {
        const int exit_code = texts[rank].at(0);
        texts[rank].erase(0, 1);
        if (exit_code == kExitOk) continue;
        if (texts.size() == 1) throw Error(exit_code, texts[rank]);
        throw Error(exit_code, strf("%s, rank %zu: %s", what.c_str(), rank, texts[rank].c_str()));
    }
    return texts;
}

void on_all_ranks(Comm& comm, const std::string& what, const std::function<void()>& work) {
    const RankOutcome mine = outcome_of([&] { return work(), ""; });
    const std::vector<std::string> all = comm.gather(static_cast<char>(mine.exit_code) + mine.text);
    bool same = true;
    for (const std::string& other : all) same &= other == all[0];
    if (same) return raise(mine);
    gather_outcomes(comm, mine, what);
}

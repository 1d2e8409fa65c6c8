#include "llmc/parallel/rank_preflight.h"

#include <algorithm>

#include "llmc/base/system/files.h"
#include "llmc/base/version.h"

void require_same_program(Comm& comm) {
    const std::string path = "/proc/self/exe";
    require_same(comm, {{"build", kBuildCommit}});
    if (comm.world().ranks > 1) require_same(comm, {{"executable", xxh3_of_range(path, 0, file_bytes(path))}});
}

std::string environment_difference(Comm& comm, std::vector<std::string> variables) {
    std::erase_if(variables, [](const std::string& variable) { return !variable.starts_with("NCCL_"); });
    std::sort(variables.begin(), variables.end());
    const std::string difference = rank_difference(comm, "set of NCCL_ variables", list_text(variables, " "));
    return difference.empty() ? "" : "WARNING: " + difference;
}

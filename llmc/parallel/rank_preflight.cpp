#include "llmc/parallel/rank_preflight.h"

#include <map>
#include <set>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"
#include "llmc/base/system/files.h"
#include "llmc/base/version.h"
#include "llmc/config/environment.h"

namespace {

std::map<std::string, std::string> variables_of(const std::string& lines) {
    std::map<std::string, std::string> variables;
    std::istringstream stream(lines);
    for (std::string line; std::getline(stream, line);)
        if (const size_t equals = line.find('='); equals != std::string::npos)
            variables[line.substr(0, equals)] = line.substr(equals + 1);
    return variables;
}

std::string shown(const std::map<std::string, std::string>& variables, const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? "none" : "\"" + printable(found->second) + "\"";
}

std::string own_executable() {
    const std::string path = "/proc/self/exe";
    return xxh3_of_range(path, 0, file_bytes(path));
}

}  // namespace

void require_same_program(Comm& comm) {
    require_same(comm, {{"build", kBuildCommit}});
    if (comm.world().ranks > 1) require_same(comm, {{"executable", own_executable()}});
}

std::vector<std::string> environment_differences(const std::vector<std::string>& environments,
                                                 const std::vector<std::string>& hosts) {
    std::vector<std::map<std::string, std::string>> ranks;
    std::set<std::string> names;
    for (const std::string& lines : environments) {
        ranks.push_back(variables_of(lines));
        for (const auto& [name, value] : ranks.back()) names.insert(name);
    }
    std::vector<std::string> lines;
    for (const std::string& name : names)
        for (size_t rank = 1; rank < ranks.size(); rank++) {
            const std::string mine = shown(ranks[rank], name), first = shown(ranks[0], name);
            if (mine == first) continue;
            lines.push_back(strf("WARNING: %s differs: rank 0 (host %s) has %s, rank %zu (host %s) has %s",
                                 name.c_str(), hosts[0].c_str(), first.c_str(), rank, hosts[rank].c_str(),
                                 mine.c_str()));
            break;
        }
    return lines;
}

std::vector<std::string> environment_differences(Comm& comm) {
    if (comm.world().ranks == 1) return {};
    std::string mine;
    for (const std::string& line : own_environment())
        if (line.rfind("NCCL_", 0) == 0 && line.find('\n') == std::string::npos) mine += line + "\n";
    return environment_differences(comm.gather(mine), comm.gather(host_name()));
}

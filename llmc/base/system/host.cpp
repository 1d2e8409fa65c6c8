#include "llmc/base/system/host.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

std::string host_name() {
    if (const char* given = std::getenv(kHostVariable)) return given;
    char name[256] = "";
    ::gethostname(name, sizeof name - 1);
    return name;
}

int64_t meminfo_bytes(const std::string& key) {
    std::ifstream file("/proc/meminfo");
    std::string name, unit;
    int64_t value;
    while (file >> name >> value) {
        if (name == key + ":") return value * 1024;
        std::getline(file, unit);
    }
    return -1;
}

int64_t cgroup_memory_limit(const std::string& folder) {
    int64_t least = -1, limit = 0;
    for (size_t end = folder.size(); end > 0 && end != std::string::npos; end = folder.rfind('/', end - 1)) {
        if (std::ifstream(folder.substr(0, end) + "/memory.max") >> limit)   // fails for "max"
            least = least < 0 ? limit : std::min(least, limit);
    }
    return least;
}

std::string own_cgroup() {
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("0::", 0) == 0) return "/sys/fs/cgroup" + line.substr(3);
    return "";
}

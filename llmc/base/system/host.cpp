#include "llmc/base/system/host.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

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

std::vector<std::string> process_stat(const std::string& pid) {
    // getline treats a failed read (ESRCH) as the end of the file; an istreambuf_iterator would throw. The file is one
    // line, because the kernel escapes line breaks in the name.
    std::ifstream file("/proc/" + pid + "/stat");
    std::string text;
    std::getline(file, text);
    // The second field is a name that may contain spaces and parentheses.
    const size_t close = text.rfind(')');
    std::vector<std::string> fields;
    std::istringstream words(close == std::string::npos ? "" : text.substr(close + 1));
    for (std::string word; words >> word;) fields.push_back(word);
    return fields;
}

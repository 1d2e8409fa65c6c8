#include "llmc/base/system/host.h"

#include <unistd.h>

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

#include "llmc/base/host.h"

#include <unistd.h>

#include <cstdlib>

std::string host_name() {
    if (const char* given = std::getenv(kHostVariable)) return given;
    char name[256] = "";
    ::gethostname(name, sizeof name - 1);
    return name;
}

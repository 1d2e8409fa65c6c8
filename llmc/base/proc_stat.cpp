#include "llmc/base/proc_stat.h"

#include <fstream>
#include <sstream>

std::vector<std::string> process_stat(const std::string& pid) {
    // getline takes a read that fails (ESRCH) for the end; an istreambuf_iterator would throw. It is one line: the
    // kernel escapes a name's own line ends.
    std::ifstream file("/proc/" + pid + "/stat");
    std::string text;
    std::getline(file, text);
    // The second field is a name that may hold spaces and brackets.
    const size_t close = text.rfind(')');
    std::vector<std::string> fields;
    std::istringstream words(close == std::string::npos ? "" : text.substr(close + 1));
    for (std::string word; words >> word;) fields.push_back(word);
    return fields;
}

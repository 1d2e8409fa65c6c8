#include "llmc/base/system/proc_stat.h"

#include <fstream>
#include <sstream>

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

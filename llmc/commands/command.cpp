#include "llmc/commands/command.h"

#include "llmc/base/check.h"
#include "llmc/base/nearest.h"

void read_command_options(const std::vector<std::string>& words, const CommandOptions& options) {
    std::vector<std::string> known;
    for (const auto& [name, text] : options.texts) known.push_back(name);
    for (const auto& [name, flag] : options.flags) known.push_back(name);
    for (size_t i = 0; i < words.size(); i++) {
        const size_t equals = words[i].find('=');
        const std::string name = words[i].substr(0, equals);
        if (const auto flag = options.flags.find(name); flag != options.flags.end()) {
            REQUIRE(equals == std::string::npos, "%s takes no value", name.c_str());
            *flag->second = true;
            continue;
        }
        const auto text = options.texts.find(name);
        REQUIRE(text != options.texts.end(), "%s has no option %s: did you mean %s?", options.command, name.c_str(),
                nearest(name, known).c_str());
        std::string value;
        if (equals != std::string::npos) value = words[i].substr(equals + 1);
        else if (i + 1 < words.size()) value = words[++i];
        REQUIRE(!value.empty() && !value.starts_with("--"), "%s needs a value", name.c_str());
        *text->second = value;
    }
}

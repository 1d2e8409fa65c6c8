// Whether an option has an effect under the values of others.
#include <algorithm>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/config/config_table.h"

bool holds(const Condition& condition, const Config& config) {
    const OptionRow* row = find_option(condition.option);
    CHECK(row, "a condition names the unknown option --%s", condition.option);
    const Json value = row->value.get(config);
    std::string values = condition.values;
    if (values == ">0") return value.is_number() && value.get<double>() > 0;
    const bool negated = values[0] == '!';
    std::istringstream words(values.substr(negated));
    std::string text = value.is_null() ? "" : json_text(value);
    if (text.empty()) text = "unset";
    for (std::string word; words >> word;)
        if (word == text) return !negated;
    return negated;
}

bool offloads(const Config& config, const std::string& word) {
    return std::find(config.offload.begin(), config.offload.end(), word) != config.offload.end();
}

const char* why_inert(const OptionRow& row, const Config& config) {
    if (row.generate_only && !config.generating) return "it is for the command generate";
    for (const Condition& condition : row.acts_if)
        if (!holds(condition, config)) return condition.reason;
    return row.inert ? row.inert(config) : nullptr;
}
